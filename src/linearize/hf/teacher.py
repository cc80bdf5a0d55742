"""Read the shape of a teacher from its ``config.json`` alone, as far as recipes need it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from linearize.base import UserError
from linearize.configs.shape import LayerShape
from linearize.hf.architectures import ARCHITECTURES
from linearize.hf.config_json import blaming_fields, positive, read_contents
from linearize.hf.config_refusals import refuse

# Without these fields, transformers would use the sizes of its default model.
_STATED = ("num_hidden_layers", "num_attention_heads", "hidden_size")
# Special tokens of a vision model, besides the patches of its image.
_SPECIAL_TOKENS = {"vit": 1, "deit": 2, "dinov2": 1}


@dataclass(frozen=True)
class TeacherShape:
    """Sizes of a decoder or an encoder.

    Attributes:
        vocab_size: 0 for vision models.
        max_positions: for vision models, the patches and special tokens of an image of the model's own size.
        sliding_layers: layers whose own attention has a sliding window.
        passes: how often the residual stream goes through each layer; layers with shared weights (ALBERT) are one.
        bidirectional: whether tokens see later tokens, as in encoders.
        contents: of the config.json, from which `MetaModel` builds the model.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    sliding_layers: tuple[int, ...]
    passes: tuple[int, ...]
    bidirectional: bool
    contents: dict[str, Any] = field(repr=False, compare=False)

    def refuse_encoder(self, field: str, reason: str) -> None:
        """Raise UserError if this is an encoder, with the `field` and the `reason` in the message."""
        if self.bidirectional:
            raise UserError(f"{field}: expected a decoder, found the encoder {self.model_type!r}; {reason}")

    @property
    def layer(self) -> LayerShape:
        """Return the sizes of one attention layer and of the mixer that takes its place."""
        return LayerShape(self.num_heads, self.num_kv_heads, self.head_dim, self.hidden_size, self.max_positions)

    @classmethod
    def from_config(cls, contents: dict[str, Any]) -> TeacherShape:
        """Read the shape from the contents of a ``config.json``, of a softmax model or a linearized one.

        Raises:
            UserError: the architecture is not supported, or a field is invalid.
        """
        model_type = str(contents.get("model_type") or "").removeprefix("linearized_")
        supported = model_type in ARCHITECTURES
        refuse(contents, model_type, {x.name for x in fields(CONFIG_MAPPING[model_type])} if supported else None)
        if not supported:
            raise UserError(
                f"model_type: expected one of {', '.join(ARCHITECTURES)}; found {model_type or 'nothing'!r}; "
                "this architecture is not supported yet"
            )
        if ARCHITECTURES[model_type].bidirectional and contents.get("is_decoder"):
            raise UserError(f"config.json: is_decoder: expected false, found true; {model_type} converts as an encoder")
        if not ARCHITECTURES[model_type].bidirectional and not contents.get("is_causal", True):
            raise UserError(f"config.json: is_causal: expected true, found false; {model_type} converts as a decoder")
        contents = contents | {"model_type": model_type}
        names = CONFIG_MAPPING[model_type].attribute_map
        for name in _STATED:
            positive(names.get(name, name), contents.get(names.get(name, name), contents.get(name)))
        return blaming_fields(contents, cls._read)

    @classmethod
    def _read(cls, contents: dict[str, Any]) -> TeacherShape:
        config = read_contents(contents)
        model_type, bidirectional = contents["model_type"], ARCHITECTURES[contents["model_type"]].bidirectional
        size = partial(_size, config)
        heads, hidden, passes = size("num_attention_heads"), size("hidden_size"), _passes(config)
        kv_heads = size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UserError(f"config.json: num_key_value_heads: expected a divisor of {heads} heads, found {kv_heads}")
        rotated = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1)
        if not 0 < rotated <= 1:
            raise UserError(f"config.json: partial_rotary_factor: expected a number from 0 to 1, found {rotated}")
        positions = _patches(config) + _SPECIAL_TOKENS[model_type] if model_type in _SPECIAL_TOKENS else 0
        # No token uses positions up to the padding token's id in RoBERTa.
        unused = 1 + (config.pad_token_id or 0) if model_type == "roberta" else 0
        return cls(
            model_type=model_type,
            num_layers=len(passes),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size("head_dim", hidden // heads),
            hidden_size=hidden,
            vocab_size=0 if positions else size("vocab_size"),
            max_positions=positions or size("max_position_embeddings") - unused,
            sliding_layers=_sliding_layers(config, len(passes)),
            passes=passes,
            bidirectional=bidirectional,
            contents=contents,
        )


def _size(config: PreTrainedConfig, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    return positive(config.attribute_map.get(name, name), default if value is None else value)


def _passes(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return how often the residual stream goes through each layer: once, except in ALBERT's groups."""
    depth, groups = config.num_hidden_layers, getattr(config, "num_hidden_groups", config.num_hidden_layers)
    if depth < positive("num_hidden_groups", groups):
        raise UserError(f"config.json: num_hidden_layers: expected {groups} (num_hidden_groups) or more, found {depth}")
    used = [int(index / (depth / groups)) for index in range(depth)]
    return tuple(map(used.count, range(groups)))


def _patches(config: PreTrainedConfig) -> int:
    (height, width), (patch_height, patch_width) = _sides(config, "image_size"), _sides(config, "patch_size")
    return positive("image_size", (height // patch_height) * (width // patch_width))


def _sides(config: PreTrainedConfig, field: str) -> tuple[int, int]:
    """Return height and width of an image or a patch; the field has two positive integers, or one for a square."""
    value = getattr(config, field)
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UserError(f"config.json: {field}: expected a positive integer or two, found {value!r}")
    return sides[0], sides[1]


def _sliding_layers(config: PreTrainedConfig, layers: int) -> tuple[int, ...]:
    """Return the layers whose own attention has a sliding window, by the fields that transformers' code reads.

    A window over all of the model's positions does not count.
    """
    architecture, window = ARCHITECTURES[config.model_type], getattr(config, "sliding_window", None)
    if not architecture.slides or window is None or window >= config.max_position_embeddings:
        return ()
    kinds = getattr(config, "layer_types", None)
    if kinds is None or not architecture.slides_by_layer:
        return tuple(range(layers))
    return tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")


def break_even_tokens(state_bytes: int, growth_teacher: int, growth_student: int) -> int | None:
    """Return the least number of tokens at which a student takes less memory than its teacher; None: never.

    Args:
        state_bytes: the student's bytes before the first token, less the teacher's.
        growth_teacher, growth_student: bytes per further token.
    """
    saved = growth_teacher - growth_student
    return max(state_bytes // saved + 1, 0) if saved > 0 else None
