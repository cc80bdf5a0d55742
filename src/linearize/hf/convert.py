"""Conversion: a softmax model in, a model with mixers beside its own projections out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.hf.checkpoint import drops_soft_cap
from linearize.hf.classes import ARCHITECTURES, CONFIG_CLASSES, MODEL_CLASSES, install, plan_to_config
from linearize.hf.quantized import beside_parameters, settle
from linearize.mixers.config import LayerPlan


def convert_layers(teacher: PreTrainedModel, plan: LayerPlan, *, seed: int = 0) -> PreTrainedModel:
    """A student that shares the teacher's storage; the teacher itself is left as it is.

    Mixers are new and initialised as the plan says. Training the shared weights in place would change the teacher too;
    `linearize.finetune` copies what it changes.

    What is random about a layer's mixer is a function of the seed and the layer's index: the files of a training stage
    hold learned numbers only, so the random projections beside them must come out the same when the stage is resumed or
    loaded, and in a block of layers the same as in the whole model (`linearize.hf.partial_model`).

    Raises:
        UserError: an architecture or head that is not supported.
    """
    config = teacher.config
    if config.model_type not in ARCHITECTURES:
        raise UserError(f"model: expected a softmax model, found {config.model_type!r}, which is linearized already")
    classes = {cls for head in MODEL_CLASSES[f"linearized_{config.model_type}"].values() for cls in head}
    student_class = next((cls for cls in classes if cls.__bases__[-1] is type(teacher)), None)
    if student_class is None:
        known = ", ".join(sorted(cls.__bases__[-1].__name__ for cls in classes))
        raise UserError(f"model: expected one of {known}; found {type(teacher).__name__}")

    if drops_soft_cap(config):
        raise UserError(
            "model: expected an implementation of attention that caps its logits, as this model does, found sdpa, "
            "which leaves the cap out; load it with attn_implementation='eager'"
        )
    fields = {k: v for k, v in config.to_dict().items() if k not in {"model_type", "transformers_version"}}
    config_class: Any = CONFIG_CLASSES[config.model_type]
    student_config = config_class(**fields, linearize=plan_to_config(plan))
    # What the teacher chose to compute with, which no config.json says.
    for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
        setattr(student_config, name, getattr(config, name, None))
    settle(teacher)
    # Copy the module tree, not the tensors: the copies' parameters are new objects over the same storage.
    shared: dict[int, object] = {id(config): student_config}
    for parameter in teacher.parameters():
        shared[id(parameter)] = _over_the_same_storage(parameter)
    for tensor in (*teacher.buffers(), *beside_parameters(teacher)):
        shared[id(tensor)] = tensor
    student = copy.deepcopy(teacher, shared)
    student.__class__ = student_class
    # No folder holds this model yet. Of the teacher's name, an adapter would make its base: a softmax model.
    student.name_or_path = student_config.name_or_path = ""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        install(student)
    return student


def _over_the_same_storage(parameter: nn.Parameter) -> nn.Parameter:
    """A new parameter; a quantized one is of a class of its own, which says how, and stays: nobody trains it."""
    quantized = type(parameter) is not nn.Parameter
    return parameter if quantized else nn.Parameter(parameter.data, parameter.requires_grad)
