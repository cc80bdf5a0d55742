"""The sections of the page, in their order. Each is made of one or more runs, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from linearize.report.blocks import Section
from linearize.report.load import RunFiles
from linearize.report.sections import attention, costs, paths, positions, quality, recall, recipe, tasks, training

_SECTIONS = (
    recipe.recipe,
    training.training,
    quality.quality,
    positions.positions,
    quality.agreement,
    recall.recall,
    attention.fidelity,
    attention.maps,
    paths.paths,
    tasks.tasks,
    costs.speed,
    tasks.generations,
    costs.provenance,
)


def sections(runs: Sequence[RunFiles]) -> list[Section]:
    return [section(runs) for section in _SECTIONS]
