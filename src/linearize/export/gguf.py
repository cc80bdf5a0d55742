"""Write a stock model of the class `granite_swa` as a GGUF file for llama.cpp and programs built on it.

llama.cpp's architecture `granite_swa` has the parts of the class: a window per layer, sink logits, biases of attention.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, progress

ARCHITECTURE = CLASS = "granite_swa"  # llama.cpp and transformers use the same name
TYPES = ("bf16", "f16", "f32", "q8_0")  # of matrices; vectors are float32
CONVERTER = "use `--to hf` and llama.cpp's convert_hf_to_gguf.py"
BLOCK = 32  # numbers that share one scale in q8_0

# Names of llama.cpp, by those of transformers.
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    **{
        f"self_attn.{name}_proj.{kind}": f"attn_{short}.{kind}"
        for name, short in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
        for kind in ("weight", "bias")
    },
    **{
        f"mlp.{name}_proj.{kind}": f"ffn_{name}.{kind}"
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

# llama.cpp's names of the rules that split text before byte-pair encoding, by their settings in tokenizer.json.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS = {
    (("ByteLevel", True),): "gpt-2",
    (("Digits", True), ("ByteLevel", True)): "smollm",
    (("Split", _LLAMA_3), ("ByteLevel", False)): "llama-bpe",
    (("Split", _QWEN_2), ("ByteLevel", False)): "qwen2",
}


def write_gguf(model: PreTrainedModel, tokenizer: Tokenizer, path: Path, *, kind: str, name: str) -> None:
    """Write a model of the class `granite_swa` and its tokenizer to a GGUF file.

    Args:
        kind: dtype of matrices, one of TYPES.
        name: of the model, as programs show it.

    Raises:
        UserError: the package gguf is missing, the tokenizer is no byte-pair encoding over bytes, or angles of RoPE
            depend on the length of the text.
    """
    gguf = gguf_package()
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_name(name)
    writer.add_file_type({"bf16": 32, "f16": 1, "f32": 0, "q8_0": 7}[kind])
    for key, value in _sizes(config).items():
        value_type = gguf.GGUFValueType.UINT32 if isinstance(value, int) else gguf.GGUFValueType.FLOAT32
        writer.add_key_value(f"{ARCHITECTURE}.{key}", value, value_type)
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_array(f"{ARCHITECTURE}.attention.sliding_window_pattern", windowed)
    _add_tokenizer(writer, tokenizer, config.vocab_size, gguf.TokenType)
    storage = gguf.GGMLQuantizationType[kind.upper()]
    for key, tensor in progress(list(_tensors(model)), "writing tensors"):
        matrix = tensor.ndim == 2
        if matrix and kind == "q8_0" and tensor.shape[1] % BLOCK:
            raise UserError(
                f"--type: expected rows of a multiple of {BLOCK} for q8_0, found {key} of {tensor.shape[1]}"
            )
        data = tensor.detach().float().cpu().numpy()
        if matrix:
            data = data.astype(np.float16) if kind == "f16" else gguf.quants.quantize(data, storage)
        writer.add_tensor(key, np.ascontiguousarray(data), raw_dtype=storage if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(model: PreTrainedModel, path: Path) -> dict[str, Tensor]:
    """Return the weights in a file of `write_gguf` as a state of `model`, dequantized to float32."""
    gguf = gguf_package()
    stored = {x.name: gguf.quants.dequantize(x.data, x.tensor_type) for x in gguf.GGUFReader(path).tensors}
    state = {}
    for name in model.state_dict():
        key = _gguf_name(name)
        if key == "output.weight" and key not in stored:
            key = "token_embd.weight"
        tensor = torch.from_numpy(np.array(stored[key], dtype=np.float32))
        if heads := _rotated_heads(name, model.config):
            tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        state[name] = tensor
    return state


def gguf_package() -> Any:
    """Return the package gguf.

    Raises:
        UserError: it is not installed.
    """
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise UserError("--to gguf: expected the package gguf, found none; pip install 'linearize[gguf]'") from None
    return gguf


def _sizes(config: Any) -> dict[str, int | float]:
    """Return the numbers of a config by llama.cpp's names, without the architecture before them."""
    head_dim = config.head_dim
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.scale": float(config.attention_multiplier),
        "attention.sliding_window": config.sliding_window,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by llama.cpp's names; dimensions that RoPE rotates together become adjacent."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if heads := _rotated_heads(name, config):
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        yield _gguf_name(name), tensor
    yield from _rope_factors(model)


def _rope_factors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the divisors of rotary frequencies, if the teacher scales them.

    Raises:
        UserError: they depend on the length of the text, or scale attention.
    """
    rotary: Any = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    kind = model.config.rope_parameters["rope_type"]
    if kind == "default":
        return
    if kind not in {"linear", "llama3"}:
        raise UserError(f"rope_parameters: expected default, linear or llama3 RoPE for --to gguf, found {kind}")
    width = model.config.head_dim
    unscaled = model.config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)
    yield "rope_freqs.weight", (unscaled / rotary.inv_freq.double().cpu()).float()


def _gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}"


def _rotated_heads(name: str, config: Any) -> int:
    """Return how many heads of queries or keys a tensor has; 0 for all other tensors."""
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else 0


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, vocab_size: int, kinds: Any) -> None:
    """Add vocabulary, merges, special tokens and the chat template."""
    backend: Any = tokenizer.backend_tokenizer
    contents = json.loads(backend.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(contents))
    tokens, types = [f"[PAD{index}]" for index in range(vocab_size)], [int(kinds.UNUSED)] * vocab_size
    for token, index in contents["model"]["vocab"].items():
        tokens[index], types[index] = token, int(kinds.NORMAL)
    for added in contents["added_tokens"]:
        kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = contents["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name in ("bos", "eos", "pad", "unk"):
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    first = tokenizer("a").input_ids[:1]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer(contents: dict[str, Any]) -> str:
    """Return llama.cpp's name of the rules by which a tokenizer.json splits text.

    Raises:
        UserError: these rules have no known name, or this is not byte-pair encoding over bytes.
    """
    if contents["model"]["type"] != "BPE" or contents["model"].get("byte_fallback"):
        raise UserError(
            f"tokenizer: expected byte-pair encoding over bytes for --to gguf, found {contents['model']['type']}"
            f"{' with byte fallback' if contents['model'].get('byte_fallback') else ''}; {CONVERTER}"
        )
    pre: dict[str, Any] = contents.get("pre_tokenizer") or {"type": "none"}
    parts: list[dict[str, Any]] = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    fields = {"ByteLevel": "use_regex", "Digits": "individual_digits"}
    found = tuple(
        (x["type"], x["pattern"].get("Regex") if x["type"] == "Split" else x.get(fields.get(x["type"], ""), True))
        for x in parts
    )
    if found not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS.values())
        raise UserError(f"tokenizer: expected one that splits text as {known}, found {found!r:.200}; {CONVERTER}")
    return _PRE_TOKENIZERS[found]
