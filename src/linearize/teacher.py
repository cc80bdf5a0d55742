"""The shape of a teacher, read from its ``config.json`` alone: what resolving and planning need, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linearize.config_json import ConfigJson
from linearize.encoders import ENCODERS, EncoderSizes
from linearize.errors import UserError

# Where a model type keeps each number when it is not under the common name.
_GPT2_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT2_NAMES |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
_DISTILBERT_NAMES = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
_DISTILBERT_NAMES |= {"intermediate_size": "hidden_dim"}
# ALBERT has several layers with the same weights; what converts is the weights.
_ALBERT_NAMES = {"num_hidden_layers": "num_hidden_groups"}
SUPPORTED: dict[str, dict[str, str]] = {"llama": {}, "mistral": {}, "qwen3": {}, "gpt2": _GPT2_NAMES}
SUPPORTED |= {name: {} for name in ENCODERS} | {"distilbert": _DISTILBERT_NAMES, "albert": _ALBERT_NAMES}
# Where positions are embeddings, added to the tokens once; all others rotate queries and keys in every layer (RoPE).
_WITHOUT_ROPE = frozenset({"gpt2", *ENCODERS} - {"modernbert"})


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one attention layer; `hidden_size` and `max_positions` are the model's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_positions: int


@dataclass(frozen=True)
class TeacherShape:
    """Sizes of a decoder or an encoder: layers, heads, widths, and which layers already attend within a sliding window.

    Layers that share their weights (ALBERT) are one. A vision model has no vocabulary (0), and its `max_positions` are
    the patches and special tokens of an image of its own size.
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
    encoder: EncoderSizes | None = None

    @property
    def bidirectional(self) -> bool:
        """Whether every token sees those behind it too: an encoder."""
        return self.encoder is not None

    @property
    def passes(self) -> tuple[int, ...]:
        """How often the stream goes through each layer; once, but in ALBERT."""
        return (1,) * self.num_layers if self.encoder is None else self.encoder.passes

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

    @property
    def has_rope(self) -> bool:
        """Whether the model rotates queries and keys (RoPE); then they exist unrotated as well."""
        return self.model_type not in _WITHOUT_ROPE

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TeacherShape:
        """Read the shape from the contents of a ``config.json``.

        Raises:
            UserError: the architecture is not supported, or a size is missing.
        """
        model_type = str(config.get("model_type") or "").removeprefix("linearized_")
        if model_type not in SUPPORTED:
            raise UserError(
                f"model_type: expected one of {', '.join(SUPPORTED)}; found {model_type or 'nothing'!r}; "
                "this architecture is not supported yet"
            )
        found = ConfigJson(config, SUPPORTED[model_type])
        heads, hidden, layers = (
            found.size(field) for field in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        common = {
            "model_type": model_type,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": found.size("num_key_value_heads", heads),
            "head_dim": found.size("head_dim", hidden // heads),
            "hidden_size": hidden,
            "tied_embeddings": bool(config.get("tie_word_embeddings", model_type == "gpt2")),
        }
        if model_type not in ENCODERS:
            return cls(
                **common,
                intermediate_size=found.size("intermediate_size", 4 * hidden),
                vocab_size=found.size("vocab_size"),
                max_positions=found.size("max_position_embeddings", 2048),
                sliding_layers=_sliding_layers(config, layers),
            )
        if config.get("is_decoder"):
            raise UserError(f"config.json: is_decoder: expected false, found true; {model_type} converts as an encoder")
        encoder = ENCODERS[model_type](found)
        return cls(
            **common,
            intermediate_size=encoder.intermediate_size,
            vocab_size=encoder.vocab_size,
            max_positions=encoder.max_positions,
            sliding_layers=_local_layers(config, layers) if model_type == "modernbert" else (),
            encoder=encoder.sizes,
        )


def _sliding_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Indices of layers whose own attention is windowed; ``layer_types`` decides where the config has it."""
    if config.get("layer_types"):
        return tuple(i for i, kind in enumerate(config["layer_types"]) if kind == "sliding_attention")
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    return tuple(range(layers)) if windowed else ()


def _local_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Of ModernBERT, which attends globally in every n-th layer, beginning with the first."""
    if config.get("layer_types"):
        return _sliding_layers(config, layers)
    every = config.get("global_attn_every_n_layers", 3)
    return tuple(index for index in range(layers) if index % every)
