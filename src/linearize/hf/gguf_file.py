"""Read softmax models in GGUF files: config, tokenizer, and weights in full precision.

transformers (integrations/ggml.py, modeling_gguf_pytorch_utils.py) translates names, the order of rotated dimensions
and quantized blocks. It ignores settings that it has no field for, so files with such settings are refused here.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError
from linearize.hf.config_json import read_contents
from linearize.hf.strict_loading import load_whole

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-(\d{5})$")  # of a name without its suffix, as llama.cpp writes it
_NAMED = 4  # the most files named in a message
# `general.architecture` of tested files. For others, transformers ignores fields that change the logits: soft caps,
# scales and windows of Gemma, the angles of Phi-3, positions of GPT-2.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FREQUENCIES = "rope_freqs.weight"
# For Llama 3's scaled angles, files contain the divisors of the frequencies but not these fields.
_ORIGINAL_LENGTH = 8192
_LOW = 1.0  # `low_freq_factor`
_HIGH = 4.0  # `high_freq_factor`


def gguf_file(model: str) -> Path | None:
    """Return the GGUF file that `model` names: the file itself, or the only one in a folder without a config.json.

    Raises:
        UserError: the folder contains several such files, the file is a part of a model, or it is no GGUF file.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(file for file in path.glob(f"*{SUFFIX}") if file.is_file())
        if not files:
            return None
        if len(files) > 1 and not all(_PART.search(file.stem) for file in files):
            names = ", ".join(file.name for file in files[:_NAMED])
            more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
            raise UserError(f"model: expected one GGUF file in {path}, found {names}{more}; name the file itself")
        path = files[0]
    elif not (path.is_file() and path.suffix.lower() == SUFFIX):
        return None
    if (part := _PART.search(path.stem)) and int(part[1]) > 1:
        raise _one_part(path, int(part[1]))
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise UserError(f"model: {path}: cannot be read: {error.strerror or error}") from None
    if magic != _MAGIC:
        raise UserError(f"model: {path}: expected a GGUF file, found one that does not begin with GGUF; copy it again")
    return path


def _one_part(path: Path, parts: int) -> UserError:
    return UserError(
        f"model: expected a GGUF file with the whole model, found {path}, one of {parts} parts; join them by "
        "`llama-gguf-split --merge FIRST_PART OUT.gguf`, and name that file"
    )


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return the config of the model in a GGUF file, in the form of a config.json, without reading the weights.

    Raises:
        UserError: the package gguf is missing, the file is damaged, or it has settings that transformers ignores.
    """
    state = path.stat()
    return copy.deepcopy(_read_header(path.resolve(), state.st_size, state.st_mtime_ns)[0])


@functools.lru_cache(maxsize=4)
def _read_header(path: Path, size: int, modified: int) -> tuple[dict[str, Any], int]:
    """Return the config and the number of weights in the file; cached, because a vocabulary takes seconds to read."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"model: {path}: GGUF files need the package gguf; run `pip install 'linearize[gguf]'`")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = str(_value(reader, "general.architecture"))
        parts = int(_value(reader, "split.count") or 1)
    except Exception as error:  # damaged files raise nearly every kind of error
        raise UserError(f"model: {path}: expected a whole GGUF file, found {_reason(error)}; copy it again") from None
    if architecture not in _ARCHITECTURES:
        raise UserError(
            f"model: {path}: expected a GGUF file of {', '.join(_ARCHITECTURES)}, found {architecture!r}, which "
            "transformers cannot read completely; use the model's folder with config.json and safetensors"
        )
    if parts > 1:
        raise _one_part(path, parts)
    try:
        # The model's name in the file is not the name of a folder or hub model.
        contents, _ = PreTrainedConfig.get_config_dict(str(path.parent), gguf_file=path.name)
        contents = {name: x for name, x in contents.items() if name != "_model_name_or_path"}
        classes: Any = transformers.AutoModelForCausalLM._model_mapping
        contents["architectures"] = [classes[type(read_contents(contents))].__name__]
        _complete(path, reader, architecture, contents)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model: {path}: expected a GGUF file that transformers {transformers.__version__} can read, found: "
            f"{_reason(error)}; use the model's folder with config.json and safetensors"
        ) from None
    weights = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != _FREQUENCIES)
    return contents, weights


def _complete(path: Path, reader: Any, architecture: str, contents: dict[str, Any]) -> None:
    """Add fields to `contents` that transformers does not read from the file.

    Raises:
        UserError: the file has a setting for which there is no field.
    """
    if contents["model_type"] == "mistral":  # transformers infers it from the model's name; the file has no window
        contents["sliding_window"] = None
    config = read_contents(contents)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture != "llama" and (length := _value(reader, f"{architecture}.attention.key_length")) is not None:
        contents["head_dim"] = head_dim = int(length)  # for llama, transformers reads `rope.dimension_count`
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        length = _value(reader, f"{architecture}.{name}")
        if length is not None and int(length) != head_dim:
            raise _dropped(path, f"{architecture}.{name}", f"{length} for heads of {head_dim} dimensions")
    scaling = _value(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise _dropped(path, f"{architecture}.rope.scaling.type", repr(scaling))
    for name in ("expert_count", "attention.sliding_window"):
        if value := _value(reader, f"{architecture}.{name}"):
            raise _dropped(path, f"{architecture}.{name}", str(value))
    divisors = next((tensor for tensor in reader.tensors if tensor.name == _FREQUENCIES), None)
    if divisors is not None:
        given = torch.tensor(divisors.data, dtype=torch.float64).flatten()
        base = float(_value(reader, f"{architecture}.rope.freq_base") or 10_000.0)
        scaled = {
            "rope_type": "llama3",
            "factor": float(given.max()),
            "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH,
            "original_max_position_embeddings": _ORIGINAL_LENGTH,
        }
        expected = _llama3_divisors(scaled["factor"], base, head_dim)
        if given.shape != expected.shape or not torch.allclose(given, expected, rtol=1e-4):
            raise _dropped(path, _FREQUENCIES, "other divisors than those of Llama 3")
        contents["rope_scaling"] = scaled


def _dropped(path: Path, name: str, found: str) -> UserError:
    return UserError(
        f"model: {path}: {name}: expected what transformers reads, found {found}, which it would drop; use the "
        "model's folder with config.json and safetensors"
    )


def _llama3_divisors(factor: float, base: float, head_dim: int) -> torch.Tensor:
    """Return the divisors of the rotary frequencies of Llama 3.1 (transformers' `modeling_rope_utils`)."""
    wavelengths = 2 * torch.pi * base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = (_ORIGINAL_LENGTH / wavelengths - _LOW) / (_HIGH - _LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = torch.where(wavelengths > _ORIGINAL_LENGTH / _LOW, torch.tensor(factor, dtype=torch.float64), between)
    return torch.where(wavelengths < _ORIGINAL_LENGTH / _HIGH, torch.ones_like(divisors), divisors)


def load_gguf(path: Path, *, dtype: torch.dtype, auto_class: str) -> PreTrainedModel:
    """Load the model in a GGUF file on the CPU, with weights widened to `dtype`; it can be saved like any other.

    Raises:
        UserError: as `read_gguf_config`, or weights are missing, left over, or not read.
    """
    config = read_contents(read_gguf_config(path))
    options: dict[str, Any] = {"dtype": dtype, "config": config, "gguf_file": path.name}
    if (settings := getattr(transformers, "GgufConfig", None)) is not None:  # older versions always widen
        options["quantization_config"] = settings(dequantize=True)
    load = getattr(transformers, auto_class).from_pretrained
    model, _ = load_whole(load, str(path.parent), **options)
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    state = path.stat()
    expected = _read_header(path.resolve(), state.st_size, state.st_mtime_ns)[1]
    loaded = sum(parameter.numel() for parameter in model.parameters())
    if auto_class == "AutoModelForCausalLM" and loaded != expected:
        raise UserError(
            f"model: {path}: expected {loaded:,} weights of a {type(model).__name__}, found {expected:,}; use the "
            "model's folder with config.json and safetensors"
        )
    return model


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Make the tokenizer that the file describes; errors of transformers can be of any kind."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    contents = read_gguf_config(path)
    for name in ("bos", "eos", "unk", "pad"):  # older versions do not read these from the file
        number = contents.get(f"{name}_token_id")
        token = None if number is None else tokenizer.convert_ids_to_tokens(number)
        if getattr(tokenizer, f"{name}_token") != token:
            setattr(tokenizer, f"{name}_token", token)
    return tokenizer


def _value(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
