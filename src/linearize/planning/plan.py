"""Check a run and compute its cost from the recipe and the teacher's config.json, on models without weights.

Encoders have neither cache nor state: conversion makes time and memory of their attention linear in length. Their
parameters are the base model's, without the head of a task. Parameters, bytes of state and bytes per token are exact.
FLOPs and disk are estimates, which docstrings define. `costs` has the costs of one mixer, `forecast` the memory of a
step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from rich.table import Table

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan
from linearize.configs.training import FinetuneConfig, LoRAConfig, TrainConfig, TransferConfig
from linearize.costs import FP32, Mixers, generation_memory, mixer_costs, softmax_flops
from linearize.data.load import check_data, row_length
from linearize.hf.classes import build, projections
from linearize.hf.meta import MetaModel
from linearize.hf.partial_model import stored_by_layer
from linearize.hf.teacher import TeacherShape
from linearize.planning.forecast import step_bytes
from linearize.planning.results import Plan, StageCost
from linearize.recipe import Recipe
from linearize.training.attention_transfer import check_transfer
from linearize.training.finetune import check_trains
from linearize.training.optimizers import MOMENT_BYTES

# In memory: a trained parameter, its gradient and AdamW's two moments. On disk: its latest and best value, the moments.
_TRAINED = 4 * FP32

AnyStage = TransferConfig | FinetuneConfig


def make_plan(
    recipe: Recipe,
    teacher: TeacherShape,
    layers: LayerPlan,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    training_tokens: int | None,
) -> Plan:
    """Return the plan for a recipe that was resolved to `layers`.

    Args:
        dtype: of the model: weights and KV cache.
        device: the device whose memory to forecast, which takes seconds; None: no forecast.
        training_tokens: tokens of the packed training rows, counted once; None: the data are not known.

    Raises:
        UserError: the contents of the teacher's config.json make no model.
    """
    if len(layers) != teacher.num_layers:
        raise ValueError(f"layers: expected one entry per teacher layer ({teacher.num_layers}), found {len(layers)}")
    model = MetaModel.of(teacher)
    mixers = mixer_costs(layers, teacher, dtype, model.rotary_dims)
    converted, kept = ([i for i, mixer in enumerate(mixers) if (mixer is None) is stays] for stays in (False, True))
    memory = generation_memory(mixers, teacher, dtype)
    new = sum(mixer.parameters for mixer in mixers if mixer is not None)
    rows, _ = row_length(recipe.data, teacher)

    def stage(config: AnyStage, trainable: int, flops: int) -> StageCost:
        tokens, memory = _tokens(config, training_tokens), None
        if device is not None:
            memory = stage_memory(config, model, layers, mixers, dtype=dtype, length=rows, device=device)
        return StageCost(trainable, tokens, None if tokens is None else tokens * flops, memory)

    transfer, between_blocks = None, 0
    if recipe.transfer is not None:
        flops = _transfer_flops(teacher, model, mixers, rows)
        transfer = stage(recipe.transfer, new, flops)
        between_blocks = _between_blocks(recipe.transfer, teacher, training_tokens)

    def on_outputs(config: FinetuneConfig | None) -> StageCost | None:
        if config is None:
            return None
        trained = finetuned_parameters(config, model, new)
        flops = _finetune_flops(config, teacher, model, mixers, rows)
        return stage(config, trained, flops)

    adapt, finetune = on_outputs(recipe.adapt), on_outputs(recipe.finetune)
    controls: int | None = 0
    if finetune is not None and recipe.controls:
        tokens = [one.tokens for one in (transfer, adapt, finetune) if one is not None]
        controls = None
        if finetune.flops is not None and all(tokens):
            controls = len(recipe.controls) * finetune.flops * sum(filter(None, tokens)) // (finetune.tokens or 1)
    trainable = sum(one.trainable_parameters for one in (transfer, adapt, finetune) if one is not None)
    return Plan(
        recipe=recipe.name,
        model_type=teacher.model_type,
        bidirectional=teacher.bidirectional,
        converted_layers=tuple(converted),
        kept_layers=tuple(kept),
        teacher_parameters=model.total,
        new_parameters=new,
        transfer=transfer,
        adapt=adapt,
        finetune=finetune,
        control_flops=controls,
        state_bytes=memory.state_bytes,
        student_cache_bytes_per_token=memory.student_bytes_per_token,
        teacher_cache_bytes_per_token=memory.teacher_bytes_per_token,
        break_even_tokens=memory.break_even_tokens,
        disk_bytes=model.total * dtype.itemsize + new * FP32 + trainable * _TRAINED,
        activation_bytes=None if between_blocks is None else between_blocks * dtype.itemsize,
    )


def finetuned_parameters(config: FinetuneConfig, teacher: MetaModel, mixers: int) -> int:
    """Return the number of trained parameters when a student with `mixers` parameters in mixers is fine-tuned."""
    if config.all_weights:
        return teacher.total + mixers
    adapters = 0 if config.lora is None else lora_parameters(config.lora, teacher)
    return adapters + (mixers if config.mixers else 0)


def lora_parameters(lora: LoRAConfig, teacher: MetaModel) -> int:
    """Return the number of LoRA parameters: rank x (inputs + outputs) per projection; fused ones count as one."""
    adapted: dict[str, Any] = projections(teacher.model, lora.targets)
    return lora.rank * sum(sum(module.weight.shape) for module in adapted.values())


def stage_memory(
    config: AnyStage,
    model: MetaModel,
    layers: LayerPlan,
    mixers: Mixers,
    *,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
) -> int:
    """Return the peak bytes of a stage: weights, fp32 copies and moments of trained ones, and a step (`forecast`)."""
    new = sum(mixer.parameters for mixer in mixers if mixer is not None)
    if isinstance(config, TransferConfig):
        weights, trained = _transferred_at_once(config, model, mixers)
    else:
        weights, trained = model.total + new, finetuned_parameters(config, model, new)
    step = step_bytes(model, layers, config, dtype=dtype, length=length, device=device) if trained else 0
    return weights * dtype.itemsize + trained * FP32 + int(trained * MOMENT_BYTES[config.optimizer]) + step


def _transferred_at_once(config: TransferConfig, model: MetaModel, mixers: Mixers) -> tuple[int, int]:
    """Return the numbers of weights and of trained parameters in memory: of the whole model, or the largest block."""
    new = [0 if mixer is None else mixer.parameters for mixer in mixers]
    size = config.layers_per_block
    if size is None:
        return model.total + sum(new), sum(new)
    at_once = []
    for start in range(0, len(new), size):  # no block has the head
        block = slice(start, start + size)
        embeddings = 0 if start else model.embeddings
        at_once.append((sum(model.layers[block]) + sum(new[block]) + embeddings, sum(new[block])))
    return max(at_once)


def _between_blocks(config: TransferConfig, teacher: TeacherShape, training_tokens: int | None) -> int | None:
    """Return how many numbers of the residual stream are on disk: of all training tokens at each block boundary.

    See LoLCATs 3.3.2. None: the number of tokens is not known.
    """
    if config.layers_per_block is None:
        return 0
    tokens = config.max_tokens if training_tokens is None else training_tokens
    boundaries = -(-teacher.num_layers // config.layers_per_block) - 1
    return None if tokens is None else tokens * boundaries * teacher.hidden_size


def _tokens(stage: TrainConfig, training_tokens: int | None) -> int | None:
    """Return epochs x the data, but at most `max_tokens`; None: neither is known."""
    if training_tokens is None:
        return stage.max_tokens
    tokens = stage.epochs * training_tokens
    return tokens if stage.max_tokens is None else min(tokens, stage.max_tokens)


def _model_flops(teacher: TeacherShape, model: MetaModel) -> int:
    """Return the forward FLOPs of one token's weights: 2 per parameter, none for looked-up embeddings.

    Weights that an encoder's layers share count once per pass, and experts only if the token is sent to them.
    """
    return 2 * (model.outside + sum(map(operator.mul, teacher.passes, model.used)))


def _softmax_flops(teacher: TeacherShape, sequence_length: int) -> int:
    """Return the FLOPs of one token in one layer: causal softmax sees half a row on average, an encoder's all of it."""
    return softmax_flops(teacher, sequence_length if teacher.bidirectional else sequence_length // 2)


def _transfer_flops(teacher: TeacherShape, model: MetaModel, mixers: Mixers, sequence_length: int) -> int:
    """Return the FLOPs per token: the teacher forward, mixers forward and backward (3x)."""
    softmax = sum(teacher.passes) * _softmax_flops(teacher, sequence_length)
    through = sum(times * mixer.flops for mixer, times in zip(mixers, teacher.passes, strict=True) if mixer is not None)
    return _model_flops(teacher, model) + softmax + 3 * through


def _finetune_flops(
    config: FinetuneConfig, teacher: TeacherShape, model: MetaModel, mixers: Mixers, sequence_length: int
) -> int:
    """Return the FLOPs per token.

    These are 4 per weight (forward, and the gradient of its input), 6 per trained weight, 3x each layer's attention
    with its mixer's own weights, and the teacher forward if the loss needs it. Activation checkpointing adds another
    forward of each layer.
    """
    softmax, forward = _softmax_flops(teacher, sequence_length), _model_flops(teacher, model)
    attention = sum(
        times * (softmax if mixer is None else mixer.flops) for mixer, times in zip(mixers, teacher.passes, strict=True)
    )
    adapters = 0 if config.lora is None else lora_parameters(config.lora, model)
    outputs = forward + sum(teacher.passes) * softmax if config.loss.needs_teacher else 0
    again = forward - 2 * model.outside + 2 * adapters + attention if config.activation_checkpointing else 0
    return (3 if config.all_weights else 2) * forward + 6 * adapters + 3 * attention + outputs + again


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


def render(plan: Plan) -> Table:
    """Return the plan as a two-column table for the terminal."""
    table = Table(title=f"{plan.recipe} on {plan.model_type}", show_header=False)
    for row in plan.rows().items():
        table.add_row(*row)
    return table
