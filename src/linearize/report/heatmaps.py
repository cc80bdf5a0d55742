"""Make figures of grids of numbers, such as layers by heads: heat maps on one scale, with a table of all numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, nan
from textwrap import wrap

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.ma import masked_invalid

from linearize.report import html
from linearize.report.figures import WIDTH
from linearize.report.numbers import Number, capital, scaled, short
from linearize.report.svg import LEVELS, colour, draw

Grid = Sequence[Sequence[Number | None]]

_RIGHT, _MARGIN, _LEGEND = 22, 70, 64  # pixels: between panels; above and below one; height of the legend
_ROOMY = 34  # least width of a cell with its number
_LETTER = 7.2  # width of a letter of a label
_LINE, _MOST_LINES = 15, 3  # height of a further line of a title, and most lines of it


@dataclass(frozen=True)
class Scale:
    """Steps of colour, between LEVELS + 1 `edges`."""

    title: str
    edges: tuple[Number, ...]

    @classmethod
    def even(cls, title: str, low: Number, high: Number) -> Scale:
        """Return a scale of equal steps."""
        high = high if high > low else low + 1.0
        return cls(title, tuple(low + (high - low) * i / LEVELS for i in range(LEVELS + 1)))

    @classmethod
    def fitting(cls, title: str, values: Iterable[Number | None]) -> Scale:
        """Return equal steps, or equal ratios if positive numbers span a factor above 30; then at most 1,000."""
        found = [value for value in values if value is not None and isfinite(value)]
        high = max(found, default=1.0)
        low = min((value for value in found if value > 0), default=high)
        if high <= 0 or high / low <= 30:
            return cls.even(title, min(0.0, *found, 0.0), high)
        low = max(low, high / 1000)
        return cls(f"{title} (logarithmic)", tuple(low * (high / low) ** (i / LEVELS) for i in range(LEVELS + 1)))

    def level(self, value: Number | None) -> int | None:
        """Return the step of a number; None for None and numbers that are not finite."""
        if value is None or not isfinite(value):
            return None
        return min(max(bisect_right(self.edges, value) - 1, 0), LEVELS - 1)


@dataclass(frozen=True)
class Panel:
    """One grid: rows from the top."""

    title: str
    values: Grid
    rows: Sequence[str]
    columns: Sequence[str]


def grids(
    key: str,
    title: str,
    caption: str,
    panels: Sequence[Panel],
    scale: Scale,
    axes: tuple[str, str],
    write: Callable[[Number | None], str],
    said: str = "",
) -> html.Figure:
    """Return a figure of panels on one scale.

    Args:
        axes: names of a row and of a column.
        write: formats a number of the table.
        said: description for screen readers, in place of the caption.
    """
    groups = [
        html.Group(
            [[f"{axes[0]} {name}", *map(write, row)] for name, row in zip(panel.rows, panel.values, strict=True)],
            panel.title or None,
        )
        for panel in panels
    ]
    columns = max((panel.columns for panel in panels), key=len)
    caption_of_numbers = title if scale.title.startswith(title) else f"{title}: {scale.title}"
    numbers = html.Table(caption_of_numbers, [f"by {axes[0]} and {axes[1]}", *columns], groups, collapsed=True)
    drawn = heatmaps(key, f"{title}. {said or caption}", panels, scale, row_title=axes[0], column_title=axes[1])
    return html.Figure(title, drawn, capital(caption), numbers, half=_narrow(panels))


def heatmaps(
    key: str, label: str, panels: Sequence[Panel], scale: Scale, *, row_title: str, column_title: str
) -> Markup:
    """Draw grids side by side on one scale, with their numbers if there is room."""
    across, cell, tall = _cell_sizes(panels)
    width = across * _panel_width(panels, cell)
    down = ceil(len(panels) / across)
    titles = [_title_lines(panel, cell) for panel in panels]
    legend_title = wrap(scale.title, max(int(width / _LETTER), 1))
    margin = _MARGIN + _LINE * (max(map(len, titles)) - 1)
    height = down * (tall * max(len(panel.rows) for panel in panels) + margin) + _LEGEND
    height += _LINE * (len(legend_title) - 1)

    def paint(figure: Figure) -> None:
        axes = list(figure.subplots(down, across, squeeze=False).flat)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for index, (axis, panel) in enumerate(zip(axes, panels, strict=False)):
            _draw_panel(axis, panel, scale, cell, tall)
            axis.set_title("\n".join(titles[index]))
            axis.set_xlabel(column_title)
            if index % across == 0:
                axis.set_ylabel(row_title)
        colours = ScalarMappable(BoundaryNorm(scale.edges, LEVELS), _colours())
        bar = figure.colorbar(colours, ax=axes, location="bottom", aspect=30, spacing="uniform")
        bar.set_label("\n".join(legend_title))
        marked = [scale.edges[0], scale.edges[LEVELS // 2], scale.edges[LEVELS]]
        bar.set_ticks(marked, labels=[scaled(edge, digits=2) for edge in marked])
        bar.ax.tick_params(length=0)
        if any(scale.level(value) is None for panel in panels for row in panel.values for value in row):
            blank = Patch(facecolor=colour("empty"), label="not measured")
            figure.legend(handles=[blank], loc="outside lower right")

    return draw(key, label, width, height, paint)


def _narrow(panels: Sequence[Panel]) -> bool:
    """Return whether two such drawings fit side by side."""
    across, cell, _ = _cell_sizes(panels)
    return across * _panel_width(panels, cell) <= WIDTH / 2


def _cell_sizes(panels: Sequence[Panel]) -> tuple[int, Number, Number]:
    """Return the number of panels side by side, and the width and height of a cell in pixels."""
    columns = max(len(panel.columns) for panel in panels)
    fitting = [(n, (WIDTH / n - _panel_width(panels, 0)) / columns) for n in (3, 2, 1) if n <= len(panels)]
    across, cell = next(
        (pair for enough in (_ROOMY, 11, 5) for pair in fitting if pair[1] >= enough), (1, max(fitting[-1][1], 3.0))
    )
    cell = min(cell, 42.0)
    return across, cell, max(min(cell, 26.0 if cell >= _ROOMY else 16.0), 4.0)


def _panel_width(panels: Sequence[Panel], cell: Number) -> Number:
    """Return the width of a panel with cells of this width, and with the names of its rows."""
    names = max(len(row) for panel in panels for row in panel.rows)
    return max(58.0, 30 + _LETTER * names) + _RIGHT + cell * max(len(panel.columns) for panel in panels)


def _title_lines(panel: Panel, cell: Number) -> list[str]:
    """Return the title in lines that fit the panel's width; of a title with too many lines, the last ones."""
    letters = int((cell * len(panel.columns) + _RIGHT) / _LETTER)
    lines = wrap(panel.title, max(letters - 1, 1)) or [""]
    if len(lines) <= _MOST_LINES:
        return lines
    return [f"\N{HORIZONTAL ELLIPSIS}{lines[-_MOST_LINES]}", *lines[1 - _MOST_LINES :]]


def _colours() -> Colormap:
    return ListedColormap([colour(f"h{level}") for level in range(LEVELS)]).with_extremes(bad=colour("empty"))


def _draw_panel(axis: Axes, panel: Panel, scale: Scale, cell: Number, tall: Number) -> None:
    levels = [[nan if (level := scale.level(value)) is None else level for value in row] for row in panel.values]
    gap = 1.0 if min(cell, tall) >= 10 else 0.0
    axis.pcolormesh(
        masked_invalid(levels), cmap=_colours(), vmin=-0.5, vmax=LEVELS - 0.5, edgecolors=colour("paper"), linewidth=gap
    )
    if cell >= _ROOMY:
        for y, row in enumerate(panel.values):
            for x, value in enumerate(row):
                ink = colour(_ink(scale.level(value)))
                axis.text(x + 0.5, y + 0.5, short(value), ha="center", va="center_baseline", fontsize=11, color=ink)
    axis.set_xlim(0, len(panel.columns))
    axis.set_ylim(len(panel.rows), 0)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    widest = max(len(name) for name in panel.columns)
    _ticks(axis.set_xticks, panel.columns, ceil((_LETTER * widest + 4) / cell))
    _ticks(axis.set_yticks, panel.rows, ceil(13 / tall))


def _ink(level: int | None) -> str:
    """Return a colour that is readable on a step's colour, in both themes."""
    if level is None:
        return "muted"
    middle = LEVELS // 2
    return "low-text" if level < middle else "mid-text" if level == middle else "high-text"


def _ticks(set_ticks: Callable[..., object], names: Sequence[str], step: int) -> None:
    chosen = range(0, len(names), step)
    set_ticks([index + 0.5 for index in chosen], [names[index] for index in chosen])
