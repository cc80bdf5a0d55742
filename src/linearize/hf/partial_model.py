"""Load a few layers of a softmax model as a model of their own, whose input is the residual stream.

No other weights are read: this is for models that do not fit in memory (LoLCATs sec. 3.3). Modules keep their names and
layer indices, so trained weights and random numbers of a block are those of the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from linearize.base import UserError
from linearize.hf.architectures import ARCHITECTURES, Parts
from linearize.hf.checkpoint import hub_options, readable
from linearize.hf.gguf_file import gguf_file


def stored_by_layer(model_type: str) -> bool:
    """Return whether `load_block` supports a model type: a decoder whose files name weights as the model does."""
    return not ARCHITECTURES[model_type].bidirectional and not get_checkpoint_conversion_mapping(model_type)


def load_block(model: str, layers: range, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load these layers of a causal language model, in eval mode, with no other weights.

    The first block has the embeddings and takes `input_ids`. Other blocks take the output of the previous layer as
    `inputs_embeds` [B, T, E]. All return the residual stream after their last layer, un-normalised, as
    ``last_hidden_state`` of ``base_model``. There is no language model head.

    Args:
        model: a folder or a hub id with safetensors; only the files with these layers are fetched from the hub.

    Raises:
        UserError: a linearized model, or weights that are missing, quantized or unreadable.
    """
    checkpoint = StoredWeights(model)
    with torch.device("meta"):
        block: Any = AutoModelForCausalLM.from_config(checkpoint.config, dtype=dtype)
    _keep(block, layers)
    with readable(model, "readable weights"):
        tensors = checkpoint.read(block.state_dict(), block.base_model_prefix, device)
        block.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
        compute_buffers(block, device)
    return block.to(device).eval()


def _keep(model: Any, layers: range) -> None:
    """Remove all modules but `layers` from a model without weights, in place."""
    base: Any = model.base_model
    parts = ARCHITECTURES[model.config.model_type].parts
    assert isinstance(parts, Parts)  # of a decoder
    stack = base.get_submodule(parts.layers)
    for index in set(range(len(stack))) - set(layers):
        delattr(stack, str(index))  # `del stack[index]` would rename the layers after it
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None) is not None:  # read by the place in the stack
        model.config.layer_types = model.config.layer_types[layers.start : layers.stop]
    model.set_output_embeddings(nn.Identity())
    _replace(base, (parts.norm, parts.exit), nn.Identity)
    if layers.start:
        _replace(base, parts.embeddings, _NoEmbedding)
        _replace(base, (parts.entry,), nn.Identity)
        if parts.multiplier is not None:
            setattr(base, parts.multiplier, 1.0)
    if parts.rope is not None:  # computed, not loaded
        setattr(base, parts.rope, type(getattr(base, parts.rope))(model.config))


@torch.no_grad()
def compute_buffers(model: Any, device: torch.device) -> None:
    """Compute buffers that are in no checkpoint, such as the factor of Gemma's embeddings, by the model's own code."""
    for module in model.modules():
        missing = {name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if missing:
            for name in missing:
                setattr(module, name, torch.empty_like(getattr(module, name), device=device))
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True
            model._init_weights(module)


def _replace(base: nn.Module, paths: Iterable[str | None], make: Callable[[], nn.Module]) -> None:
    """Replace the modules at these paths by new ones of `make`; paths that this model lacks stay empty."""
    for path in paths:
        around, _, name = (path or "").rpartition(".")
        if getattr(base.get_submodule(around), name, None) is not None:
            setattr(base.get_submodule(around), name, make())


class _NoEmbedding(nn.Module):
    """Return 0 in place of token or position embeddings, which are in the residual stream already."""

    def forward(self, ids: Shaped[Tensor, "B T"], *args: object, **kwargs: object) -> Tensor:
        return torch.zeros((), device=ids.device)


def weight_files(model: str) -> dict[str, str]:
    """Return the file of each tensor of a model, a folder or hub id, with the same preferences as transformers.

    Raises:
        UserError: there are no safetensors.
    """
    options = hub_options(model) | {"_raise_exceptions_for_missing_entries": False}
    whole = cached_file(model, SAFE_WEIGHTS_NAME, **options)
    if whole is not None:
        with safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    index = cached_file(model, SAFE_WEIGHTS_INDEX_NAME, **options)
    if index is None:
        raise UserError(
            f"model {model}: expected {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, found neither; "
            "its weights are read in parts: load the model and save_pretrained() it once"
        )
    return json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]


def stored_config(model: str, field: str, off: str) -> Any:
    """Return the config of a model whose weights are read in parts.

    Raises:
        UserError: a GGUF file, or quantized weights; the message says to set the recipe's `field` to `off`.
    """
    if gguf_file(model) is not None:
        raise UserError(
            f"model {model}: {field}: expected safetensors, which are read in parts, found a GGUF file; "
            f"set {field}={off}"
        )
    with readable(model, "readable weights"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False, **hub_options(model))
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"model {model}: {field}: expected weights that are not quantized, found a quantization_config; use "
            f"another copy of the model, or set {field}={off}"
        )
    return config


class StoredWeights:
    """The safetensors of a softmax model, in one file or several, in a folder or on the hub.

    Raises:
        UserError: as `load_block`.
    """

    def __init__(self, model: str) -> None:
        self._model, self._options = model, hub_options(model)
        self.config = stored_config(model, "transfer.layers_per_block", "null")
        if self.config.model_type not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UserError(f"model: expected a softmax model ({known}), found {self.config.model_type!r}")
        with readable(model, "readable weights"):
            self._files = weight_files(model)

    def read(self, names: Iterable[str], prefix: str, device: torch.device) -> dict[str, Tensor]:
        """Return these tensors by name. In checkpoints of a base model their names lack `prefix`.

        Raises:
            UserError: a tensor is missing.
        """
        wanted: dict[str, dict[str, str]] = {}  # file -> name in it -> name
        for name in names:
            stored = name if name in self._files else name.removeprefix(f"{prefix}.")
            if stored not in self._files:
                raise UserError(f"model {self._model}: expected a tensor {name}, found none in its safetensors")
            wanted.setdefault(self._files[stored], {})[stored] = name
        tensors = {}
        for filename, stored_names in wanted.items():
            path = cached_file(self._model, filename, **self._options)
            with safe_open(path, framework="pt", device=str(device)) as file:
                tensors |= {name: file.get_tensor(stored) for stored, name in stored_names.items()}
        return tensors
