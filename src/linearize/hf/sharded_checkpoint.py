"""Read and write models whose weights are divided among processes: no process ever holds the whole model.

Each process reads its rows of every tensor (torch's distributed checkpoints over safetensors). Weights are gathered for
one written file at a time.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import cached_file

from linearize.base import UserError, progress
from linearize.distributed import main_process_first, read_rows, world
from linearize.hf.attention import mixer_weights
from linearize.hf.checkpoint import CAUSAL, as_trained, hub_options, readable
from linearize.hf.partial_model import compute_buffers, stored_config, weight_files
from linearize.hf.sharding import first_row, local, replace_weights, shard, skeleton, whole

FILE_SIZE = "5GB"  # of each written file, which the main process holds in memory
_READS = 16  # parts in which a model is read, for the progress bar; each reads the headers of all files


def load_sharded(
    model: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    stored: torch.dtype | None = None,
    auto_class: str = CAUSAL,
) -> PreTrainedModel:
    """Load a softmax decoder in eval mode with its weights divided among all processes, which call this together.

    Args:
        model: a folder, or a hub id, which the main process fetches first.
        dtype: of the layers' computation.
        stored: of the weights, if it differs: that of master weights for training.

    Raises:
        UserError: a GGUF file, an encoder, quantized weights, or weights that are missing, left over, or of another
            shape.
    """
    config = stored_config(model, "distributed.shard", "none")
    with readable(model, "readable weights"):
        with main_process_first():
            files = weight_files(model)
            paths = [Path(str(cached_file(model, name, **hub_options(model)))) for name in {*files.values()}]
        with torch.device("meta"), no_init_weights():
            bare: Any = getattr(transformers, auto_class).from_config(config, dtype=dtype)
        bare.tie_weights()
        with suppress(OSError):  # most models' folders have one
            bare.generation_config = GenerationConfig.from_pretrained(model, **hub_options(model))
        bare = as_trained(bare.eval().to(stored or dtype))
        shard(bare, device)
        replace_weights(bare, lambda _, weight: torch.empty_like(weight, device=device))
        compute_buffers(bare, device)
        _read(bare, model, paths[0].parent, set(files))
    return bare.requires_grad_(False)


def _read(model: Any, name: str, folder: Path, stored: set[str]) -> None:
    """Fill the weights from the tensors named `stored` in the safetensors in `folder`.

    Raises:
        UserError: as `load_sharded`.
    """
    metadata: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    expected: dict[str, Tensor] = {}
    for key, tensor in _weights(model).items():
        expected |= as_stored(model, key, torch.empty(tensor.shape, device="meta"))
    names = {key: _name_in(stored, key, model) for key in expected}
    missing = {key for key, found in names.items() if found is None}
    left = {key for key in stored - set(names.values()) if not _of_no_account(key, model)}
    problems = [f"none for {min(missing)}"] if missing else []
    problems += [f"{min(left)}, which it has not"] if left else []
    for key, tensor in expected.items():
        if key not in missing:
            of = metadata[names[key]]  # type: ignore[index]
            if of.size != tensor.shape:
                problems.append(f"{key} of shape {list(of.size)} for {list(tensor.shape)}")
            if not of.properties.dtype.is_floating_point:
                problems.append(f"{key} as {of.properties.dtype}, without a quantization_config")
    if problems:
        raise UserError(
            f"model {name}: expected all weights of a {type(model).__name__.removeprefix('FSDP')} and no others, "
            f"found {problems[0]}; use a whole copy of the checkpoint, saved without adapters"
        )
    mine: dict[Any, Tensor] = {}
    for key, tensor in _weights(model).items():
        as_it_is = as_stored(model, key, torch.empty(tensor.shape, device="meta")).popitem()[1].shape == tensor.shape
        rows = tensor if as_it_is else local(tensor)  # experts are slices of what this process has
        mine |= {names[x]: part for x, part in as_stored(model, key, rows, first_row(tensor)).items()}
    for some in progress([[*mine][i::_READS] for i in range(_READS)], f"loading a part of {name}"):
        read_rows(folder, {key: mine[key] for key in some})


def save_sharded(model: Any, folder: Path) -> None:
    """Write the files of `save_pretrained` for a divided model. All processes call this; the main process writes.

    Weights are saved in the dtype in which layers compute.
    """
    if world().main:
        bare = skeleton(model).to(model.config.dtype)
        bare.generation_config = model.generation_config
        bare.save_pretrained(folder, state_dict={})
        for path in folder.glob("*.safetensors"):
            path.unlink()
    weights, mixers = _weights(model), mixer_weights(model)
    dtypes = {key: x.dtype if key in mixers else model.config.dtype for key, x in weights.items()}
    shapes = {key: torch.empty(x.shape, dtype=dtypes[key], device="meta") for key, x in weights.items()}
    split = split_torch_state_dict_into_shards(
        shapes, max_shard_size=FILE_SIZE, filename_pattern="model{suffix}.safetensors"
    )
    index: dict[str, str] = {}
    for file, keys in progress(split.filename_to_tensors.items(), "writing weights"):
        tensors: dict[str, Tensor] = {}
        for key in keys:
            gathered = whole(weights[key].detach().to(dtypes[key]))
            if world().main:
                tensors |= as_stored(model, key, gathered.cpu())
        if world().main:
            save_file({key: x.contiguous() for key, x in tensors.items()}, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file)
    if world().main and split.is_sharded:
        text = json.dumps({"metadata": split.metadata, "weight_map": index}, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def as_stored(model: PreTrainedModel, name: str, tensor: Tensor, first: int = 0) -> dict[str, Tensor]:
    """Return views of a tensor of the model by their names in checkpoints, which store experts one by one.

    Args:
        tensor: the whole tensor, or of experts some rows, from number `first` on.
    """
    transforms = get_checkpoint_conversion_mapping(model.config.model_type) or ()
    parts = {name: tensor}
    for transform in transforms:
        if isinstance(transform, WeightConverter) and transform.target_patterns[0] in name:
            (target,), sources = transform.target_patterns, transform.source_patterns
            parts = {
                name.replace(target, source.replace("*", str(first + number))): part
                for number, expert in enumerate(tensor)
                for source, part in zip(sources, expert.chunk(len(sources)), strict=True)
            }
    for transform in transforms:
        if not isinstance(transform, WeightConverter):
            (target,), (source,) = transform.target_patterns, transform.source_patterns
            parts = {key.replace(target, source): part for key, part in parts.items()}
    return parts


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the model that checkpoints have, tied weights once."""
    buffers, held = dict(model.named_buffers()), model.state_dict().keys()
    return dict(model.named_parameters()) | {name: x for name, x in buffers.items() if name in held}


def _name_in(stored: set[str], key: str, model: Any) -> str | None:
    """Return the name of a tensor in the files: with or without the base's prefix, for tied weights either name."""
    tied = getattr(model, "all_tied_weights_keys", {})
    names = [key, *(alias for alias, of in tied.items() if of == key)]
    names += [name.removeprefix(f"{model.base_model_prefix}.") for name in names]
    return next((name for name in names if name in stored), None)


def _of_no_account(key: str, model: Any) -> bool:
    """Return whether files may have this tensor although the model lacks it: tied, or ignored by transformers."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return key in getattr(model, "all_tied_weights_keys", {}) or any(re.search(pattern, key) for pattern in ignored)
