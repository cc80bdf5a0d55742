"""A process that generates on a device, by steps that the model compiles by itself, run by `test_compiled`.

The tests' shape checks do not compile. A CPU, which models pass over by themselves, is allowed here. It has no CUDA
graphs, but shows what they would be left out for: an input that is written to and has no fixed address.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import linearize
from linearize.hf import compiled
from linearize.recipe import Recipe
from tests.hf.models import random_tokens

NEW = 80  # more than the window has room for
PROMPTS = ((50, 0), (20, 7), (200, 0))  # tokens, and padding of the first row

moving: list[set[int]] = []  # of each graph, the inputs that are written to and have no fixed address


def look(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Compile the inner graph, and note which of its inputs captured graphs could not write to."""
    made: Any = compile_fx_inner(graph, inputs, **options)
    assert made.mutated_input_idxs  # the state
    moving.append(set(made.mutated_input_idxs) - set(options["static_input_idxs"]))
    return made


def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Be inductor. It is a function because generate() copies its settings."""
    return compile_fx(graph, inputs, inner_compile=look)


device = sys.argv[1]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=60,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    eos_token_id=None,
    pad_token_id=0,
)
student: Any = linearize.convert(LlamaForCausalLM(config).to(device).eval(), Recipe.load("lolcats"))
if device == "cpu":
    settings = CompileConfig(backend=backend, mode=None)  # type: ignore[arg-type]
    settings._compile_all_devices = True  # type: ignore[assignment]
    student.generation_config.compile_config = settings
compiled.STEPS_TO_PAY = 1
counters = torch._dynamo.utils.counters
for length, padding in PROMPTS:
    ids = random_tokens(2, length).to(device)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = dict(attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    eager = student.generate(ids, **options, disable_compile=True)
    assert torch.equal(student.generate(ids, **options), eager), length
assert compiled.history(student).compiled == {2}
assert counters["stats"]["unique_graphs"] == 2, counters["stats"]  # of `require_compiler`, and of the step
assert not counters["graph_break"], counters["graph_break"]
if device == "cpu":
    assert moving == [set()], moving
else:
    assert not counters["inductor"]["cudagraph_skips"], counters["inductor"]
sys.stdout.write("equal")
