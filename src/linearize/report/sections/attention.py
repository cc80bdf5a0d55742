"""The output errors of converted heads, by layer and head."""

from __future__ import annotations

from collections.abc import Sequence

from linearize.report.findings import outliers
from linearize.report.heatmaps import Scale
from linearize.report.html import Block, Figure, Section, Text
from linearize.report.load import RunFiles
from linearize.report.numbers import number
from linearize.report.sections.grids import by_head, ends, grids
from linearize.report.unmeasured import not_measured

TITLE = "Relative output error"


def fidelity(runs: Sequence[RunFiles]) -> Section:
    """Return the section with errors by layer and head, and the names of heads that stand out."""
    measured = [run for run in runs if run.results.fidelity]
    blocks: list[Block] = []
    for run in measured:
        finding = outliers(run)
        blocks.append(Text(run.prefix + (finding.words if finding else "No head stands out.")))
    if measured:
        blocks.append(_errors(measured))
    blocks += not_measured(runs, "fidelity")
    summary = "How far each head's output is from that of the softmax head it replaces." if measured else ""
    return Section("fidelity", "Fidelity of each head", blocks, summary=summary)


def _errors(runs: Sequence[RunFiles]) -> Figure:
    panels, said = [], []
    for run in runs:
        layers = [] if run.results.fidelity is None else run.results.fidelity.layers
        panels.append(by_head(run.group or "", [(layer.layer, layer.output_relative) for layer in layers]))
        best, worst = ends(panels[-1])
        said.append(f"{run.name}: worst {worst[1]}, {number(worst[0])}; best {best[1]}, {number(best[0])}")
    scale = Scale.fitting(TITLE, [x for panel in panels for row in panel.values for x in row])
    meaning = "mean square error of a head's output, over the mean square of the teacher's."
    words, axes = "; ".join(said), ("layer", "head")
    return grids("fidelity-output-relative", TITLE, meaning, panels, scale, axes, lambda x: number(x, 4), words)
