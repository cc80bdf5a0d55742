"""The registered classes: ``model_type: linearized_<base>``, one config and one class per head of each architecture.

They derive from the base's own classes and are attributes of this module, so that they can be pickled. Parameter names
are the base model's; a linearized layer adds ``<attention>.mixer.*``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from linearize.base import UserError
from linearize.configs.mixer import HeadwiseConfig, LayerPlan, MixerConfig, is_spread
from linearize.hf.architectures import ARCHITECTURES, DECODER_HEADS, ENCODER_HEADS, Architecture, architecture_of
from linearize.hf.attention import IMPLEMENTATION, LinearizedAttention, attach, linearized_layers, mixer_weights
from linearize.hf.cache import layer_of, same_size_mask
from linearize.hf.compiled import cache_to_compile, history
from linearize.hf.layouts import encoder_layout_hook, keep_documents_apart, layout_hook
from linearize.hf.offload import keep_in_memory
from linearize.hf.strict_loading import load_whole
from linearize.hf.teacher import TeacherShape
from linearize.hf.unsupported import (
    Unsupported,
    length_of_angles,
    refuse_candidates,
    refuse_forgetting,
    refuse_other_angles,
)
from linearize.mixers.bidirectional import BidirectionalMixer
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.linear import LinearMixer

__all__ = ["ARCHITECTURES"]

# Versions of the layer plan in a config. From 2 on, layers can have a mixer per group of heads, and a KV cache.
FORMAT_VERSIONS = (1, 2)
AUTO_MODULE = "modeling_linearize"


def plan_to_config(plan: LayerPlan) -> dict[str, Any]:
    """Return a layer plan as the plain data that a config stores under `linearize`."""
    newer = is_spread(plan)
    fields = None if newer else {"cache"}  # format 1 has no such field
    layers = [None if layer is None else layer.model_dump(mode="json", exclude=fields) for layer in plan]
    return {"format_version": FORMAT_VERSIONS[newer], "layers": layers}


def read_plan(config: PreTrainedConfig) -> LayerPlan:
    """Return the layer plan stored in a linearized config.

    Raises:
        ValueError: no plan, or one that this version cannot read; its message has one line.
    """
    stored = getattr(config, "linearize", None)
    if not stored:
        raise ValueError(f"config.linearize: expected a layer plan, found {stored!r}; convert a model with linearize")
    if stored.get("format_version") not in FORMAT_VERSIONS:
        raise ValueError(
            f"config.linearize.format_version: expected 1 or 2, found {stored.get('format_version')!r}; "
            "install the version of linearize that wrote this checkpoint, or a newer one"
        )
    try:
        return tuple(
            None if layer is None else (HeadwiseConfig if "groups" in layer else MixerConfig).model_validate(layer)
            for layer in stored["layers"]
        )
    except ValidationError as error:
        first = error.errors()[0]
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"config.linearize.layers: {field}: {reason}") from None


# A value for config fields with which no model can be made, so that transformers' own classes refuse the folder. Else
# they would load it as a softmax model, with a mere warning about unknown weights. There are two fields, because an
# argument of `from_pretrained` may override `attn_implementation`, but not `transformers_weights`, the name of a file.
_OURS = "linearize (load this model by an Auto class, after `import linearize` or with trust_remote_code=True)"
_MARKED = ("attn_implementation", "transformers_weights")


def auto_map(config_class: str, model_class: str, auto_class: str) -> dict[str, str]:
    """Return the config's `auto_map`, by which ``trust_remote_code=True`` finds the classes."""
    return {"AutoConfig": f"{AUTO_MODULE}.{config_class}", auto_class: f"{AUTO_MODULE}.{model_class}"}


def write_auto_module(folder: str | os.PathLike[str], references: dict[str, str]) -> None:
    """Write the module of an `auto_map`. It only imports, so transformers says if the package is missing."""
    classes = [reference.rpartition(".")[2] for reference in references.values()]
    names = ", ".join(f'"{name}"' for name in classes)
    text = f"from linearize.hf.classes import {', '.join(classes)}\n\n__all__ = [{names}]\n"
    (Path(folder) / f"{AUTO_MODULE}.py").write_text(text, encoding="utf-8")


class LinearizedConfig:
    """Mixin for the base's config classes, which saves the module that `auto_map` names with a config."""

    auto_map: dict[str, str]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the config, as in transformers, without the fields that `to_diff_dict` adds."""
        config_dict = {name: x for name, x in config_dict.items() if not (name in _MARKED and x == _OURS)}
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the fields to save, as in transformers, and those that make softmax classes refuse the folder."""
        fields: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        return fields | dict.fromkeys(_MARKED, _OURS)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save the config and the module of `auto_map`. Models call this before they upload new files of the folder."""
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        if hasattr(self, "auto_map"):  # set by models alone
            write_auto_module(save_directory, self.auto_map)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing. transformers calls this for remote code, and would then copy our source into saved folders."""


class LinearizedModel(Unsupported, PreTrainedModel):
    """Mixin for the base's model classes: builds the mixers and initialises them."""

    _keep_in_fp32_modules_strict = {"mixer"}  # noqa: RUF012 (transformers declares it so)

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if config._attn_implementation == IMPLEMENTATION:  # another model of this config hides masks, see `install`
            config._attn_implementation_internal = None  # transformers chooses again
        super().__init__(config, *args, **kwargs)
        # Some heads make their base model by AutoModel; that is a linearized model, which has its mixers already.
        if not linearized_layers(self):
            install(self)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as in transformers. Mixers are in memory, even if a `device_map` keeps their layers on disk.

        Raises:
            UserError: weights are missing or left over, see `load_whole`.
        """
        model, info = load_whole(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)
        for layer in linearized_layers(model).values():
            keep_in_memory(layer.mixer)
        return (model, info) if kwargs.get("output_loading_info") else model

    def mixer_weights(self) -> set[str]:
        """Return the names of all mixer tensors in a checkpoint of this model."""
        return mixer_weights(self)

    def initialize_weights(self) -> None:
        """Initialise weights as in transformers, and mixers that the checkpoint does not have (a softmax teacher's)."""
        for layer in linearized_layers(self).values():
            for part in (part for _, mixer in layer.mixer.parts() for part in mixer.children()):
                if not all(getattr(x, "_is_hf_initialized", False) for x in (*part.parameters(), *part.buffers())):
                    part.reset_parameters()
            for module in layer.mixer.modules():
                module._is_hf_initialized = True
        super().initialize_weights()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Ask the base class: transformers searches the source of the class's module, which is not this one."""
        return cls.__bases__[-1]._can_set_experts_implementation()  # type: ignore[attr-defined]

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as in transformers; the folder also loads with ``trust_remote_code=True`` if linearize is installed."""
        if getattr(self, "is_quantized", False):
            # transformers cannot convert quantized weights back to their original format.
            kwargs.setdefault("save_original_format", False)
        auto, cls = registered(self)
        self.config.auto_map = auto_map(type(self.config).__name__, cls.__name__, auto)
        super().save_pretrained(save_directory, *args, **kwargs)


class LinearizedGeneration(GenerationMixin):
    """Mixin for the base's classes that generate: adapts `generate` to states, and refuses unsupported options."""

    def _prepare_cache_for_generation(
        self: Any,
        generation_config: Any,
        model_kwargs: Any,
        generation_mode: Any,
        batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Prepare the cache as in transformers, with our layers. Assisted generation can take candidates back.

        If compiled steps save time, the cache is static: see `cache_to_compile`.

        Raises:
            UserError: candidates cannot be taken back, see `refuse_candidates`.
        """
        candidates = generation_config.is_assistant or generation_mode == "assisted_generation"
        if candidates:
            positions = model_kwargs.get("position_ids")
            prompt = 0 if positions is None else int(positions.max()) + 1
            refuse_candidates(self.config, prompt, generation_config.max_length)
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        plan = partial(read_plan, self.config)
        cache = cache_to_compile(self, plan, generation_config, model_kwargs, generation_mode, rows)
        if cache is not None:
            model_kwargs["past_key_values"] = cache
            return None
        result = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, *args, **kwargs
        )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            for module in linearized_layers(self).values():
                layer = layer_of(cache, module)
                if candidates:
                    layer.activate_past_recording()
        return result

    def get_compiled_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the compiled call, as in transformers, but never that of the model from which this one was copied."""
        if vars(self).get("_compiled_for") != id(self):
            vars(self).pop("_compiled_call", None)
            self._compiled_for = id(self)
        return super().get_compiled_call(*args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs as in the base class, which may drop the cache and read all tokens again (Phi-3, `longrope`).

        Raises:
            UserError: tokens in a state would be lost (`refuse_forgetting`), or new tokens have other rotary angles.
        """
        history(self).steps[len(input_ids)] += 1
        inputs: dict[str, Any]
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        cache = kwargs.get("past_key_values")
        if cache is not None and inputs.get("past_key_values") is None:
            if held := int(cache.get_seq_length()):
                refuse_forgetting(input_ids, kwargs.get("position_ids"), held)
            else:
                inputs["past_key_values"] = cache  # an empty cache has no tokens to read again
        if (position_ids := inputs.get("position_ids")) is not None:  # here, because a compiled forward cannot
            cache, tokens = inputs.get("past_key_values"), position_ids.shape[-1]
            length = length_of_angles(self.config, cache, position_ids, tokens)
            refuse_other_angles(self.config, cache, length, tokens)
        return inputs

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """Return the 2D mask, from which linearized layers read padding and softmax layers make their own masks."""
        one_token = inputs_embeds is not None and inputs_embeds.shape[1] == 1
        return same_size_mask(attention_mask, past_key_values) if one_token else attention_mask


class LinearizedEncoder(LinearizedModel):
    """Mixin for an encoder's model classes, which cannot generate."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UserError: an encoder predicts no next token."""
        raise UserError(f"model: expected a decoder to generate with, found the encoder {type(self).__name__}")


def attention_modules(model: nn.Module, architecture: Architecture) -> list[Any]:
    """Return the self-attention modules of a base model, in order, and set `layer_idx` where an encoder does not.

    Modules are visited in the order of layers.
    """
    found: list[Any] = [m for m in model.modules() if isinstance(m, architecture.attention)]
    for index, module in enumerate(found):
        if getattr(module, "layer_idx", None) is None:
            module.layer_idx = index
    return sorted(found, key=lambda m: m.layer_idx)


def projections(model: PreTrainedModel, roles: Collection[str]) -> dict[str, nn.Module]:
    """Return the attention projections of `model`, softmax or linearized, for any of `roles` (q, k, v, o), by name."""
    architecture = architecture_of(model)
    assert architecture is not None
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, architecture.attention):
            for path, computes in architecture.projections.items():
                if set(computes) & set(roles):
                    around = name.rpartition(".")[0] if path.startswith("../") else name
                    child = f"{around}.{path.removeprefix('../')}"
                    found[child] = model.get_submodule(child)
    return found


def install(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Add the mixers that `model.config` plans to the model's attention modules, in place.

    They are on `device`, or on that of the attention's weights. Random numbers of a mixer depend on torch's generator
    and its layer's index alone, so a block of layers has the same mixers as the whole model.
    """
    base_type = model.config.model_type.removeprefix("linearized_")
    shape, plan = TeacherShape.from_config(model.config.to_dict()), read_plan(model.config)
    architecture = ARCHITECTURES[base_type]
    modules = attention_modules(model, architecture)
    if len(modules) != len(plan):
        raise ValueError(f"config.linearize.layers: expected {len(modules)} layers, found {len(plan)}")
    seed = int(torch.randint(2**62, (), device="cpu"))
    for module, mixer_config in zip(modules, plan, strict=True):
        if mixer_config is None:
            continue
        weight = next(module.parameters())
        # Mixers are fp32 for models of every dtype but fp64.
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        # Drawn on the CPU in fp32, so that a seed gives the same random numbers on every device and in every dtype.
        at = weight.device if device is None else device
        where = torch.device("meta" if at.type == "meta" else "cpu")
        with where, _default_dtype(torch.float32), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(Random(f"{seed}, layer {module.layer_idx}").getrandbits(63))
            mixer = build(mixer_config, shape)
        attach(module, mixer.to(at, dtype), ATTENTION_CLASSES[base_type], model.config)
    if None not in plan:  # transformers builds no T x T masks for our function
        model.config._attn_implementation_internal = IMPLEMENTATION
    if architecture.parts is None:
        model.base_model.register_forward_pre_hook(encoder_layout_hook, with_kwargs=True)
    else:  # not on the base model: OPT's language model calls the module inside it directly
        stack = model.base_model.get_submodule(architecture.parts.stack)
        # This hook runs first, because it reads the caller's mask, and the other hook may make one.
        stack.register_forward_pre_hook(layout_hook, with_kwargs=True, prepend=True)
        keep_documents_apart(model)


def build(config: MixerConfig | HeadwiseConfig, teacher: TeacherShape) -> Any:
    """Return a new mixer for one layer of `teacher`."""
    if isinstance(config, HeadwiseConfig):
        return HeadwiseMixer(config, teacher.layer)
    return (BidirectionalMixer if teacher.bidirectional else LinearMixer)(config, teacher.layer)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype in the `with` block; transformers sets the model's, but QR does not support bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def registered(model: PreTrainedModel) -> tuple[str, type[PreTrainedModel]]:
    """Return the Auto class that loads a linearized model, and the model's class without wrappers such as FSDP2's."""
    made = [(auto, cls) for auto, classes in MODEL_CLASSES[model.config.model_type].items() for cls in classes]
    for base in type(model).__mro__:
        for auto, cls in made:
            if cls is base:
                return auto, cls
    raise UserError(
        f"model: expected a linearized model itself, found {type(model).__name__} around one; take the model out of "
        "it (PEFT: merge_and_unload(), torch.compile: _orig_mod)"
    )


ATTENTION_CLASSES: dict[str, type] = {}
CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {}
# The classes that each Auto class makes. If there are several, the checkpoint names one; the first is the default.
MODEL_CLASSES: dict[str, dict[str, tuple[type[PreTrainedModel], ...]]] = {}


def _define(base: type, mixin: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    name = f"Linearized{base.__name__}"
    namespace = {"__module__": __name__, "__qualname__": name, "__doc__": f"{base.__name__}, linearized."} | namespace
    globals()[name] = type(name, (*mixin, base), namespace)
    return globals()[name]


def _register() -> None:
    """Make and register the classes of every architecture; runs once, on import."""
    for base_type, architecture in ARCHITECTURES.items():
        model_type = f"linearized_{base_type}"
        fields = {"linearize": "dict | None", "state_dtype": "str | None", "prefill": "str | None"}
        namespace = {"model_type": model_type, "__annotations__": fields} | dict.fromkeys(fields)
        config = _define(CONFIG_MAPPING[base_type], (LinearizedConfig,), namespace)
        CONFIG_CLASSES[base_type] = config
        bidirectional = {"bidirectional": architecture.bidirectional}
        ATTENTION_CLASSES[base_type] = _define(architecture.attention, (LinearizedAttention,), bidirectional)
        AutoConfig.register(model_type, config)
        MODEL_CLASSES[model_type] = {}
        # Names that differ in checkpoints, as those of experts do; for the model type here, for a class below.
        if renamed := get_checkpoint_conversion_mapping(base_type):
            register_checkpoint_conversion_mapping(model_type, renamed)
        mixin: type[LinearizedModel] = LinearizedEncoder if architecture.bidirectional else LinearizedModel
        made: dict[type, type[PreTrainedModel]] = {}  # several Auto classes can make one class
        for auto in ENCODER_HEADS if architecture.bidirectional else DECODER_HEADS:
            found = getattr(transformers, auto)._model_mapping.get(CONFIG_MAPPING[base_type], ())
            several = isinstance(found, tuple)
            for base in found if several else (found,):
                if base not in made:
                    generates = issubclass(base, GenerationMixin) and not architecture.bidirectional
                    mixins = (LinearizedGeneration, mixin) if generates else (mixin,)
                    made[base] = _define(base, mixins, {"config_class": config})
                    if renamed := get_checkpoint_conversion_mapping(base.__name__):
                        register_checkpoint_conversion_mapping(made[base].__name__, renamed)
                MODEL_CLASSES[model_type][auto] = (*MODEL_CLASSES[model_type].get(auto, ()), made[base])
            if found:
                classes = MODEL_CLASSES[model_type][auto]
                getattr(transformers, auto).register(config, classes if several else classes[0])


_register()
