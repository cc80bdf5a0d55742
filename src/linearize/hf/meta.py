"""A teacher without its weights, on torch's meta device, whose sizes plans count."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from linearize.hf.architectures import ARCHITECTURES, drops_soft_cap
from linearize.hf.config_json import blaming_fields, read_contents
from linearize.hf.teacher import TeacherShape


@dataclass(frozen=True)
class MetaModel:
    """Numbers of weights of a softmax model: a language model with its head, or the base of an encoder.

    Attributes:
        model: the model without data.
        total: all weights, tied ones once.
        embeddings: weights that are looked up or added: of tokens, positions, types, special tokens.
        layers: weights of each layer.
        used: weights of each layer that one token uses: only the experts that it is sent to.
        outside: weights outside the layers by which every token is multiplied; also those of a head tied to embeddings.
        rotary_dims: dimensions of a head that each layer rotates (RoPE), 0 for layers without RoPE and for encoders.
        contents: of the config.json, as JSON.
    """

    model: PreTrainedModel
    total: int
    embeddings: int
    layers: tuple[int, ...]
    used: tuple[int, ...]
    outside: int
    rotary_dims: tuple[int, ...]
    contents: str

    def reduced(self, layers: Sequence[int], dtype: torch.dtype) -> PreTrainedModel:
        """Return a copy in `dtype` with these layers alone, on the meta device, frozen and in eval mode.

        An encoder keeps all layers.
        """
        parts, left_out = ARCHITECTURES[self.model.config.model_type].parts, dict[int, object]()
        if parts is not None:
            stack: Any = self.model.base_model.get_submodule(parts.layers)
            left_out[id(stack)] = nn.ModuleList(copy.deepcopy(stack[index]) for index in layers)
        model: Any = copy.deepcopy(self.model, left_out).to(dtype=dtype)  # type: ignore[call-arg]
        if parts is not None:
            model.config.num_hidden_layers = len(layers)
            if getattr(model.config, "layer_types", None) is not None:  # read by the place in the stack
                model.config.layer_types = [model.config.layer_types[index] for index in layers]
        if model._supports_sdpa:  # transformers' default, but sdpa ignores soft caps
            model.set_attn_implementation("sdpa")
            if drops_soft_cap(model.config):
                model.set_attn_implementation("eager")
        return model.eval().requires_grad_(False)

    @classmethod
    def of(cls, teacher: TeacherShape) -> MetaModel:
        """Build the model and count its weights.

        Raises:
            UserError: the contents of config.json make no model.
        """
        return blaming_fields(teacher.contents, cls._of)

    @classmethod
    def _of(cls, contents: dict[str, Any]) -> MetaModel:
        model, architecture = _build(contents), ARCHITECTURES[contents["model_type"]]
        attention = {name: m for name, m in model.named_modules() if isinstance(m, architecture.attention)}
        # A layer is the module with the last number in the path to its attention.
        layers = [model.get_submodule(re.findall(r".*\b\d+(?=\.)", name)[0]) for name in attention]
        within = {module for layer in layers for module in layer.modules()}
        looked_up = sum(
            parameter.numel()
            for module in set(model.modules()) - within
            # Parameters of modules with children are special tokens and positions of images.
            if isinstance(module, nn.Embedding) or next(module.children(), None) is not None
            for parameter in module.parameters(recurse=False)
        )
        in_layers = tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)
        total = sum(p.numel() for p in model.parameters())
        head: Any = model.get_output_embeddings()
        looked_up_in: Any = model.get_input_embeddings()
        tied = head.weight.numel() if head is not None and head.weight is looked_up_in.weight else 0
        rotary = 0
        if architecture.parts is not None and architecture.parts.rope is not None:
            angles = model.base_model.get_submodule(architecture.parts.rope)
            rotary = 2 * next(angles.buffers()).numel()  # one angle for two dimensions
        return cls(
            model=model,
            total=total,
            embeddings=looked_up,
            layers=in_layers,
            used=tuple(sum(_met(p, model.config) for p in layer.parameters()) for layer in layers),
            outside=total - sum(in_layers) - looked_up + tied,
            # `use_rope` is SmolLM3's own attribute.
            rotary_dims=tuple(rotary if getattr(m, "use_rope", True) else 0 for m in attention.values()),
            contents=json.dumps(contents, sort_keys=True),
        )


def _build(contents: dict[str, Any]) -> PreTrainedModel:
    bidirectional = ARCHITECTURES[contents["model_type"]].bidirectional
    auto = transformers.AutoModel if bidirectional else transformers.AutoModelForCausalLM
    # Nothing is computed, so the implementation does not matter; that of the config.json may not be installed.
    with torch.device("meta"), no_init_weights():
        model = auto.from_config(read_contents(contents), attn_implementation="eager")
    model.tie_weights()  # which is part of initialising them
    return model


def _met(parameter: nn.Parameter, config: Any) -> int:
    """Return how many numbers of a parameter one token uses. Experts are the first of three dimensions."""
    return parameter.numel() if parameter.ndim < 3 else config.num_experts_per_tok * parameter[0].numel()
