"""Make a `LayerPlan` (a mixer's config or None, softmax, per layer) from a recipe and a teacher's ``config.json``.

After conversion, the plan alone defines the model; it is stored in the student's ``config.json``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from linearize.base import UserError
from linearize.configs.memory import MemoryConfig
from linearize.configs.mixer import HeadwiseConfig, LayerPlan, MixerConfig
from linearize.configs.mixer_parts import Add
from linearize.hf.teacher import TeacherShape
from linearize.recipe import Recipe
from linearize.training.memory import (
    budget_bytes,
    head_mixer,
    layer_mixer,
    layer_sizes,
    pair_bytes,
    require_room,
)


def resolve(
    recipe: Recipe,
    teacher: TeacherShape,
    errors: Sequence[float] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> LayerPlan:
    """Return a complete mixer config per layer of the teacher; None for a layer that stays softmax.

    Args:
        errors: each layer's transfer error, if layers to keep are chosen by it; None before it is measured, when all
            layers are converted.
        dtype: of keys and values, for counting the bytes of `memory`.

    Raises:
        UserError: a layer index the teacher does not have, nothing left to convert, less memory than the smallest
            window in every head needs, a size that does not fit these layers, or a setting for decoders only.
    """
    if teacher.bidirectional:
        _check_encoder(recipe)
    layers = convertible_layers(recipe, teacher, errors)
    if recipe.memory is not None:
        return _before_measuring(recipe.memory, teacher, layers, dtype)
    mixer = recipe.mixer.resolved(teacher.layer)
    if teacher.bidirectional:
        mixer = mixer.model_copy(update={"combine": Add()})  # there is no window to combine with
    plan: dict[int, list[MixerConfig | None]] = {index: [mixer] * teacher.num_kv_heads for index in layers}
    for listed in recipe.heads:
        for layer, head in listed.places(teacher.num_layers, teacher.num_kv_heads):
            if layer not in plan:
                raise UserError(f"heads.kv_heads: expected heads of layers that are converted, found {layer}.{head}")
            plan[layer][head] = listed.mixer and listed.mixer.resolved(teacher.layer)
    return tuple(HeadwiseConfig.of(plan[index]) if index in plan else None for index in range(teacher.num_layers))


def convertible_layers(recipe: Recipe, teacher: TeacherShape, errors: Sequence[float] | None = None) -> list[int]:
    """Return the indices of the layers that the recipe converts, in rising order.

    Args:
        errors: as in `resolve`.

    Raises:
        UserError: a layer index the teacher does not have, or nothing left to convert.
    """
    kept = recipe.layers.keep_softmax.kept(teacher.num_layers, errors)
    if not recipe.layers.convert_sliding:
        kept |= set(teacher.sliding_layers)
    if len(kept) == teacher.num_layers:
        raise UserError(
            "layers: nothing to convert, every layer stays softmax; shorten layers.keep_softmax, or set "
            "layers.convert_sliding=true to convert layers that already attend within a sliding window"
        )
    return [index for index in range(teacher.num_layers) if index not in kept]


def _before_measuring(
    memory: MemoryConfig, teacher: TeacherShape, layers: Sequence[int], dtype: torch.dtype
) -> LayerPlan:
    """Return a plan with the same bytes as the allocation, which is unknown until the teacher is measured.

    Full layers are spread evenly, and all KV heads have the same window.
    """
    require_room(memory, teacher, len(layers), dtype)
    full = set[int]()
    if memory.per == "layer":
        count, window = layer_sizes(memory, teacher, len(layers), dtype)
        full = {layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)}
        mixer = layer_mixer(window, memory.sinks, learned_sink=memory.learned_sink)
    else:
        pairs = budget_bytes(memory, teacher, dtype) // (
            pair_bytes(teacher, dtype) * teacher.num_kv_heads * len(layers)
        )
        mixer = head_mixer(max(1, pairs - memory.sinks), 0, memory.sinks)
    return tuple(mixer if index in layers and index not in full else None for index in range(teacher.num_layers))


def _check_encoder(recipe: Recipe) -> None:
    """Check that the recipe has no setting that only decoders support.

    Raises:
        UserError: it has one.
    """
    if recipe.mixer.encoder_error is not None:
        raise UserError(
            f"mixer.{recipe.mixer.encoder_error}; use the recipe hedgehog-bert or hedgehog-vit, or set it with --set"
        )
    if recipe.transfer is not None and recipe.transfer.layers_per_block is not None:
        raise UserError(
            "transfer.layers_per_block: expected null, because an encoder is transferred as a whole; "
            f"found {recipe.transfer.layers_per_block}"
        )
    if recipe.heads or recipe.memory is not None:
        field = "heads" if recipe.heads else "memory"
        raise UserError(
            f"{field}: expected none, because an encoder keeps no keys; set it to {'[]' if recipe.heads else 'null'}"
        )
    if recipe.data.select_rows_by_esl is not None:
        raise UserError(
            "data.select_rows_by_esl: expected null, because effective sequence lengths are a decoder's; "
            f"found {recipe.data.select_rows_by_esl}"
        )
