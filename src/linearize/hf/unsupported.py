"""Refuse ways of running a model that do not support a carried state, before any work, with an alternative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linearize.base import UserError

CONTINUOUS_BATCHING = (
    "{found}: expected generate() with a padded batch, found continuous batching, which keeps keys and values in "
    "pages; a linearized layer has a state of constant size instead. Use generate() on a left-padded batch, and go on "
    "with conversations from their own states (linearize.save_state, linearize.fork_state)"
)


class Unsupported:
    """Mixin for the model classes that refuses to split a model or its cache over processes or pages."""

    _supports_context_parallel = False

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as in transformers; raise UserError if tensor parallelism is requested."""
        distributed = kwargs.get("distributed_config") or {}
        asked = dict(distributed if isinstance(distributed, dict) else vars(distributed))
        asked |= {name: kwargs[name] for name in ("tp_plan", "tp_size") if kwargs.get(name) is not None}
        if asked.get("tp_plan") or (asked.get("tp_size") or 1) > 1:
            raise UserError(
                "tensor parallelism: expected none, because no plan shards the mixers with their heads; found "
                f"tp_plan={asked.get('tp_plan')!r}, tp_size={asked.get('tp_size')!r}. Use device_map='auto' to spread "
                "the layers over devices, or one copy of the model per process"
            )
        return super().from_pretrained(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UserError: continuous batching needs a cache of pages, which states do not have."""
        raise UserError(CONTINUOUS_BATCHING.format(found="generation"))

    init_continuous_batching = generate_batch


def refuse_context_parallel() -> None:
    """Raise UserError within torch's `context_parallel`, which replaces softmax attention."""
    if torch.compiler.is_compiling():
        return
    module = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
    if module.startswith("torch.distributed"):
        raise UserError(
            "context parallelism: expected whole sequences, found ones sharded over processes; a linearized layer's "
            "state goes from the first token to the last and is not exchanged between processes. A long sequence takes "
            "linear memory: feed it whole, or in chunks (prefill_chunk_size), and spread rows over processes instead"
        )


def angles_change(config: Any) -> bool:
    """Return whether a model's rotary angles depend on the length of the text."""
    return bool(_limits(config))


def length_of_angles(config: Any, cache: Any, position_ids: Tensor | None, tokens: int) -> int | None:
    """Return the text length from which transformers computes the rotary angles of new tokens, one for all rows.

    Args:
        config: of the model.
        cache: None, or the state of the tokens before.
        position_ids: [B or 1, T], or None: they continue those of the cache.
        tokens: T.

    Returns:
        The length; None if angles do not depend on it, and in a compiled graph, which cannot read it.
    """
    if torch.compiler.is_compiling() or not angles_change(config):
        return None
    if position_ids is not None:
        return int(position_ids.max()) + 1
    return tokens + (0 if cache is None else int(cache.get_seq_length()))


def rotated_length(cache: Any) -> int:
    """Return the length of the text that set the rotary angles of the keys in a cache; 0 for an empty cache."""
    slots = int(cache.get_seq_length())
    lengths = (getattr(layer, "rotated", None) for layer in cache.layers)  # of linearized layers
    return max((length for length in lengths if length is not None), default=slots) if slots else 0


def refuse_other_angles(config: Any, cache: Any, length: int | None, tokens: int) -> None:
    """Check that new tokens have the rotary angles of the keys in a cache, which cannot be rotated again.

    Args:
        length: `length_of_angles` of the new tokens.

    Raises:
        UserError: they have other angles.
    """
    before = 0 if cache is None or length is None else rotated_length(cache)
    changed = _changed_angles(config, before, length) if before and length is not None else None
    if not changed or length is None:
        return
    (kind, limit), held = changed, length - tokens
    if before > max(held, limit):
        raise UserError(
            f"config.rope_parameters: expected a state whose keys have the angles of a text of {length} tokens, "
            f"because those of {kind!r} change beyond {limit} and keys in a state cannot be rotated again; found keys "
            f"with the angles of {before} tokens, of which {held} are left in these rows. Give all {length} tokens in "
            "one call with a new state"
        )
    raise UserError(
        f"config.rope_parameters: expected at most {limit} tokens if a state is continued, because the angles "
        f"of {kind!r} change beyond them and keys in a state cannot be rotated again; found {held} tokens in the "
        f"state and {tokens} more. Give all {length} tokens in one call with a new state, or let the answer end at "
        f"token {limit} (a smaller max_new_tokens); in Python, generate(..., use_cache=False) goes on"
        + ("; or choose a rope_type with fixed angles (linear, yarn)" if kind == "dynamic" else "")
    )


def refuse_candidates(config: Any, prompt: int, longest: int) -> None:
    """Check that rotary angles do not change during assisted generation: rejected candidates would change them too.

    Args:
        longest: largest number of tokens of prompt and answer.

    Raises:
        UserError: they may change.
    """
    if changed := _changed_angles(config, prompt, longest):
        kind, limit = changed
        raise UserError(
            f"assisted generation: expected at most {limit} tokens in all, because the angles of {kind!r} "
            f"(config.rope_parameters) change beyond them, found room for {longest}; set a smaller max_new_tokens, or "
            "generate without an assistant"
        )


def refuse_forgetting(input_ids: Tensor, position_ids: Tensor | None, cached: int) -> None:
    """Check that a model that drops its cache, to read all tokens again with other rotary angles, has all of them.

    Args:
        input_ids: [B, T], all tokens or those after the cached ones.
        position_ids: [B or 1, T or more] up to the last of these tokens, or None.
        cached: number of tokens in the cache.

    Raises:
        UserError: it has only the new ones.
    """
    tokens = input_ids.shape[1]
    if tokens <= cached or (position_ids is not None and tokens <= int(position_ids.max())):
        raise UserError(
            "input_ids: expected all tokens of the conversation, because this model reads them again when a text "
            f"exceeds the length that it was trained on (longrope); found {tokens} of them after a state of {cached}; "
            "give those before as well"
        )


def _limits(config: Any) -> list[tuple[str, int]]:
    """Return each rope type whose angles change with the length of the text, and the length up to which they do not.

    Beyond this length, angles of `longrope` change once for all tokens, and those of `dynamic` change with every
    further token. At max_position_embeddings itself, transformers may still use `dynamic` angles of an earlier text.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for part in [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]:
        if part.get("rope_type") == "longrope":
            limits.append(("longrope", part["original_max_position_embeddings"]))
        elif part.get("rope_type") == "dynamic":
            limits.append(("dynamic", config.max_position_embeddings - 1))
    return limits


def _changed_angles(config: Any, before: int, after: int) -> tuple[str, int] | None:
    """Return the rope type whose angles differ between texts of `before` and `after` tokens, and its limit, or None."""
    for kind, limit in _limits(config):
        beyond = before > limit, after > limit
        if any(beyond) if kind == "dynamic" else beyond[0] != beyond[1]:
            return kind, limit
    return None
