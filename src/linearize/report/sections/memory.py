"""Which KV head was given how much of a budget of memory, and what each would lose with the least."""

from __future__ import annotations

from collections.abc import Sequence

from linearize.report.findings import spread
from linearize.report.heatmaps import Panel, Scale
from linearize.report.html import Block, Section, Text
from linearize.report.load import RunFiles
from linearize.report.numbers import Number, scaled, short
from linearize.report.sections.grids import by_head, grids


def memory(runs: Sequence[RunFiles]) -> Section:
    """Bytes by head, beside what was measured of the head."""
    blocks: list[Block] = []
    bytes_held: list[Panel] = []
    needs: list[Panel] = []
    for run in runs:
        assert run.allocation is not None
        if (said := spread(run)) is not None:
            blocks.append(Text(run.prefix + said.words))
        sizes, losses = run.allocation["bytes"], run.allocation["losses"]
        smallest = sizes.index(min(sizes))
        bytes_held.append(by_head(run.group or "", list(run.held_by_head.items())))
        rows = [(int(layer), [head[smallest] for head in heads]) for layer, heads in losses.items()]
        needs.append(by_head(run.group or "", rows))
    axes = ("layer", "KV head")
    held_scale = Scale.fitting("bytes held", [x for panel in bytes_held for row in panel.values for x in row])
    lost_scale = Scale.fitting("nats per token", [x for panel in needs for row in panel.values for x in row])
    caption = "what a sequence holds of each head, constant or at the length that the budget was counted at."
    blocks.append(grids("memory-held", "Memory by head", caption, bytes_held, held_scale, axes, _bytes))
    caption = (
        "how far the teacher's next tokens move (KL divergence, estimated to second order) when this head alone has "
        "the smallest of the candidates."
    )
    blocks.append(grids("memory-needs", "What each head needs memory for", caption, needs, lost_scale, axes, short))
    summary = "Recall lives in few heads; a budget is spread over them by what each would lose."
    return Section("memory", "Memory by head", blocks, summary=summary)


def _bytes(value: Number | None) -> str:
    return "-" if value is None else scaled(value, "B")
