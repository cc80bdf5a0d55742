"""The KV cache with eviction in a mixer: what it holds for each block of queries and for one more token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from linearize.mixers.config import MixerConfig
from linearize.mixers.eviction_cache import EvictionCache, EvictionScorer
from linearize.mixers.mixer_state import MixerState, Tokens
from linearize.ops.eviction_cache import at_places, choose, cut, held_before, leaving, taken, written
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import Blocks, CachedPairs
from linearize.ops.layout import Layout, TerracedSpan
from linearize.ops.recurrent import NextToken

SCORES = "scores"  # eviction scores of the slots of window and cache
STEPS = ("log_decay_k", "log_decay_v", "offset")  # what is a place's own, whichever key is written there


class CachedKeys(NamedTuple):
    """The keys that the cache holds for each block of queries, and those that leave the window when a block begins.

    Attributes:
        cache: its size and parts.
        pool: slots of the cache of an earlier call, where there was one, then those of the layout: all that is a
            token's own, and its `position`.
        carried: places in the pool of what the earlier cache holds, -1 where a slot is empty; None: there was none.
        leaves: places in the pool; where there is no key, the number of the pool's places.
        held: places in the pool, -1 where there is none.
    """

    cache: EvictionCache
    pool: Tokens
    carried: Int[Tensor, "B G C"] | None
    blocks: Blocks
    leaves: Int[Tensor, "b J w"]
    held: Int[Tensor, "B G J C"]

    @property
    def pairs(self) -> CachedPairs:
        """Return the pairs that attention reads."""
        return CachedPairs(self.pool["keys"], self.pool["values"], self.blocks, self.held)

    @property
    def before(self) -> int:
        """Return the number of slots of the pool that belong to the earlier cache."""
        return 0 if self.carried is None else self.cache.size

    def last(self) -> Tokens:
        """What it holds after the last token."""
        return taken(self.pool, self.held[:, :, -1])

    def seen_by(self, queries: Int[Tensor, " N"]) -> Bool[Tensor, "B G N K"]:
        """Which slots each of the queries, by their slots, reads from the cache, but for what it carried."""
        batch, heads, _, size = self.held.shape
        width, slots = self.blocks.slots.shape[2], self.pool["position"].shape[2] - self.before
        mine = self.blocks.slots.expand(batch, -1, -1).flatten(1)[:, None] == queries[:, None]
        block = mine.to(torch.uint8).argmax(-1) // width
        held = self.held.gather(2, block[:, None, :, None].expand(-1, heads, -1, size)) - self.before
        seen = torch.zeros(*held.shape[:3], slots + 1, dtype=torch.bool, device=held.device)
        return seen.scatter(3, torch.where(held >= 0, held, slots), True)[..., :slots]

    def as_written(self, tokens: Tokens) -> Tokens:
        """`tokens` as they are written to the linear state: each with what is written in its place."""
        (batch, heads), slots = self.held.shape[:2], tokens["keys"].shape[2]
        own = torch.arange(self.before, self.before + slots, device=self.held.device)
        new = leaves = self.leaves[:, None].expand(batch, heads, -1, -1)
        for part in self.cache.parts:
            carried = None if self.carried is None else self.carried[..., part]
            new = _passed_on(self.held[..., part], carried, self.blocks, new)
        places = pad(own.expand(batch, heads, -1), (0, 1))  # one more, for what is none
        places = places.scatter(2, leaves.flatten(2) - self.before, new.flatten(2))[:, :, :slots]
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
    carried, before = None, 0
    if state is not None:
        assert state.exact is not None
        pool, carried = _pooled(cache, state.exact, pool)
        before = cache.size
    leaves = layout.once(("leaves", span, before), lambda: leaving(blocks, span, layout, before))
    fresh = None if layout.uniform else blocks.fresh  # a uniform row is one document
    held: list[Tensor] = []
    offered: Tensor = leaves
    for column, part in enumerate(cache.parts):
        its = None if carried is None else carried[..., part]
        held.append(choose(pool[SCORES][..., column], offered, part.stop - part.start, fresh=fresh, carried=its))
        if part.start:  # another part follows
            new = _passed_on(held[-1], its, blocks, leaves[:, None].expand(*held[-1].shape[:3], -1))
            offered = torch.where(new < 0, pool["position"].shape[2], new)
    return CachedKeys(cache, pool, carried, blocks, leaves, _joined(held))


def _passed_on(
    held: Int[Tensor, "B G J C"],
    carried: Int[Tensor, "B G C"] | None,
    blocks: Blocks,
    offered: Int[Tensor, "B G J w"],
) -> Int[Tensor, "B G J w"]:
    """What a part of the cache passes on in the places of the keys that are offered to it when a block begins."""
    return written(held_before(held, carried, blocks.fresh), held, offered)


def _joined(parts: list[Tensor]) -> Tensor:
    """Parts in the order of their slots."""
    return parts[0] if len(parts) == 1 else torch.cat(parts[::-1], dim=-1)


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
    scored = _scored(tokens, scorer, position)
    if state.linear is None:
        return Dropped(_exchanged(cache, exact, scored, full=at.keeps_full(cache.size)), None, position)
    pool, carried = _pooled(cache, exact, scored)
    places = torch.arange(cache.size + span.window_size, device=position.device)
    there = torch.where(pool["position"] >= 0, places, -1)
    held = _chosen(cache, pool, there)
    exact = taken(pool, held)
    new = there[:, :, cache.size :]
    for part in cache.parts:
        new = written(carried[..., part].sort(-1).values, held[..., part], new)
    tokens = _as_written(pool, new, places[cache.size :]) | {name: tokens[name] for name in STEPS if name in tokens}
    return Dropped(exact, tokens, position)


def _exchanged(cache: EvictionCache, held: Tokens, tokens: Tokens, *, full: bool) -> Tokens:
    """Return what a cache holds after a block, whose tokens have position -1 in rows where none leaves the window.

    As `_chosen` and `taken`, in fewer operations. `full`: neither cache nor block has an empty slot.
    """
    pool = _appended(held, tokens)
    # Empty slots of the cache come before those of the block, so that they are chosen first.
    empty = None if full else pool["position"] < 0
    # One part has the oldest first already.
    ages = pool["position"].argsort(dim=-1, stable=True) if len(cache.parts) > 1 else None
    return _best(cache, pool, ages, empty)


def _best(
    cache: EvictionCache,
    pool: Tokens,
    ages: Int[Tensor, "B G P"] | None = None,
    empty: Bool[Tensor, "B G P"] | None = None,
) -> Tokens:
    """Return what a cache holds of a pool of no fewer slots.

    `ages`: its places, the oldest first; None: as they lie. `empty`: which slots are; None: none.
    """
    chosen: list[Tensor] = []
    for column, part in enumerate(cache.parts):
        scores, size = pool[SCORES][..., column], part.stop - part.start
        scores = scores if empty is None else scores.masked_fill(empty, -torch.inf)
        scores = scores if ages is None else scores.gather(2, ages)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        best = order[:, :, :size].sort(-1).values
        chosen.append(best if ages is None else ages.gather(2, best))
        if part.start:
            others = order[:, :, size:].sort(-1).values
            ages = others if ages is None else ages.gather(2, others)
    index = _joined(chosen)
    found: Tokens = {}
    for name, x in pool.items():
        if name == "position":
            found[name] = x.expand(*index.shape[:2], -1).gather(2, index)
        else:
            found[name] = at_places(x, index[..., None])
    return found


@torch.no_grad()
def _chosen(cache: EvictionCache, pool: Tokens, there: Int[Tensor, "B G P"]) -> Int[Tensor, "B G C"]:
    """What the cache holds of all keys of a pool, as `choose`: each part takes of those that the one before left.

    Args:
        there: their places, the oldest first, -1 where there is none.
    """
    held: list[Tensor] = []
    for column, part in enumerate(cache.parts):
        scores = pool[SCORES][..., column].masked_fill(there < 0, -torch.inf)
        size = part.stop - part.start
        order = scores.argsort(dim=-1, descending=True, stable=True)[:, :, :size]
        held.append(pad(there.gather(2, order).sort(-1).values, (size - order.shape[2], 0), value=-1))
        if part.start:
            there = there.scatter(2, order, -1)
    return _joined(held)


def room(config: MixerConfig) -> int:
    """How many tokens may stand in window and cache before a key is dropped; 0 without a cache."""
    cache, span = config.cache, config.span
    if cache is None:
        return 0
    assert isinstance(span, TerracedSpan)
    return span.max_lag + cache.size // span.window_size * span.window_size


def cache_after(
    config: MixerConfig, scorer: EvictionScorer | None, tokens: Tokens, layout: Layout, state: MixerState | None
) -> Tokens:
    """Return what the cache holds after all tokens behind their context, where no query reads it before.

    A choice for each block would end with the same pairs, for a running top-C is the top C of all.
    """
    cache, span = config.cache, config.span
    assert cache is not None and scorer is not None
    if state is None and layout.uniform:
        lowest = int(span.lo(torch.tensor(layout.length - 1, device="cpu")))
        if lowest - span.sinks >= cache.size:  # nothing is empty
            position = layout.key_position[:, span.sinks : lowest]
            left = {name: x[:, :, span.sinks : lowest] for name, x in tokens.items()}
            return _best(cache, _scored(left, scorer, position))
    last, position = layout.count[:, None] - 1, layout.key_position
    pool = _scored(tokens, scorer, position)
    candidates = (position >= span.sinks) & (position < span.lo(last)) & (layout.key_document == layout.last_document)
    candidates = candidates[:, None].expand(*tokens["keys"].shape[:2], -1)
    if state is not None:
        assert state.exact is not None
        pool, _ = _pooled(cache, state.exact, pool)
        carried = (pool["position"][..., : cache.size] >= 0) & (layout.last_document == 0)[..., None]
        candidates = torch.cat([carried, candidates], dim=2)
    every = torch.arange(candidates.shape[2], device=position.device)
    return taken(pool, _chosen(cache, pool, torch.where(candidates, every, -1)))


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


def _pooled(cache: EvictionCache, held: Tokens, tokens: Tokens) -> tuple[Tokens, Int[Tensor, "B G C"]]:
    """The cache's keys, the oldest first, then these; and the places of what each slot of the cache holds, -1 is none.

    One part has the oldest first already.
    """
    places = torch.arange(cache.size, device=held["position"].device).expand_as(held["position"])
    filled = held["position"] >= 0
    if len(cache.parts) > 1:
        age = held["position"].argsort(dim=-1, stable=True)
        held, places = taken(held, age), age.argsort(-1)
    return _appended(held, tokens), torch.where(filled, places, -1)


def _appended(held: Tokens, tokens: Tokens) -> Tokens:
    """Return the cache's slots, then these."""
    pool: Tokens = {}
    for name, x in tokens.items():
        before = held[name]
        before = before if before.dtype == x.dtype else before.to(x.dtype)
        x = x if x.shape[:2] == before.shape[:2] else x.expand(*before.shape[:2], *x.shape[2:])
        pool[name] = torch.cat([before, x], dim=2)
    return pool


def _as_written(pool: Tokens, places: Int[Tensor, "B G N"], own: Int[Tensor, " N"]) -> Tokens:
    """What is written in these places; where it is nothing, the place's own with `input_scale` 0."""
    tokens = taken(pool, torch.where(places >= 0, places, own))
    there = (places >= 0)[..., None].to(tokens["values"].dtype)
    scale = tokens.get("input_scale", there)
    tokens["input_scale"] = scale * repeat_kv(there, scale.shape[1])
    return tokens
