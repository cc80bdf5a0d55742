"""The shape of a teacher, read from its ``config.json`` alone: what resolving and planning need, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linearize.base import UserError
from linearize.hf.config_json import ConfigJson
from linearize.hf.config_refusals import refuse
from linearize.hf.decoders import DECODERS, Decoder, LayerSizes
from linearize.hf.encoders import ENCODERS
from linearize.hf.sizes import Sizes
from linearize.mixers.shape import LayerShape

# Where an encoder keeps each number when it is not under the common name.
_DISTILBERT_NAMES = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
_DISTILBERT_NAMES |= {"intermediate_size": "hidden_dim"}
# ALBERT has several layers with the same weights; what converts is the weights.
_ALBERT_NAMES = {"num_hidden_layers": "num_hidden_groups"}
_ENCODER_NAMES = {"distilbert": _DISTILBERT_NAMES, "albert": _ALBERT_NAMES}
SUPPORTED = (*DECODERS, *ENCODERS)


@dataclass(frozen=True)
class TeacherShape:
    """Sizes of a decoder or an encoder: layers, heads, widths, and which layers already attend within a sliding window.

    Layers that share their weights (ALBERT) are one. A vision model has no vocabulary (0), and its `max_positions` are
    the patches and special tokens of an image of its own size. `rotary_dims`: how many dimensions of a head each layer
    rotates (RoPE), 0 where positions are embeddings, or nothing. `bidirectional`: every token sees those behind it,
    too, which makes an encoder. `fused_qkv`: queries, keys and values come out of one matrix.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    sliding_layers: tuple[int, ...]
    rotary_dims: tuple[int, ...]
    bidirectional: bool
    fused_qkv: bool
    sizes: Sizes

    @property
    def passes(self) -> tuple[int, ...]:
        """How often the stream goes through each layer; once, but in ALBERT."""
        return self.sizes.passes

    def refuse_encoder(self, field: str, reason: str) -> None:
        """For what only a decoder can do.

        Raises:
            UserError: this is an encoder.
        """
        if self.bidirectional:
            raise UserError(f"{field}: expected a decoder, found the encoder {self.model_type!r}; {reason}")

    @property
    def layer(self) -> LayerShape:
        """What one attention layer, and the mixer that takes its place, needs to know."""
        return LayerShape(self.num_heads, self.num_kv_heads, self.head_dim, self.hidden_size, self.max_positions)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TeacherShape:
        """Read the shape from the contents of a ``config.json``.

        Raises:
            UserError: the architecture is not supported, or cannot be, or a size is missing.
        """
        model_type = str(config.get("model_type") or "").removeprefix("linearized_")
        refuse(config, model_type)
        if model_type in DECODERS:
            return cls._decoder(model_type, DECODERS[model_type], config)
        if model_type in ENCODERS:
            return cls._encoder(model_type, config)
        raise UserError(
            f"model_type: expected one of {', '.join(SUPPORTED)}; found {model_type or 'nothing'!r}; "
            "this architecture is not supported yet"
        )

    @classmethod
    def _decoder(cls, model_type: str, decoder: Decoder, config: dict[str, Any]) -> TeacherShape:
        found = ConfigJson(decoder.defaults | config, decoder.names)
        common = _common(model_type, found)
        layers, h, vocabulary = common["num_layers"], common["hidden_size"], found.size("vocab_size")
        inner, positions = found.size("intermediate_size", 4 * h), found.size("max_position_embeddings", 2048)
        layer = LayerSizes(h, inner, common["num_heads"], common["num_kv_heads"], common["head_dim"])
        weights = decoder.layers(found, layer, layers)
        width = decoder.embedding_size(found, h)
        learned = 0 if decoder.learned_positions is None else (positions + decoder.learned_positions) * h
        sizes = Sizes(
            passes=(1,) * layers,
            embeddings=vocabulary * width + learned,
            layers=tuple(one.stored for one in weights),
            used=tuple(one.used for one in weights),
            head=vocabulary * width,
            outside=decoder.norm * h + decoder.more(found, h),
        )
        return cls(
            **common,
            intermediate_size=inner,
            vocab_size=vocabulary,
            max_positions=positions,
            sliding_layers=_sliding_layers(found, decoder, layers, positions),
            rotary_dims=decoder.rotary_dims(found, layers, common["head_dim"]),
            bidirectional=False,
            fused_qkv=decoder.fused_qkv,
            sizes=sizes,
        )

    @classmethod
    def _encoder(cls, model_type: str, config: dict[str, Any]) -> TeacherShape:
        if config.get("is_decoder"):
            raise UserError(f"config.json: is_decoder: expected false, found true; {model_type} converts as an encoder")
        found = ConfigJson(config, _ENCODER_NAMES.get(model_type, {}))
        common = _common(model_type, found)
        encoder, modern = ENCODERS[model_type](found), model_type == "modernbert"
        return cls(
            **common,
            intermediate_size=encoder.intermediate_size,
            vocab_size=encoder.vocab_size,
            max_positions=encoder.max_positions,
            sliding_layers=_local_layers(config, common["num_layers"]) if modern else (),
            rotary_dims=(common["head_dim"] if modern else 0,) * common["num_layers"],
            bidirectional=True,
            fused_qkv=modern,
            sizes=encoder.sizes,
        )


def _common(model_type: str, found: ConfigJson) -> dict[str, Any]:
    heads, hidden, layers = (found.size(field) for field in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    return {
        "model_type": model_type,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": found.size("num_key_value_heads", heads),
        "head_dim": found.size("head_dim", hidden // heads),
        "hidden_size": hidden,
        "tied_embeddings": found.flag("tie_word_embeddings", False),
    }


def _sliding_layers(c: ConfigJson, decoder: Decoder, layers: int, positions: int) -> tuple[int, ...]:
    """Indices of layers whose own attention is windowed; ``layer_types`` decides where the config has it.

    A window over all positions that the model has hides nothing.
    """
    window = c.contents.get("sliding_window")
    if kinds := c.contents.get("layer_types"):
        slide = [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    else:
        slide = decoder.sliding(c, layers) if window and c.flag("use_sliding_window", True) else ()
    return () if window and window >= positions else tuple(slide)


def _local_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Of ModernBERT, which attends globally in every n-th layer, beginning with the first."""
    if kinds := config.get("layer_types"):
        return tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    every = config.get("global_attn_every_n_layers", 3)
    return tuple(index for index in range(layers) if index % every)
