"""Numbers by row and column, as heat maps with a table of all of them; grids of layers by heads among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linearize.report.heatmaps import Panel, Scale, heatmaps, narrow
from linearize.report.html import Figure, Group, Table
from linearize.report.numbers import Number, capital

Cell = tuple[Number, str]
"""A number, and where it stands."""


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
    """Panels on one scale.

    Args:
        axes: what a row and what a column is.
        write: a number in the table.
        said: what the drawing shows, in words, where it is more than the caption.
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
    """A grid of layers by heads; a layer without numbers is a row of blanks."""
    heads = max(len(values or []) for _, values in rows)
    grid = [list(values) if values else [None] * heads for _, values in rows]
    return Panel(title, grid, [str(layer) for layer, _ in rows], [str(head) for head in range(heads)])


def ends(panel: Panel) -> tuple[Cell, Cell]:
    """The least and the greatest number of layers by heads."""
    cells = [
        (x, f"layer {layer} head {head}")
        for layer, row in zip(panel.rows, panel.values, strict=True)
        for head, x in enumerate(row)
        if x is not None
    ]
    return min(cells, key=lambda cell: cell[0]), max(cells, key=lambda cell: cell[0])
