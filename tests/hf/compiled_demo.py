"""A process that compiles steps of the bundled teacher and of its conversion, run by `test_compiled`.

The tests' shape checks do not compile. Says how many graphs each model has.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import linearize
from linearize.demo.corpus import teacher_path
from linearize.evaluation.speed import generation_speed
from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.recipe import Recipe

NEW = 40

folder = str(teacher_path())
teacher = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
models: dict[str, Any] = {"teacher": teacher, "student": linearize.convert(teacher, Recipe.load("lolcats"))}
prompt = load_tokenizer(folder)("def read_config(path):\n", return_tensors="pt")
settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
eager = {name: model.generate(**prompt, **settings) for name, model in models.items()}
linearize.compile_steps(*models.values())
statistics = torch._dynamo.utils.counters["stats"]
for name, model in models.items():
    statistics.clear()
    for _ in range(2):  # on a cache each
        assert torch.equal(model.generate(**prompt, **settings), eager[name]), name
    graphs = statistics["unique_graphs"]
    assert not torch._dynamo.utils.counters["graph_break"], name
    sys.stdout.write(f"{name}: {graphs} {'graph' if graphs == 1 else 'graphs'}\n")
statistics.clear()
speeds = generation_speed(models, [20], new_tokens=NEW, repeats=2)
assert statistics["unique_graphs"] == len(models)
for speed in speeds:
    # It was compiled before it was timed.
    assert speed.compiling is not None and NEW * speed.decode.high < speed.compiling, speed
