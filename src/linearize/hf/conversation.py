"""Save, load and copy the state of a conversation: functions of the ordinary transformers cache."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import Cache, DynamicCache, PreTrainedModel

from linearize.base import UserError, atomic_file
from linearize.hf.architectures import ARCHITECTURES
from linearize.hf.attention import LinearizedAttention
from linearize.hf.cache import fill_layer, layer_of, layer_tensors
from linearize.hf.classes import MODEL_CLASSES, attention_modules
from linearize.hf.fingerprint import fingerprint
from linearize.hf.unsupported import angles_change, rotated_length

VERSION = 3  # of the file


def save_state(state: Cache, model: PreTrainedModel, path: str | os.PathLike[str]) -> None:
    """Write the state of a conversation with `model` to the safetensors file `path`, all or nothing.

    `state` is the cache that `generate(..., return_dict_in_generate=True)` or a forward returned as `past_key_values`.
    The file holds the states of linearized layers, whose size does not depend on the tokens seen, and the keys and
    values of layers that stayed softmax. It does not hold the tokens.

    Raises:
        UserError: the cache is empty or of a kind that cannot be saved, or the disk is full.
    """
    path, tokens = Path(path), int(state.get_seq_length())
    if not tokens:
        raise UserError(f"state: expected a cache that has seen tokens, found an empty one; {path} is not written")
    named = {
        f"layers.{i}.{name}": x for i, layer in enumerate(state.layers) for name, x in layer_tensors(layer).items()
    }
    # Clones, because safetensors refuses tensors that share storage.
    named = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in named.items()}
    num_bytes = sum(x.nbytes for x in named.values())
    lengths = {"tokens": str(tokens), "rotated": str(rotated_length(state))}
    with atomic_file(path, num_bytes, "save the state again") as scratch:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(named, scratch, metadata=_identity(model) | lengths)


def load_state(path: str | os.PathLike[str], model: PreTrainedModel) -> Cache:
    """Load a file of `save_state`; return a cache on the devices of `model`, to pass on as `past_key_values`.

    Raises:
        UserError: no such file, or the state of another model.
    """
    try:
        with safe_open(path, "pt") as file:
            found, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"state {path}: expected a file that save_state wrote; found: {error}") from None
    if found.get("state_version") != str(VERSION):
        raise UserError(
            f"state {path}: expected a state of version {VERSION}, found {found.get('state_version')}; feed the "
            "conversation to the model again, and save it with this version of linearize"
        )
    if "rotated" not in found and angles_change(model.config):
        raise UserError(
            f"state {path}: expected the length of the text by which its keys were rotated, because this model's "
            "angles change with it (config.rope_parameters), found none; feed the conversation to the model again, and "
            "save it with this version of linearize"
        )
    for name, expected in _identity(model).items():
        if found.get(name) != expected:
            raise UserError(
                f"state {path}: expected a state of this model, which has {name} {expected}; found {name} "
                f"{found.get(name)}; load it into the model that it was saved from"
            )
    rotated = int(found["rotated"]) if angles_change(model.config) else None
    cache = DynamicCache(config=model.config)
    architecture = ARCHITECTURES[model.config.model_type.removeprefix("linearized_")]
    for index, module in enumerate(attention_modules(model, architecture)):
        prefix, device = f"layers.{index}.", next(module.parameters()).device
        mine = {name.removeprefix(prefix): x.to(device) for name, x in tensors.items() if name.startswith(prefix)}
        layer = layer_of(cache, module) if isinstance(module, LinearizedAttention) else cache.layers[index]
        fill_layer(layer, mine, int(found["tokens"]), rotated)
    return cache


def fork_state(state: Cache, rows: Sequence[int] | None = None) -> Cache:
    """Return an independent copy of the whole batch, or of its `rows`, in that order; rows may repeat.

    `rows=[0] * n` starts n continuations of the first conversation. To return to a point later, keep a copy, continue
    with the original, and fork the copy again. Keys and values of layers that stayed softmax are copied completely.

    Raises:
        UserError: a row does not exist, or rows of a mixed model's static cache, which cannot be chosen.
    """
    fork = copy.deepcopy(state)
    if rows is not None:
        batch = min((len(x) for layer in state.layers for x in layer_tensors(layer).values()), default=0)
        if not rows or not all(0 <= row < batch for row in rows):
            raise UserError(f"rows: expected some of 0 to {batch - 1}, the rows of the state; found {list(rows)}")
        fork.batch_select_indices(torch.tensor(rows))
    return fork


def _identity(model: PreTrainedModel) -> dict[str, str]:
    """Return the properties of a model that must be equal when a state is saved and loaded.

    Raises:
        UserError: not a linearized model.
    """
    if model.config.model_type not in MODEL_CLASSES:
        raise UserError(f"model: expected a linearized model, found {model.config.model_type!r}; see linearize.convert")
    plan = model.config.linearize
    layers = {f"layer {i}": json.dumps(mixer, sort_keys=True) for i, mixer in enumerate(plan["layers"])}
    identity = {"state_version": str(VERSION), "model_type": model.config.model_type, "layers": str(len(layers))}
    identity |= {"format_version": str(plan["format_version"]), "dtype": str(model.dtype).removeprefix("torch.")}
    # Users often change these, which are not weights, for longer contexts.
    identity["rope_parameters"] = json.dumps(getattr(model.config, "rope_parameters", None), sort_keys=True)
    if angles_change(model.config):
        identity["max_position_embeddings"] = str(model.config.max_position_embeddings)
    return identity | layers | {"weights": fingerprint(model)}
