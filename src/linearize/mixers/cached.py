"""The KV cache with eviction in a mixer: what it holds for each block of queries and for one more token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from linearize.mixers.config import MixerConfig
from linearize.mixers.eviction_cache import EvictionScorer
from linearize.mixers.mixer_state import MixerState, Tokens
from linearize.ops.eviction_cache import Blocks, choose, cut, held_before, leaving, taken, written
from linearize.ops.heads import repeat_kv
from linearize.ops.layout import Layout, TerracedSpan
from linearize.ops.recurrent import NextToken

SCORES = "scores"  # eviction scores of the slots of window and cache
STEPS = ("log_decay_k", "log_decay_v", "offset")  # what is a place's own, whichever key is written there


class CachedKeys(NamedTuple):
    """What the cache holds for each block of queries, and which keys leave the window, when each block begins.

    Attributes:
        pool: slots of the cache of an earlier call, where there was one, then those of the layout: all that is a
            token's own, and its `position`.
        carried: how many slots of the pool are the earlier cache's.
        leaves: places in the pool; where there is no key, the number of the pool's places.
        held: places in the pool, -1 where there is none.
    """

    pool: Tokens
    carried: int
    blocks: Blocks
    leaves: Int[Tensor, "b J w"]
    held: Int[Tensor, "B G J C"]

    def last(self) -> Tokens:
        """What it holds after the last token."""
        return taken(self.pool, self.held[:, :, -1])

    def seen_by(self, queries: Int[Tensor, " N"]) -> Bool[Tensor, "B G N K"]:
        """Which slots each of the queries, by their slots, reads from the cache, but for what it carried."""
        batch, heads, _, size = self.held.shape
        width, slots = self.blocks.slots.shape[2], self.pool["position"].shape[2] - self.carried
        mine = self.blocks.slots.expand(batch, -1, -1).flatten(1)[:, None] == queries[:, None]
        block = mine.to(torch.uint8).argmax(-1) // width
        held = self.held.gather(2, block[:, None, :, None].expand(-1, heads, -1, size)) - self.carried
        seen = torch.zeros(*held.shape[:3], slots + 1, dtype=torch.bool, device=held.device)
        return seen.scatter(3, torch.where(held >= 0, held, slots), True)[..., :slots]

    def as_written(self, tokens: Tokens) -> Tokens:
        """`tokens` as they are written to the linear state: each with what is written in its place."""
        (batch, heads), slots = self.held.shape[:2], tokens["keys"].shape[2]
        own = torch.arange(self.carried, self.carried + slots, device=self.held.device)
        leaves = self.leaves[:, None].expand(batch, heads, -1, -1)
        filled = None if not self.carried else self.pool["position"][:, :, : self.carried] >= 0
        before = held_before(self.held, filled, self.blocks.fresh)
        new = written(before, self.held, leaves).flatten(2)
        places = torch.nn.functional.pad(own.expand(batch, heads, -1), (0, 1))  # one more, for what is none
        places = places.scatter(2, leaves.flatten(2) - self.carried, new)[:, :, :slots]
        return _as_written(self.pool, places, own) | {name: tokens[name] for name in STEPS if name in tokens}


def cached_keys(
    config: MixerConfig, scorer: EvictionScorer | None, tokens: Tokens, layout: Layout, state: MixerState | None
) -> CachedKeys | None:
    """Return what the cache holds for all tokens behind their context; None where there is no cache."""
    cache, span = config.cache, config.span
    if cache is None:
        return None
    assert isinstance(span, TerracedSpan) and scorer is not None
    blocks = layout.once(("blocks", span), lambda: cut(layout, span))
    pool = _scored(tokens, scorer, layout.key_position)
    carried, filled = 0, None
    if state is not None:
        assert state.exact is not None
        pool, carried = _pooled(state.exact, pool), cache.size
        filled = state.exact["position"] >= 0
    leaves = layout.once(("leaves", span, carried), lambda: leaving(blocks, span, layout, carried))
    fresh = None if layout.uniform else blocks.fresh  # a uniform row is one document
    held = choose(pool[SCORES][..., 0], leaves, cache.size, fresh=fresh, filled=filled)
    return CachedKeys(pool, carried, blocks, leaves, held)


class Dropped(NamedTuple):
    """The cache for one more token, and what is written to the linear state before it.

    Attributes:
        exact: the cache.
        tokens: as they are written, where there is a linear state.
        position: of these tokens, -1 where a row writes nothing.
    """

    exact: Tokens
    tokens: Tokens | None
    position: Int[Tensor, "B w"]


def cache_of_next(
    config: MixerConfig, scorer: EvictionScorer | None, state: MixerState, at: NextToken
) -> Dropped | None:
    """Return what one more token does: a new choice in rows where a block begins with it; None where none does."""
    cache, span, exact = config.cache, config.span, state.exact
    if cache is None or exact is None or not at.may_flush:
        return None
    assert isinstance(span, TerracedSpan) and scorer is not None
    position = at.leaving
    slots = slice(span.sinks, span.sinks + span.window_size)
    tokens = {name: x[:, :, slots] for name, x in state.slots.items()}
    pool = _pooled(exact, _scored(tokens, scorer, position))
    places = torch.arange(cache.size + span.window_size, device=position.device)
    there = torch.where(pool["position"] >= 0, places, -1)
    with torch.no_grad():
        best = pool[SCORES][..., 0].masked_fill(there < 0, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        held = there.gather(2, best[:, :, : cache.size]).sort(-1).values
    exact = taken(pool, held)
    if state.linear is None:
        return Dropped(exact, None, position)
    new = written(there[:, :, : cache.size], held, there[:, :, cache.size :])
    tokens = _as_written(pool, new, places[cache.size :]) | {name: tokens[name] for name in STEPS if name in tokens}
    return Dropped(exact, tokens, position)


def room(config: MixerConfig) -> int:
    """How many tokens may stand in window and cache before a key is dropped; 0 without a cache."""
    cache, span = config.cache, config.span
    if cache is None:
        return 0
    assert isinstance(span, TerracedSpan)
    return span.max_lag + cache.size // span.window_size * span.window_size


def first_cache(config: MixerConfig, scorer: EvictionScorer | None, tokens: Tokens) -> Tokens:
    """What the cache holds after one document's first tokens, of which there was `room` for all: none is dropped."""
    cache, span, length = config.cache, config.span, tokens["keys"].shape[2]
    assert cache is not None and scorer is not None and isinstance(span, TerracedSpan)
    left = ((length - 1) // span.window_size - span.blocks + 1) * span.window_size
    kept = max(0, left - span.sinks)
    position = torch.arange(span.sinks, span.sinks + kept, device=tokens["keys"].device)[None]
    tokens = {name: x[:, :, span.sinks : span.sinks + kept] for name, x in tokens.items()}
    found = empty_cache(tokens, cache.size)
    for name, x in _scored(tokens, scorer, position).items():
        found[name][:, :, cache.size - kept :] = x
    return found


def empty_cache(tokens: Tokens, size: int) -> Tokens:
    """A cache of `size` slots, for tokens like these, that holds nothing."""
    k = tokens["keys"]
    slots = {name: x.new_zeros(len(k), max(x.shape[1], k.shape[1]), size, x.shape[3]) for name, x in _own(tokens)}
    return slots | {"position": k.new_full((*k.shape[:2], size), -1, dtype=torch.int64)}


def _own(tokens: Tokens) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in tokens.items() if name not in STEPS]


def _scored(tokens: Tokens, scorer: EvictionScorer, position: Int[Tensor, "#B N"]) -> Tokens:
    """What is a token's own, with its whole score, and its position [B or 1, 1, N]."""
    scores = scorer.whole(tokens[SCORES], tokens["values"], position)
    return dict(_own(tokens)) | {SCORES: scores, "position": position[:, None]}


def _pooled(held: Tokens, tokens: Tokens) -> Tokens:
    """The cache's slots, then these."""
    pool: Tokens = {}
    for name, x in tokens.items():
        before = held[name]
        before = before if before.dtype == x.dtype else before.to(x.dtype)
        pool[name] = torch.cat([before, x.expand(*before.shape[:2], *x.shape[2:])], dim=2)
    return pool


def _as_written(pool: Tokens, places: Int[Tensor, "B G N"], own: Int[Tensor, " N"]) -> Tokens:
    """What is written in these places; where it is nothing, the place's own with `input_scale` 0."""
    tokens = taken(pool, torch.where(places >= 0, places, own))
    there = (places >= 0)[..., None].to(tokens["values"].dtype)
    scale = tokens.get("input_scale", there)
    tokens["input_scale"] = scale * repeat_kv(there, scale.shape[1])
    return tokens
