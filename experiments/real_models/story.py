"""Linearize a small model of stories, and print its story and its teacher's.

    python experiments/real_models/story.py --model stories260K --dataset tinystories/train.txt \\
        --validation-dataset tinystories/valid.txt --output-dir RUN

The model is stories260K, a Llama of 0.26M parameters: karpathy/tinyllamas on the hub (MIT), converted to the Hugging
Face layout. The text is TinyStories: roneneldan/TinyStories on the hub, as text files with <|endoftext|> between
stories; a few megabytes of it are enough.

This is one run of the recipe `lolcats`, with a window of 16 tokens, a fraction of a story; its folder holds all that a
run writes. Of its evaluation this takes the held-out perplexities, those of the window-only controls among them, and
lets teacher, untrained student and finished student continue "Once upon a time" greedily.

Writes story.json and the same as a page beside it (.md). The same again resumes.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import linearize
from linearize.evaluation.intervals import Interval
from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.recipe import Recipe, parse_overrides
from linearize.report.findings import difference
from linearize.report.load import load_run
from linearize.run.folder import Run, versions
from linearize.run.pipeline import run as run_pipeline

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import write_page

RECIPE: dict[str, Any] = {
    "mixer.span.window_size": 16,
    "data.sequence_length": 256,
    "transfer.max_tokens": 1_000_000,
    "finetune.max_tokens": 300_000,
    "finetune.eval_every": 24,
    "evaluation.examine": False,
}
PROMPT = "Once upon a time"
NEW_TOKENS = 200


def story(model: Any, tokenizer: Any) -> list[int]:
    """The tokens with which the model continues the prompt, greedily."""
    prompt = tokenizer(PROMPT, return_tensors="pt")
    told = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)
    return told[0, prompt["input_ids"].shape[1] :].tolist()


def alike(first: list[int], second: list[int]) -> int:
    """After how many tokens two stories part."""
    differ = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))


def measured(a: argparse.Namespace) -> dict[str, Any]:
    """The run's own measurements, and the stories.

    Raises:
        UserError: arguments or data that cannot be used.
    """
    overrides = RECIPE | parse_overrides(a.set)
    data = {"data.dataset": a.dataset, "data.validation_dataset": a.validation_dataset}
    run = Run(Recipe.load("lolcats", overrides | data), a.model, a.output_dir, torch.float32, torch.device("cpu"))
    results = run_pipeline(run)
    assert results is not None and results.provenance is not None
    files = load_run(run.folder)
    against = [difference(files, line.other) for line in results.comparisons]
    tokenizer, teacher = load_tokenizer(a.model), run.load_teacher()
    student = load_model(str(run.folder / "model"), dtype=run.dtype, device=run.device)
    models = {"teacher": teacher, "student, untrained": linearize.convert(teacher, run.recipe), "student": student}
    told = {name: story(model, tokenizer) for name, model in models.items()}
    return {
        "model": a.model,
        "set": overrides,
        "tokens": results.provenance.tokens,
        "perplexity": {line.label: _perplexity(line.quality.loss) for line in results.measured},
        "findings": [finding.words for finding in against if finding is not None],
        "stories": {
            name: {"as_the_teacher": alike(told["teacher"], ids), "tokens": len(ids), "text": _text(tokenizer, ids)}
            for name, ids in told.items()
        },
        "versions": versions(),
    }


def _perplexity(loss: Interval) -> dict[str, float]:
    return {name: math.exp(value) for name, value in asdict(loss).items()}


def _text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(tokenizer(PROMPT)["input_ids"] + ids, skip_special_tokens=True)


def markdown(found: dict[str, Any]) -> str:
    """The same as a page."""
    lines = ["# A model of stories, linearized", ""]
    lines += [f"By `experiments/real_models/story.py --model {found['model']}`: the recipe `lolcats` with", ""]
    lines += [f"    --set {shlex.quote(f'{name}={value}')}" for name, value in found["set"].items()]
    lines += ["", f"## Perplexity of {found['tokens']:,} held-out tokens", "", "With 95 % intervals.", ""]
    lines += ["| model | perplexity |", "| --- | --- |"]
    for label, x in found["perplexity"].items():
        lines.append(f"| {label} | {x['mean']:.2f} [{x['low']:.2f}, {x['high']:.2f}] |")
    lines += ["", *(f"- {words}" for words in found["findings"])]
    lines += ["", f'## "{PROMPT}", continued greedily']
    for name, told in found["stories"].items():
        heading = f"**{name}**"
        if name != "teacher":
            heading += f", the same as the teacher's for {told['as_the_teacher']} of {told['tokens']} tokens"
        lines += ["", f"{heading}:", "", *(f"> {line}" for line in told["text"].splitlines())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model of stories: a folder or hub id")
    parser.add_argument("--dataset", required=True, help="stories to train on: a file, a folder or a hub id")
    parser.add_argument("--validation-dataset", required=True, help="held-out stories, likewise")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of the recipe")
    parser.add_argument("--output-dir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the results go")
    a = parser.parse_args()
    write_page(a.json, lambda: measured(a), markdown)


if __name__ == "__main__":
    main()
