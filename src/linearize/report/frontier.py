"""The results of `linearize frontier` as a table, a page and a drawing of quality against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter
from rich.table import Table

from linearize.report.numbers import memory_size

FINE_TUNED = "the same, all fine-tuned"
QUALITIES = {
    "far": "long-context gain retained",
    "far_finetuned": FINE_TUNED,
    "copying": "copying",
    "needle": "needle",
}
DRAWN = ("far", "copying", "needle")
ALLOCATED, LAYERS, WINDOW = "per-head allocation", "full layers and windows", "window and sinks"
COLOURS = {ALLOCATED: "#0072b2", LAYERS: "#cc79a7", WINDOW: "#d55e00", "window": "#009e73"}


def table(about: dict[str, Any]) -> Table:
    """Return the table for the terminal."""
    heading, *rows = _rows(about)
    shown = Table(*heading, title=f"quality against bytes, of the teacher's cache at {about['length']:,} tokens")
    for row in rows:
        shown.add_row(*row)
    return shown


def _rows(about: dict[str, Any]) -> list[list[str]]:
    """Return the heading, then a row per point; without fine-tuning, its column is left out."""
    keys = [key for key in QUALITIES if key != "far_finetuned" or about["tokens"] is not None]
    rows = [["of the cache", "state", "bytes", *(QUALITIES[key] for key in keys)]]
    for point in about["points"]:
        name, shares = _label(point["name"], point["trained"]), [_percent(_share(point, key)) for key in keys]
        rows.append([f"{point['fraction']:.0%}", name, f"{point['bytes']:,}", *shares])
    return rows


def _label(name: str, trained: bool) -> str:
    return f"{name}, fine-tuned" if trained else name


def page(about: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    window, tokens = about["reference"], about["tokens"]
    trained = "" if tokens is None else "; then the same with all of them fine-tuned on the same tokens"
    heading, *rows = _rows(about)
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
        f"| {' | '.join(heading)} |",
        f"|{' --- |' * len(heading)}",
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
        axis.set_title(QUALITIES[key], loc="left", fontsize=10)
        for name, colour in COLOURS.items():
            for trained, dash in ((True, "-"), (False, "--")):
                points = [x for x in about["points"] if (x["name"], x["trained"]) == (name, trained)]
                line = sorted((x["bytes"], share["mean"]) for x in points if (share := _share(x, key)))
                if line:
                    label = _label(name, trained)
                    axis.plot(*zip(*line, strict=True), dash, marker="o", markersize=4, color=colour, label=label)
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
        "axes.grid": True,
        "grid.color": "#dddddd",
        "font.size": 9,
    }
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=(11, 3.4), layout="constrained")
        axes: Sequence[Axes] = drawn.subplots(1, len(DRAWN))
        for axis, key in zip(axes, DRAWN, strict=True):
            paint(axis, key)
        drawn_lines = {
            label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        drawn.legend(drawn_lines.values(), drawn_lines, loc="outside lower center", ncols=5, frameon=False)
        written = StringIO()
        drawn.savefig(written, format="svg", facecolor="white", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def _share(point: dict[str, Any], key: str) -> dict[str, float] | None:
    found = point[key]
    return None if found is None else found["recovery" if key == "needle" else "share"]


def _percent(share: dict[str, float] | None) -> str:
    return "-" if share is None else f"{share['mean']:.0%} [{share['low']:.0%}, {share['high']:.0%}]"


def _heads(chosen: dict[str, Any]) -> str:
    layers = " | ".join(" ".join(map(str, heads)) for heads in chosen["recall"].values())
    words = f"{chosen['window']}+{chosen['text']} in every head, for recall {layers}"
    full = ", ".join(map(str, chosen["full_layers"])) or "none"
    return f"{words}; per layer: full {full}, windows of {chosen['layer_window']}"
