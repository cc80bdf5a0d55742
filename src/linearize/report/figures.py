"""Kinds of charts: dots with intervals, and curves. `heatmaps` has heat maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from linearize.evaluation.intervals import Interval
from linearize.report.load import RunFiles
from linearize.report.numbers import Number, number, scaled
from linearize.report.svg import DASHES, MARKERS, SERIES, colour, draw

WIDTH = 860  # of a drawing across the whole column, in CSS pixels


@dataclass(frozen=True)
class Dots:
    """Intervals of one series (a run, a model), one per row of its panel; None: not measured.

    `style` is the colour (-1: the colour of text), `marker` the shape.
    """

    name: str
    values: Sequence[Interval | None]
    style: int = 0
    marker: int = 0


@dataclass(frozen=True)
class DotPanel:
    """A panel whose rows share one scale.

    Attributes:
        zero: whether zero is marked.
        cut: whether values far above all others become arrows at the edge, with their numbers.
        write: turns a value into a tick label.
    """

    title: str
    series: Sequence[Dots]
    zero: bool = False
    cut: bool = False
    write: Callable[[Number], str] | None = None


@dataclass(frozen=True)
class Line:
    """Points of a curve; `low` and `high` bound its band, if it has one."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number]
    style: int = 0
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    dash: int = 0


@dataclass(frozen=True)
class LinePanel:
    """Curves over one x axis; `ticks` names places on it."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    ticks: dict[Number, str] = field(default_factory=dict)


def by_run(
    title: str, runs: Sequence[RunFiles], values: Sequence[Sequence[Interval | None]], **options: Any
) -> DotPanel:
    """Return a panel with a series for each run, in its own colour; `options` are those of `DotPanel`."""
    pairs = zip(runs, values, strict=True)
    return DotPanel(title, [Dots(run.name, found, place, place) for place, (run, found) in enumerate(pairs)], **options)


def line_colour(style: int) -> str:
    return colour("ink" if style < 0 else f"s{style % SERIES}")


def dots(key: str, label: str, rows: Sequence[str], panels: Sequence[DotPanel]) -> Markup:
    """Draw a dot with its interval per row and series; panels share their rows, and the row "student" is shaded."""
    count = max(len(panel.series) for panel in panels)
    height = 62 + len(rows) * (14 + 13 * count) + (26 if count > 1 else 0)

    def paint(figure: Figure) -> None:
        axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
        for axis, panel in zip(axes, panels, strict=True):
            _dot_panel(axis, panel)
            if "student" in rows:
                place = rows.index("student")
                axis.axhspan(place - 0.5, place + 0.5, color=colour("rule"), alpha=0.35, linewidth=0, zorder=0)
        axes[0].set_yticks(range(len(rows)), rows)
        axes[0].tick_params(axis="y", labelcolor=colour("ink"), labelsize=12)
        axes[0].set_ylim(len(rows) - 0.4, -0.6)
        _legend(figure, axes)

    return draw(key, label, WIDTH, height, paint)


def _dot_panel(axis: Axes, panel: DotPanel) -> None:
    low, high = _limits(panel)
    axis.set_title(panel.title)
    axis.set_xlim(low, high)
    axis.grid(axis="x")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    if panel.write is not None:
        write = panel.write
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    if panel.zero:
        axis.axvline(0, color=colour("ink"), linewidth=1)
    for place, series in enumerate(panel.series):
        shift = (place - (len(panel.series) - 1) / 2) * 0.62 / max(1, len(panel.series))
        shown = [(row + shift, value) for row, value in enumerate(series.values) if value is not None]
        paint, marker = line_colour(series.style), MARKERS[series.marker % len(MARKERS)]
        # NaN gives the series a name in the legend even if no point is visible.
        axis.plot([float("nan")], [0], marker, color=paint, label=series.name)
        for y, value in shown:
            if value.low > high:
                text = f"{number(value.mean, 2)} \N{RIGHTWARDS ARROW}"
                ground = {"facecolor": colour("paper"), "pad": 1.5}
                axis.annotate(text, (high, y), ha="right", va="center", color=paint, fontsize=11, bbox=ground)
                continue
            axis.plot([value.low, value.high], [y, y], color=paint, solid_capstyle="butt")
            axis.plot([value.mean], [y], marker, color=paint)


def _limits(panel: DotPanel) -> tuple[Number, Number]:
    """Return the ends of the scale: of all values, or with `cut` of those below a gap wider than their range."""
    kept = sorted((v for series in panel.series for v in series.values if v is not None), key=lambda value: value.low)
    low = min([value.low for value in kept[:1]] + [0.0] * panel.zero, default=0.0)
    high = max([0.0] * panel.zero, default=low)
    for place, value in enumerate(kept):
        if panel.cut and place >= 2 and value.low - high > high - low:
            break
        high = max(high, value.high)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def curves(key: str, label: str, panels: Sequence[LinePanel], *, height: Number = 250) -> Markup:
    """Draw curves; up to three panels side by side, further ones below."""
    columns = len(panels) if len(panels) <= 3 else 2  # a run's panels are two or three
    rows = ceil(len(panels) / columns)

    def paint(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, squeeze=False)
        axes = list(grid.flat)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(axes, panels, strict=False):
            _line_panel(axis, panel)
        _legend(figure, axes[: len(panels)])

    return draw(key, label, WIDTH, rows * height + 30, paint)


def _line_panel(axis: Axes, panel: LinePanel) -> None:
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(axis="y")
    for line in panel.lines:
        paint = line_colour(line.style)
        if line.low:
            axis.fill_between(line.x, line.low, line.high, color=paint, alpha=0.11, linewidth=0)
        axis.plot(
            line.x,
            line.y,
            marker=MARKERS[max(line.style, 0) % len(MARKERS)],
            markersize=4,
            color=paint,
            linewidth=1.8,
            linestyle=DASHES[line.dash % len(DASHES)],
            label=line.name,
        )
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.yaxis.set_major_locator(MaxNLocator(5))
    for scale, log, set_scale in (
        (axis.xaxis, panel.log_x, axis.set_xscale),
        (axis.yaxis, panel.log_y, axis.set_yscale),
    ):
        if log:
            set_scale("log")
            # With powers of ten alone, no tick may be visible.
            scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=6))
            scale.set_minor_locator(NullLocator())
            scale.set_minor_formatter(NullFormatter())
        scale.set_major_formatter(FuncFormatter(lambda value, _: scaled(value)))
    if panel.ticks:
        axis.xaxis.set_major_locator(FixedLocator(list(panel.ticks)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panel.ticks.get(value, "")))
        axis.xaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Add one legend above all panels, if there is more than one name."""
    named = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    if len(named) > 1:
        columns = max(1, min(len(named), 118 // (max(map(len, named)) + 6)))
        figure.legend(list(named.values()), list(named), loc="outside upper left", ncols=columns)
