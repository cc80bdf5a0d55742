"""Decoders: what each calls otherwise in its ``config.json`` or leaves out there, and its weights besides attention's.

Letters: V vocabulary, h hidden size, I intermediate size, H query heads, G KV heads, D head dimension, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from linearize.hf.config_json import ConfigJson


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one attention layer and of the MLP behind it."""

    h: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def queries(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Layer:
    """Weights of one layer but for its attention matrices, and how many of them a token meets."""

    stored: int
    used: int


Layers = Callable[[ConfigJson, LayerSizes, int], Sequence[Layer]]
Sliding = Callable[[ConfigJson, int], Sequence[int]]


@dataclass(frozen=True)
class Decoder:
    """What is particular to one type of decoder.

    Attributes:
        layers: of so many layers, their weights but for the attention matrices.
        names: fields that it calls otherwise.
        defaults: what a missing field means, where that is not what it means elsewhere.
        sliding: layers that attend within a sliding window, where `layer_types` does not say.
        norm: weights of the last norm, in units of h.
        more: weights outside the layers besides embeddings, head and last norm.
        width: field with the width of the embeddings and of the head, where that may differ from h.
        learned_positions: rows of position embeddings beyond `max_position_embeddings`; None where it has none.
        rope: whether it rotates queries and keys (RoPE).
        partial_rope: whether it may rotate a part of the head dimensions only.
        fused_qkv: whether queries, keys and values come out of one matrix.
    """

    layers: Layers
    names: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    sliding: Sliding = lambda c, layers: range(layers)
    norm: int = 1
    more: Callable[[ConfigJson, int], int] = lambda c, h: 0
    width: str | None = None
    learned_positions: int | None = None
    rope: bool = True
    partial_rope: bool = False
    fused_qkv: bool = False

    def embedding_size(self, c: ConfigJson, h: int) -> int:
        return h if self.width is None else c.size(self.width, h)

    def rotary_dims(self, c: ConfigJson, layers: int, head_dim: int) -> tuple[int, ...]:
        """How many dimensions of a head each layer rotates; 0 where it rotates none."""
        if not self.rope:
            return (0,) * layers
        share = c.rope("partial_rotary_factor") if self.partial_rope else None
        dims = head_dim if share is None else int(head_dim * share)
        rotating = c.contents.get("no_rope_layers")  # 1 for layers that do rotate
        if rotating is None and (interval := c.contents.get("no_rope_layer_interval")):
            rotating = [(index + 1) % interval for index in range(layers)]
        return (dims,) * layers if rotating is None else tuple(dims if one else 0 for one in rotating)


# --- weights of layers ------------------------------------------------------------------------------------------------


def _attention_biases(c: ConfigJson, s: LayerSizes) -> int:
    """Of q, k, v and o, all or none."""
    return s.queries + 2 * s.keys + s.h if c.flag("attention_bias", False) else 0


def _gated(c: ConfigJson, s: LayerSizes) -> int:
    return 3 * s.h * s.inner + (2 * s.inner + s.h if c.flag("mlp_bias", False) else 0)


def _plain(s: LayerSizes) -> int:
    """Two matrices with biases."""
    return 2 * s.h * s.inner + s.inner + s.h


def _alike(count: Callable[[ConfigJson, LayerSizes], int]) -> Layers:
    """Layers that are all the same, of which a token meets every weight."""

    def layers(c: ConfigJson, s: LayerSizes, number: int) -> list[Layer]:
        weights = count(c, s)
        return [Layer(weights, weights)] * number

    return layers


def _llama(c: ConfigJson, s: LayerSizes) -> int:
    return _attention_biases(c, s) + _gated(c, s) + 2 * s.h


def _bare(c: ConfigJson, s: LayerSizes) -> int:
    """Without any bias."""
    return 3 * s.h * s.inner + 2 * s.h


def _qwen2(c: ConfigJson, s: LayerSizes) -> int:
    """Biases of q, k and v, always."""
    return _bare(c, s) + s.queries + 2 * s.keys


def _qwen3(c: ConfigJson, s: LayerSizes) -> int:
    """Norms of queries and keys, by head."""
    return _bare(c, s) + _attention_biases(c, s) + 2 * s.head_dim


def _gemma(c: ConfigJson, s: LayerSizes) -> int:
    return _bare(c, s) + _attention_biases(c, s)


def _gemma2(c: ConfigJson, s: LayerSizes) -> int:
    """Norms behind attention and MLP, too."""
    return _gemma(c, s) + 2 * s.h


def _gemma3(c: ConfigJson, s: LayerSizes) -> int:
    return _gemma2(c, s) + 2 * s.head_dim


def _olmo2(c: ConfigJson, s: LayerSizes) -> int:
    """Norms of all queries and of all keys at once."""
    return _gemma(c, s) + s.queries + s.keys


def _phi(c: ConfigJson, s: LayerSizes) -> int:
    """One layer norm; the norms of queries and keys are there if asked for."""
    norms = 2 * s.h + (4 * (s.h // s.num_heads) if c.flag("qk_layernorm", False) else 0)
    return s.queries + 2 * s.keys + s.h + _plain(s) + norms


def _gpt_neox(c: ConfigJson, s: LayerSizes) -> int:
    return (4 * s.h if c.flag("attention_bias", True) else 0) + _plain(s) + 4 * s.h


def _gpt2(c: ConfigJson, s: LayerSizes) -> int:
    return 4 * s.h + _plain(s) + 4 * s.h


def _opt(c: ConfigJson, s: LayerSizes) -> int:
    biases = 4 * s.h + s.inner + s.h if c.flag("enable_bias", True) else 0
    return biases + 2 * s.h * s.inner + (4 * s.h if c.flag("layer_norm_elementwise_affine", True) else 0)


def _experts(c: ConfigJson, s: LayerSizes, number: int, inner: int) -> Layer:
    """Gated MLPs and the router that chooses among them."""
    chosen, expert = c.size("num_experts_per_tok"), 3 * s.h * inner
    return Layer(number * (expert + s.h), chosen * expert + number * s.h)


def _mixtral(c: ConfigJson, s: LayerSizes, layers: int) -> list[Layer]:
    experts = _experts(c, s, c.size("num_local_experts"), s.inner)
    return [Layer(experts.stored + 2 * s.h, experts.used + 2 * s.h)] * layers


def _qwen3_moe(c: ConfigJson, s: LayerSizes, layers: int) -> list[Layer]:
    """Experts in every `decoder_sparse_step`-th layer, but not in those of `mlp_only_layers`."""
    step, dense = c.size("decoder_sparse_step", 1), c.contents.get("mlp_only_layers") or ()
    number = c.size("num_local_experts", c.size("num_experts"))  # called so as of late
    experts, mlp = _experts(c, s, number, c.size("moe_intermediate_size")), 3 * s.h * s.inner
    others = _qwen3(c, s) - mlp
    sparse = [index not in dense and (index + 1) % step == 0 for index in range(layers)]
    kinds = {True: Layer(experts.stored + others, experts.used + others), False: Layer(mlp + others, mlp + others)}
    return [kinds[one] for one in sparse]


# --- which layers slide -----------------------------------------------------------------------------------------------


def _from_the_top(c: ConfigJson, layers: int) -> range:
    """Qwen's: all but the first ones."""
    return range(c.contents.get("max_window_layers", 28), layers)


def _without_rope(c: ConfigJson, layers: int) -> list[int]:
    """SmolLM3's: the layers that do not rotate."""
    dims = DECODERS["smollm3"].rotary_dims(c, layers, 1)
    return [index for index in range(layers) if not dims[index]]


def _but_every(default: int) -> Sliding:
    def sliding(c: ConfigJson, layers: int) -> list[int]:
        pattern = c.contents.get("sliding_window_pattern") or default
        return [index for index in range(layers) if (index + 1) % pattern]

    return sliding


# --- outside the layers -----------------------------------------------------------------------------------------------


def _opt_projections(c: ConfigJson, h: int) -> int:
    """Between the width of the embeddings and that of the layers, where they differ; and the last norm, if there."""
    width = c.size("word_embed_proj_dim", h)
    has_norm = c.flag("do_layer_norm_before", True) and not c.flag("_remove_final_layer_norm", False)
    norm = 2 * h if has_norm and c.flag("layer_norm_elementwise_affine", True) else 0
    return norm + (2 * width * h if width != h else 0)


_GPT2_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT2_NAMES |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
_TIED = {"tie_word_embeddings": True}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_position_embeddings": 32768}
_QWEN3_MOE = _QWEN | {"num_key_value_heads": 4, "moe_intermediate_size": 768}
_QWEN3_MOE |= {"num_experts": 128, "num_experts_per_tok": 8}
_GEMMA = _TIED | {"head_dim": 256, "max_position_embeddings": 8192}
_GEMMA2 = _GEMMA | {"num_key_value_heads": 4, "sliding_window": 4096}
_SMOLLM3 = _TIED | {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "use_sliding_window": False}

DECODERS: dict[str, Decoder] = {
    "llama": Decoder(_alike(_llama)),
    "mistral": Decoder(_alike(_bare), defaults=_MISTRAL | {"sliding_window": 4096}),
    "mixtral": Decoder(_mixtral, defaults=_MISTRAL | _EXPERTS),
    "qwen2": Decoder(_alike(_qwen2), defaults=_QWEN, sliding=_from_the_top),
    "qwen3": Decoder(_alike(_qwen3), defaults=_QWEN | {"head_dim": 128}, sliding=_from_the_top),
    "qwen3_moe": Decoder(_qwen3_moe, defaults=_QWEN3_MOE),
    "gemma": Decoder(_alike(_gemma), defaults=_GEMMA),
    "gemma2": Decoder(_alike(_gemma2), defaults=_GEMMA2, sliding=_but_every(2)),
    "gemma3_text": Decoder(
        _alike(_gemma3), defaults=_GEMMA2 | {"max_position_embeddings": 131072}, sliding=_but_every(6)
    ),
    "phi": Decoder(
        _alike(_phi),
        defaults={"partial_rotary_factor": 0.5},
        norm=2,
        more=lambda c, h: c.size("vocab_size"),  # its head has a bias
        partial_rope=True,
    ),
    "phi3": Decoder(_alike(_bare), partial_rope=True, fused_qkv=True),
    "gpt_neox": Decoder(
        _alike(_gpt_neox),
        names={"partial_rotary_factor": "rotary_pct"},
        defaults={"rotary_pct": 0.25},
        norm=2,
        partial_rope=True,
        fused_qkv=True,
    ),
    "gpt2": Decoder(
        _alike(_gpt2),
        names=_GPT2_NAMES,
        defaults=_TIED,
        norm=2,
        learned_positions=0,
        rope=False,
        fused_qkv=True,
    ),
    "opt": Decoder(
        _alike(_opt),
        names={"intermediate_size": "ffn_dim"},
        defaults=_TIED,
        norm=0,
        more=_opt_projections,
        width="word_embed_proj_dim",
        learned_positions=2,
        rope=False,
    ),
    "olmo2": Decoder(_alike(_olmo2)),
    "smollm3": Decoder(_alike(_llama), defaults=_SMOLLM3, sliding=_without_rope),
    "granite": Decoder(_alike(_llama)),
}
