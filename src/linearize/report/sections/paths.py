"""Whether the linear part carries anything, or the window does all the work (arXiv 2510.05901)."""

from __future__ import annotations

from collections.abc import Sequence

from linearize.evaluation.path_usage import ByDistance
from linearize.report.findings import path_usage
from linearize.report.heatmaps import Panel, Scale
from linearize.report.html import Block, Figure, Section, Table, Text
from linearize.report.load import RunFiles
from linearize.report.missing import not_measured
from linearize.report.numbers import Number, share, with_interval
from linearize.report.sections.grids import by_head, ends, grids
from linearize.report.sections.positions import bin_names


def paths(runs: Sequence[RunFiles]) -> Section:
    """The linear part's share of the weight, by head and by distance, and what is lost without either part."""
    measured = [run for run in runs if run.results.path_usage]
    blocks: list[Block] = []
    if measured:
        usages = [run.results.path_usage for run in measured if run.results.path_usage]
        lines = [
            ["without the linear part", *(with_interval(usage.without_linear, sign=True) for usage in usages)],
            ["without the window", *(with_interval(usage.without_window, sign=True) for usage in usages)],
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
    panels, said = [], []
    for run in runs:
        assert run.results.path_usage is not None
        layers = run.results.path_usage.layers
        panels.append(by_head(run.group or "", [(x.layer, x.linear_share) for x in layers]))
        values = [x for row in panels[-1].values for x in row if x is not None]
        least, most = (f"{share(x, 1)} ({where})" for x, where in ends(panels[-1]))
        said.append(f"{run.prefix}{share(sum(values) / len(values), 1)} on average, least {least}, most {most}")
    scale = Scale.even("share of the weight on the linear part", low=0.0, high=1.0)
    title = "What the linear part carries, by head"
    return grids("paths-heads", title, f"{'; '.join(said)}.", panels, scale, ("layer", "head"), _share)


def _by_distance(runs: Sequence[RunFiles]) -> Figure:
    """Mass, and the linear part's share of it, by layer and distance; heads averaged, the share weighted by mass."""
    panels, said = [], []
    for run in runs:
        found = run.results.path_usage
        assert found is not None
        bins, names = bin_names(found.edges), [str(layer.layer) for layer in found.layers]
        mass, linear = zip(*(_averaged(layer.by_distance) for layer in found.layers), strict=True)
        panels.append(Panel(f"{run.prefix}weight at that distance", mass, names, bins))
        panels.append(Panel(f"{run.prefix}of it, on the linear part", linear, names, bins))
        if far := [row[-1] for row in linear if row[-1] is not None]:
            carried = share(sum(far) / len(far), 1)
            said.append(f"{run.prefix}at distances {bins[-1]} the linear part carries {carried} of the weight")
    scale, axes = Scale.even("share", low=0.0, high=1.0), ("layer", "distance, tokens")
    caption = "Left: which share of a layer's weight lies at each distance. Right: the part of that which is linear. "
    title = "What the linear part carries, by distance"
    return grids("paths-distance", title, f"{caption}Means over heads.", panels, scale, axes, _share, "; ".join(said))


def _share(value: Number | None) -> str:
    return share(value, 1)


def _averaged(found: ByDistance) -> tuple[list[Number | None], list[Number | None]]:
    masses: list[Number | None] = []
    shares: list[Number | None] = []
    for place in range(len(found.mass[0])):
        pairs = [(m[place] or 0.0, x[place]) for m, x in zip(found.mass, found.linear, strict=True)]
        total = sum(m for m, _ in pairs)
        known = sum(m for m, x in pairs if x is not None)
        masses.append(total / len(pairs))
        shares.append(sum(m * x for m, x in pairs if x is not None) / known if known else None)
    return masses, shares
