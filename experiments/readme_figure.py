"""Draws what a conversion keeps and costs, in one figure, from the committed runs and benchmarks.

    python experiments/readme_figure.py        # writes docs/figures/conversion.svg

Left: the loss beyond the window, above the teacher's, of every committed run and of its controls. Middle: bytes that a
sequence occupies while it is generated. Right: how much faster a prompt is read, by an attention layer alone
(benchmarks/results/forward.json) and by the whole models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from figures import COLOURS, draw
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from linearize.report.load import RunFiles, load_run

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "figures" / "conversion.svg"
TITLES = ("Kept: loss above the teacher's", "Memory of one sequence", "Speed of reading a prompt")
TEACHER, RECOMMENDED, LOLCATS, HEDGEHOG, GLA = COLOURS
# The first two are of one teacher, whose memory and speed the other panels show.
RUNS = (
    ("recommended", "Python code", "recommended/pycode-5m", RECOMMENDED),
    ("LoLCATs", "Python code", "lolcats/pycode-5m", LOLCATS),
    ("absolute-scale", "Python code", "absolute_scale/pycode-5m", HEDGEHOG),
    ("LoLCATs", "stories", "lolcats/stories260K", LOLCATS),
)
LAYERS = (("hedgehog", HEDGEHOG, "v"), ("lolcats", LOLCATS, "s"), ("gla", GLA, "^"))
Named = tuple[str, str, RunFiles]  # the recipe, its colour, the run's files


def kept(axis: Axes, runs: Sequence[Named]) -> None:
    """A row per run: the student, and what its control with a window alone comes to, trained alike and untrained."""
    for row, (_, colour, run) in enumerate(runs):
        losses = {line["name"]: line["quality"]["beyond"]["mean"] for line in run.evaluation["measured"]}
        above = {name: loss - losses["teacher"] for name, loss in losses.items()}
        ahead = run.comparison("window_lora")
        assert ahead is not None
        # Paired on the same tokens: where the bar begins behind the student, it is worth more than the window.
        bar = [above["student"] - ahead["beyond"][bound] for bound in ("low", "high")]
        axis.plot(bar, [row, row], color=TEACHER, linewidth=3, alpha=0.35)
        axis.plot(above["student"], row, "o", color=colour, markersize=7)
        axis.plot(above["window_lora"], row, "|", color=TEACHER, markersize=11, markeredgewidth=1.5)
        axis.plot(above["window"], row, "x", color=TEACHER, markersize=7, markeredgewidth=1.5)
    marks = {"o": "student", "|": "its window control, trained alike (95 %)", "x": "the same, untrained"}
    for marker, label in marks.items():
        axis.plot([], [], marker, color=TEACHER, label=label, markeredgewidth=1.5)
    names = [f"{recipe}\n{text}" for recipe, text, *_ in RUNS]
    axis.axvline(0, ymax=0.75, color=TEACHER, linewidth=1)  # below the legend
    axis.set(ylim=(len(runs) - 0.6, -1.5), yticks=range(len(runs)), yticklabels=names)
    axis.set_xlabel("nats per token, beyond the window;\n0 is the teacher as it came, further left is better")
    axis.legend(loc="upper left", fontsize=8, borderaxespad=0.2)


def memory(axis: Axes, runs: Sequence[Named]) -> None:
    """Bytes over tokens: as the plan has them for the teacher, as they were measured at the points."""
    longest = 1024
    for height, (name, colour, run) in zip((4, -10), runs, strict=True):
        for who, shade in (("teacher", TEACHER), ("student", colour)):
            lines = [line for line in run.evaluation["speed"] if line["model"] == who]
            points = [(line["prompt_length"] + line["new_tokens"], line["cache_bytes"] / 1e6) for line in lines]
            axis.plot(*zip(*points, strict=True), "o", color=shade, markersize=5)
        state = points[0][1]
        axis.plot([0, longest], [state, state], color=colour)
        label = {"textcoords": "offset points", "ha": "right"}
        axis.annotate(f"{name}: {state:.1f} MB", (longest, state), (0, height), color=colour, **label)
    assert run.plan is not None
    per_token = run.plan["teacher_cache_bytes_per_token"] / 1e6
    axis.plot([0, longest], [0, longest * per_token], color=TEACHER)
    axis.annotate("the teacher's\nkeys and values", (700, 700 * per_token), (-4, 0), **label)
    axis.set(xlim=(0, 1.03 * longest), ylim=(0, None), xlabel="tokens so far", ylabel="MB, in fp32")
    axis.xaxis.set_major_locator(FixedLocator([0, 256, 512, 768, 1024]))


def speed(axis: Axes, runs: Sequence[Named]) -> None:
    """Times as fast as softmax over prompt lengths, both axes logarithmic."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "forward.json").read_text(encoding="utf-8"))["results"]
    for name, colour, marker in LAYERS:
        points = [(row["length"], row["times_faster"]["median"]) for row in rows if row["recipe"] == name]
        axis.plot(*zip(*points, strict=True), marker=marker, color=colour, markersize=5, label=f"a layer, {name}")
    for name, colour, run in runs:
        seconds = {
            (line["model"], line["prompt_length"]): line["prefill"]["median"] for line in run.evaluation["speed"]
        }
        points = [(n, seconds["teacher", n] / taken) for (who, n), taken in seconds.items() if who == "student"]
        style = {"color": colour, "fillstyle": "none", "linewidth": 1, "label": f"whole 5M model, {name}"}
        axis.plot(*zip(*points, strict=True), "o--", **style)
    axis.axhline(1, color=TEACHER, linewidth=1)
    axis.annotate("as fast as softmax", (32768, 1), (0, -10), textcoords="offset points", ha="right", fontsize=8)
    axis.set(xscale="log", yscale="log", ylim=(0.25, 180))
    axis.set(xlabel="tokens of the prompt", ylabel="times as fast, on a CPU")
    axis.xaxis.set_major_locator(FixedLocator([256, 1024, 4096, 16384]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    axis.yaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4, 8, 16]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.legend(loc="upper left", fontsize=8, borderaxespad=0.2)


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FIGURE)
    output = parser.parse_args().output
    runs = [(recipe, colour, load_run(ROOT / "experiments" / folder)) for recipe, _, folder, colour in RUNS]

    def paint(axes: Sequence[Axes]) -> None:
        kept(axes[0], runs)
        memory(axes[1], runs[:2])
        speed(axes[2], runs[:2])

    draw(output, TITLES, paint, width=3.5)


if __name__ == "__main__":
    main()
