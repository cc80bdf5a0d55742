"""Conversion: a softmax model in, a model with mixers beside its own projections out; and the way back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan
from linearize.distributed import is_sharded
from linearize.hf.architectures import drops_soft_cap
from linearize.hf.attention import detach, linearized_layers
from linearize.hf.classes import ARCHITECTURES, CONFIG_CLASSES, MODEL_CLASSES, install, plan_to_config, registered
from linearize.hf.layouts import forget_layouts
from linearize.hf.offload import refuse_offloaded
from linearize.hf.quantized import beside_parameters, refuse_unsavable, settle
from linearize.hf.sharding import shard_alike, skeleton


def convert_layers(teacher: PreTrainedModel, plan: LayerPlan, *, seed: int = 0) -> PreTrainedModel:
    """A student that shares the teacher's storage; the teacher itself is left as it is.

    Mixers are new and initialised as the plan says. An optimizer that trains the shared weights in place changes the
    teacher, too; `linearize.finetune` copies what it changes. The student of a teacher whose weights are divided among
    processes, which all call this, is divided alike.

    What is random about a layer's mixer is a function of the seed and the layer's index: the files of a training stage
    hold learned numbers only, so the random projections beside them must come out the same when the stage is resumed or
    loaded, and in a block of layers the same as in the whole model (`linearize.hf.partial_model`).

    Raises:
        UserError: an architecture or head that is not supported, or weights that cannot be saved or are offloaded.
    """
    config, whole = teacher.config, teacher
    if is_sharded(teacher):  # FSDP2's units cannot be copied
        teacher = skeleton(whole)
    if config.model_type not in ARCHITECTURES:
        raise UserError(f"model: expected a softmax model, found {config.model_type!r}, which is linearized already")
    classes = {cls for head in MODEL_CLASSES[f"linearized_{config.model_type}"].values() for cls in head}
    student_class = next((cls for cls in classes if cls.__bases__[-1] is type(teacher)), None)
    if student_class is None:
        known = ", ".join(sorted(cls.__bases__[-1].__name__ for cls in classes))
        raise UserError(f"model: expected one of {known}; found {type(teacher).__name__}")

    refuse_unsavable(teacher)
    refuse_offloaded(teacher)
    if drops_soft_cap(config):
        raise UserError(
            "model: expected an implementation of attention that caps its logits, as this model does, found sdpa, "
            "which leaves the cap out; load it with attn_implementation='eager'"
        )
    config_class: Any = CONFIG_CLASSES[config.model_type]
    student = _remade(teacher, student_class, config_class(**_fields(config), linearize=plan_to_config(plan)), {})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        install(student, whole.device if is_sharded(whole) else None)
    if is_sharded(whole):
        shard_alike(student, whole)
    return student


def to_softmax(student: PreTrainedModel) -> PreTrainedModel:
    """The way back: an ordinary model of the base's class, with softmax attention and the student's other weights.

    It shares the student's storage, and the student is left as it is. Of an untrained student it is the teacher, bit
    for bit; of a finetuned one it has the finetuned weights. What it saves loads without linearize.

    Raises:
        UserError: not a linearized model.
    """
    config = student.config
    if config.model_type not in MODEL_CLASSES:
        raise UserError(f"model: expected a linearized model, found {config.model_type!r}, which has softmax attention")
    base_class = registered(student)[1].__bases__[-1]
    base_config: Any = CONFIG_MAPPING[config.model_type.removeprefix("linearized_")](**_fields(config))
    layers = linearized_layers(student).values()
    # Neither mixers nor the layers' own configs are copied: in their places nothing, and the model's config.
    instead: dict[int, object] = {id(layer.mixer): None for layer in layers}
    model = _remade(student, base_class, base_config, instead | {id(layer.config): base_config for layer in layers})
    for layer in linearized_layers(model).values():
        base_config._attn_implementation_internal = layer.softmax_implementation
        detach(layer)
    forget_layouts(model)
    return model


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as arguments of another class of configs: what both kinds of models have."""
    ours = {"model_type", "transformers_version", "linearize", "state_dtype", "prefill", "auto_map", "architectures"}
    return {name: value for name, value in config.to_dict().items() if name not in ours}


def _remade(model: PreTrainedModel, cls: type, config: Any, instead: dict[int, object]) -> PreTrainedModel:
    """A model of another class and config over the same storage; `instead` is what parts are replaced by, by their id.

    Its module tree is copied, not the tensors: the copies' parameters are new objects over the same storage.
    """
    # What a model chose to compute with, which no config.json says.
    for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
        setattr(config, name, getattr(model.config, name, None))
    settle(model)
    shared: dict[int, object] = {id(model.config): config} | instead
    for parameter in model.parameters():
        shared[id(parameter)] = _over_the_same_storage(parameter)
    for tensor in (*model.buffers(), *beside_parameters(model)):
        shared[id(tensor)] = tensor
    remade = copy.deepcopy(model, shared)
    remade.__class__ = cls
    # No folder holds this model yet. Of the first one's name, an adapter would make its base: a model of another class.
    remade.name_or_path = config.name_or_path = ""
    return remade


def _over_the_same_storage(parameter: nn.Parameter) -> nn.Parameter:
    """A new parameter; a quantized one is of a class of its own, which says how, and stays: nobody trains it."""
    quantized = type(parameter) is not nn.Parameter
    return parameter if quantized else nn.Parameter(parameter.data, parameter.requires_grad)
