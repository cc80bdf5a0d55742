"""The section on loss by the token's position in its document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from linearize.evaluation.agreement import PositionLosses
from linearize.report.figures import Line, LinePanel, curves
from linearize.report.html import Block, Figure, Group, Section, Table
from linearize.report.load import RunFiles, label
from linearize.report.numbers import count, with_interval
from linearize.report.unmeasured import not_measured

# Colours of candidates in all panels with several of them; -1 is the colour of text.
STYLES = {
    "teacher": -1,
    "student": 0,
    "window_finetuned": 1,
    "teacher_finetuned": 2,
    "ablated": 3,
    "equal_finetuned": 4,
    "window": 5,
    "exact_finetuned": 5,
}
# The table has all candidates.
_CURVES = ("teacher", "student", "window_finetuned", "equal_finetuned", "exact_finetuned", "ablated")


def positions(runs: Sequence[RunFiles]) -> Section:
    """Return the section on loss by the token's position in its document (SUPRA, Fig. 3)."""
    measured = [(run, found) for run in runs if (found := run.results.positions)]
    blocks: list[Block] = [_by_position(measured)] if measured else []
    blocks += not_measured(runs, "positions")
    summary = (
        "The loss of a model that uses long context keeps falling along a document. The loss of a model that sees its "
        "window only stops falling there."
    )
    return Section("positions", "Loss by position", blocks, summary=summary if measured else "")


def _by_position(measured: Sequence[tuple[RunFiles, PositionLosses]]) -> Figure:
    panels, groups, said = [], [], []
    columns = list(dict.fromkeys(name for _, found in measured for name in found.losses))
    for run, found in measured:
        bins = bin_names(found.edges)
        lines = []
        for name in _CURVES:
            if name not in found.losses:
                continue
            points = [(i, value) for i, value in enumerate(found.losses[name]) if value is not None]
            at, values = [i for i, _ in points], [value for _, value in points]
            low, high = [value.low for value in values], [value.high for value in values]
            lines.append(Line(label(name), at, [v.mean for v in values], STYLES[name], low, high))
            if values:
                last = bins[at[-1]]
                said.append(f"{run.name}, {label(name)}, at positions {last}: {with_interval(values[-1])}")
        stride = max(1, -(-len(bins) // 5))
        ticks = {float(i): name for i, name in enumerate(bins) if i % stride == 0}
        panels.append(LinePanel(f"{run.prefix}loss", lines, "position, tokens", "nats per token", ticks=ticks))
        losses = [found.losses.get(name, [None] * len(bins)) for name in columns]
        rows = [[place, *(with_interval(x[i]) for x in losses)] for i, place in enumerate(bins)]
        groups.append(Group(rows, run.group))
    return Figure(
        "Held-out loss by position in the document",
        curves("positions", "Loss by position. " + "; ".join(said), panels, height=300),
        "Means over the tokens of each bin of positions, with bands of 95 % intervals.",
        Table("Loss by position, nats per token", ["positions", *map(label, columns)], groups, collapsed=True),
    )


def bin_names(edges: Sequence[int]) -> list[str]:
    """Return the names of bins: for ``[0, 1, 2, 4]`` "0", "1", "2-3", as the last edge is outside."""
    return [count(a) if b - a <= 1 else f"{count(a)}\N{EN DASH}{count(b - 1)}" for a, b in pairwise(edges)]
