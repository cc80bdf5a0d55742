"""Choose settings with which a new run fits its GPU; its recipe.yaml keeps them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from linearize.hf.checkpoint import read_config
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.fit import SETTINGS, fit, parse_memory
from linearize.planning.plan import check_run
from linearize.planning.results import TRAINING_STAGES
from linearize.recipe import Recipe
from linearize.run.folder import Run


def settled(run: Run, gpu_memory: str | None, note: Callable[[str], None]) -> Run:
    """Return the run with settings that fit `gpu_memory`, or the memory of its own GPU; unchanged without both.

    A run that was begun keeps its settings on every GPU. `note` is called with each chosen setting.

    Raises:
        UserError: a size that cannot be read, or a recipe that cannot be run.
    """
    if gpu_memory is None and run.device.type != "cuda":
        return run
    memory = (
        torch.cuda.get_device_properties(run.device).total_memory if gpu_memory is None else parse_memory(gpu_memory)
    )
    written = run.folder / "recipe.yaml"
    if written.is_file():
        return replace(run, recipe=_as_before(run.recipe, Recipe.load(str(written))))
    shape = TeacherShape.from_config(read_config(run.model))
    layers = resolve(run.recipe, shape, dtype=run.dtype)
    check_run(run.recipe, shape, layers)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    found = fit(run.recipe, shape, layers, dtype=run.dtype, memory=memory, processes=processes)
    for stage, line in zip(found.stages, found.lines(), strict=True):
        if stage.settings or not stage.fits:
            note(f"chosen to fit the GPU: {line}" if stage.fits else line)
    return replace(run, recipe=found.recipe)


def _as_before(recipe: Recipe, begun: Recipe) -> Recipe:
    """Return `recipe` with the settings of `begun` that it does not set itself."""
    changed = {}
    for name in TRAINING_STAGES:
        config, before = getattr(recipe, name), getattr(begun, name)
        if config is not None and before is not None:
            kept = set(SETTINGS) & set(type(config).model_fields) - config.model_fields_set
            changed[name] = config.model_copy(update={field: getattr(before, field) for field in kept})
    return recipe.model_copy(update=changed)
