"""Draw what conversions of SmolLM2-135M-Instruct keep and cost, from the committed benchmark.

    python experiments/readme_figure.py        # writes docs/figures/conversion.svg and conversion-narrow.svg

The second file has the panels below each other, for narrow screens. Colours follow the reader's theme.
All numbers are of benchmarks/results/kvpress-smollm2-135m.json (`benchmarks/kvpress.py`). Left: the loss of a
continuation minus the teacher's. Middle: needles found. Right: bytes that a sequence occupies.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import COLOURS, DARK, MARKERS, draw
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kvpress-smollm2-135m.json"
FIGURES = ROOT / "docs" / "figures"
TITLES = ("Loss of a continuation", "Needles found", "Memory of one sequence")
GREY = "#888888"
# All have constant memory once the context is read. Presses read it with full attention, conversions by streaming.
NAMED = ("recommended", "recommended, trained", "window and 4 sinks", "SnapKV, held", "TOVA, held")
Rows = list[dict[str, Any]]


def by_method(rows: Rows) -> dict[str, Rows]:
    """Return the rows of each method of the figure that was measured, by rising share of the cache."""
    found: dict[str, Rows] = {}
    for row in sorted(rows, key=lambda row: row.get("share", 0)):
        name = re.sub(r", [\d.]+ %.*", "", row["method"])
        if "share" in row and name in NAMED and "in full" not in row["method"]:
            found.setdefault(name, []).append(row)
    return {name: found[name] for name in NAMED if name in found}


def against_share(axis: Axes, methods: dict[str, Rows], key: str, label: str, scale: float) -> None:
    """Draw a number of each method, with its 95 % interval, over the share of the cache."""
    for (name, rows), marker in zip(methods.items(), MARKERS, strict=False):
        x = [100 * row["share"] for row in rows]
        y, low, high = ([scale * row[key][part] for row in rows] for part in ("mean", "low", "high"))
        bars = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
        colour = COLOURS[1 + NAMED.index(name)] if name in NAMED[:2] else GREY
        axis.errorbar(x, y, bars, marker=marker, color=colour, label=name, markersize=5, linewidth=1, capsize=2)
    axis.set(xscale="log", xlabel="% of the teacher's cache at 1,024 tokens", ylabel=label)
    axis.xaxis.set_major_locator(FixedLocator([6, 11, 20]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def memory(axis: Axes, teacher: dict[str, Any], rows: Rows, context: int) -> None:
    """Draw bytes over tokens: the teacher's keys and values grow, conversions do not."""
    longest = 4096
    per_token = teacher["bytes_after_context"] / context / 1e6
    axis.plot([0, longest], [0, longest * per_token], color=COLOURS[0])
    label: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 8}
    axis.annotate("the teacher's\nkeys and values", (2300, 2300 * per_token), (-4, 0), color=COLOURS[0], **label)
    held = sorted((row["bytes_after_context"] / 1e6 for row in rows), reverse=True)
    for size in held:
        axis.plot([0, longest], [size, size], color=COLOURS[1])
    sizes = f"converted: {', '.join(f'{size:.1f}' for size in held)} MB"
    axis.annotate(sizes, (longest, held[0]), (0, 3), color=COLOURS[1], **label)
    axis.set(xlim=(0, longest), ylim=(0, None), xlabel="tokens so far", ylabel="MB, in fp32")
    axis.xaxis.set_major_locator(FixedLocator([0, 1024, 2048, 3072, 4096]))


def main() -> None:
    """Write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FIGURES, help="where to write (default: %(default)s)")
    folder = parser.parse_args().folder
    about = json.loads(RESULTS.read_text(encoding="utf-8"))
    methods = by_method(about["results"])

    def paint(axes: Sequence[Axes]) -> None:
        against_share(axes[0], methods, "minus_teacher", "nats above the teacher's", 1)
        axes[0].set(ylim=(0, None))
        axes[0].legend(fontsize=8)
        against_share(axes[1], methods, "needles", "%", 100)
        axes[1].set(ylim=(-3, 103))
        memory(axes[2], about["results"][0], methods[NAMED[0]], about["context"])

    draw(folder / "conversion.svg", TITLES, paint, width=3.5, style=DARK)
    draw(folder / "conversion-narrow.svg", TITLES, paint, width=3.6, stacked=True, style=DARK)


if __name__ == "__main__":
    main()
