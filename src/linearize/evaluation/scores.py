"""Score a student, its teacher and its controls at their task."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from linearize.configs.tasks import AnyTask
from linearize.evaluation.candidates import Candidate
from linearize.evaluation.intervals import Interval, Totals, intervals
from linearize.evaluation.metrics import Answered, bootstrapped

# Candidates with which the student is compared, if available.
OTHERS = ("teacher", "teacher_finetuned", "window_finetuned", "equal_finetuned", "exact_finetuned", "ablated")
LEAST_SCORE = 1e-3  # teacher's score below which the student's share of it has no meaning


@dataclass(frozen=True)
class Scored:
    """Scores of one candidate by metric, and the share of its answers that equal the teacher's.

    `agreement` is None for the teacher itself, without a teacher, and if answers are values.
    """

    name: str
    label: str
    note: str
    scores: dict[str, Interval]
    agreement: Interval | None


@dataclass(frozen=True)
class ScoreDifference:
    """The student's score minus another's, paired on the same examples."""

    other: str
    metric: str
    difference: Interval


@dataclass(frozen=True)
class TaskScores:
    """Scores of all candidates at one task.

    Attributes:
        type, auto_class, pipeline_tag: the kind of task, and its names in transformers and on the hub.
        metrics: the first is the main one; higher is better for all.
        examples: number of held-out examples.
        scored: candidates in the given order.
        recovery: the student's score over the teacher's; None: the interval of the teacher's includes 0.
    """

    type: str
    auto_class: str
    pipeline_tag: str
    metrics: tuple[str, ...]
    examples: int
    scored: list[Scored]
    differences: list[ScoreDifference]
    recovery: dict[str, Interval | None]


def score_task(
    candidates: Sequence[Candidate],
    answer: Callable[[PreTrainedModel, str], Answered],
    task: AnyTask,
    *,
    samples: int,
    seed: int,
) -> TaskScores:
    """Return the scores of every candidate on the same examples.

    Args:
        candidates: opened one after another; "student" must be among them.
        answer: runs a model over the held-out examples; its text is the title of a progress bar.

    Raises:
        UserError: too few examples.
    """
    answered: dict[str, Answered] = {}
    for candidate in candidates:
        with candidate.open() as model:
            answered[candidate.name] = answer(model, f"measuring: {candidate.label}")
        del model
        gc.collect()
    metrics = answered["student"].metrics
    draws = bootstrapped(answered, samples=samples, seed=seed)
    scores = {name: given.scores() for name, given in answered.items()}

    def interval(mean: float, drawn: Float[Tensor, " S"]) -> Interval:
        return Interval.of(torch.tensor(mean, dtype=torch.float64), drawn)

    def agreement(name: str) -> Interval | None:
        if name == "teacher" or "teacher" not in answered:
            return None
        shares = answered[name].agreement(answered["teacher"])
        return None if shares is None else intervals([Totals.of_each(shares)], samples=samples, seed=seed)[0]

    def difference(other: str, metric: str) -> ScoreDifference:
        mean, drawn = scores["student"][metric] - scores[other][metric], draws["student"][metric] - draws[other][metric]
        return ScoreDifference(other, metric, interval(mean, drawn))

    by_metric = {name: {x: interval(scores[name][x], draws[name][x]) for x in metrics} for name in answered}
    recovery: dict[str, Interval | None] = {}
    if "teacher" in answered:
        for metric in metrics:
            # In a few resamples the teacher may score 0; the clamp avoids a division by zero.
            ratio = draws["student"][metric] / draws["teacher"][metric].clamp(min=LEAST_SCORE)
            recovery[metric] = None
            if by_metric["teacher"][metric].low > LEAST_SCORE:
                recovery[metric] = interval(scores["student"][metric] / scores["teacher"][metric], ratio)
    return TaskScores(
        task.type,
        task.auto_class,
        task.pipeline_tag,
        metrics,
        len(answered["student"]),
        [Scored(c.name, c.label, c.note, by_metric[c.name], agreement(c.name)) for c in candidates],
        [difference(other, metric) for other in OTHERS if other in answered for metric in metrics],
        recovery,
    )
