"""Make figures of grids, such as layers by heads: heat maps with a table of all numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linearize.report.heatmaps import Panel, Scale, heatmaps, narrow
from linearize.report.html import Figure, Group, Table
from linearize.report.numbers import Number, capital

Cell = tuple[Number, str]
"""A number, and its place."""


def grids(
    key: str,
    title: str,
    caption: str,
    panels: Sequence[Panel],
    scale: Scale,
    axes: tuple[str, str],
    write: Callable[[Number | None], str],
    said: str = "",
) -> Figure:
    """Return a figure of panels on one scale.

    Args:
        axes: names of a row and of a column.
        write: formats a number of the table.
        said: description for screen readers, in place of the caption.
    """
    groups = [
        Group(
            [[f"{axes[0]} {name}", *map(write, row)] for name, row in zip(panel.rows, panel.values, strict=True)],
            panel.title or None,
        )
        for panel in panels
    ]
    columns = max((panel.columns for panel in panels), key=len)
    caption_of_numbers = title if scale.title.startswith(title) else f"{title}: {scale.title}"
    numbers = Table(caption_of_numbers, [f"by {axes[0]} and {axes[1]}", *columns], groups, collapsed=True)
    drawn = heatmaps(key, f"{title}. {said or caption}", panels, scale, row_title=axes[0], column_title=axes[1])
    return Figure(title, drawn, capital(caption), numbers, half=narrow(panels))


def by_head(title: str, rows: Sequence[tuple[int, Sequence[Number | None] | None]]) -> Panel:
    """Return a grid of layers by heads; a layer without numbers is a row of blanks."""
    heads = max(len(values or []) for _, values in rows)
    grid = [list(values) if values else [None] * heads for _, values in rows]
    return Panel(title, grid, [str(layer) for layer, _ in rows], [str(head) for head in range(heads)])


def ends(panel: Panel) -> tuple[Cell, Cell]:
    """Return the least and the greatest number of a grid of layers by heads, with their places."""
    cells = [
        (x, f"layer {layer} head {head}")
        for layer, row in zip(panel.rows, panel.values, strict=True)
        for head, x in enumerate(row)
        if x is not None
    ]
    return min(cells, key=lambda cell: cell[0]), max(cells, key=lambda cell: cell[0])
