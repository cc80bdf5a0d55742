"""GGUF files of tiny models, as llama.cpp's converter writes them; needs the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.byte_tokenizer import SPECIAL, byte_tokenizer

MERGED = ("QQ", "ZZ")  # a GGUF file cannot contain an empty list of merges, and transformers 5.17 not read one of one
VOCABULARY = 256 + len(SPECIAL) + len(MERGED)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    *,
    quantization: str = "F32",
    tensors: dict[str, np.ndarray] | None = None,
    **fields: Any,
) -> Path:
    """Write a Llama-like model with the vocabulary of `byte_tokenizer`.

    Args:
        quantization: the type of the matrices, of `gguf.GGMLQuantizationType`; vectors stay in fp32.
        tensors: more of them, as they are.
        fields: more metadata of the architecture; two underscores in a name stand for a dot.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in fields.items():
        add = {str: writer.add_string, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{name.replace('__', '.')}", value)
    tokens = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(token for token, _ in tokens), *MERGED])
    writer.add_token_types([*(3 if token in SPECIAL else 1 for token, _ in tokens), *(1 for _ in MERGED)])
    writer.add_token_merges([" ".join(token) for token in MERGED])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    quantized = gguf.GGMLQuantizationType[quantization]
    for name, array in _stored(model, architecture).items():
        data = gguf.quantize(array, quantized if array.ndim == 2 else gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, data, raw_dtype=quantized if array.ndim == 2 else gguf.GGMLQuantizationType.F32)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """Return the weights by their names in the file; of llama, q and k in the order of dimensions of llama.cpp."""
    import gguf

    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    stored: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        around, _, kind = name.rpartition(".")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(around.split(".")[-1])
        array = weight.float().numpy()
        if architecture == "llama" and heads is not None:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        stored[f"{names.get_name(around)}.{kind}"] = np.ascontiguousarray(array)
    return stored


def widened(model: PreTrainedModel, quantization: str) -> PreTrainedModel:
    """Quantize the model's matrices and widen them again, in place, in the order that files have."""
    import gguf

    kind = gguf.GGMLQuantizationType[quantization]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                array = gguf.dequantize(gguf.quantize(parameter.float().numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(np.array(array)))
    return model
