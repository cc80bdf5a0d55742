"""Drawings beside the tables: SVG on white, the same bytes wherever they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from linearize.run.folder import write_text

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib: every machine lays text out alike
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}
COLOURS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
MARKERS = "osD^v"


def draw(path: Path, titles: Sequence[str], paint: Callable[[Sequence[Axes]], None], *, width: float = 4.4) -> None:
    """Panels side by side, each `width` inches wide, which `paint` fills."""
    with matplotlib.rc_context(STYLE):
        matplotlib.rcParams["svg.hashsalt"] = path.name
        figure = Figure(figsize=(width * len(titles), 3.3), layout="constrained")
        panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
        for panel, title in zip(panels, titles, strict=True):
            panel.set_title(title, loc="left", fontsize=10)
        paint(panels)
        written = StringIO()
        figure.savefig(written, format="svg", facecolor="white", metadata={"Date": None})
    write_text(path, "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n")


def scatter(path: Path, y_label: str, panels: dict[str, dict[str, tuple[float, float]]]) -> None:
    """One panel per quantity x: points (x, y) with their names, the same in every panel."""

    def paint(axes: Sequence[Axes]) -> None:
        for axis, (x_label, points) in zip(axes, panels.items(), strict=True):
            axis.set(xlabel=x_label, ylabel=y_label)
            axis.margins(0.08)
            for number, (name, (x, y)) in enumerate(points.items()):
                # Hollow: those that lie on one another can be told apart.
                colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
                axis.plot([x], [y], marker, color=colour, label=name, fillstyle="none", markeredgewidth=1.5)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)

    draw(path, [""] * len(panels), paint)


def curves(path: Path, lengths: Sequence[int], panels: dict[str, dict[str, Sequence[float]]]) -> None:
    """One panel per measure: a curve per name over sequence lengths, both axes logarithmic."""

    def paint(axes: Sequence[Axes]) -> None:
        for axis, lines in zip(axes, panels.values(), strict=True):
            for (name, values), colour, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
                axis.plot(lengths, values, marker=marker, color=colour, label=name, markersize=4)
            axis.set(xscale="log", yscale="log", xlabel="tokens")
            axis.xaxis.set_major_locator(FixedLocator(lengths))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:.0f}k")
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes[0].legend()

    draw(path, list(panels), paint)
