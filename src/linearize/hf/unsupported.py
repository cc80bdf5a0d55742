"""Ways to run a model that a carried state does not survive: they raise before any work, and say what to do instead."""

from __future__ import annotations

from typing import Any

import torch
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
