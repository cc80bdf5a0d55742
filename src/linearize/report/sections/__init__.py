"""The sections of the page, in order. Each shows one or more runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from linearize.report.html import Section, Text
from linearize.report.load import RunFiles
from linearize.report.sections import (
    costs,
    heads,
    quality,
    recall,
    recipe,
    scores,
    tasks,
    training,
)


def _with_heads(run: RunFiles) -> bool:
    """Return whether heads were compared, or there is a reason why not."""
    results = run.results
    return run.is_language_model or results.fidelity is not None or "fidelity" in results.not_measured


def _of_text(run: RunFiles) -> bool:
    return run.is_language_model


# Each section, and whether it concerns a run. It also names measurements that are missing in these runs.
_SECTIONS: tuple[tuple[Callable[[Sequence[RunFiles]], Section], Callable[[RunFiles], bool]], ...] = (
    (recipe.recipe, lambda run: True),
    (training.training, lambda run: True),
    (scores.scores, lambda run: run.task is not None),
    (quality.short, lambda run: run.results.short is not None),
    (quality.quality, _of_text),
    (quality.positions, _of_text),
    (quality.agreement, _of_text),
    (recall.recall, _of_text),
    (heads.fidelity, _with_heads),
    (heads.memory, lambda run: run.allocation is not None),
    (tasks.tasks, _of_text),
    (costs.speed, _of_text),
    (tasks.generations, _of_text),
    (costs.provenance, lambda run: True),
)


def sections(runs: Sequence[RunFiles]) -> list[Section]:
    """Return the sections that concern at least one run; they name these runs if they do not concern all."""
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
