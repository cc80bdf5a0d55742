"""Choose the keys of a KV cache with eviction below a terraced window, and compute softmax over them.

Rows are cut into the blocks of the span. Every key has an eviction score. When a block of queries begins, the cache
holds the C keys with the highest scores among those of the document that have left the window. A score depends on its
key alone, so this is a running top-C: all forms choose the same keys, and blocks are chosen in parallel. With a linear
state, evicted keys are written to it in the places of the block that leaves the window (`written`).

Further axes: J blocks of a row, w keys of a block, C size of the cache, P pool of keys (the C slots of an earlier
call's cache, if there was one, then the K slots).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from linearize.configs.spans import TerracedSpan
from linearize.ops.block_sizes import kind
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import Blocks, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import Partial, accumulation_dtype

RANKS_AT_ONCE = 1024  # ranks of one block that a round of `choose` merges
SCORES_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}  # scores of queries with cached keys that exist at a time


def cut(layout: SequenceLayout, span: TerracedSpan) -> Blocks:
    """Return the blocks of a layout's rows."""
    position, document = layout.key_position, layout.key_document
    width, every = span.window_size, torch.arange(position.shape[1], device=position.device)
    valid = (position >= 0) & (every >= layout.sink_slots)  # sink slots are no part of the row
    number = position.div(width, rounding_mode="floor")
    # A block begins where a valid slot is in another block than the valid slot before it.
    place = torch.where(valid, every, -1).cummax(1).values
    before = pad(place, (1, 0), value=-1)[:, :-1]
    there, before = before >= 0, before.clamp_min(0)
    begins = valid & (~there | (number.gather(1, before) != number) | (document.gather(1, before) != document))
    block = begins.cumsum(1) - 1
    count = -(-position.shape[1] // width) if layout.uniform else max(1, int(block.amax()) + 1)
    batch = len(position)
    index = torch.where(valid, block * width + position % width, count * width)
    slots = position.new_full((batch, count * width + 1), -1)
    slots = slots.scatter(1, index, every.expand(batch, -1))
    slots = slots[:, :-1].unflatten(1, (count, width))

    first = slots.amax(2).clamp_min(0)  # a slot of each block
    exists = (slots >= 0).any(2)
    of, its = document.gather(1, first), number.gather(1, first)
    earlier_of = pad(of, (1, 0), value=-1)[:, :-1]
    fresh = exists & (of != earlier_of) & (its == 0)
    back = span.blocks
    source_of = pad(of, (back, 0), value=-1)[:, :count]
    leaves = exists & (source_of == of) & (its >= back)
    if layout.seen is not None:
        started = (of == 0) & (its * width < layout.seen[:, None])
        leaves, fresh = leaves & ~started, fresh & ~started
    return Blocks(slots, leaves, fresh)


def leaving(blocks: Blocks, span: TerracedSpan, layout: SequenceLayout, carried: int) -> Int[Tensor, "B J w"]:
    """Return the keys, without sinks, that leave the window when each block begins.

    They are places in a pool of `carried` slots followed by the layout's; the size of the pool stands for no key.
    """
    position, count = layout.key_position, blocks.slots.shape[1]
    back = pad(blocks.slots, (0, 0, span.blocks, 0), value=-1)[:, :count]
    leaves = (back >= 0) & blocks.leaves[..., None]
    if span.sinks:
        index = back.clamp_min(0).flatten(1).expand(len(position), -1)
        leaves = leaves & (position.gather(1, index).view(len(position), *back.shape[1:]) >= span.sinks)
    return torch.where(leaves, back, position.shape[1]) + carried


@torch.no_grad()
def choose(
    scores: Float[Tensor, "B G P"],
    leaves: Int[Tensor, "#B J w"] | Int[Tensor, "B G J w"],
    size: int,
    *,
    fresh: Bool[Tensor, "#B J"] | None = None,
    carried: Int[Tensor, "B G C"] | None = None,
) -> Int[Tensor, "B G J C"]:
    """Return the keys in the cache after each block's choice: places in the pool, sorted, after -1 for empty slots.

    The pool is ranked once, 0 for the highest score. Then a prefix scan over blocks keeps the C least ranks: each round
    merges as many lists as `RANKS_AT_ONCE` allows. Ranks of a later document are less than those of earlier ones.

    Args:
        scores: eviction scores of the pool. Keys with the highest scores stay; of equal scores, the older key.
        leaves: places in the pool of the keys that leave the window when each block begins (`leaving`).
        size: C.
        fresh: whether a document begins with the block, so that the cache is empty; None: only with the first.
        carried: places in the pool of an earlier cache's keys, -1 for empty slots; None: there was no cache.
    """
    batch, heads, none = scores.shape
    blocks, width = leaves.shape[-2:]
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = pad(order.argsort(-1), (0, 1), value=none)
    leaves = leaves if leaves.ndim == 4 else leaves[:, None]
    best = rank.gather(2, leaves.flatten(2).expand(batch, heads, -1)).view(batch, heads, blocks, width)
    start = None  # the first rank of each block's document
    if fresh is not None:
        start = -(none + 1) * fresh.to(torch.int64).cumsum(1)[:, None, :, None]
        best = best + start
    best, step = _least(best, size), 1
    while step < blocks:
        lists = min(max(2, RANKS_AT_ONCE // best.shape[3]), -(-blocks // step))
        before = pad(best, (0, 0, (lists - 1) * step, 0), value=none)
        row, head, block, one = before.stride()
        shape = (batch, heads, blocks, lists, best.shape[3])
        best = torch.as_strided(before, shape, (row, head, block, step * block, one))
        best = _least(best.flatten(3), size)
        step *= lists
    if carried is not None:
        before = rank.gather(2, torch.where(carried < 0, none, carried))[:, :, None]
        best = _least(torch.cat([before.expand(-1, -1, blocks, -1), best], dim=3), size)
    if start is not None:
        best = (best - start).clamp_max(none)  # drops the keys of earlier documents
    held = pad(order, (0, 1), value=-1).gather(2, best.flatten(2)).view_as(best)
    return pad(held, (size - held.shape[3], 0), value=-1).sort(-1).values


@torch.no_grad()
def evicted(
    scores: Float[Tensor, "B G K"],
    enters: Int[Tensor, "#B #G K"],
    size: int,
    blocks: int,
    document: Int[Tensor, "#B K"] | None = None,
) -> Int[Tensor, "B G K"]:
    """Return the block of queries at whose beginning each key is evicted from the cache, as `choose` decides.

    A key stays until C keys with higher scores have entered. This takes O(K J) memory: use it for short rows only.

    Args:
        scores: eviction scores. Keys with the highest scores stay; of equal scores, the older key.
        enters: block of a key's document at whose beginning the key enters the cache; J for keys that never do.
        size: C.
        blocks: J, the number of blocks of the longest document.
        document: the document of each key, in order; None: there is only one.

    Returns:
        A block after the one in which the key entered, or that block if the cache does not take the key; J if it stays.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if document is not None:
        document = document[:, None].expand_as(order).gather(2, order)
        order = order.gather(2, document.argsort(dim=-1, stable=True))
    entered = enters.expand_as(order).gather(2, order)[..., None] <= torch.arange(blocks, device=scores.device)
    count = entered.cumsum(2, dtype=torch.int32)  # of a key itself and those with higher scores
    if document is not None:
        document = document.sort(dim=-1).values
        first = torch.searchsorted(document, document)[..., None].expand_as(count)
        count = count - pad(count, (0, 0, 1, 0)).gather(2, first)
    until = torch.empty_like(order).scatter_(2, order, (count <= size).sum(-1))
    return until.maximum(enters)


def _least(ranks: Int[Tensor, "*rows M"], size: int) -> Int[Tensor, "*rows m"]:
    return ranks if ranks.shape[-1] <= size else ranks.topk(size, largest=False, sorted=False).values


def held_before(
    held: Int[Tensor, "B G J C"], carried: Int[Tensor, "B G C"] | None, fresh: Bool[Tensor, "#B J"]
) -> Int[Tensor, "B G J C"]:
    """Return the keys in the cache before each block's choice, from those after each choice (`choose`)."""
    first = held.new_full(held[:, :, 0].shape, -1) if carried is None else carried.sort(-1).values
    return torch.cat([first[:, :, None], held[:, :, :-1]], dim=2).masked_fill(fresh[:, None, :, None], -1)


@torch.no_grad()
def written(
    before: Int[Tensor, "*rows C"], after: Int[Tensor, "*rows C"], leaves: Int[Tensor, "*rows w"]
) -> Int[Tensor, "*rows w"]:
    """Return the keys that are written to the linear state in the places of a block that leaves the window; -1: none.

    These are the block's own keys, except those that enter the cache. The evicted keys take their places, in order.
    Evicted keys are no more than entering ones, and older. So the key in a place is never newer than the place, and all
    rules of the state hold (running maximum, decays).

    In a cache of two parts, these are also the keys that the first part passes on to the second.
    """
    ordered = after.sort(-1).values
    out, taken = (before >= 0) & ~_among(ordered, before), _among(ordered, leaves)
    order = out.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    thrown = torch.where(out, before, -1).gather(-1, order)
    nth = (taken.cumsum(-1) - 1).clamp_min(0)
    return torch.where(taken, thrown.gather(-1, nth), leaves)


def _among(ordered: Int[Tensor, "*rows C"], places: Int[Tensor, "*rows M"]) -> Bool[Tensor, "*rows M"]:
    at = torch.searchsorted(ordered, places.contiguous()).clamp_max(ordered.shape[-1] - 1)
    return (ordered.gather(-1, at) == places) & (places >= 0)


def taken(pool: dict[str, Tensor], places: Int[Tensor, "B G M"]) -> dict[str, Tensor]:
    """Return these places of a pool of `keys`, `values`, `position` and more; for place -1, zeros and position -1."""
    there = places >= 0
    found, present = gathered(pool, places.clamp_min(0)), there[..., None]
    for name, x in found.items():
        found[name] = x.masked_fill(~there, -1) if name == "position" else x * repeat_kv(present, x.shape[1])
    return found


def gathered(pool: dict[str, Tensor], places: Int[Tensor, "B G M"]) -> dict[str, Tensor]:
    """Return these places of a pool, as `taken`; no place may be -1."""
    found = {name: at_places(x, places[..., None]) for name, x in pool.items() if name != "position"}
    return found | {"position": pool["position"].expand(*places.shape[:2], -1).gather(2, places)}


def at_places(x: Float[Tensor, "B h P X"], index: Int[Tensor, "B G M 1"]) -> Float[Tensor, "B H M X"]:
    """Return the numbers of `x` at each KV head's places; `x` has 1, G, or a multiple of G heads."""
    heads = max(x.shape[1], index.shape[1])
    x = x if x.shape[1] == heads else x.expand(-1, heads, -1, -1)
    return x.gather(2, repeat_kv(index, heads).expand(-1, -1, -1, x.shape[3]))


def cached_softmax(x: SoftmaxInputs) -> Partial:
    """Return softmax of every query over the cached keys of its block, in O(T C) time and O(T C / w) memory."""
    assert x.cached is not None
    q, k, v, blocks, held, layout = x.q, x.cached.keys, x.cached.values, x.cached.blocks, x.cached.held, x.layout
    dtype, (batch, heads), length = accumulation_dtype(v.dtype), q.shape[:2], layout.length
    before = layout.key_position.shape[1] - length
    at = torch.where(blocks.slots >= before, blocks.slots - before, -1).expand(batch, -1, -1)
    count, width = at.shape[1:]
    per_block = batch * heads * width * held.shape[3]
    step = max(1, SCORES_AT_ONCE[kind(q.device)] // per_block)
    found = []
    for start in range(0, count, step):
        some = slice(start, start + step)
        given = q, k, v, at[:, some], held[:, :, some], x.scaling, x.softcap, dtype
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
        found.append(checkpoint(_of_blocks, *given, use_reentrant=False) if wanted else _of_blocks(*given))
    # Back to the order of the queries. Queries in no block are padding and read nothing.
    place = at.new_full((batch, length + 1), count * width)
    flat = at.flatten(1)
    place = place.scatter(
        1, torch.where(flat >= 0, flat, length), torch.arange(count * width, device=q.device).expand(batch, -1)
    )
    place = place[:, None, :length].expand(-1, heads, -1)
    parts = (pad(torch.cat(part, dim=2).flatten(2, 3), (0, 0, 0, 1)) for part in zip(*found, strict=True))
    num, den, top = (part.gather(2, place[..., None].expand(-1, -1, -1, part.shape[3])) for part in parts)
    return Partial(num, den[..., 0], top[..., 0])


def _of_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Int[Tensor, "B j w"],
    held: Int[Tensor, "B G j C"],
    scaling: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return num [B, H, j, w, D], den and log_scale [B, H, j, w, 1] of the queries of some blocks."""
    heads, groups = q.shape[1], k.shape[1]
    queries = q.gather(2, at.clamp_min(0).flatten(1)[:, None, :, None].expand(-1, heads, -1, q.shape[3])).to(dtype)
    # The query heads of a KV head are concatenated: [B, G, j, r w, D].
    queries = queries.unflatten(2, at.shape[1:]).unflatten(1, (groups, -1)).transpose(2, 3).flatten(3, 4)
    index = held.clamp_min(0).flatten(2)[..., None]
    keys, values = (at_places(x, index).unflatten(2, held.shape[2:]).to(dtype) for x in (k, v))
    scores = (queries * scaling) @ keys.mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill((held < 0)[..., None, :], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    weights = (scores - top).exp()
    found = weights @ values, weights.sum(-1, keepdim=True), top
    return tuple(x.unflatten(3, (-1, at.shape[2])).transpose(2, 3).flatten(1, 2) for x in found)


def merged(a: Partial, b: Partial) -> Partial:
    """Return one softmax over the disjoint keys of both parts (log-sum-exp merge)."""
    top = torch.maximum(_top(a), _top(b))
    top = torch.where(top == -torch.inf, 0, top)
    near, far = ((_top(x) - top).exp() for x in (a, b))
    num = near[..., None] * a.num + far[..., None] * b.num
    return Partial(num, near * a.den + far * b.den, top)


def _top(x: Partial) -> Tensor:
    return torch.where(x.den > 0, x.log_scale, -torch.inf)
