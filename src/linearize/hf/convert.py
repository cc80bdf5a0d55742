"""Convert a softmax model into one with mixers between its own projections, and back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan
from linearize.distributed import is_sharded
from linearize.hf.architectures import drops_soft_cap
from linearize.hf.attention import detach, linearized_layers
from linearize.hf.classes import ARCHITECTURES, CONFIG_CLASSES, MODEL_CLASSES, install, plan_to_config, registered
from linearize.hf.layouts import forget_layouts
from linearize.hf.offload import refuse_offloaded
from linearize.hf.sharding import shard_alike, skeleton


def convert_layers(teacher: PreTrainedModel, plan: LayerPlan, *, seed: int = 0) -> PreTrainedModel:
    """Return a student that shares the teacher's storage; the teacher is unchanged.

    Mixers are new and initialised as the plan says. An optimizer that trains shared weights in place also changes the
    teacher; `linearize.finetune` copies the weights that it trains. If the teacher's weights are divided among
    processes, all of them call this, and the student's weights are divided in the same way.

    Random numbers of a layer's mixer depend on the seed and the layer's index alone. Files of a training stage have
    learned numbers only, so random projections must be equal when a stage is resumed or loaded, and in a block of
    layers (`linearize.hf.partial_model`).

    Raises:
        UserError: the architecture or head is not supported, or weights cannot be saved or are offloaded.
    """
    config, whole = teacher.config, teacher
    if is_sharded(teacher):  # modules of FSDP2 cannot be copied
        teacher = skeleton(whole)
    if config.model_type not in ARCHITECTURES:
        raise UserError(f"model: expected a softmax model, found {config.model_type!r}, which is linearized already")
    classes = {cls for head in MODEL_CLASSES[f"linearized_{config.model_type}"].values() for cls in head}
    student_class = next((cls for cls in classes if cls.__bases__[-1] is type(teacher)), None)
    if student_class is None:
        known = ", ".join(sorted(cls.__bases__[-1].__name__ for cls in classes))
        raise UserError(f"model: expected one of {known}; found {type(teacher).__name__}")

    _refuse_unsavable(teacher)
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
    """Return an ordinary model of the base's class, with softmax attention and the student's other weights.

    It shares the student's storage; the student is unchanged. For an untrained student it equals the teacher bit for
    bit; for a fine-tuned student it has the fine-tuned weights. Folders that it saves load without linearize.

    Raises:
        UserError: not a linearized model.
    """
    config = student.config
    if config.model_type not in MODEL_CLASSES:
        raise UserError(f"model: expected a linearized model, found {config.model_type!r}, which has softmax attention")
    base_class = registered(student)[1].__bases__[-1]
    base_config: Any = CONFIG_MAPPING[config.model_type.removeprefix("linearized_")](**_fields(config))
    layers = linearized_layers(student).values()
    # The copy has None in place of mixers, and the model's config in place of the layers' own.
    instead: dict[int, object] = {id(layer.mixer): None for layer in layers}
    model = _remade(student, base_class, base_config, instead | {id(layer.config): base_config for layer in layers})
    for layer in linearized_layers(model).values():
        base_config._attn_implementation_internal = layer.softmax_implementation
        detach(layer)
    forget_layouts(model)
    return model


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that softmax and linearized models share."""
    ours = {"model_type", "transformers_version", "linearize", "state_dtype", "prefill", "auto_map", "architectures"}
    return {name: value for name, value in config.to_dict().items() if name not in ours}


def _remade(model: PreTrainedModel, cls: type, config: Any, instead: dict[int, object]) -> PreTrainedModel:
    """Return a model of another class and config over the same storage; `instead` maps ids of parts to replacements.

    The module tree is copied, but not the tensors: parameters are new objects over the same storage.
    """
    # Implementations that were chosen for the model in memory, which no config.json says.
    for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
        setattr(config, name, getattr(model.config, name, None))
    _settle(model)
    shared: dict[int, object] = {id(model.config): config} | instead
    shared |= {id(parameter): _over_the_same_storage(parameter) for parameter in model.parameters()}
    # 8-bit weights of settled layers are neither parameters nor buffers.
    states: list[Any] = [module.state for module in model.modules() if hasattr(module, "init_8bit_state")]
    eight_bit = [x for state in states for x in vars(state).values() if isinstance(x, Tensor)]
    shared |= {id(tensor): tensor for tensor in (*model.buffers(), *eight_bit)}
    remade = copy.deepcopy(model, shared)
    remade.__class__ = cls
    # No folder holds this model yet. With the original's name, an adapter would name a model of another class its base.
    remade.name_or_path = config.name_or_path = ""
    return remade


def _over_the_same_storage(parameter: nn.Parameter) -> nn.Parameter:
    """Return a new parameter over the same storage; a quantized one, which is never trained, is returned itself."""
    quantized = type(parameter) is not nn.Parameter
    return parameter if quantized else nn.Parameter(parameter.data, parameter.requires_grad)


# --- quantized teachers -----------------------------------------------------------------------------------------------


def _refuse_unsavable(model: nn.Module) -> None:
    """Raise UserError if weights are quantized in a way that transformers cannot save, as from a GGUF file."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.is_serializable():
        return
    method = getattr(quantizer.quantization_config.quant_method, "value", None)
    instead = "with quantization_config=GgufConfig(dequantize=True)" if method == "gguf" else "unquantized"
    raise UserError(
        f"model: expected weights that transformers can save, found weights quantized by {method}, which it cannot; "
        f"load the model {instead}"
    )


def _settle(model: nn.Module) -> None:
    """Prepare layers of bitsandbytes (0.50), in place, so that their first use does not change them.

    8-bit layers are initialised now. 4-bit layers are kept from packing their weights anew on CPUs with AVX512-BF16:
    packed weights have no gradients and are saved wrongly.

    Raises:
        UserError: 4-bit weights are packed already.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "init_8bit_state") and module.weight.CB is not None:
            module.init_8bit_state()
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise UserError(
                    "model: expected 4-bit weights of bitsandbytes as they were loaded, found weights that were packed "
                    "for this CPU when the model was first used; convert it before that"
                )
