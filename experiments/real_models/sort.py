"""Linearize a GPT-2 that sorts, and count how many of all its inputs it still sorts.

    python experiments/real_models/sort.py --model gpt-nano-sort --output-dir RUN

The model is gpt-nano-sort, a GPT-2 of 3 layers that reads six letters of three and writes them in order: from
bbycroft/llm-viz on GitHub (MIT), converted to the Hugging Face layout. Any GPT-2 like it will do: n_positions says how
many letters it reads (11: six in, and five of the six that it writes), vocab_size how many different ones there are.

Each method converts the model, transfers its attention and finetunes it, once on all inputs, which are finitely many,
and once on half of them, so that the other half tells whether it sorts what it did not train on. After each stage
`generate` writes the answers greedily, with a cache. A window of 2 tokens does not reach the first letters through
three layers. The window alone, fine-tuned on the same tokens, shows what the linear part adds.

Writes sort.json and the same as tables beside it (.md). The same again resumes.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.configs.spans import NoSpan
from linearize.data.examples import ClassifiedTokens
from linearize.data.rows import IGNORED
from linearize.evaluation.controls import window_only_plan
from linearize.hf.checkpoint import load_model, read_config
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.recipe import Recipe
from linearize.run.folder import versions

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import write_page

BUDGET: dict[str, Any] = {
    "transfer.batch_size": 27,
    "transfer.epochs": 20,
    "finetune.batch_size": 27,
    "finetune.epochs": 20,
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "Hedgehog, no window": ("hedgehog-gpt2", BUDGET),
    "LoLCATs, window of 2": ("lolcats", BUDGET | {"mixer.span.window_size": 2}),
}
STAGES = {
    "swapped": "converted, untrained",
    "transferred": "after transfer",
    "finetuned": "finetuned",
    "window": "window only, untrained",
    "window_finetuned": "window only, finetuned",
}
MOST_INPUTS = 100_000  # what is generated in one batch


def every_input(model: str) -> Tensor:
    """[N, K]: all that the model can be asked to sort.

    Raises:
        UserError: no such model, or one of so many tokens or positions that it cannot be one that sorts.
    """
    shape = TeacherShape.from_config(read_config(model))
    letters, length = shape.vocab_size, (shape.max_positions + 1) // 2
    if letters**length > MOST_INPUTS:
        raise UserError(
            f"--model: expected a model that sorts, with at most {MOST_INPUTS:,} inputs, found {letters} tokens and "
            f"{shape.max_positions} positions; use gpt-nano-sort or one like it"
        )
    return torch.tensor(list(itertools.product(range(letters), repeat=length)))


def answers(model: Any, inputs: Tensor) -> Tensor:
    """[N, K]: what the model writes after each input."""
    length = inputs.shape[1]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "use_cache": True}
    return model.generate(inputs, max_new_tokens=length, **options)[:, length:]


def rightly_sorted(model: PreTrainedModel, inputs: Tensor) -> int:
    """How many of the inputs the model writes in order."""
    return int((answers(model, inputs) == inputs.sort(dim=1).values).all(dim=1).sum())


def sorting_rows(inputs: Tensor, outputs: Tensor) -> ClassifiedTokens:
    """Inputs with what is to be written; each letter of that is the class of the token before it, the last one too."""
    tokens = torch.cat([inputs, outputs], dim=1)
    labels = tokens[:, 1:].clone()
    labels[:, : inputs.shape[1] - 1] = IGNORED
    lengths = torch.full((len(labels),), labels.shape[1])
    return ClassifiedTokens(tokens[:, :-1], lengths, segments=None, use_cache=False, labels=labels)


def counts(teacher: PreTrainedModel, recipe: Recipe, learned: Tensor, scored: Tensor, folder: Path) -> dict[str, int]:
    """How many of `scored` are sorted after each stage of training on `learned`.

    Checkpoints are chosen on `learned` too: what is only scored takes no part in training.
    """
    assert recipe.transfer is not None and recipe.finetune is not None
    rows = sorting_rows(learned, answers(teacher, learned))
    student = linearize.convert(teacher, recipe)
    found = {"swapped": rightly_sorted(student, scored)}
    linearize.attention_transfer(student, rows, rows, recipe.transfer, output_dir=folder / "transfer")
    found["transferred"] = rightly_sorted(student, scored)
    linearize.finetune(student, rows, rows, recipe.finetune, output_dir=folder / "finetune")
    found["finetuned"] = rightly_sorted(student, scored)
    if not isinstance(recipe.mixer.span, NoSpan):
        window = convert_layers(teacher, window_only_plan(read_plan(student.config), teacher, 0))
        found["window"] = rightly_sorted(window, scored)
        options: dict[str, Any] = {"output_dir": folder / "window", "title": "control: window"}
        linearize.finetune(window, rows, rows, recipe.finetune, **options)
        found["window_finetuned"] = rightly_sorted(window, scored)
    return found


def measured(a: argparse.Namespace) -> dict[str, Any]:
    """Every method, trained on all inputs and on half of them.

    Raises:
        UserError: a model or an output folder that cannot be used.
    """
    inputs = every_input(a.model)
    teacher = load_model(a.model, dtype=torch.float32, device=torch.device("cpu"))
    shuffled = inputs[torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))]
    learned, rest = shuffled.tensor_split(2)
    found: dict[str, Any] = {"model": a.model, "inputs": len(inputs), "other_half": len(rest)}
    found |= {"teacher": rightly_sorted(teacher, inputs), "methods": {}}
    for label, (name, overrides) in METHODS.items():
        recipe = Recipe.load(name, overrides)
        found["methods"][label] = {
            "recipe": name,
            "set": overrides,
            "all": counts(teacher, recipe, inputs, inputs, a.output_dir / name / "all"),
            "half": counts(teacher, recipe, learned, rest, a.output_dir / name / "half"),
        }
    return found | {"versions": versions()}


def markdown(found: dict[str, Any]) -> str:
    """The same as tables."""
    count, rest = found["inputs"], found["other_half"]
    lines = [
        "# A model that sorts, linearized",
        "",
        f"By `experiments/real_models/sort.py --model {found['model']}`:",
        "",
    ]
    for label, method in found["methods"].items():
        overrides = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in method["set"].items())
        lines.append(f"- {label}: `{method['recipe']}`, {overrides}")
    lines += ["", f"The teacher sorts {found['teacher']} of {count} inputs. Greedy generation, with a cache."]
    lines += ["", f"## Trained on all inputs: sorted of these {count}", "", *_table(found, "all")]
    lines += ["", f"## Trained on {count - rest} inputs: sorted of the other {rest}", "", *_table(found, "half")]
    return "\n".join(lines) + "\n"


def _table(found: dict[str, Any], side: str) -> list[str]:
    rows = [["method", *STAGES.values()], ["---"] * (len(STAGES) + 1)]
    for label, method in found["methods"].items():
        rows.append([label, *(str(method[side].get(stage, "-")) for stage in STAGES)])
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GPT-2 that sorts: a folder or hub id")
    parser.add_argument("--output-dir", type=Path, required=True, help="the stages' folder, to resume from")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the counts go")
    a = parser.parse_args()
    write_page(a.json, lambda: measured(a), markdown)


if __name__ == "__main__":
    main()
