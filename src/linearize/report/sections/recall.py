"""What can be got back from far away: copying, and grids of trials over distances and depths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linearize.evaluation.candidates import LABELS
from linearize.report.blocks import Block, Figure, Group, Section, Table, Text
from linearize.report.figures import DotPanel, Dots, dots
from linearize.report.heatmaps import Panel, Scale, heatmaps, narrow
from linearize.report.load import RunFiles, interval, label
from linearize.report.numbers import percent, plain, sentence, share, with_interval
from linearize.report.sections.missing import lacking, not_measured


def recall(runs: Sequence[RunFiles]) -> Section:
    """Copying of random tokens, then each retrieval task: models side by side, a grid each."""
    blocks: list[Block] = []
    copied = [run for run in runs if any(line.get("copying") for line in run.evaluation["measured"])]
    if copied:
        blocks.append(_copying(copied))
    for run in runs:
        where = f" ({run.name})" if len(runs) > 1 else ""
        if reason := run.section("copying_missing"):
            blocks.append(Text(f"Copying{where}: {reason}.", tone="missing"))
    tasks: dict[str, list[tuple[RunFiles, dict[str, Any]]]] = {}
    for run in runs:
        for task in run.section("retrieval") or []:
            tasks.setdefault(task["name"], []).append((run, task))
    for name, found in tasks.items():
        drawn = [(run, task) for run, task in found if task["row_values"]]
        if drawn:
            blocks.append(_grids(name, drawn, several=len(runs) > 1))
        for run, task in found:
            if not task["row_values"]:
                words = f"{name.replace('_', ' ')}: {task['verdict']}"
                blocks.append(Text(f"{run.name}, {words}" if len(runs) > 1 else sentence(words), tone="missing"))
    blocks += not_measured(runs, lacking(runs, "retrieval"), "retrieval")
    return Section(
        "recall",
        "Recall",
        blocks,
        summary="Whether something seen far back can still be produced. Perplexity says little about it.",
    )


def _copying(runs: Sequence[RunFiles]) -> Figure:
    def gain(run: RunFiles, name: str, key: str = "gain") -> Any:
        line = run.measured(name)
        return interval(line["copying"][key]) if line and line.get("copying") else None

    names = [name for name in LABELS if any(gain(run, name) for run in runs)]
    panel = DotPanel(
        "loss on the first copy minus loss on the second, nats per token",
        [Dots(run.name, [gain(run, name) for name in names], place, place) for place, run in enumerate(runs)],
        zero=True,
    )
    groups = [
        Group(
            [
                [label(name), *(with_interval(gain(run, name, key), 2) for key in ("first", "second", "gain"))]
                for name in names
                if gain(run, name)
            ],
            title=run.name if len(runs) > 1 else None,
        )
        for run in runs
    ]
    said = "; ".join(
        f"{run.name}, {label(name)}: {with_interval(gain(run, name), 2)}"
        for run in runs
        for name in ("teacher", "student")
        if gain(run, name)
    )
    return Figure(
        "Copying random tokens from beyond the window",
        dots("copying", f"Gain from a second copy. {said}", [label(name) for name in names], [panel]),
        "Random tokens come a second time, too far back for the window; who can copy loses less the second time.",
        Table(
            "Copying: loss in nats per token",
            ["candidate", "first copy", "second copy", "gain"],
            groups,
            collapsed=True,
        ),
    )


def _grids(name: str, found: Sequence[tuple[RunFiles, dict[str, Any]]], several: bool) -> Figure:
    first = found[0][1]
    title = f"{name.replace('_', ' ').capitalize()} by {first['rows']}"
    panels, groups, said = [], [], []
    for run, task in found:
        prefix = f"{run.name}: " if several else ""
        # The teacher stands beside the student; other candidates follow.
        names = sorted(task["models"], key=lambda model: ("teacher", "student", model).index(model))
        rows, columns = [[plain(value) for value in task[key]] for key in ("row_values", "column_values")]
        for model in names:
            panels.append(Panel(prefix + label(model), task["models"][model], rows, columns))
        for model in names:
            lines = [
                [row, *(share(value) for value in values)]
                for row, values in zip(rows, task["models"][model], strict=True)
            ]
            groups.append(Group(lines, title=prefix + label(model)))
        said.append(
            f"{prefix}teacher right in {percent(interval(task['teacher_share']))}, student in "
            f"{percent(interval(task['student_share']))}, recovery {percent(interval(task['recovery']))}"
        )
    scale = Scale.even("share of trials that are right", low=0.0, high=1.0)
    drawn = heatmaps(
        f"recall-{name.replace('_', '-')}",
        f"{title}. {'; '.join(said)}",
        panels,
        scale,
        row_title=first["rows"],
        column_title=first["columns"],
    )
    columns = [f"{first['rows']} \\ {first['columns']}", *map(plain, first["column_values"])]
    numbers = Table(f"{title}: share of trials that are right", columns, groups, collapsed=True)
    verdicts = [f"{run.name}: {sentence(t['verdict'])}" if several else sentence(t["verdict"]) for run, t in found]
    words = f"{sentence(first['words'])} {first['count']} trials per cell. {' '.join(verdicts)}"
    return Figure(title, drawn, words, numbers, half=narrow(panels))
