"""The exact cache within a mixer: what it holds for each block of queries, and for one more token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.mixers.config import MixerConfig
from linearize.mixers.mixer_state import MixerState, Tokens
from linearize.ops.exact_cache import Blocks, best, choose, cut, taken
from linearize.ops.layout import Layout, TerracedSpan, context_positions


class CachedKeys(NamedTuple):
    """What the cache holds for each block of queries, as places in a pool of slots (`keys`, `values`, `position`)."""

    pool: Tokens
    blocks: Blocks
    held: Int[Tensor, "B G J C"]

    def last(self) -> Tokens:
        """What it holds after the last token."""
        return taken(self.pool, self.held[:, :, -1])


def cached_keys(config: MixerConfig, tokens: Tokens, layout: Layout, state: MixerState | None) -> CachedKeys | None:
    """Of all tokens behind their context; None where there is no cache."""
    cache, span, k, v = config.cache, config.span, tokens["keys"], tokens["values"]
    if cache is None:
        return None
    assert isinstance(span, TerracedSpan)
    position = layout.key_position[:, None].expand(len(k), k.shape[1], -1)
    held = empty_cache(k, v, cache.size) if state is None else state.exact
    assert held is not None
    pool = _pooled(held, k, v, position)
    blocks = cut(layout, span)
    places = choose(pool["keys"], pool["values"], pool["position"], blocks, span, cache.size, cache.worth)
    return CachedKeys(pool, blocks, places)


def cache_of_next(config: MixerConfig, state: MixerState) -> Tokens | None:
    """The cache for one more token: chosen again in rows where a block begins with it; None where there is none."""
    cache, span, exact = config.cache, config.span, state.exact
    if cache is None or exact is None:
        return None
    assert isinstance(span, TerracedSpan)
    begins = state.seen % span.window_size == 0
    if not torch.compiler.is_compiling() and not begins.is_meta and not begins.any():
        return exact
    leaving = slice(span.sinks, span.sinks + span.window_size)
    position = context_positions(state.seen, span)[:, leaving]
    position = torch.where((position >= span.sinks) & begins[:, None], position, -1)
    k, v = (state.slots[name][:, :, leaving] for name in ("keys", "values"))
    pool = _pooled(exact, k, v, position[:, None].expand(-1, k.shape[1], -1))
    places = torch.arange(cache.size + span.window_size, device=position.device)
    places = torch.where(pool["position"] >= 0, places, -1)
    held = best(pool["keys"], pool["values"], pool["position"], places, cache.size, cache.worth)
    return taken(pool, held)


def empty_cache(k: Float[Tensor, "B G T D"], v: Float[Tensor, "B G T D"], size: int) -> Tokens:
    """A cache of `size` slots, for keys and values like these, that holds nothing."""
    slots = {name: x.new_zeros(*x.shape[:2], size, x.shape[3]) for name, x in (("keys", k), ("values", v))}
    return slots | {"position": k.new_full((*k.shape[:2], size), -1, dtype=torch.int64)}


def _pooled(held: Tokens, k: Tensor, v: Tensor, position: Int[Tensor, "B G N"]) -> Tokens:
    """The cache's slots, then these."""
    new = {"keys": k, "values": v, "position": position}
    return {name: torch.cat([held[name].to(x.dtype), x], dim=2) for name, x in new.items()}
