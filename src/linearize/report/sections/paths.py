"""Whether the linear part carries anything, or the window does all the work (arXiv 2510.05901)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linearize.report.findings import path_usage
from linearize.report.heatmaps import Panel, Scale, heatmaps
from linearize.report.html import Block, Figure, Group, Section, Table, Text
from linearize.report.load import RunFiles, interval
from linearize.report.missing import not_measured
from linearize.report.numbers import Number, share, with_interval
from linearize.report.sections.attention import by_head
from linearize.report.sections.positions import bin_names


def paths(runs: Sequence[RunFiles]) -> Section:
    """The linear part's share of the weight, by head and by distance, and what is lost without either part."""
    measured = [run for run in runs if run.section("path_usage")]
    blocks: list[Block] = []
    if measured:
        lines = [
            [title, *(with_interval(interval(run.section("path_usage").get(key)), sign=True) for run in measured)]
            for key, title in (("without_linear", "without the linear part"), ("without_window", "without the window"))
        ]
        caption = (
            "What the student's loss gains when a part is switched off, nats per token (above zero: the part is used)"
        )
        blocks.append(Table.of(caption, ["", *(run.name for run in measured)], lines))
        for run in measured:
            if (said := path_usage(run)) is not None:
                blocks.append(Text(run.prefix + said.words))
        blocks += [_by_head(measured), _by_distance(measured)]
    blocks += not_measured(runs, "path_usage")
    return Section(
        "paths",
        "Path usage",
        blocks,
        summary="A hybrid of window and linear attention can score well and ignore its linear part."
        if measured
        else "",
    )


def _by_head(runs: Sequence[RunFiles]) -> Figure:
    panels, groups, said = [], [], []
    for run in runs:
        layers = run.section("path_usage")["layers"]
        panels.append(by_head(run.group or "", [(x["layer"], x["linear_share"]) for x in layers]))
        cells = [
            (x, layer["layer"], head)
            for layer in layers
            for head, x in enumerate(layer["linear_share"])
            if x is not None
        ]
        mean = sum(x for x, _, _ in cells) / len(cells)
        most, least = max(cells), min(cells)
        said.append(
            f"{run.prefix}{share(mean, 1)} on average, least {share(least[0], 1)} (layer {least[1]}, head {least[2]}), "
            f"most {share(most[0], 1)} (layer {most[1]}, head {most[2]})"
        )
        rows = [[f"layer {x['layer']}", *(share(v, 1) for v in x["linear_share"])] for x in layers]
        groups.append(Group(rows, run.group))
    scale = Scale.even("share of the weight on the linear part", low=0.0, high=1.0)
    label = f"Share of attention weight that the linear part carries. {'; '.join(said)}"
    drawn = heatmaps("paths-heads", label, panels, scale, row_title="layer", column_title="head")
    heads = [f"head {head}" for head in range(max(len(panel.columns) for panel in panels))]
    numbers = Table("Share of the weight on the linear part", ["", *heads], groups, collapsed=True)
    return Figure("What the linear part carries, by head", drawn, f"{'; '.join(said)}.", numbers)


def _by_distance(runs: Sequence[RunFiles]) -> Figure:
    """Mass, and the linear part's share of it, by layer and distance; heads averaged, the share weighted by mass."""
    panels, groups, said = [], [], []
    columns: list[str] = []
    for run in runs:
        found = run.section("path_usage")
        bins = bin_names(found["edges"])
        columns = columns if len(columns) > len(bins) else bins
        names = [str(layer["layer"]) for layer in found["layers"]]
        mass, linear = zip(*(_averaged(layer["by_distance"]) for layer in found["layers"]), strict=True)
        for title, grid in (("weight at that distance", mass), ("of it, on the linear part", linear)):
            panels.append(Panel(run.prefix + title, grid, names, bins))
            lines = [[f"layer {name}", *(share(v, 1) for v in row)] for name, row in zip(names, grid, strict=True)]
            groups.append(Group(lines, run.prefix + title))
        far = [row[-1] for row in linear if row[-1] is not None]
        if far:
            carried = share(sum(far) / len(far), 1)
            said.append(f"{run.prefix}at distances {bins[-1]} the linear part carries {carried} of the weight")
    scale = Scale.even("share", low=0.0, high=1.0)
    label = f"Attention weight by layer and distance, and the linear part's share of it. {'; '.join(said)}"
    drawn = heatmaps("paths-distance", label, panels, scale, row_title="layer", column_title="distance, tokens")
    numbers = Table(
        "By distance: share of all weight, and the linear part's share of it", ["", *columns], groups, collapsed=True
    )
    return Figure(
        "What the linear part carries, by distance",
        drawn,
        "Left: which share of a layer's weight lies at each distance. Right: the part of that which is "
        "linear. Means over heads.",
        numbers,
    )


def _averaged(found: dict[str, Any]) -> tuple[list[Number | None], list[Number | None]]:
    mass, linear = found["mass"], found["linear"]
    masses: list[Number | None] = []
    shares: list[Number | None] = []
    for place in range(len(mass[0])):
        pairs = [(m[place] or 0.0, x[place]) for m, x in zip(mass, linear, strict=True)]
        total = sum(m for m, _ in pairs)
        known = sum(m for m, x in pairs if x is not None)
        masses.append(total / len(pairs))
        shares.append(sum(m * x for m, x in pairs if x is not None) / known if known else None)
    return masses, shares
