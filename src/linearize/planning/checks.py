"""Check a recipe against the teacher's config.json, before any weights are read."""

from __future__ import annotations

import torch

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan
from linearize.data.load import check_data
from linearize.hf.classes import build
from linearize.hf.partial_model import stored_by_layer
from linearize.hf.teacher import TeacherShape
from linearize.recipe import Recipe
from linearize.training.attention_transfer import check_transfer
from linearize.training.finetune import check_trains


def check_run(recipe: Recipe, teacher: TeacherShape, layers: LayerPlan) -> None:
    """Check, without weights, that a teacher can be converted and trained as a recipe says.

    Args:
        layers: the recipe's plan, resolved for the teacher.

    Raises:
        UserError: the teacher does not fit the task, or has too few positions; a stage has no weights to train, or a
            loss that is not defined for these mixers; or the weights cannot be read block by block.
    """
    check_data(recipe.data, teacher)
    with torch.device("meta"):
        built = {config: build(config, teacher) for config in dict.fromkeys(layers) if config is not None}
    mixers = {f"layer {index}": built[config] for index, config in enumerate(layers) if config is not None}
    if recipe.transfer is not None:
        check_transfer(recipe.transfer, mixers)
        if recipe.transfer.layers_per_block is not None:
            _check_blocks(recipe, teacher)
    for stage, config in (("adapt", recipe.adapt), ("finetune", recipe.finetune)):
        if config is not None:
            check_trains(config, [*mixers.values()], stage)


def _check_blocks(recipe: Recipe, teacher: TeacherShape) -> None:
    """Raise UserError if block-wise transfer is impossible: no language model, or experts stored one by one."""
    task, advice = recipe.data.task, "set transfer.layers_per_block=null"
    if not task.language:
        raise UserError(f"transfer.layers_per_block: expected a language model, found the task {task.type}; {advice}")
    if not stored_by_layer(teacher.model_type):
        raise UserError(
            f"transfer.layers_per_block: expected weights that are stored in the layout of the model, found "
            f"{teacher.model_type!r}, whose experts are not; {advice}"
        )
