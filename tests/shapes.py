"""Shapes of teachers, from the numbers alone."""

from __future__ import annotations

from transformers import CONFIG_MAPPING

from linearize.hf.teacher import TeacherShape


def make_shape(
    model_type: str,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    inner: int,
    vocabulary: int,
    positions: int,
    tied: bool,
) -> TeacherShape:
    """Of a decoder without sliding layers."""
    fields = dict(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    fields |= dict(hidden_size=hidden, intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=tied)
    fields |= dict(max_position_embeddings=positions, sliding_window=None, pad_token_id=None)
    names = CONFIG_MAPPING[model_type].attribute_map | {
        "intermediate_size": "n_inner" if model_type == "gpt2" else "intermediate_size"
    }
    return TeacherShape.from_config({names.get(k, k): v for k, v in fields.items()} | {"model_type": model_type})
