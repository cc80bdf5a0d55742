"""The section on recall from far back: copying, and grids of trials over distances and depths."""

from __future__ import annotations

from collections.abc import Sequence

from linearize.evaluation.candidates import LABELS
from linearize.evaluation.intervals import Interval
from linearize.evaluation.retrieval import Retrieval
from linearize.report import findings, tables
from linearize.report.figures import by_run, dots
from linearize.report.heatmaps import Panel, Scale, grids
from linearize.report.html import Block, Figure, Section, Text
from linearize.report.load import RunFiles, label
from linearize.report.numbers import capital, plain, share
from linearize.report.unmeasured import not_measured


def recall(runs: Sequence[RunFiles]) -> Section:
    """Return the section with copying of random tokens, then a grid of each model for each retrieval task."""
    blocks: list[Block] = []

    def has_copied(run: RunFiles) -> bool:
        return any(line.copying for line in run.results.measured)

    if copied := [run for run in runs if has_copied(run)]:
        blocks.append(_copying(copied))
    blocks += not_measured(runs, "copying", has_copied)
    tasks: dict[str, list[tuple[RunFiles, Retrieval]]] = {}
    for run in runs:
        for task in run.results.retrieval:
            tasks.setdefault(task.name, []).append((run, task))
    for name, found in tasks.items():
        if drawn := [(run, task) for run, task in found if task.row_values]:
            blocks.append(_grids(name, drawn))
        blocks += [Text(_said(*pair), tone="missing") for pair in found if not pair[1].row_values]
    blocks += not_measured(runs, "retrieval")
    return Section(
        "recall",
        "Recall",
        blocks,
        summary="Recall of tokens from far back. Perplexity shows little of it.",
    )


def _said(run: RunFiles, task: Retrieval) -> str:
    return f"{run.prefix}{findings.recall(run, task).words}"


def _copying(runs: Sequence[RunFiles]) -> Figure:
    def gain(run: RunFiles, name: str) -> Interval | None:
        line = run.measured(name)
        return None if line is None or line.copying is None else line.copying.gain

    names = [name for name in LABELS if any(gain(run, name) for run in runs)]
    title = "loss on the first copy minus loss on the second, nats per token"
    panel = by_run(title, runs, [[gain(run, name) for name in names] for run in runs], zero=True)
    numbers = tables.copying(runs)
    return Figure(
        "Copying random tokens from beyond the window",
        dots("copying", f"{numbers.caption}. {numbers.spoken()}", [label(name) for name in names], [panel]),
        "Random tokens are repeated beyond the window. A model that copies has a lower loss on the second copy.",
        numbers,
    )


def _grids(name: str, found: Sequence[tuple[RunFiles, Retrieval]]) -> Figure:
    first = found[0][1]
    title = f"{name.replace('_', ' ').capitalize()} by {first.rows}"
    panels = []
    for run, task in found:
        rows = list(map(plain, task.row_values))
        columns = list(map(plain, task.column_values))
        # The teacher comes first, then the student, then other candidates.
        for model in sorted(task.models, key=lambda model: ("teacher", "student", model).index(model)):
            panels.append(Panel(run.prefix + label(model), task.models[model], rows, columns))
    verdicts = " ".join(_said(*pair) for pair in found)
    words = f"{capital(first.words).rstrip('.')}. {first.count} trials per cell. {verdicts}"
    scale = Scale.even("share of trials that are right", 0.0, 1.0)
    axes = first.rows, first.columns
    return grids(f"recall-{name.replace('_', '-')}", title, words, panels, scale, axes, share, verdicts)
