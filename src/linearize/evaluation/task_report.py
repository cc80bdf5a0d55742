"""Measure a student at its task, beside its teacher and its controls, and say in plain words what was kept and lost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Group
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.evaluation.candidates import BATCH_SIZE, LABELS, Candidate
from linearize.evaluation.config import EvaluationConfig
from linearize.evaluation.fidelity import Fidelity, measure_fidelity
from linearize.evaluation.metrics import Answered, bootstrapped, title
from linearize.evaluation.perplexity import Interval, Totals, resample
from linearize.evaluation.tables import markdown_table, terminal_table

OTHERS = ("teacher", "teacher_lora", "window_lora", "ablated")  # what the student is compared with, where at hand
LEAST_SCORE = 1e-3  # of the teacher: what is below is no score of which the student could have a share

Draws = dict[str, dict[str, Float[Tensor, " S"]]]


@dataclass(frozen=True)
class Scored:
    """One line of the table: scores by metric; `agreement`: share of answers that are the teacher's.

    The agreement is None for the teacher itself, without one, and where answers are not alike or unlike (values).
    """

    name: str
    label: str
    note: str
    scores: dict[str, Interval]
    agreement: Interval | None


@dataclass(frozen=True)
class Difference:
    """The student's score minus another's, paired on the same examples."""

    other: str
    metric: str
    difference: Interval
    words: str


@dataclass(frozen=True)
class TaskReport:
    """Scores of all candidates at one task.

    Attributes:
        type: which kind of task.
        metrics: the first is the one that counts; all are better where higher.
        examples: how many the scores rest on.
        scored: candidates in the order in which they were given.
        recovery: the student's score over the teacher's; None where the teacher's is not above 0 for certain.
        description: further facts for whoever shows the report, like "auto_class" and "pipeline_tag".
    """

    type: str
    metrics: tuple[str, ...]
    examples: int
    scored: list[Scored]
    differences: list[Difference]
    recovery: dict[str, Interval | None]
    description: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data; the description's fields stand beside the others."""
        data = asdict(self)
        return data.pop("description") | data | {"metrics": list(self.metrics)}

    def lines(self) -> list[str]:
        """The findings, a sentence each."""
        lines = [difference.words for difference in self.differences]
        student = next(line for line in self.scored if line.name == "student")
        if not any(difference.other == "teacher" for difference in self.differences):
            lines += [
                f"{_capital(metric)}: the student has {_three(score)} on {self.examples:,} held-out examples."
                for metric, score in student.scores.items()
            ]
        for metric, share in self.recovery.items():
            if share is not None:
                lines.append(f"{_capital(metric)}: the student has {_percent(share)} of the teacher's score.")
            else:
                lines.append(f"{_capital(metric)}: the teacher's score is not above 0 for certain, so no share of it.")
        if student.agreement is not None:
            lines.append(f"The student's answer is the teacher's in {_percent(student.agreement)} of all cases.")
        return lines

    def header(self) -> list[str]:
        return ["model", *map(title, self.metrics), "teacher's answers", "what it is"]

    def cells(self) -> list[list[str]]:
        return [
            [
                line.label,
                *(_three(line.scores[metric]) for metric in self.metrics),
                "-" if line.agreement is None else _percent(line.agreement),
                line.note,
            ]
            for line in self.scored
        ]

    def caption(self) -> str:
        what = self.type.replace("_", " ")
        return f"{what[:1].upper()}{what[1:]}, {self.examples:,} examples, with 95 % intervals (higher is better)"


@dataclass(frozen=True)
class TaskCard:
    """Everything measured about a student whose task is not language modelling; `not_measured` says why, by section."""

    task: TaskReport
    fidelity: Fidelity | None
    missing: list[str] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data, by section."""
        return {
            "task": self.task.to_json(),
            "fidelity": None if self.fidelity is None else self.fidelity.to_json(),
            "missing": self.missing,
            "not_measured": self.not_measured,
            "provenance": self.provenance,
        }

    def lines(self) -> list[str]:
        """The findings, a sentence each."""
        lines = self.task.lines()
        if self.fidelity is not None:
            lines += [outlier.words for outlier in self.fidelity.worst]
        lines += [f"Not measured, {name}: {reason.rstrip('.')}." for name, reason in self.not_measured.items()]
        if self.missing:
            lines.append(f"Not measured: {', '.join(self.missing)}.")
        return lines

    def render(self) -> Group:
        """The table and the findings, for a terminal."""
        cells = [line[:-1] for line in self.task.cells()]
        table = terminal_table(self.task.caption(), self.task.header()[:-1], cells)
        return Group(table, *(Text(f"- {line}") for line in self.lines()))

    def to_markdown(self) -> str:
        """The same as Markdown."""
        table = markdown_table(self.task.header(), self.task.cells())
        return f"{self.task.caption()}\n\n{table}\n" + "".join(f"- {line}\n" for line in self.lines())


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_task(
    candidates: Sequence[Candidate],
    answer: Callable[[PreTrainedModel, str], Answered],
    *,
    task: str,
    description: dict[str, Any],
    config: EvaluationConfig,
    seed: int,
    missing: Sequence[str] = (),
    rows: Any = None,
) -> TaskCard:
    """Scores of every candidate on the same examples, and how faithful the student's heads are.

    Args:
        candidates: opened one after another; "student" must be among them.
        answer: runs a model over the held-out examples; the text is what a progress bar may say.
        task: which kind of task.
        description: see `TaskReport`.
        missing: names of controls that could not be had.
        rows: held-out inputs on which to look at the heads; none are looked at without.

    Raises:
        UserError: too few examples.
    """
    report = score_task(candidates, answer, task=task, description=description, config=config, seed=seed)
    fidelity, reasons = None, {}
    if not config.examine:
        reasons["fidelity"] = "not asked for, evaluation.examine is false"
    elif rows is not None:
        student = next(candidate for candidate in candidates if candidate.name == "student")
        sampled: dict[str, Any] = {"max_tokens": config.fidelity_tokens, "batch_size": BATCH_SIZE, "seed": seed}
        with student.open() as model:
            try:
                fidelity = measure_fidelity(model, rows, None, **sampled)
            except UserError as error:  # of this model's kind: the scores do not depend on it
                reasons["fidelity"] = str(error)
    return TaskCard(report, fidelity, [LABELS[name] for name in missing], reasons)


def score_task(
    candidates: Sequence[Candidate],
    answer: Callable[[PreTrainedModel, str], Answered],
    *,
    task: str,
    description: dict[str, Any],
    config: EvaluationConfig,
    seed: int,
) -> TaskReport:
    """The scores alone; arguments and errors as `measure_task`."""
    answered: dict[str, Answered] = {}
    for candidate in candidates:
        with candidate.open() as model:
            answered[candidate.name] = answer(model, f"measuring: {candidate.label}")
        del model
        gc.collect()
    draws = bootstrapped(answered, samples=config.bootstrap_samples, seed=seed)
    scores = {name: given.scores() for name, given in answered.items()}
    intervals = {
        name: {metric: _interval(score, draws[name][metric]) for metric, score in found.items()}
        for name, found in scores.items()
    }
    scored = [
        Scored(
            candidate.name,
            candidate.label,
            candidate.note,
            intervals[candidate.name],
            _agreement(answered, candidate.name, config.bootstrap_samples, seed),
        )
        for candidate in candidates
    ]
    student = answered["student"]
    others = [name for name in OTHERS if name in answered]
    differences = [_difference(scores, draws, intervals, name, metric) for name in others for metric in student.metrics]
    recovery = {}
    if "teacher" in answered:
        recovery = {metric: _recovery(scores, draws, intervals, metric) for metric in student.metrics}
    return TaskReport(task, student.metrics, len(student), scored, differences, recovery, description)


def _interval(mean: float, draws: Float[Tensor, " S"]) -> Interval:
    return Interval.of(torch.tensor(mean, dtype=torch.float64), draws)


def _agreement(answered: Mapping[str, Answered], name: str, samples: int, seed: int) -> Interval | None:
    if name == "teacher" or "teacher" not in answered:
        return None
    alike = answered[name].agreement(answered["teacher"])
    if alike is None:
        return None
    mean, draws = resample([Totals(alike.double(), torch.ones(len(alike)).double())], samples=samples, seed=seed)
    return Interval.of(mean[0], draws[:, 0])


Scores = Mapping[str, Mapping[str, float]]
Intervals = Mapping[str, Mapping[str, Interval]]


def _difference(scores: Scores, draws: Draws, intervals: Intervals, other: str, metric: str) -> Difference:
    mean, drawn = scores["student"][metric] - scores[other][metric], draws["student"][metric] - draws[other][metric]
    found = _interval(mean, drawn)
    who = f"the {LABELS[other]}"
    values = f"{_three(intervals['student'][metric])} against {_three(intervals[other][metric])}"
    if found.low <= 0 <= found.high:
        size = f"{mean:+.3f}, 95 % interval {found.low:+.3f} to {found.high:+.3f}"
        words = f"{_capital(metric)}: the student and {who} are level as far as this can show ({size}); {values}."
    else:
        near, far = sorted((abs(found.low), abs(found.high)))
        word, less = ("worse", "less") if mean < 0 else ("better", "more")
        words = f"{_capital(metric)}: the student is {word} than {who}: {abs(mean):.3f} {less} "
        words += f"(95 % interval {near:.3f} to {far:.3f}); {values}."
    return Difference(other, metric, found, words)


def _recovery(scores: Scores, draws: Draws, intervals: Intervals, metric: str) -> Interval | None:
    if intervals["teacher"][metric].low <= LEAST_SCORE:
        return None
    # The few resamples where the teacher happens to score nothing would divide by zero.
    ratio = draws["student"][metric] / draws["teacher"][metric].clamp(min=LEAST_SCORE)
    return _interval(scores["student"][metric] / scores["teacher"][metric], ratio)


def _capital(metric: str) -> str:
    name = title(metric)
    return f"{name[:1].upper()}{name[1:]}"


def _three(found: Interval) -> str:
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _percent(share: Interval) -> str:
    return f"{100 * share.mean:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"
