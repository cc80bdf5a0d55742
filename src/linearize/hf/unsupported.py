"""Ways to run a model that a carried state does not survive: they raise before any work, and say what to do instead."""

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
    """Mixed into the model classes: refuses what would split a model or its cache over processes or pages."""

    _supports_context_parallel = False

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, in one process per model.

        Raises:
            UserError: tensor parallelism was asked for.
        """
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
        """There are no pages.

        Raises:
            UserError: always.
        """
        raise UserError(CONTINUOUS_BATCHING.format(found="generation"))

    init_continuous_batching = generate_batch


def refuse_paged_cache(kwargs: dict[str, Any]) -> None:
    """See that a call of an attention layer does not come from continuous batching.

    Raises:
        UserError: it does: its layers are handed a `cache` instead of `past_key_values`.
    """
    if kwargs.get("cache") is not None:
        raise UserError(CONTINUOUS_BATCHING.format(found=f"cache={type(kwargs['cache']).__name__}"))


def refuse_context_parallel() -> None:
    """See that a forward is not within torch's `context_parallel`, which exchanges softmax attention while it lasts.

    Raises:
        UserError: it is.
    """
    if torch.compiler.is_compiling():
        return
    module = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
    if module.startswith("torch.distributed"):
        raise UserError(
            "context parallelism: expected whole sequences, found ones sharded over processes; a linearized layer's "
            "state goes from the first token to the last and is not exchanged between processes. A long sequence takes "
            "linear memory: feed it whole, or in chunks (prefill_chunk_size), and spread rows over processes instead"
        )


def refuse_other_angles(config: Any, cache: Any, position_ids: Tensor | None, tokens: int) -> None:
    """See that rotary angles are the same for what a cache holds and for what follows.

    The angles of `longrope` change behind the length that a model was trained on, and those of `dynamic` with every
    token there. Keys in a state cannot be rotated again.

    Args:
        config: of the model.
        cache: None, or what the tokens before are held in.
        position_ids: [B or 1, T], or None: counted on from what the cache holds.
        tokens: T.

    Raises:
        UserError: they are not.
    """
    if cache is None or torch.compiler.is_compiling():
        return
    for kind, border in _borders(config):
        before = int(cache.get_seq_length())
        if before and position_ids is not None:
            before = int(position_ids[:, 0].max())
        after = before + tokens
        if before > 0 and border < after and (before <= border or kind == "dynamic"):
            raise UserError(
                f"config.rope_parameters: expected at most {border} tokens where a state is carried on, because the "
                f"angles of {kind!r} are others behind them and keys in a state cannot be rotated again; found "
                f"{before} tokens in the state and {tokens} more. Give all {after} tokens in one call with a new state"
                + (", or choose a rope_type with fixed angles (linear, yarn)" if kind == "dynamic" else "")
            )


def _borders(config: Any) -> list[tuple[str, int]]:
    """Each rope type of a config whose angles change with the length, and the tokens up to which they do not."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = []
    for one in [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]:
        if one.get("rope_type") == "longrope":
            found.append(("longrope", one["original_max_position_embeddings"]))
        elif one.get("rope_type") == "dynamic":
            found.append(("dynamic", config.max_position_embeddings))
    return found


def refuse_forgetting(input_ids: Tensor, position_ids: Tensor | None, held: int) -> None:
    """See that a base that drops a cache, to read all tokens again with other rotary angles, has all of them.

    Args:
        input_ids: [B, T], all tokens or those behind the cache.
        position_ids: [B or 1, T or more] up to the last of these tokens, or None.
        held: tokens in the cache.

    Raises:
        UserError: it does not.
    """
    seen = held if position_ids is None else int(position_ids.max()) + 1
    if max(held, seen - 1) >= input_ids.shape[1]:
        raise UserError(
            f"input_ids: expected all tokens of the conversation, because this model reads them again where a text "
            f"grows past the length that it was trained on (longrope); found {input_ids.shape[1]} of them behind a "
            f"state of {held}; give those before as well"
        )


def refuse_candidates(config: Any, prompt: int, longest: int) -> None:
    """See that assisted generation stays on one side of the length where rotary angles change.

    Candidates beyond it would turn the keys of tokens before it, too.

    Args:
        config: of the model.
        prompt: tokens that it starts from.
        longest: tokens that it may come to.

    Raises:
        UserError: it may not.
    """
    for kind, border in _borders(config):
        if border < longest and (prompt <= border or kind == "dynamic"):
            raise UserError(
                f"assisted generation: expected at most {border} tokens in all, because the angles of {kind!r} "
                f"(config.rope_parameters) are others behind them, found room for {longest}; set a smaller "
                "max_new_tokens, or generate without an assistant"
            )
