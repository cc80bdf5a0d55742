"""Encoders: where each keeps its sizes, and how many weights it has besides the matrices of attention.

Counted is the base model, with its pooler where it has one; the head of a task comes on top. Letters: V vocabulary, E
width of the embeddings, h hidden size, I intermediate size, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from linearize.base import UserError
from linearize.hf.config_json import ConfigJson
from linearize.hf.sizes import Sizes


@dataclass(frozen=True)
class Encoder:
    """Its `Sizes`, and what a decoder has under a common name; a vision model has no vocabulary (0)."""

    vocab_size: int
    max_positions: int
    intermediate_size: int
    sizes: Sizes


def _sizes(passes: tuple[int, ...], embeddings: int, layer: int, outside: int) -> Sizes:
    """Of layers that are all alike, without the head of a task."""
    layers = (layer,) * len(passes)
    return Sizes(passes, embeddings, layers, layers, head=0, outside=outside)


# --- text -------------------------------------------------------------------------------------------------------------


def _bert_layer(h: int, inner: int) -> int:
    """Biases of q, k, v, o; two layer norms; an MLP of two matrices, with biases."""
    return 4 * h + 4 * h + 2 * h * inner + inner + h


def _bert(c: ConfigJson, unused_positions: int = 0) -> Encoder:
    h, inner, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("num_hidden_layers")
    vocabulary, positions = c.size("vocab_size"), c.size("max_position_embeddings", 512)
    embeddings = (vocabulary + positions + c.size("type_vocab_size", 2)) * h
    sizes = _sizes((1,) * layers, embeddings, _bert_layer(h, inner), 2 * h + h * h + h)
    return Encoder(vocabulary, positions - unused_positions, inner, sizes)


def _roberta(c: ConfigJson) -> Encoder:
    """Positions count from behind the padding token's id: those up to it are never used by a token."""
    padding = c.contents.get("pad_token_id")
    return _bert(c, unused_positions=(1 if padding is None else padding) + 1)


def _distilbert(c: ConfigJson) -> Encoder:
    h, inner, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("num_hidden_layers")
    vocabulary, positions = c.size("vocab_size"), c.size("max_position_embeddings", 512)
    sizes = _sizes((1,) * layers, (vocabulary + positions) * h, _bert_layer(h, inner), 2 * h)
    return Encoder(vocabulary, positions, inner, sizes)


def _albert(c: ConfigJson) -> Encoder:
    """Its `num_hidden_layers` go through `num_hidden_groups` sets of weights, each many times in a row."""
    if (inner_layers := c.size("inner_group_num", 1)) != 1:
        raise UserError(f"config.json: inner_group_num: expected 1, found {inner_layers}; this is not supported yet")
    groups, depth = c.size("num_hidden_layers"), c.contents.get("num_hidden_layers")  # the first: what it calls groups
    if not isinstance(depth, int) or depth < groups:
        raise UserError(f"config.json: num_hidden_layers: expected {groups} (num_hidden_groups) or more, found {depth}")
    used = [int(index / (depth / groups)) for index in range(depth)]  # as transformers chooses the group
    h, inner, width = c.size("hidden_size"), c.size("intermediate_size"), c.size("embedding_size", 128)
    vocabulary, positions = c.size("vocab_size"), c.size("max_position_embeddings", 512)
    embeddings = (vocabulary + positions + c.size("type_vocab_size", 2)) * width
    outside = 2 * width + (width * h + h) + (h * h + h)
    sizes = _sizes(tuple(map(used.count, range(groups))), embeddings, _bert_layer(h, inner), outside)
    return Encoder(vocabulary, positions, inner, sizes)


def _modernbert(c: ConfigJson) -> Encoder:
    """Gated MLPs, and norms before them and before attention; but the first layer has none before attention."""
    h, inner, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("num_hidden_layers")
    norm = h * (2 if c.flag("norm_bias", False) else 1)
    attention = 4 * h if c.flag("attention_bias", False) else 0
    mlp = 3 * h * inner + (2 * inner + h if c.flag("mlp_bias", False) else 0)
    vocabulary = c.size("vocab_size")
    # Outside: the norms of the embeddings and of the end, less the one that the first layer lacks.
    sizes = _sizes((1,) * layers, vocabulary * h, attention + mlp + 2 * norm, 2 * norm - norm)
    return Encoder(vocabulary, c.size("max_position_embeddings", 8192), inner, sizes)


# --- vision -----------------------------------------------------------------------------------------------------------


def _patches(c: ConfigJson) -> int:
    (height, width), (patch_height, patch_width) = c.sides("image_size"), c.sides("patch_size")
    return (height // patch_height) * (width // patch_width)


def _patch_projection(c: ConfigJson, h: int) -> int:
    patch_height, patch_width = c.sides("patch_size")
    return c.size("num_channels", 3) * patch_height * patch_width * h + h


def _vision_attention(c: ConfigJson, h: int) -> int:
    """Biases of q, k, v, where there are any, and of o; and the two norms of a layer."""
    heads = c.size("num_attention_heads")
    return (3 * heads * c.size("head_dim", h // heads) if c.flag("qkv_bias", True) else 0) + h + 4 * h


def _vit(c: ConfigJson, special: int = 1) -> Encoder:
    """`special`: tokens before the patches."""
    h, inner, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("num_hidden_layers")
    positions, pooled = _patches(c) + special, c.size("pooler_output_size", h)
    layer = _vision_attention(c, h) + 2 * h * inner + inner + h
    outside = _patch_projection(c, h) + 2 * h + h * pooled + pooled
    return Encoder(0, positions, inner, _sizes((1,) * layers, (special + positions) * h, layer, outside))


def _deit(c: ConfigJson) -> Encoder:
    return _vit(c, special=2)


def _dinov2(c: ConfigJson) -> Encoder:
    """Layer scales, and an MLP that may be gated, with two thirds of the width in multiples of 8; no pooler."""
    h, layers = c.size("hidden_size"), c.size("num_hidden_layers")
    inner, positions = int(h * c.contents.get("mlp_ratio", 4)), _patches(c) + 1
    if c.flag("use_swiglu_ffn", False):
        inner = (int(inner * 2 / 3) + 7) // 8 * 8
        mlp = 3 * h * inner + 2 * inner + h
    else:
        mlp = 2 * h * inner + inner + h
    special = 2 if c.flag("use_mask_token", True) else 1
    layer = _vision_attention(c, h) + mlp + 2 * h
    sizes = _sizes((1,) * layers, (special + positions) * h, layer, _patch_projection(c, h) + 2 * h)
    return Encoder(0, positions, inner, sizes)


ENCODERS: dict[str, Callable[[ConfigJson], Encoder]] = {
    "bert": _bert,
    "roberta": _roberta,
    "distilbert": _distilbert,
    "albert": _albert,
    "modernbert": _modernbert,
    "vit": _vit,
    "deit": _deit,
    "dinov2": _dinov2,
}
