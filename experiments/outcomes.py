"""What is kept of each model of a cell, and the numbers that come out of it: token losses, or answers to a task."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from linearize.evaluation.intervals import Interval
from linearize.evaluation.metrics import Answered, MaskedTokens, Predictions, Similarities, bootstrapped
from linearize.evaluation.perplexity import TokenLosses, bootstrap, paired_difference

FAR = 64  # tokens before a query; losses "beyond" are of tokens that stand further into their document
POSITIONS = (0, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
FILE = "outcomes.safetensors"

Outcome = TokenLosses | Predictions | MaskedTokens | Similarities


def write(outcomes: dict[str, Outcome], folder: Path) -> None:
    """All models' outcomes in one file."""
    tensors, kinds = {}, {}
    for name, outcome in outcomes.items():
        parts, kinds[name] = _parts(outcome), [type(outcome).__name__, *getattr(outcome, "metrics", ())]
        tensors |= {f"{name}.{key}": x.clone().contiguous() for key, x in parts.items()}
    save_file(tensors, folder / FILE, metadata={"kinds": json.dumps(kinds)})


def read(folder: Path) -> dict[str, Outcome]:
    """What `write` wrote."""
    tensors = load_file(folder / FILE)
    with safe_open(folder / FILE, framework="pt") as file:
        kinds = json.loads(file.metadata()["kinds"])
    found = {}
    for name, (kind, *metrics) in kinds.items():
        parts = {key.split(".", 1)[1]: x for key, x in tensors.items() if key.split(".", 1)[0] == name}
        found[name] = KINDS[kind](parts, tuple(metrics))
    return found


KINDS: dict[str, Callable[[dict[str, Tensor], tuple[str, ...]], Outcome]] = {
    "TokenLosses": lambda parts, metrics: TokenLosses(**parts),
    "Predictions": lambda parts, metrics: Predictions(**parts, metrics=metrics),
    "MaskedTokens": lambda parts, metrics: MaskedTokens(**parts),
    "Similarities": lambda parts, metrics: Similarities({name: parts[name] for name in metrics}),
}


def _parts(outcome: Outcome) -> dict[str, Tensor]:
    if isinstance(outcome, Similarities):
        return outcome.values
    named = ((field.name, getattr(outcome, field.name)) for field in dataclasses.fields(outcome))
    return {name: x for name, x in named if isinstance(x, Tensor)}


def summary(outcomes: dict[str, Any], reference: Any) -> dict[str, Any]:
    """Intervals of every model's numbers, and the student's differences to the teacher and to the reference's student.

    There is no teacher where a cell starts from random weights.
    """
    of_text = isinstance(outcomes["student"], TokenLosses)
    return _losses(outcomes, reference) if of_text else _scores(outcomes, reference)


def _losses(losses: dict[str, TokenLosses], reference: TokenLosses | None) -> dict[str, Any]:
    found: dict[str, Any] = {"loss": {}, "beyond": {}, "documents": losses["student"].documents}
    for name, loss in losses.items():
        found["loss"][name] = vars(bootstrap(loss))
        if loss.beyond_missing(FAR) is None:
            found["beyond"][name] = vars(bootstrap(loss.beyond(FAR)))
    student = losses["student"]
    if "teacher" in losses:
        found["minus_teacher"] = vars(paired_difference(student, losses["teacher"]))
    if reference is not None:
        found["minus_reference"] = vars(paired_difference(student, reference))
        if student.beyond_missing(FAR) is None:
            found["minus_reference_beyond"] = vars(paired_difference(student.beyond(FAR), reference.beyond(FAR)))
    found["by_position"] = {
        name: [_mean_between(losses[name], low, high) for low, high in pairwise(POSITIONS)]
        for name in ("teacher", "student")
        if name in losses
    }
    return found


def _mean_between(losses: TokenLosses, low: int, high: int) -> float | None:
    chosen = losses.mask & (losses.position >= low) & (losses.position < high)
    return losses.loss[chosen].mean().item() if chosen.any() else None


def _scores(answered: dict[str, Answered], reference: Answered | None) -> dict[str, Any]:
    """By the first metric, the one that counts: differences and recovery. Scores are of all metrics."""
    models = answered | ({} if reference is None else {"reference": reference})
    draws, first = bootstrapped(models), answered["student"].metrics[0]
    scores = {name: given.scores() for name, given in models.items()}

    def interval(mean: float, drawn: Tensor) -> dict[str, float]:
        return vars(Interval.of(torch.tensor(mean, dtype=torch.float64), drawn))

    def minus(other: str) -> dict[str, float]:
        drawn = draws["student"][first] - draws[other][first]
        return interval(scores["student"][first] - scores[other][first], drawn)

    found: dict[str, Any] = {
        "metrics": list(answered["student"].metrics),
        "examples": len(answered["student"]),
        "scores": {
            name: {metric: interval(score, draws[name][metric]) for metric, score in scores[name].items()}
            for name in answered
        },
    }
    if "teacher" in answered:
        found["score_minus_teacher"] = minus("teacher")
        if found["scores"]["teacher"][first]["low"] > 0:
            share = draws["student"][first] / draws["teacher"][first].clamp_min(1e-3)
            found["recovered"] = interval(scores["student"][first] / scores["teacher"][first], share)
    return found | ({} if reference is None else {"score_minus_reference": minus("reference")})
