"""Configs of tiny decoders, each with what is particular to its architecture; `models` makes teachers of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_TOKENS = dict(vocab_size=60, bos_token_id=None, eos_token_id=None, pad_token_id=0)
_SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
_PLAIN = _TOKENS | _SIZES | dict(intermediate_size=48)
_ROPE = _PLAIN | dict(num_key_value_heads=2)
# It multiplies embeddings by the root of its width, rounded to the dtype it is made in.
_GEMMA = _ROPE | dict(hidden_size=16, head_dim=16)
# The second layer slides.
_SLIDING = dict(sliding_window=6, layer_types=["full_attention", "sliding_attention"])
# Of the layers that do not rotate, one slides.
_NO_ROPE = dict(num_hidden_layers=3, no_rope_layers=[1, 0, 0])
_NO_ROPE |= dict(layer_types=["full_attention", "full_attention", "sliding_attention"])
# The other implementation of experts knows no fp64.
_EXPERTS = dict(num_experts_per_tok=2, experts_implementation="eager")
_GRANITE = dict(attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=2.0)
_TRAINED = dict(rope_theta=1e4, original_max_position_embeddings=16)
_LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=3.0)
_LLAMA3 = _TRAINED | dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
_YARN = _TRAINED | dict(rope_type="yarn", factor=4.0)
_DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=3.0)
_LONG = _TRAINED | dict(rope_type="longrope", factor=4.0, short_factor=[1, 2], long_factor=[3, 9])
_GEMMA3_ROPE = {
    "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    "sliding_attention": dict(rope_type="default", rope_theta=1e4),
}


def _scaled(rope: dict[str, Any]) -> dict[str, Any]:
    """A model that was trained on 16 positions."""
    return _ROPE | dict(rope_parameters=rope, max_position_embeddings=64, original_max_position_embeddings=16)


# By a name, the model type and the fields of the config.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", _ROPE | _EXPERTS | dict(num_local_experts=4, sliding_window=None)),
    "qwen2": ("qwen2", _ROPE | _SLIDING | dict(use_sliding_window=True, tie_word_embeddings=True)),
    "qwen3_moe": (
        "qwen3_moe",
        _ROPE | _EXPERTS | dict(head_dim=8, num_experts=4, moe_intermediate_size=24, mlp_only_layers=[1]),
    ),
    "gemma": ("gemma", _GEMMA | dict(num_key_value_heads=1)),
    "gemma2": ("gemma2", _GEMMA | _SLIDING | dict(query_pre_attn_scalar=3, attn_logit_softcapping=4.0)),
    "gemma3_text": (
        "gemma3_text",
        _GEMMA | _SLIDING | dict(query_pre_attn_scalar=5, rope_parameters=_GEMMA3_ROPE),
    ),
    "phi": ("phi", _ROPE | dict(partial_rotary_factor=0.5, qk_layernorm=True)),
    "phi3": ("phi3", _ROPE | dict(partial_rotary_factor=0.5, sliding_window=None)),
    "gpt_neox": ("gpt_neox", _PLAIN | dict(rotary_pct=0.25)),
    "opt": ("opt", _TOKENS | _SIZES | dict(ffn_dim=48, word_embed_proj_dim=16, dropout=0.0)),
    "olmo2": ("olmo2", _ROPE | dict(attention_bias=True)),
    "smollm3": ("smollm3", _ROPE | _NO_ROPE | dict(use_sliding_window=True, sliding_window=6)),
    "granite": ("granite", _ROPE | _GRANITE | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama-linear": ("llama", _scaled(_LINEAR)),
    "llama-llama3": ("llama", _scaled(_LLAMA3)),
    "llama-yarn": ("llama", _scaled(_YARN)),
    "llama-dynamic": ("llama", _scaled(_DYNAMIC)),
    "phi3-longrope": ("phi3", _scaled(_LONG | dict(partial_rotary_factor=0.5))),
}
# One of each model type.
ARCHITECTURES = tuple(name for name, (model_type, _) in DECODERS.items() if name == model_type)
EXACT = "fp64"


def exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention with soft-capped scores, as Gemma 2's own, which takes its softmax in fp32."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    assert scaling is not None
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(EXACT, exact_attention)
AttentionMaskInterface.register(EXACT, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
