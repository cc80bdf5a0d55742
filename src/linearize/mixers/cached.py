"""The KV cache with eviction in a mixer: what it holds for each block of queries and for one more token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from linearize.mixers.config import MixerConfig
from linearize.mixers.mixer_state import MixerState, Tokens
from linearize.ops.eviction_cache import Blocks, choose, cut, leaving, ranked, taken, written
from linearize.ops.heads import repeat_kv
from linearize.ops.layout import Layout, TerracedSpan, context_positions
from linearize.ops.recurrent import NextToken

SCORES = "scores"  # eviction scores of the slots of window and cache
STEPS = ("log_decay_k", "log_decay_v", "offset")  # what is a place's own, whichever key is written there


class CachedKeys(NamedTuple):
    """What the cache holds for each block of queries, as places in a pool of slots: all that is a token's own, and its
    `position`; and which keys leave the window, and what the cache held, when each block begins.
    """

    pool: Tokens
    blocks: Blocks
    leaves: Int[Tensor, "B G J w"]
    before: Int[Tensor, "B G J C"]
    held: Int[Tensor, "B G J C"]

    def last(self) -> Tokens:
        """What it holds after the last token."""
        return taken(self.pool, self.held[:, :, -1])

    def seen_by(self, queries: Int[Tensor, " N"]) -> Bool[Tensor, "B G N K"]:
        """Which slots each of the queries, by their slots, reads from the cache, but for what it carried."""
        batch, heads, _, size = self.held.shape
        width, slots = self.blocks.slots.shape[2], self.pool["position"].shape[2] - size
        mine = self.blocks.slots.expand(batch, -1, -1).flatten(1)[:, None] == queries[:, None]
        block = mine.to(torch.uint8).argmax(-1) // width
        held = self.held.gather(2, block[:, None, :, None].expand(-1, heads, -1, size)) - size
        seen = torch.zeros(*held.shape[:3], slots + 1, dtype=torch.bool, device=held.device)
        return seen.scatter(3, torch.where(held >= 0, held, slots), True)[..., :slots]

    def as_written(self, tokens: Tokens) -> Tokens:
        """`tokens` as they are written to the linear state: each with what is written in its place."""
        size, slots = self.held.shape[-1], tokens["keys"].shape[2]
        own = torch.arange(size, size + slots, device=self.held.device)
        places = own.expand(*self.held.shape[:2], -1)
        # One more place, for what is none.
        at = torch.where(self.leaves >= 0, self.leaves - size, slots).flatten(2)
        new = written(self.before, self.held, self.leaves).flatten(2)
        places = torch.nn.functional.pad(places, (0, 1)).scatter(2, at, new)[:, :, :slots]
        return _as_written(self.pool, places, own) | {name: tokens[name] for name in STEPS if name in tokens}


def cached_keys(config: MixerConfig, tokens: Tokens, layout: Layout, state: MixerState | None) -> CachedKeys | None:
    """Return what the cache holds for all tokens behind their context; None where there is no cache."""
    cache, span = config.cache, config.span
    if cache is None:
        return None
    assert isinstance(span, TerracedSpan)
    held = empty_cache(tokens, cache.size) if state is None else state.exact
    assert held is not None
    pool = _pooled(held, tokens, layout.key_position)
    position, blocks = pool["position"], layout.once(("blocks", span), lambda: cut(layout, span))
    if span.sinks:
        leaves = leaving(blocks, span, position, cache.size)
    else:  # which are of no single layer's keys
        known = "leaves", span, cache.size, position.shape[:2]
        leaves = layout.once(known, lambda: leaving(blocks, span, position, cache.size))
    before, after = choose(pool[SCORES][..., 0], position, leaves, blocks.fresh, cache.size)
    return CachedKeys(pool, blocks, leaves, before, after)


class Dropped(NamedTuple):
    """The cache for one more token, and `tokens` as they are written to the linear state before it, at `position`; -1
    where a row writes nothing.
    """

    exact: Tokens
    tokens: Tokens
    position: Int[Tensor, "B w"]


def cache_of_next(config: MixerConfig, state: MixerState, at: NextToken) -> Dropped | None:
    """Return what one more token does: a new choice in rows where a block begins with it; None where none does."""
    cache, span, exact, begins = config.cache, config.span, state.exact, at.flushes
    if cache is None or exact is None or begins is None or not at.may_flush:
        return None
    assert isinstance(span, TerracedSpan)
    slots = slice(span.sinks, span.sinks + span.window_size)
    position = context_positions(state.seen, span)[:, slots]
    position = torch.where((position >= span.sinks) & begins[:, 0], position, -1)
    tokens = {name: x[:, :, slots] for name, x in state.slots.items()}
    pool = _pooled(exact, tokens, position)
    places = torch.arange(cache.size + span.window_size, device=position.device)
    there = torch.where(pool["position"] >= 0, places, -1)
    with torch.no_grad():
        held = ranked(pool[SCORES][..., 0], there, cache.size).sort(-1).values
    new = written(there[:, :, : cache.size], held, there[:, :, cache.size :])
    tokens = _as_written(pool, new, places[cache.size :]) | {name: tokens[name] for name in STEPS if name in tokens}
    return Dropped(taken(pool, held), tokens, position)


def room(config: MixerConfig) -> int:
    """How many tokens may stand in window and cache before a key is dropped; 0 without a cache."""
    cache, span = config.cache, config.span
    if cache is None:
        return 0
    assert isinstance(span, TerracedSpan)
    return span.max_lag + cache.size // span.window_size * span.window_size


def first_cache(config: MixerConfig, tokens: Tokens) -> Tokens:
    """What the cache holds after one document's first tokens, of which there was `room` for all: none is dropped."""
    cache, span, length = config.cache, config.span, tokens["keys"].shape[2]
    assert cache is not None and isinstance(span, TerracedSpan)
    left = ((length - 1) // span.window_size - span.blocks + 1) * span.window_size
    found, kept = empty_cache(tokens, cache.size), max(0, left - span.sinks)
    for name, x in _own(tokens):
        found[name][:, :, cache.size - kept :] = x[:, :, span.sinks : span.sinks + kept]
    found["position"][:, :, cache.size - kept :] = torch.arange(span.sinks, span.sinks + kept, device=x.device)
    return found


def empty_cache(tokens: Tokens, size: int) -> Tokens:
    """A cache of `size` slots, for tokens like these, that holds nothing."""
    k = tokens["keys"]
    slots = {name: x.new_zeros(len(k), max(x.shape[1], k.shape[1]), size, x.shape[3]) for name, x in _own(tokens)}
    return slots | {"position": k.new_full((*k.shape[:2], size), -1, dtype=torch.int64)}


def _own(tokens: Tokens) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in tokens.items() if name not in STEPS]


def _pooled(held: Tokens, tokens: Tokens, position: Int[Tensor, "#B N"]) -> Tokens:
    """The cache's slots, then these."""
    batch, heads = held["position"].shape[:2]
    new = {name: x.expand(batch, held[name].shape[1] if x.shape[1] == 1 else -1, -1, -1) for name, x in _own(tokens)}
    new["position"] = position[:, None].expand(batch, heads, -1)
    return {name: torch.cat([held[name].to(x.dtype), x], dim=2) for name, x in new.items()}


def _as_written(pool: Tokens, places: Int[Tensor, "B G N"], own: Int[Tensor, " N"]) -> Tokens:
    """What is written in these places; where it is nothing, the place's own with `input_scale` 0."""
    tokens = taken(pool, torch.where(places >= 0, places, own))
    there = (places >= 0)[..., None].to(tokens["values"].dtype)
    scale = tokens.get("input_scale", there)
    tokens["input_scale"] = scale * repeat_kv(there, scale.shape[1])
    return tokens
