"""The shape of a teacher, read from its ``config.json`` alone: what resolving and planning need, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linearize.errors import UserError

# Where a model type keeps each number when it is not under the common name.
_GPT2_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT2_NAMES |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
SUPPORTED: dict[str, dict[str, str]] = {"llama": {}, "mistral": {}, "qwen3": {}, "gpt2": _GPT2_NAMES}
# Where positions are embeddings, added to the tokens once; all others rotate queries and keys in every layer (RoPE).
_WITHOUT_ROPE = frozenset({"gpt2"})


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
    """Sizes of a decoder: layers, heads, widths, and which layers already attend within a sliding window."""

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
        names = SUPPORTED[model_type]

        def size(field: str, default: int | None = None) -> int:
            value = config.get(names.get(field, field))
            value = default if value is None else value
            if not isinstance(value, int) or value <= 0:
                raise UserError(f"config.json: {names.get(field, field)}: expected a positive integer, found {value!r}")
            return value

        heads, hidden, layers = size("num_attention_heads"), size("hidden_size"), size("num_hidden_layers")
        return cls(
            model_type=model_type,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // heads),
            hidden_size=hidden,
            intermediate_size=size("intermediate_size", 4 * hidden),
            vocab_size=size("vocab_size"),
            max_positions=size("max_position_embeddings", 2048),
            tied_embeddings=bool(config.get("tie_word_embeddings", model_type == "gpt2")),
            sliding_layers=_sliding_layers(config, layers),
        )


def _sliding_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Indices of layers whose own attention is windowed; ``layer_types`` decides where the config has it."""
    if config.get("layer_types"):
        return tuple(i for i, kind in enumerate(config["layer_types"]) if kind == "sliding_attention")
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    return tuple(range(layers)) if windowed else ()
