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


def every_run(run: RunFiles) -> bool:
    return True


def language_models(run: RunFiles) -> bool:
    return run.is_language_model


def measured_shortly(run: RunFiles) -> bool:
    return run.results.short is not None


def at_a_task(run: RunFiles) -> bool:
    return run.task is not None


def with_heads(run: RunFiles) -> bool:
    """Return whether heads were compared, or a reason is given why they were not."""
    results = run.results
    return run.is_language_model or results.fidelity is not None or "fidelity" in results.not_measured


def with_a_budget(run: RunFiles) -> bool:
    return run.allocation is not None


# Each with the runs that it concerns. Where it concerns one, it says too what was not measured of it.
_SECTIONS: tuple[tuple[Callable[[Sequence[RunFiles]], Section], Callable[[RunFiles], bool]], ...] = (
    (recipe.recipe, every_run),
    (training.training, every_run),
    (scores.scores, at_a_task),
    (short.short, measured_shortly),
    (quality.quality, language_models),
    (positions.positions, language_models),
    (quality.agreement, language_models),
    (recall.recall, language_models),
    (attention.fidelity, with_heads),
    (memory.memory, with_a_budget),
    (tasks.tasks, language_models),
    (costs.speed, language_models),
    (tasks.generations, language_models),
    (costs.provenance, every_run),
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
