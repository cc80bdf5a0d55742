"""The sections of the page, in their order. Each is made of one or more runs, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from linearize.report.html import Section, Text
from linearize.report.load import RunFiles
from linearize.report.sections import (
    attention,
    costs,
    memory,
    positions,
    quality,
    recall,
    recipe,
    scores,
    short,
    tasks,
    training,
)


def _with_heads(run: RunFiles) -> bool:
    """Return whether heads were compared, or a reason is given why they were not."""
    results = run.results
    return run.is_language_model or results.fidelity is not None or "fidelity" in results.not_measured


def _of_text(run: RunFiles) -> bool:
    return run.is_language_model


# Each with the runs that it concerns. Where it concerns one, it says too what was not measured of it.
_SECTIONS: tuple[tuple[Callable[[Sequence[RunFiles]], Section], Callable[[RunFiles], bool]], ...] = (
    (recipe.recipe, lambda run: True),
    (training.training, lambda run: True),
    (scores.scores, lambda run: run.task is not None),
    (short.short, lambda run: run.results.short is not None),
    (quality.quality, _of_text),
    (positions.positions, _of_text),
    (quality.agreement, _of_text),
    (recall.recall, _of_text),
    (attention.fidelity, _with_heads),
    (memory.memory, lambda run: run.allocation is not None),
    (tasks.tasks, _of_text),
    (costs.speed, _of_text),
    (tasks.generations, _of_text),
    (costs.provenance, lambda run: True),
)


def sections(runs: Sequence[RunFiles]) -> list[Section]:
    """Those that concern at least one of the runs; where they do not concern all, they say which."""
    made = []
    for make, concerns in _SECTIONS:
        concerned = [run for run in runs if concerns(run)]
        if not concerned:
            continue
        section = make(concerned)
        if len(concerned) < len(runs):
            words = f"Of {', '.join(run.name for run in concerned)} only."
            section = replace(section, blocks=[Text(words, "note"), *section.blocks])
        made.append(section)
    return made
