"""The section on a task with scores: all candidates, and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linearize.evaluation.candidates import LABELS
from linearize.evaluation.intervals import Interval
from linearize.evaluation.metrics import title
from linearize.report import tables
from linearize.report.figures import DotPanel, by_run, dots
from linearize.report.html import Block, Figure, Group, Section, Table
from linearize.report.load import RunFiles, label
from linearize.report.numbers import capital, count, what, with_interval
from linearize.report.unmeasured import missing_controls

_ACROSS = 3  # panels side by side

Read = Callable[[RunFiles, str, str], Interval | None]


def scores(runs: Sequence[RunFiles]) -> Section:
    """Return the section with scores of all candidates, and paired differences."""
    names = list(dict.fromkeys(metric for run in runs if run.task for metric in run.task.metrics))
    chunks = [names[start : start + _ACROSS] for start in range(0, len(names), _ACROSS)]
    blocks: list[Block] = [_scores(runs, metrics) for metrics in chunks]
    compared = [run for run in runs if run.task and run.task.differences]
    blocks += [_differences(compared, metrics) for metrics in chunks if compared]
    blocks += missing_controls([run for run in runs if not run.is_language_model])
    summary = "; ".join(f"{run.prefix}{_about(run)}" for run in runs)
    return Section(
        "task",
        "Task",
        blocks,
        summary=f"{capital(summary)}. Scores are better where they are higher. All candidates have "
        "the same examples, so compare the paired differences.",
    )


def _about(run: RunFiles) -> str:
    assert run.task is not None
    return f"{what(run.task)}, {count(run.task.examples)} held-out examples"


def _scores(runs: Sequence[RunFiles], metrics: Sequence[str]) -> Figure:
    names = [name for name in LABELS if any(run.scored(name) for run in runs)]
    numbers = tables.scores(runs, metrics)
    panels = _panels(runs, metrics, names, RunFiles.score)
    return Figure(
        f"Scores of all candidates: {_titles(metrics)}",
        dots(f"task-scores-{metrics[0]}", f"Scores. {numbers.spoken()}", [label(name) for name in names], panels),
        "With 95 % bootstrap intervals over examples.",
        numbers,
    )


def _differences(runs: Sequence[RunFiles], metrics: Sequence[str]) -> Figure:
    read = RunFiles.score_difference
    names = [name for name in LABELS if any(read(run, name, metric) for run in runs for metric in metrics)]
    rows = [f"against {label(name)}" for name in names]
    groups = [
        Group(
            [
                [row, *(with_interval(read(run, name, metric), sign=True) for metric in metrics)]
                for row, name in zip(rows, names, strict=True)
            ],
            run.group,
        )
        for run in runs
    ]
    numbers = Table(f"Student's score minus the other's: {_titles(metrics)}", ["", *map(title, metrics)], groups)
    panels = _panels(runs, metrics, names, read, zero=True)
    return Figure(
        f"The student minus the others, on the same examples: {_titles(metrics)}",
        dots(f"task-pairs-{metrics[0]}", f"Paired differences of scores. {numbers.spoken()}", rows, panels),
        "Right of zero the student is better. Paired over the same examples, with 95 % intervals.",
        numbers,
    )


def _panels(
    runs: Sequence[RunFiles], metrics: Sequence[str], names: Sequence[str], read: Read, zero: bool = False
) -> list[DotPanel]:
    return [
        by_run(title(metric), runs, [[read(run, name, metric) for name in names] for run in runs], zero=zero)
        for metric in metrics
    ]


def _titles(metrics: Sequence[str]) -> str:
    return ", ".join(map(title, metrics))
