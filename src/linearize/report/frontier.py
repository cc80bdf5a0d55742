"""The results of `linearize frontier` as a table, a page and a drawing of quality against bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import compress
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter
from rich.table import Table

from linearize.report.numbers import memory_size

FINE_TUNED = "the same, all fine-tuned"
COLUMNS = (
    "of the cache",
    "state",
    "bytes",
    "long-context gain retained",
    FINE_TUNED,
    "copying",
    "needle",
)
PANELS = {"far": "long-context gain retained", "copying": "copying", "needle": "needle"}
# Names and styles of the lines that are drawn.
ALLOCATED, LAYERS, WINDOW = "per-head allocation", "full layers and windows", "window and sinks"
LINES = {
    (ALLOCATED, True): (f"{ALLOCATED}, fine-tuned", "#0072b2", "-"),
    (ALLOCATED, False): (ALLOCATED, "#0072b2", "--"),
    (LAYERS, True): (f"{LAYERS}, fine-tuned", "#cc79a7", "-"),
    (LAYERS, False): (LAYERS, "#cc79a7", "--"),
    (WINDOW, True): (f"{WINDOW}, fine-tuned", "#d55e00", "-"),
    (WINDOW, False): (WINDOW, "#d55e00", "--"),
    ("window", False): ("window", "#009e73", "--"),
}


def table(about: dict[str, Any]) -> Table:
    """Return the table for the terminal."""
    shown = Table(title=f"quality against bytes, of the teacher's cache at {about['length']:,} tokens")
    columns, rows = _shown(about)
    for column in columns:
        shown.add_column(column)
    for cells in rows:
        shown.add_row(*cells)
    return shown


def _shown(about: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows; without fine-tuning, its column is left out."""
    rows = [list(row) for row in _rows(about)]
    kept = [name != FINE_TUNED or about["tokens"] is not None for name in COLUMNS]
    return list(compress(COLUMNS, kept)), [list(compress(row, kept)) for row in rows]


def page(about: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    window, tokens = about["reference"], about["tokens"]
    trained = "" if tokens is None else "; then the same with all of them fine-tuned on the same tokens"
    columns, rows = _shown(about)
    lines = [
        "# Quality against bytes of state",
        "",
        f"Long-context gain retained: the share, beyond position {2 * window}, of what the teacher gains over a window "
        f"of {window}, both before fine-tuning{trained}. "
        f"Copying: the share of the teacher's gain on random tokens copied from {2 * window} back. Needle: the share "
        f"of the teacher's right answers to needles beyond {window} tokens. In brackets: 95 % bootstrap intervals."
        f"{'' if tokens is None else f' Fine-tuning took {tokens:,} tokens.'}",
        "",
        "![quality against bytes](frontier.svg)",
        "",
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
        "Pairs of each KV head: the window + the pairs for text, the same in every head; then the pairs for recall of "
        "each head, with | between layers. Per layer: the layers with full attention, and the window of the others.",
        "",
        *(f"- {float(fraction):.0%}: {_heads(chosen)}" for fraction, chosen in about["chosen"].items()),
        "",
        f"    {about['command']}",
        "",
    ]
    return "\n".join(lines)


def figure(about: dict[str, Any]) -> str:
    """Draw long-context gain retained, copying and needles over bytes, as SVG."""

    spread = [point for point in about["points"] if point["name"] == ALLOCATED]
    ticks = {point["bytes"]: f"{memory_size(point['bytes'])}\n{point['fraction']:.0%}" for point in spread}

    def paint(axis: Axes, key: str) -> None:
        axis.set_title(PANELS[key], loc="left", fontsize=10)
        for (name, trained), (label, colour, dash) in LINES.items():
            points = [(x, y) for x, y in _line(about["points"], name, trained, key) if y is not None]
            if points:
                axis.plot(*zip(*points, strict=True), dash, marker="o", markersize=4, color=colour, label=label)
        axis.set_xscale("log")
        axis.set_xlabel("state, and its share of the teacher's cache")
        axis.xaxis.set_major_locator(FixedLocator(list(ticks)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda held, _: ticks[held]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylim(bottom=-0.25)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "frontier",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    style |= {"axes.grid": True, "grid.color": "#dddddd", "font.size": 9}
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=(11, 3.4), layout="constrained")
        axes: Sequence[Axes] = drawn.subplots(1, len(PANELS))
        for axis, key in zip(axes, PANELS, strict=True):
            paint(axis, key)
        drawn_lines = {
            label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        drawn.legend(drawn_lines.values(), drawn_lines, loc="outside lower center", ncols=5, frameon=False)
        written = StringIO()
        drawn.savefig(written, format="svg", facecolor="white", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def _line(points: Sequence[dict[str, Any]], name: str, trained: bool, key: str) -> Iterator[tuple[int, float | None]]:
    """Yield bytes and quality of the points of one line, in order of bytes."""
    found = [point for point in points if (point["name"], point["trained"]) == (name, trained)]
    for point in sorted(found, key=lambda point: point["bytes"]):
        share = _share(point, key)
        yield point["bytes"], None if share is None else share["mean"]


def _rows(about: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for point in about["points"]:
        name = f"{point['name']}, fine-tuned" if point["trained"] else point["name"]
        shares = (_percent(_share(point, key)) for key in ("far", "far_finetuned", "copying", "needle"))
        yield f"{point['fraction']:.0%}", name, f"{point['bytes']:,}", *shares


def _share(point: dict[str, Any], key: str) -> dict[str, float] | None:
    found = point[key]
    return None if found is None else found["recovery" if key == "needle" else "share"]


def _percent(share: dict[str, float] | None) -> str:
    return "-" if share is None else f"{share['mean']:.0%} [{share['low']:.0%}, {share['high']:.0%}]"


def _heads(chosen: dict[str, Any]) -> str:
    layers = " | ".join(" ".join(map(str, heads)) for heads in chosen["recall"].values())
    words = f"{chosen['window']}+{chosen['text']} in every head, for recall {layers}"
    if "full_layers" not in chosen:  # results of an older version
        return words
    full = ", ".join(map(str, chosen["full_layers"])) or "none"
    return f"{words}; per layer: full {full}, windows of {chosen['layer_window']}"
