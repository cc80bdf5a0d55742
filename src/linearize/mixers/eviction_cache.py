"""The KV cache with eviction in a mixer: eviction scores, and the keys that the cache holds.

The keys are chosen for each block of queries of a prompt, and for one more token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import EvictionCache
from linearize.configs.shape import LayerShape
from linearize.configs.spans import TerracedSpan
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer_state import MixerState
from linearize.ops.eviction_cache import at_places, choose, cut, evicted, gathered, held_before, leaving, taken, written
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import Blocks, CachedPairs
from linearize.ops.layout import SequenceLayout, Tokens
from linearize.ops.partial import in_dtype
from linearize.ops.step import StepContext

MOST_TOKENS = 2**40  # more than any text has
SCORES = "scores"  # eviction scores of the slots of window and cache
STEPS = ("log_decay_k", "log_decay_v", "offset")  # belong to a place, whichever key is written there
LEAST_LENGTH = 1e-6  # the least length of a vector before its logarithm is taken


# --- scores -----------------------------------------------------------------------------------------------------------


class EvictionScorer(nn.Module):
    """The eviction scores of a key-value pair: linear functions of key, value, their log lengths, and the position.

    There are S scores, one for each part of the cache.

    Keys are read before RoPE (a rotation does not change their lengths), so position matters through `recency` alone. A
    score that grows with the position prefers newer pairs to older ones. Scores of a head's pairs never change relative
    to each other, so the cache is a running top-C.

    Weights are fitted in closed form to the attention that the teacher's pairs receive
    (`linearize.training.eviction_scores`), after KVzip (arXiv 2505.23416) and KVzap (arXiv 2601.07891).

    Attributes:
        weight: [G, S, 2 D + 2], of the `features`.
        recency: [G, S], score per token of position; 0: age does not matter.
    """

    weight: Tensor
    recency: Tensor

    def __init__(self, cache: EvictionCache, shape: LayerShape) -> None:
        super().__init__()
        scores = shape.num_kv_heads, len(cache.parts)
        self.register_buffer("weight", torch.empty(*scores, 2 * shape.head_dim + 2))
        self.register_buffer("recency", torch.empty(scores))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scores to minus the logarithm of the key's length (Devoto et al. 2024, arXiv 2406.11430)."""
        self.weight.zero_()
        self.weight[..., (self.weight.shape[-1] - 2) // 2] = -1
        self.recency.zero_()

    @torch.no_grad()
    def forward(self, inputs: AttnInputs, position: Int[Tensor, "#B T"]) -> Float[Tensor, "B G T S"]:
        """Return the scores of tokens at these positions of their documents, in fp32, or fp64 for fp64 inputs."""
        return self.whole(self.of_keys(inputs), inputs.v, position)

    @torch.no_grad()
    def of_keys(self, inputs: AttnInputs) -> Float[Tensor, "B G T S"]:
        """Return the keys' part of the scores. It reads keys before RoPE, which slots do not hold."""
        return self._weighted(_with_length(inputs.k if inputs.unrotated is None else inputs.unrotated[1]), 0)

    @torch.no_grad()
    def whole(
        self, of_keys: Float[Tensor, "B G T S"], v: Float[Tensor, "B G T D"], position: Int[Tensor, "#B T"]
    ) -> Float[Tensor, "B G T S"]:
        """Return the scores, from the keys' part (`of_keys`), values and positions."""
        of_values = self._weighted(_with_length(v), v.shape[-1] + 1)
        recency = in_dtype(self.recency, of_values.dtype)[:, None] * position.view(len(position), 1, -1, 1)
        return of_keys + of_values + recency

    def _weighted(self, x: Float[Tensor, "B G T D"], first: int) -> Float[Tensor, "B G T S"]:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = x if x.dtype == dtype else x.to(dtype)
        weight = self.weight if self.weight.dtype == dtype else self.weight.to(dtype)
        rows = weight[:, None, :, first : first + x.shape[-1]]
        # Each row is summed separately, so that equal keys have equal scores in calls of any length.
        return (x.unsqueeze(3) * rows).sum(-1)


def features(inputs: AttnInputs) -> Float[Tensor, "B G T F"]:
    """Return the features of eviction scores, F = 2 D + 2: key before RoPE, its log length, value, its log length."""
    k = inputs.k if inputs.unrotated is None else inputs.unrotated[1]
    return torch.cat([_with_length(k), _with_length(inputs.v)], dim=-1)


def _with_length(x: Float[Tensor, "B G T D"]) -> Float[Tensor, "B G T X"]:
    """Return vectors followed by the logarithm of their length (X = D + 1), in the accumulation dtype."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x if x.dtype == dtype else x.to(dtype)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.cat([x, length.clamp_min(LEAST_LENGTH).log()], dim=-1)


def copy_scorers(source: Any, target: Any) -> None:
    """Copy the fitted eviction scorers of a mixer to another mixer of the same groups of heads."""
    for (_, fitted), (_, mixer) in zip(source.parts(), target.parts(), strict=True):
        if getattr(mixer, "scorer", None) is not None:
            mixer.scorer.load_state_dict(fitted.scorer.state_dict())


# --- what the cache holds ---------------------------------------------------------------------------------------------


class CachedKeys(NamedTuple):
    """The keys that the cache holds for each block of queries, and those that leave the window when a block begins.

    Attributes:
        cache: size and parts of the cache.
        pool: slots of an earlier call's cache, if there was one, then those of the layout: the tokens' tensors (without
            `STEPS`), their scores and `position`.
        carried: places in the pool of the earlier cache's keys, -1 for empty slots; None: there was no cache.
        leaves: places in the pool of the leaving keys; the size of the pool stands for no key.
        held: places in the pool of the cached keys, -1 for none.
        full: whether it is known that no slot is empty after the last token.
    """

    cache: EvictionCache
    pool: Tokens
    carried: Int[Tensor, "B G C"] | None
    blocks: Blocks
    leaves: Int[Tensor, "b J w"]
    held: Int[Tensor, "B G J C"]
    full: bool

    @property
    def pairs(self) -> CachedPairs:
        """Return the pairs that attention reads."""
        return CachedPairs(self.pool["keys"], self.pool["values"], self.blocks, self.held)

    @property
    def before(self) -> int:
        """Return the number of slots of the pool that belong to the earlier cache."""
        return 0 if self.carried is None else self.cache.size

    def last(self) -> Tokens:
        """Return the pairs in the cache after the last token."""
        return (gathered if self.full else taken)(self.pool, self.held[:, :, -1])

    def as_written(self, tokens: Tokens) -> Tokens:
        """Return `tokens` as they are written to the linear state: each replaced by the key written in its place."""
        (batch, heads), slots = self.held.shape[:2], tokens["keys"].shape[2]
        own = torch.arange(self.before, self.before + slots, device=self.held.device)
        new = leaves = self.leaves[:, None].expand(batch, heads, -1, -1)
        for part in self.cache.parts:
            carried = None if self.carried is None else self.carried[..., part]
            new = _passed_on(self.held[..., part], carried, self.blocks, new)
        places = pad(own.expand(batch, heads, -1), (0, 1))  # one more place, for no key
        places = places.scatter(2, leaves.flatten(2) - self.before, new.flatten(2))[:, :, :slots]
        return _as_written(self.pool, places, own) | {name: tokens[name] for name in STEPS if name in tokens}


def cached_keys(
    config: MixerConfig, scorer: EvictionScorer | None, tokens: Tokens, layout: SequenceLayout, state: MixerState | None
) -> CachedKeys | None:
    """Return the keys that the cache holds for each block of all tokens after their context; None: no cache."""
    cache, span = config.cache, config.span
    if cache is None:
        return None
    assert isinstance(span, TerracedSpan) and scorer is not None
    blocks = layout.once(("blocks", span), lambda: cut(layout, span))
    pool = _scored(tokens, scorer, layout.key_position)
    carried, before = None, 0
    if state is not None:
        pool, carried = _pooled(cache, state.cached(span), pool)
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
    full = state is None and _evicted(span, layout) >= cache.size
    return CachedKeys(cache, pool, carried, blocks, leaves, _joined(held), full)


def _evicted(span: TerracedSpan, layout: SequenceLayout) -> int:
    """Return how many keys, without sinks, have left the window of uniform rows; 0 for other rows."""
    if not layout.uniform:
        return 0
    last = layout.length - 1
    return layout.once(("evicted", span), lambda: int(span.lo(torch.tensor(last, device="cpu"))) - span.sinks)


def _passed_on(
    held: Int[Tensor, "B G J C"],
    carried: Int[Tensor, "B G C"] | None,
    blocks: Blocks,
    offered: Int[Tensor, "B G J w"],
) -> Int[Tensor, "B G J w"]:
    """Return the keys that a part of the cache passes on, in the places of the keys offered when a block begins."""
    return written(held_before(held, carried, blocks.fresh), held, offered)


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the parts concatenated in the order of their slots."""
    return parts[0] if len(parts) == 1 else torch.cat(parts[::-1], dim=-1)


class NextBlock(NamedTuple):
    """The slots of the state when a block may begin, and the tokens written to the linear state before it.

    Attributes:
        slots: of the state, the cache after the window.
        position: of the cached pairs.
        dropped: tokens written to the linear state in the places `at.leaving`; None: there is no linear state.
    """

    slots: Tokens
    position: Int[Tensor, "B G C"]
    dropped: Tokens | None


def next_block(config: MixerConfig, scorer: EvictionScorer, state: MixerState, at: StepContext) -> NextBlock:
    """Choose the cache's keys again in rows where a block begins. Other rows keep their slots."""
    cache, before = config.cache, state.cached(config.span)
    assert cache is not None
    if state.linear is None:
        return _next_block_of_pairs(cache, scorer, state, before, at)
    tokens = {name: at.leaving_tokens(x) for name, x in state.slots.items()}
    scored = _scored(tokens, scorer, at.leaving)
    pool, carried = _pooled(cache, before, scored)
    places = torch.arange(pool["position"].shape[2], device=at.position.device)
    there = torch.where(pool["position"] >= 0, places, -1)
    held = _chosen(cache, pool[SCORES], there)
    after = taken(pool, held)
    slots = {name: torch.cat([x[:, :, : at.slots], after[name]], dim=2) for name, x in _own(state.slots)}
    new = there[:, :, cache.size :]
    for part in cache.parts:
        new = written(carried[..., part].sort(-1).values, held[..., part], new)
    steps = {name: tokens[name] for name in STEPS if name in tokens}
    dropped = _as_written(pool, new, places[cache.size :]) | steps
    return NextBlock(state.slots | slots, after["position"], dropped)


def _next_block_of_pairs(
    cache: EvictionCache, scorer: EvictionScorer, state: MixerState, before: Tokens, at: StepContext
) -> NextBlock:
    """Return `next_block` without a linear state: keys and values are copied only once, to their new slots."""
    slots = dict(state.slots)
    of_keys, groups = slots.pop(SCORES), before["position"].shape[1]
    scores = scorer.whole(at.leaving_tokens(of_keys), at.leaving_tokens(slots["values"]), at.leaving)
    pool = _appended(
        {name: before[name] for name in (SCORES, "position")}, {SCORES: scores, "position": at.leaving[:, None]}
    )
    best = _best(cache, pool[SCORES], pool["position"], full=at.keeps_full(cache.size))
    sources = at.pool_slots(cache.size)[:, None].expand(-1, groups, -1).gather(2, best)
    sources = torch.cat([at.window_slots(cache.size).expand(*best.shape[:2], -1), sources], dim=2)[..., None]
    after = {name: at_places(x, sources) for name, x in slots.items()}
    after[SCORES] = torch.cat([of_keys[:, :, : at.slots], at_places(pool[SCORES], best[..., None])], dim=2)
    return NextBlock({name: after[name] for name in state.slots}, pool["position"].gather(2, best), None)


def _best(
    cache: EvictionCache, scores: Float[Tensor, "B G P S"], position: Int[Tensor, "#B #G P"], *, full: bool
) -> Int[Tensor, "B G C"]:
    """Return the places of a pool of at least C keys that the cache holds; of equal scores, the first.

    It chooses as `_chosen`, in fewer operations. `full`: no slot of the pool has position -1.
    """
    # Empty slots of the cache come before those of the block, so that they are chosen first.
    empty = None if full else position < 0
    # A single part is sorted by age already.
    ages = position.argsort(dim=-1, stable=True) if len(cache.parts) > 1 else None
    chosen: list[Tensor] = []
    of_parts = scores
    for column, part in enumerate(cache.parts):
        scores, size = of_parts[..., column], part.stop - part.start
        scores = scores if empty is None else scores.masked_fill(empty, -torch.inf)
        ages = ages if ages is None else ages.expand(*scores.shape[:2], -1)
        scores = scores if ages is None else scores.gather(2, ages)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        best = order[:, :, :size].sort(-1).values
        chosen.append(best if ages is None else ages.gather(2, best))
        if part.start:
            others = order[:, :, size:].sort(-1).values
            ages = others if ages is None else ages.gather(2, others)
    return _joined(chosen)


@torch.no_grad()
def _chosen(
    cache: EvictionCache, scores: Float[Tensor, "B G P S"], there: Int[Tensor, "B G P"]
) -> Int[Tensor, "B G C"]:
    """Return the keys of a pool that the cache holds, as `choose`: each part selects from the previous part's rest.

    Args:
        there: places of the keys in the pool, the oldest first, -1 for none.
    """
    held: list[Tensor] = []
    for column, part in enumerate(cache.parts):
        size = part.stop - part.start
        order = scores[..., column].masked_fill(there < 0, -torch.inf)
        order = order.argsort(dim=-1, descending=True, stable=True)[:, :, :size]
        held.append(pad(there.gather(2, order).sort(-1).values, (size - order.shape[2], 0), value=-1))
        if part.start:
            there = there.scatter(2, order, -1)
    return _joined(held)


def last_queries(
    config: MixerConfig, scorer: EvictionScorer | None, tokens: Tokens, layout: SequenceLayout
) -> Int[Tensor, "#B G K"]:
    """Return the position of the last query that reads each key through window, sinks or cache, without a state."""
    span, position, length = config.span, layout.key_position, layout.length
    last = torch.where(position < span.sinks, MOST_TOKENS, span.last(position))[:, None]
    if config.cache is None:
        return last.expand(-1, tokens["keys"].shape[1], -1)
    assert isinstance(span, TerracedSpan) and scorer is not None
    blocks = -(-length // span.window_size)
    until = ((last + 1) // span.window_size).clamp_max(blocks)
    scores, document = scorer.whole(tokens[SCORES], tokens["values"], position), None
    if not layout.uniform:
        document, until = layout.key_document, torch.where(position[:, None] < 0, blocks, until)
    for column, part in enumerate(config.cache.parts):
        until = evicted(scores[..., column], until, part.stop - part.start, blocks, document)
    return until * span.window_size - 1


def room(config: MixerConfig) -> int:
    """Return how many tokens fit in window and cache before a key is evicted; 0 without a cache."""
    cache, span = config.cache, config.span
    if cache is None:
        return 0
    assert isinstance(span, TerracedSpan)
    return span.max_softmax_keys + cache.size // span.window_size * span.window_size


def cache_after(
    config: MixerConfig, scorer: EvictionScorer | None, tokens: Tokens, layout: SequenceLayout, state: MixerState | None
) -> Tokens:
    """Return the pairs in the cache after all tokens, by one choice: no query reads the cache before.

    A choice for each block would end with the same pairs, since a running top-C is the top C of all.
    """
    cache, span = config.cache, config.span
    assert cache is not None and scorer is not None and isinstance(span, TerracedSpan)
    position = layout.key_position
    if state is None and (evicted := _evicted(span, layout)) >= cache.size:  # these keys are adjacent
        left = slice(span.sinks, span.sinks + evicted)
        tokens = {name: x[:, :, left] for name, x in tokens.items()}
        pool = _scored(tokens, scorer, position[:, left])
        return gathered(pool, _best(cache, pool[SCORES], pool["position"], full=True))
    last, pool = layout.count[:, None] - 1, _scored(tokens, scorer, position)
    candidates = (position >= span.sinks) & (position < span.lo(last)) & (layout.key_document == layout.last_document)
    candidates = candidates[:, None].expand(*tokens["keys"].shape[:2], -1)
    if state is not None:
        pool, _ = _pooled(cache, state.cached(span), pool)
        carried = (pool["position"][..., : cache.size] >= 0) & (layout.last_document == 0)[..., None]
        candidates = torch.cat([carried, candidates], dim=2)
    every = torch.arange(candidates.shape[2], device=position.device)
    return taken(pool, _chosen(cache, pool[SCORES], torch.where(candidates, every, -1)))


def _own(tokens: Tokens) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in tokens.items() if name not in STEPS]


def _scored(tokens: Tokens, scorer: EvictionScorer, position: Int[Tensor, "#B N"]) -> Tokens:
    """Return the tokens' tensors without `STEPS`, with whole scores and positions [B or 1, 1, N]."""
    scores = scorer.whole(tokens[SCORES], tokens["values"], position)
    return dict(_own(tokens)) | {SCORES: scores, "position": position[:, None]}


def _pooled(cache: EvictionCache, held: Tokens, tokens: Tokens) -> tuple[Tokens, Int[Tensor, "B G C"]]:
    """Return the cache's keys, the oldest first, then these tokens; and the place of each cache slot (-1: empty)."""
    places = torch.arange(cache.size, device=held["position"].device).expand_as(held["position"])
    filled = held["position"] >= 0
    if len(cache.parts) > 1:
        age = held["position"].argsort(dim=-1, stable=True)
        held, places = taken(held, age), age.argsort(-1)
    return _appended(held, tokens), torch.where(filled, places, -1)


def _appended(held: Tokens, tokens: Tokens) -> Tokens:
    """Return the cache's slots followed by `tokens`."""
    pool: Tokens = {}
    for name, x in tokens.items():
        before = held[name]
        before = before if before.dtype == x.dtype else before.to(x.dtype)
        x = x if x.shape[:2] == before.shape[:2] else x.expand(*before.shape[:2], *x.shape[2:])
        pool[name] = torch.cat([before, x], dim=2)
    return pool


def _as_written(pool: Tokens, places: Int[Tensor, "B G N"], own: Int[Tensor, " N"]) -> Tokens:
    """Return the tokens at these places of the pool; for place -1, the place's own token with `input_scale` 0."""
    tokens = taken(pool, torch.where(places >= 0, places, own))
    there = (places >= 0)[..., None].to(tokens["values"].dtype)
    scale = tokens.get("input_scale", there)
    tokens["input_scale"] = scale * repeat_kv(there, scale.shape[1])
    return tokens
