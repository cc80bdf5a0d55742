"""Score a student, its teacher and its controls at their task."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from linearize.configs.tasks import AnyTask
from linearize.evaluation.candidates import Candidate
from linearize.evaluation.intervals import Interval, Totals
from linearize.evaluation.intervals import intervals as bootstrap_intervals
from linearize.evaluation.metrics import Answered, bootstrapped

OTHERS = (
    "teacher",
    "teacher_finetuned",
    "window_finetuned",
    "equal_finetuned",
    "exact_finetuned",
    "ablated",
)  # candidates with which the student is compared, if available
LEAST_SCORE = 1e-3  # teacher's score below which the student's share of it has no meaning

Draws = dict[str, dict[str, Float[Tensor, " S"]]]
Scores = Mapping[str, Mapping[str, float]]


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
    student = answered["student"]
    draws = bootstrapped(answered, samples=samples, seed=seed)
    scores = {name: given.scores() for name, given in answered.items()}
    intervals = {
        name: {metric: _interval(score, draws[name][metric]) for metric, score in found.items()}
        for name, found in scores.items()
    }
    scored = [
        Scored(c.name, c.label, c.note, intervals[c.name], _agreement(answered, c.name, samples, seed))
        for c in candidates
    ]
    others = [name for name in OTHERS if name in answered]
    differences = [_difference(scores, draws, other, metric) for other in others for metric in student.metrics]
    recovery: dict[str, Interval | None] = {}
    if "teacher" in answered:
        for metric in student.metrics:
            certain = intervals["teacher"][metric].low > LEAST_SCORE
            recovery[metric] = _recovery(scores, draws, metric) if certain else None
    names = task.type, task.auto_class, task.pipeline_tag
    return TaskScores(*names, student.metrics, len(student), scored, differences, recovery)


def _interval(mean: float, draws: Float[Tensor, " S"]) -> Interval:
    return Interval.of(torch.tensor(mean, dtype=torch.float64), draws)


def _agreement(answered: Mapping[str, Answered], name: str, samples: int, seed: int) -> Interval | None:
    if name == "teacher" or "teacher" not in answered:
        return None
    agreement = answered[name].agreement(answered["teacher"])
    if agreement is None:
        return None
    return bootstrap_intervals([Totals.of_each(agreement)], samples=samples, seed=seed)[0]


def _difference(scores: Scores, draws: Draws, other: str, metric: str) -> ScoreDifference:
    mean, drawn = scores["student"][metric] - scores[other][metric], draws["student"][metric] - draws[other][metric]
    return ScoreDifference(other, metric, _interval(mean, drawn))


def _recovery(scores: Scores, draws: Draws, metric: str) -> Interval:
    # In a few resamples the teacher may score 0; the clamp avoids a division by zero.
    ratio = draws["student"][metric] / draws["teacher"][metric].clamp(min=LEAST_SCORE)
    return _interval(scores["student"][metric] / scores["teacher"][metric], ratio)
