"""Refuse models that cannot be linearized, with the reason, by their ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from linearize.base import UserError

_OWN_ATTENTION = "its attention is code of its own, which leaves no place for another function of q, k and v"
_ALIBI = f"its positions are biases of the attention scores (ALiBi), and {_OWN_ATTENTION}"
_LATENT = "its keys and values are expanded from one latent vector per token (MLA), which is all that its cache keeps"
_SINKS = "its softmax has a learned sink in every head, for which linear attention has no place"
_LINEAR = "its layers are linear or recurrent already, with no softmax attention to learn from"
_HYBRID = "some of its layers are linear or recurrent already, and such hybrids are not supported"
_ENCODER = "its tokens attend to later tokens, although its architecture is a decoder's"
_CROSS_ATTENTION = "layers that attend to another model are not supported"
_IMAGES = "it is more than a language model"
_TEXT_ALONE = "save its language model by itself and give that folder"


def _any_of(*names: str) -> Callable[[Any], Any]:
    return lambda value: value if value in names else None


def _anything(value: Any) -> Any:
    return value or None


def _not_one(value: Any) -> Any:
    return None if value in (None, 1) else value


def _other_layers(kinds: Any) -> str | None:
    others = {str(kind) for kind in kinds} if isinstance(kinds, list | tuple) else set()
    return ", ".join(sorted(others - {"full_attention", "sliding_attention"})) or None


def _model_type(config: Any) -> Any:
    return config.get("model_type", "a model") if isinstance(config, dict) else None


@dataclass(frozen=True)
class Refusal:
    """A config field that rules conversion out, and why.

    Attributes:
        found: maps the field's value to the part that rules conversion out, or to None.
        everywhere: transformers reads the field for all models, not only for those whose config class has it.
    """

    field: str
    found: Callable[[Any], Any]
    expected: str
    reason: str
    advice: str = "choose another model"
    everywhere: bool = False


_OTHER = "a model with softmax attention"
REFUSALS = (
    Refusal("model_type", _any_of("bloom", "mpt"), _OTHER, _ALIBI),
    Refusal("model_type", _any_of("falcon"), _OTHER, _OWN_ATTENTION),
    Refusal("model_type", _any_of("deepseek_v2", "deepseek_v3"), _OTHER, _LATENT),
    Refusal("model_type", _any_of("gpt_oss"), _OTHER, _SINKS),
    Refusal("model_type", _any_of("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _OTHER, _LINEAR),
    Refusal("model_type", _any_of("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2"), _OTHER, _HYBRID),
    Refusal("model_type", _any_of("minimax", "nemotron_h", "qwen3_next", "recurrent_gemma"), _OTHER, _HYBRID),
    Refusal("model_type", _any_of("kimi_linear", "olmo_hybrid", "zamba", "zamba2"), _OTHER, _HYBRID),
    Refusal("kv_lora_rank", _anything, "none", _LATENT),
    Refusal("layer_types", _other_layers, "full_attention and sliding_attention", _HYBRID, everywhere=True),
    Refusal("alibi", _anything, "false", _ALIBI),
    Refusal("text_config", _model_type, "none", _IMAGES, _TEXT_ALONE, everywhere=True),
    Refusal("use_bidirectional_attention", _anything, "false", _ENCODER),
    Refusal("inner_group_num", _not_one, "1", "several layers in a group of shared weights are not supported"),
    Refusal("add_cross_attention", _anything, "false", _CROSS_ATTENTION, "give a decoder alone"),
)


def refuse(config: dict[str, Any], model_type: str, known: Collection[str] | None) -> None:
    """Check that nothing in a ``config.json`` rules conversion out.

    Args:
        config: contents of the file.
        model_type: of the softmax model.
        known: fields of its config class: other fields have no effect; None: all fields count.

    Raises:
        UserError: a field does; the message names it and says why.
    """
    for refusal in REFUSALS:
        if known is not None and refusal.field not in known and not refusal.everywhere:
            continue
        found = refusal.found(model_type if refusal.field == "model_type" else config.get(refusal.field))
        if found is not None:
            raise UserError(
                f"config.json: {refusal.field}: expected {refusal.expected}, found {found!r}: {refusal.reason}; "
                f"{refusal.advice}"
            )
