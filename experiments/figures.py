"""Drawings beside the tables: SVG, the same bytes wherever they are made."""

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


# For pictures in pages that follow the reader's theme: matplotlib's colours are inline styles, hence `!important`.
DARK = """<style>
@media (prefers-color-scheme: dark) {
  text { fill: #eeeeee !important; }
  [style*="fill: #ffffff"] { fill: #0d1117 !important; }
  [style*="stroke: #000000"], [style*="stroke: #222222"] { stroke: #eeeeee !important; }
  [style*="stroke: #dddddd"] { stroke: #333a42 !important; }
  [style*="stroke: #0072b2"] { stroke: #56b4e9 !important; }
  [style*="fill: #0072b2"] { fill: #56b4e9 !important; }
  [style*="stroke: #d55e00"] { stroke: #ff9d4d !important; }
  [style*="fill: #d55e00"] { fill: #ff9d4d !important; }
}
</style>
"""


def draw(
    path: Path,
    titles: Sequence[str],
    paint: Callable[[Sequence[Axes]], None],
    *,
    width: float = 4.4,
    stacked: bool = False,
    style: str = "",
) -> None:
    """Draw panels, each `width` inches wide, which `paint` fills: side by side, or stacked.

    Args:
        style: CSS that the file contains.
    """
    rows, columns = (len(titles), 1) if stacked else (1, len(titles))
    with matplotlib.rc_context(STYLE):
        matplotlib.rcParams["svg.hashsalt"] = path.name
        figure = Figure(figsize=(width * columns, 3.3 * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel, title in zip(panels, titles, strict=True):
            panel.set_title(title, loc="left", fontsize=10)
        paint(panels)
        written = StringIO()
        figure.savefig(written, format="svg", facecolor="white", metadata={"Date": None})
    text = "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"
    write_text(path, text.replace("</svg>", f"{style}</svg>"))


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
