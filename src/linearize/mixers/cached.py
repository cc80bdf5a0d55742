"""The exact cache within a mixer: what it holds for each block of queries, and for one more token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.mixers.config import MixerConfig
from linearize.mixers.exact_cache import ExactCache
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer_state import MixerState, Tokens
from linearize.ops.attention_received import Attention, received
from linearize.ops.exact_cache import Blocks, Worth, best, choose, cut, taken
from linearize.ops.layout import Layout, TerracedSpan, context_positions
from linearize.ops.partial import accumulation_dtype

RECEIVED = "received"  # attention, of slots of window and cache: sums over the queries so far


class CachedKeys(NamedTuple):
    """What the cache holds for each block of queries, as places in a pool of slots (`keys`, `values`, `position`)."""

    pool: Tokens
    blocks: Blocks
    held: Int[Tensor, "B G J C"]
    received: Float[Tensor, "B G P"] | None  # attention, up to the last token

    def last(self) -> Tokens:
        """What it holds after the last token."""
        held = self.held[:, :, -1]
        sums = {} if self.received is None else {RECEIVED: _at(self.received, held)}
        return taken(self.pool, held) | sums

    def sums(self) -> Tokens:
        """What the tokens have received after the last of them, where that is asked for."""
        if self.received is None:
            return {}
        return {RECEIVED: self.received[:, :, self.held.shape[3] :, None]}


def cached_keys(
    config: MixerConfig,
    worth: Worth | None,
    inputs: AttnInputs,
    tokens: Tokens,
    layout: Layout,
    state: MixerState | None,
) -> CachedKeys | None:
    """Of all tokens behind their context; None where there is no cache."""
    cache, span, k, v = config.cache, config.span, tokens["keys"], tokens["values"]
    if cache is None:
        return None
    assert isinstance(span, TerracedSpan)
    position = layout.key_position[:, None].expand(len(k), k.shape[1], -1)
    held = empty_cache(cache, k, v) if state is None else state.exact
    assert held is not None
    pool = _pooled(held, k, v, position)
    blocks = cut(layout, span)
    readers = None
    if cache.keeps is not None:
        sums = torch.cat([held[RECEIVED], tokens[RECEIVED][..., 0]], dim=2)
        how = {"layout": layout, "span": span, "size": cache.size, "keeps": cache.keeps}
        how |= {"scaling": inputs.scaling, "softcap": inputs.softcap}
        readers = Attention(inputs.q, pool["keys"], sums, blocks, **how)
    places = choose(pool["keys"], pool["values"], pool["position"], blocks, span, cache.size, worth, readers)
    return CachedKeys(pool, blocks, places, None if readers is None else readers.sums)


def block_begins(config: MixerConfig, state: MixerState) -> Bool[Tensor, " B"]:
    """Whether a block begins with the next token."""
    assert isinstance(config.span, TerracedSpan)
    return state.seen % config.span.window_size == 0


def cache_of_next(config: MixerConfig, worth: Worth | None, state: MixerState) -> Tokens | None:
    """The cache for one more token: chosen again in rows where a block begins with it; None where there is none."""
    cache, span, exact = config.cache, config.span, state.exact
    if cache is None or exact is None:
        return None
    assert isinstance(span, TerracedSpan)
    begins = block_begins(config, state)
    if not torch.compiler.is_compiling() and not begins.is_meta and not begins.any():
        return exact
    leaving = slice(span.sinks, span.sinks + span.window_size)
    position = context_positions(state.seen, span)[:, leaving]
    position = torch.where((position >= span.sinks) & begins[:, None], position, -1)
    k, v = (state.slots[name][:, :, leaving] for name in ("keys", "values"))
    pool = _pooled(exact, k, v, position[:, None].expand(-1, k.shape[1], -1))
    places = torch.arange(cache.size + span.window_size, device=position.device)
    places = torch.where(pool["position"] >= 0, places, -1)
    sums = None
    if cache.keeps is not None:
        sums = torch.cat([exact[RECEIVED], state.slots[RECEIVED][:, :, leaving, 0]], dim=2)
    rank = worth if sums is None else lambda k, v, position: sums
    assert rank is not None
    held = best(pool["keys"], pool["values"], pool["position"], places, cache.size, rank)
    return taken(pool, held) | ({} if sums is None else {RECEIVED: _at(sums, held)})


@torch.no_grad()
def with_received(
    config: MixerConfig, inputs: AttnInputs, exact: Tokens, tokens: Tokens, seen: Bool[Tensor, "B 1 S"], begins: Tensor
) -> tuple[Tokens, Tokens]:
    """The cache and the tokens after one more query has read what it sees of them; as they are where nobody asks.

    Args:
        begins: [B], whether a block begins with the query.
    """
    if config.cache is None or config.cache.keeps is None:
        return exact, tokens
    size = config.cache.size
    keys = torch.cat([exact["keys"].to(tokens["keys"].dtype), tokens["keys"]], dim=2)
    reads = torch.cat([exact["position"] >= 0, seen.expand(-1, keys.shape[1], -1)], dim=2)[:, :, None]
    more = received(inputs.q, keys.to(exact[RECEIVED].dtype), reads, scaling=inputs.scaling, softcap=inputs.softcap)
    kept = torch.where(begins, config.cache.keeps, 1.0).to(more.dtype)[:, None, None]
    sums = torch.cat([exact[RECEIVED], tokens[RECEIVED][..., 0]], dim=2) * kept + more
    return exact | {RECEIVED: sums[:, :, :size]}, tokens | {RECEIVED: sums[:, :, size:, None]}


def new_sums(cache: ExactCache | None, v: Float[Tensor, "B G T D"]) -> Tokens:
    """What tokens have received before any query has read them, where the cache asks for it."""
    if cache is None or cache.keeps is None:
        return {}
    return {RECEIVED: v.new_zeros(*v.shape[:3], 1, dtype=accumulation_dtype(v.dtype))}


def empty_cache(cache: ExactCache, k: Float[Tensor, "B G T D"], v: Float[Tensor, "B G T D"]) -> Tokens:
    """A cache for keys and values like these that holds nothing."""
    slots = {name: x.new_zeros(*x.shape[:2], cache.size, x.shape[3]) for name, x in (("keys", k), ("values", v))}
    sums = {name: x[..., 0] for name, x in new_sums(cache, slots["values"]).items()}
    return slots | sums | {"position": k.new_full((*k.shape[:2], cache.size), -1, dtype=torch.int64)}


def _at(sums: Float[Tensor, "B G P"], places: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
    """What is at these places, 0 where a place is none."""
    return sums.gather(2, places.clamp_min(0)) * (places >= 0)


def _pooled(held: Tokens, k: Tensor, v: Tensor, position: Int[Tensor, "B G N"]) -> Tokens:
    """The cache's slots, then these."""
    new = {"keys": k, "values": v, "position": position}
    return {name: torch.cat([held[name].to(x.dtype), x], dim=2) for name, x in new.items()}
