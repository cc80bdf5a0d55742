"""Heat maps: grids of numbers in twelve steps of colour, several panels on one scale."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, isfinite

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from linearize.report.figures import WIDTH
from linearize.report.numbers import Number, scaled, short
from linearize.report.svg import LEVELS, colour, draw

Grid = Sequence[Sequence[Number | None]]

_RIGHT, _LEGEND, _SWATCH = 22, 52, 18  # pixels: between panels, height of the legend, width of a step in it
_ROOMY = 34  # a cell as wide as this has room for its number
_LETTER = 7.2  # width of a letter of a tick label


@dataclass(frozen=True)
class Scale:
    """Steps of colour: `edges` are the LEVELS + 1 numbers between which they lie."""

    title: str
    edges: tuple[Number, ...]

    @classmethod
    def even(
        cls, title: str, values: Iterable[Number | None] = (), low: Number | None = None, high: Number | None = None
    ) -> Scale:
        """Equal steps from the least to the greatest number, or between given ends."""
        found = _finite(values)
        low = min(found, default=0.0) if low is None else low
        high = max(found, default=1.0) if high is None else high
        high = high if high > low else low + 1.0
        return cls(title, tuple(low + (high - low) * i / LEVELS for i in range(LEVELS + 1)))

    @classmethod
    def fitting(cls, title: str, values: Iterable[Number | None]) -> Scale:
        """Equal steps; or equal ratios where the positive numbers span a factor of thirty, down to a thousandth."""
        found = _finite(values)
        high = max(found, default=1.0)
        low = min((value for value in found if value > 0), default=high)
        if high <= 0 or high / low <= 30:
            return cls.even(title, found, low=min(0.0, *found, 0.0))
        low = max(low, high / 1000)
        return cls(f"{title} (logarithmic)", tuple(low * (high / low) ** (i / LEVELS) for i in range(LEVELS + 1)))

    def level(self, value: Number | None) -> int | None:
        """The step that a number falls in; None for no number."""
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


@dataclass(frozen=True)
class Layout:
    """Where the panels of a drawing stand, in pixels: how many side by side, a cell's size, the margins of a panel."""

    panels: int
    across: int
    rows: int
    columns: int
    cell: Number
    tall: Number
    left: Number
    top: Number
    bottom: Number
    blanks: bool  # a cell has no number, which the legend says

    @classmethod
    def of(cls, panels: Sequence[Panel]) -> Layout:
        rows, columns = max(len(p.rows) for p in panels), max(len(p.columns) for p in panels)
        left = max(58.0, 30 + _LETTER * max(len(row) for panel in panels for row in panel.rows))
        top = 28.0 if any(panel.title for panel in panels) else 6.0
        across, cell = cls._cells(columns, len(panels), left)
        cell = min(cell, 42.0)
        tall = max(min(cell, 26.0 if cell >= _ROOMY else 16.0), 4.0)
        blanks = not all(value is not None and isfinite(value) for p in panels for row in _cells(p) for _, value in row)
        return cls(len(panels), across, rows, columns, cell, tall, left, top, 50.0, blanks)

    @staticmethod
    def _cells(columns: int, panels: int, left: Number) -> tuple[int, Number]:
        """Return the number of panels side by side, and the width of a cell."""
        fitting = [(n, (WIDTH / n - left - _RIGHT) / columns) for n in (3, 2, 1) if n <= max(panels, 1)]
        for enough in (_ROOMY, 11, 5):
            for across, cell in fitting:
                if cell >= enough:
                    return across, cell
        return 1, max(fitting[-1][1], 3.0)

    @property
    def pitch(self) -> tuple[Number, Number]:
        """From one panel to the next, to the right and down."""
        return self.left + self.cell * self.columns + _RIGHT, self.top + self.tall * self.rows + self.bottom

    @property
    def size(self) -> tuple[Number, Number]:
        across, down = self.pitch
        return max(self.across * across, self.left + _SWATCH * LEVELS + (150 if self.blanks else 70)), ceil(
            self.panels / self.across
        ) * down + _LEGEND

    def corner(self, index: int) -> tuple[Number, Number]:
        """The top left corner of a panel's grid."""
        across, down = self.pitch
        return (index % self.across) * across + self.left, (index // self.across) * down + self.top


def heatmaps(
    key: str, label: str, panels: Sequence[Panel], scale: Scale, *, row_title: str, column_title: str
) -> Markup:
    """Grids side by side on one scale, with their numbers written in where there is room."""
    layout = Layout.of(panels)
    width, height = layout.size

    def place(x: Number, y: Number, w: Number, h: Number) -> tuple[Number, Number, Number, Number]:
        """Pixels from the top left corner, as matplotlib's fractions from the bottom left one."""
        return x / width, 1 - (y + h) / height, w / width, h / height

    def paint(figure: Figure) -> None:
        for index, panel in enumerate(panels):
            size = layout.cell * len(panel.columns), layout.tall * len(panel.rows)
            axis = figure.add_axes(place(*layout.corner(index), *size))
            _panel(axis, panel, scale, layout)
            axis.set_xlabel(column_title)
            if index % layout.across == 0:
                axis.set_ylabel(row_title)
        strip = place(layout.left, height - _LEGEND + 16, _SWATCH * LEVELS + 150, 14)
        _legend(figure.add_axes(strip), scale, layout.blanks)

    return draw(key, label, width, height, paint, pack=False)


def narrow(panels: Sequence[Panel]) -> bool:
    """Return whether two such drawings fit side by side."""
    return Layout.of(panels).size[0] <= WIDTH / 2


def _cells(panel: Panel) -> list[list[tuple[int, Number | None]]]:
    """Column and value of each cell that there is."""
    return [list(enumerate(row)) for row in panel.values]


def _panel(axis: Axes, panel: Panel, scale: Scale, layout: Layout) -> None:
    cell, tall = layout.cell, layout.tall
    gap = (0.5 / cell, 0.5 / tall) if min(cell, tall) >= 10 else (0.0, 0.0)
    boxes: dict[int | None, list[tuple[Number, Number, Number]]] = {}
    for y, row in enumerate(_cells(panel)):
        # Small cells of one colour are drawn as one box.
        for level, run in groupby(row, key=lambda item: scale.level(item[1])):
            columns = [column for column, _ in run]
            pieces = [(x, x + 1) for x in columns] if gap[0] else [(columns[0], columns[-1] + 1)]
            boxes.setdefault(level, []).extend((start, end, y) for start, end in pieces)
        if cell >= _ROOMY:
            for x, value in row:
                style = {
                    "ha": "center",
                    "va": "center_baseline",
                    "fontsize": 11,
                    "color": colour(_ink(scale.level(value))),
                }
                axis.text(x + 0.5, y + 0.5, short(value), **style)
    for level, placed in sorted(boxes.items(), key=lambda item: -1 if item[0] is None else item[0]):
        shade = colour("empty" if level is None else f"h{level}")
        axis.add_patch(PathPatch(_path(placed, *gap), facecolor=shade, edgecolor="none", linewidth=0))
    axis.set_xlim(0, len(panel.columns))
    axis.set_ylim(len(panel.rows), 0)
    fitting = int(layout.pitch[0] / _LETTER)
    axis.set_title(
        panel.title if len(panel.title) <= fitting else f"\N{HORIZONTAL ELLIPSIS}{panel.title[1 - fitting :]}"
    )
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


def _path(boxes: Sequence[tuple[Number, Number, Number]], gap_x: Number, gap_y: Number) -> Path:
    points: list[tuple[Number, Number]] = []
    for start, end, y in boxes:
        left, right, top, bottom = start + gap_x, end - gap_x, y + gap_y, y + 1 - gap_y
        points += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path(points, codes)


def _ticks(set_ticks: Callable[..., object], names: Sequence[str], step: int) -> None:
    chosen = range(0, len(names), step)
    set_ticks([index + 0.5 for index in chosen], [names[index] for index in chosen])


def _legend(axis: Axes, scale: Scale, blanks: bool) -> None:
    axis.set_xlim(0, _SWATCH * LEVELS + 150)
    axis.set_ylim(14, 0)
    axis.axis("off")
    small = {"va": "baseline", "fontsize": 11, "color": colour("muted")}
    for level in range(LEVELS):
        axis.add_patch(Rectangle((_SWATCH * level, 0), _SWATCH, 14, facecolor=colour(f"h{level}")))
    for edge in (0, LEVELS // 2, LEVELS):
        axis.text(_SWATCH * edge, 27, scaled(scale.edges[edge], digits=2), ha="center", **small)
    axis.text(0, -5, scale.title, **small)
    if blanks:
        axis.add_patch(Rectangle((_SWATCH * LEVELS + 24, 0), _SWATCH, 14, facecolor=colour("empty")))
        axis.text(_SWATCH * LEVELS + 48, 11, "not measured", **small)


def _finite(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None and isfinite(value)]
