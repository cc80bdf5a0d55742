"""The sections on single heads: output errors, and the allocation of a per-head KV budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from linearize.report.heatmaps import Panel, Scale, grids
from linearize.report.html import Block, Figure, Section
from linearize.report.load import RunFiles
from linearize.report.numbers import Number, number, short
from linearize.report.unmeasured import not_measured

TITLE = "Relative output error"


def fidelity(runs: Sequence[RunFiles]) -> Section:
    """Return the section with output errors by layer and head."""
    measured = [run for run in runs if run.results.fidelity]
    blocks: list[Block] = [_errors(measured)] if measured else []
    blocks += not_measured(runs, "fidelity")
    summary = "How far each head's output is from that of the softmax head it replaces." if measured else ""
    return Section("fidelity", "Fidelity of each head", blocks, summary=summary)


def _errors(runs: Sequence[RunFiles]) -> Figure:
    panels, said = [], []
    for run in runs:
        assert run.results.fidelity is not None
        layers = run.results.fidelity.layers
        panels.append(_by_head(run, {layer.layer: layer.output_relative for layer in layers}))
        errors = {f"layer {layer} head {head}": x for (layer, head), x in run.results.fidelity.errors.items()}
        worst, best = max(errors, key=errors.__getitem__), min(errors, key=errors.__getitem__)
        said.append(f"{run.name}: worst {worst}, {number(errors[worst])}; best {best}, {number(errors[best])}")
    meaning = "mean square error of a head's output, over the mean square of the teacher's."
    scale = _scale(TITLE, panels)
    words, axes = "; ".join(said), ("layer", "head")
    return grids("fidelity-output-relative", TITLE, meaning, panels, scale, axes, lambda x: number(x, 4), words)


def memory(runs: Sequence[RunFiles]) -> Section:
    """Return the section with the key-value pairs that each head keeps, and what recall needs of it."""
    pairs: list[Panel] = []
    needs: list[Panel] = []
    for run in runs:
        assert run.allocation is not None
        pairs.append(_by_head(run, run.pairs_by_head))
        # Needs are quantiles of the logarithm of attention weights.
        logs = run.allocation.needs.items()
        needs.append(_by_head(run, {layer: [fmean(map(math.exp, head)) for head in heads] for layer, heads in logs}))
    axes = ("layer", "KV head")
    kept = "key-value pairs that a sequence keeps of each head: sinks, window and KV cache with eviction."
    needed = (
        "the largest attention weight that a key-value pair of the head receives while the teacher repeats its "
        "context, mean over pairs."
    )
    title = "What recall needs of each head"
    blocks = [
        grids("memory-held", "KV pairs by head", kept, pairs, _scale("pairs", pairs), axes, short),
        grids("memory-needs", title, needed, needs, _scale("attention weight", needs), axes, short),
    ]
    summary = "How the budget is divided over KV heads, and what recall needs of each."
    return Section("memory", "KV budget by head", blocks, summary=summary)


def _by_head(run: RunFiles, layers: Mapping[int, Sequence[Number]]) -> Panel:
    """Return a grid of layers by heads."""
    heads = max(map(len, layers.values()))
    return Panel(run.group or "", list(layers.values()), list(map(str, layers)), list(map(str, range(heads))))


def _scale(title: str, panels: Sequence[Panel]) -> Scale:
    return Scale.fitting(title, [x for panel in panels for row in panel.values for x in row])
