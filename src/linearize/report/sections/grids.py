"""Make figures of grids, such as layers by heads: heat maps with a table of all numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linearize.report.heatmaps import Panel, Scale, heatmaps, narrow
from linearize.report.html import Figure, Group, Table
from linearize.report.numbers import Number, capital


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
