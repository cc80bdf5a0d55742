"""The section on the per-head KV budget allocation, and on the needs of recall by head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from linearize.report.findings import per_head_budget
from linearize.report.heatmaps import Panel, Scale
from linearize.report.html import Block, Section, Text
from linearize.report.load import RunFiles
from linearize.report.numbers import short
from linearize.report.sections.grids import by_head, grids


def memory(runs: Sequence[RunFiles]) -> Section:
    """Return the section with pairs by head, and the measured needs of each head."""
    blocks: list[Block] = []
    bytes_held: list[Panel] = []
    needs: list[Panel] = []
    for run in runs:
        assert run.allocation is not None
        if (said := per_head_budget(run)) is not None:
            blocks.append(Text(run.prefix + said.words))
        bytes_held.append(by_head(run.group or "", list(run.pairs_by_head.items())))
        rows = [(layer, [_mean(head) for head in heads]) for layer, heads in run.allocation.needs.items()]
        needs.append(by_head(run.group or "", rows))
    axes = ("layer", "KV head")
    held_scale = Scale.fitting("pairs", [x for panel in bytes_held for row in panel.values for x in row])
    lost_scale = Scale.fitting("attention weight", [x for panel in needs for row in panel.values for x in row])
    caption = "key-value pairs that a sequence keeps of each head: sinks, window and KV cache with eviction."
    blocks.append(grids("memory-held", "KV pairs by head", caption, bytes_held, held_scale, axes, short))
    caption = (
        "the largest attention weight that a key-value pair of the head receives while the teacher repeats its "
        "context, mean over pairs."
    )
    blocks.append(grids("memory-needs", "What recall needs of each head", caption, needs, lost_scale, axes, short))
    summary = "How the budget is divided over KV heads, and what recall needs of each."
    return Section("memory", "KV budget by head", blocks, summary=summary)


def _mean(needs: Sequence[float]) -> float:
    """Return the mean attention weight of the quantiles of its logarithm."""
    return sum(map(math.exp, needs)) / len(needs)
