"""Attention weights as matrices, of teacher and student, a block of queries of one row at a time.

`linearize.evaluation.fidelity` says what "teacher" and "student" are, and which q, k and v both read.

A causal mixer's weights are read off the mixer without knowing its parts: its output is linear in the values, so values
that are 1 for one key and 0 for the others give the weight of that key. Heads that have a part of a mixer of their own
are read part by part. One call does that for D keys in each of P rows
of a batch, and the mixer's own carried state takes these rows from one block of queries to the next. Nothing larger
than H x C x K exists, for C = 64 queries and the K slots back to the start of the first query's document. An encoder's
are the products of its features, for K all slots of the row. Padding is left out of a row before anything is counted.

Axes: B rows, H query heads, G KV heads, T slots of a row, C queries, K keys, D head dimension, N rows, L tokens each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linearize.configs.feature_maps import RfaMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import DeltaUpdate, NoNormalizer
from linearize.evaluation.fidelity import Visit
from linearize.hf.attention import sliding_window
from linearize.mixers.attention_weights import Features, LinearPart
from linearize.mixers.eviction_cache import SCORES, CachedKeys, EvictionScorer, cached_keys
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer import Mixer
from linearize.mixers.normalizers import NoNorm, SumNorm
from linearize.ops.layout import SequenceLayout

QUERIES = 64  # of a block
CANCELLED = 1e-6


@dataclass(frozen=True)
class WeightBlock:
    """Weights of C neighbouring queries of one row on all keys that one of them sees; fp32, or fp64 for fp64 models.

    Attributes:
        row: in the sample.
        queries, keys: slots of that row, padding left out; the keys end with the last query, an encoder's with the row.
        following: how many blocks of the row follow this one.
        scores: the logits of the teacher's softmax, q.k scaled and soft-capped, of unseen keys too.
        teacher: softmax weights; each row sums to 1.
        student: what the mixer multiplies each value by. A normaliser that is not linear in the values (group and RMS
            norm) counts as the number by which it makes that token's output longer or shorter. Where a decay weighs
            each value differently, the weight of the key in slot t is that of its value t mod D.
        seen: the key stands in the query's document, and not behind it, but in an encoder. All weights are 0 elsewhere.
        linear: the mixer reads the key through its linear part (the window and the linear part share no key).
        distance: tokens from key to query; 0 is the query's own. In an encoder, to either side.
    """

    row: int
    queries: slice
    keys: slice
    following: int
    scores: Float[Tensor, "H C K"]
    teacher: Float[Tensor, "H C K"]
    student: Float[Tensor, "H C K"]
    seen: Bool[Tensor, "C K"]
    linear: Bool[Tensor, "H C K"]
    distance: Int[Tensor, "C K"]

    def divided(self) -> Float[Tensor, "H C K"]:
        """The student's weights, each row over the absolute value of its sum (SUPRA App. A).

        0 where that sum is none: below 1e-6 of what the weights come to without their signs, so mere rounding.
        """
        total, mass = self.student.sum(-1, keepdim=True).abs(), self.student.abs().sum(-1, keepdim=True)
        return torch.where(total > CANCELLED * mass, self.student / total, 0)


def never_negative(config: MixerConfig | None) -> bool:
    """Whether no weight of such a mixer can be negative, so that a row over its sum is a distribution."""
    if config is None or config.feature_map is None:
        return True
    signed = config.feature_map.signed or isinstance(config.feature_map, RfaMap)
    return not signed and not isinstance(config.update, DeltaUpdate)


def weight_blocks(visit: Visit) -> Iterator[WeightBlock]:
    """All queries of the layer's rows, row by row, in order."""
    mixer, reach = visit.module.mixer, sliding_window(visit.module)
    for row in range(len(visit.inputs.q)):
        inputs, layout = _alone(visit.inputs.accumulated(), visit.layout, row)
        length, device = inputs.q.shape[2], inputs.q.device
        position, document = layout.query_position[0].cpu(), layout.query_document[0].cpu()
        parts = list(mixer.parts())
        # By KV head: whose heads a part has, one after the other.
        order = torch.tensor([head for heads, _ in parts for head in heads], device=device).argsort()
        read = (_read(part, inputs.heads(heads), layout, position, document) for heads, part in parts)
        for found in zip(*read, strict=True):
            queries, keys = found[0][:2]
            student, linear = (
                torch.cat([x[place] for x in found]).unflatten(0, (len(order), -1))[order].flatten(0, 1)
                for place in (2, 3)
            )
            distance = torch.arange(queries.start, queries.stop)[:, None] - torch.arange(keys.start, keys.stop)
            seen = document[queries, None] == document[keys]
            seen, distance = (seen & (distance >= 0), distance) if mixer.causal else (seen, distance.abs())
            seen, distance = seen.to(device), distance.to(device)
            linear = linear & seen
            visible = seen if reach is None else seen & (distance < reach)
            scores, teacher = _softmax_weights(inputs, queries, keys, visible)
            following = (length - 1) // QUERIES - queries.start // QUERIES
            yield WeightBlock(
                visit.first_row + row, queries, keys, following, scores, teacher, student, seen, linear, distance
            )


def _read(
    mixer: Any, inputs: AttnInputs, layout: SequenceLayout, position: Int[Tensor, " T"], document: Int[Tensor, " T"]
) -> Iterator[tuple[slice, slice, Float[Tensor, "h C K"], Bool[Tensor, "h C K"]]]:
    """(queries, keys, weights, whether they are the linear part's) of each block of one row, of one part's heads."""
    stretch, cached = _stretch(mixer, inputs, layout), None
    if mixer.feature_map is not None and mixer.config.cache is not None:
        tokens = {"keys": inputs.k, "values": inputs.v, SCORES: mixer.scorer.of_keys(inputs)}
        cached = cached_keys(mixer.config, mixer.scorer, tokens, layout, None)
    read = _probed(mixer, inputs, position, document) if mixer.causal else _multiplied(mixer, inputs, layout)
    for keys, queries, weights in read:
        linear = torch.full(weights.shape[1:], mixer.feature_map is not None)
        if mixer.causal and mixer.feature_map is not None:
            key_at, lowest = position[keys], mixer.span.lo(position[queries, None])
            linear = (key_at < lowest) & (key_at >= mixer.span.sinks)
        linear = linear.to(weights.device).expand_as(weights)
        if cached is not None:
            exact = _read_from_cache(cached, torch.arange(queries.start, queries.stop, device=weights.device))[
                0, :, :, keys
            ]
            linear = linear & ~exact.repeat_interleave(len(weights) // len(exact), dim=0)
        if stretch is not None:
            weights = weights * torch.where(linear, stretch[0, :, queries, None], 1)
        yield queries, keys, weights, linear


def _read_from_cache(cached: CachedKeys, queries: Int[Tensor, " N"]) -> Bool[Tensor, "B G N K"]:
    """Return which slots each query reads from the cache, without the pairs of the earlier cache."""
    batch, heads, _, size = cached.held.shape
    width, slots = cached.blocks.slots.shape[2], cached.pool["position"].shape[2] - cached.before
    mine = cached.blocks.slots.expand(batch, -1, -1).flatten(1)[:, None] == queries[:, None]
    block = mine.to(torch.uint8).argmax(-1) // width
    held = cached.held.gather(2, block[:, None, :, None].expand(-1, heads, -1, size)) - cached.before
    seen = torch.zeros(*held.shape[:3], slots + 1, dtype=torch.bool, device=held.device)
    return seen.scatter(3, torch.where(held >= 0, held, slots), True)[..., :slots]


def _alone(inputs: AttnInputs, layout: SequenceLayout | None, row: int) -> tuple[AttnInputs, SequenceLayout]:
    """One row by itself, without its padding."""
    tokens = inputs.q.shape[2]
    part = _row(inputs, row, slice(0, tokens), inputs.v[row : row + 1])
    if layout is None:
        return part, SequenceLayout.full(tokens, inputs.q.device)
    at = row if len(layout.key_position) > 1 else 0
    position, document = layout.query_position[at : at + 1], layout.query_document[at : at + 1]
    valid = position[0] >= 0
    if bool(valid.all()):
        return part, SequenceLayout(position, document, tokens)

    def kept(x: Tensor, axis: int) -> Tensor:
        return x.index_select(axis, valid.nonzero().squeeze(1))

    def pair(x: tuple[Tensor, Tensor] | None, axis: int) -> tuple[Tensor, Tensor] | None:
        return None if x is None else (kept(x[0], axis), kept(x[1], axis))

    q, k, v = (kept(x, 2) for x in (part.q, part.k, part.v))
    hidden = None if part.hidden is None else kept(part.hidden, 1)
    both = {"unrotated": pair(part.unrotated, 2), "rope": pair(part.rope, 1)}
    layout = SequenceLayout(kept(position, 1), kept(document, 1), int(valid.sum()))
    return replace(part, q=q, k=k, v=v, hidden=hidden, **both), layout


def _softmax_weights(
    inputs: AttnInputs, queries: slice, keys: slice, visible: Bool[Tensor, "C K"]
) -> tuple[Float[Tensor, "H C K"], Float[Tensor, "H C K"]]:
    """Logits, and their softmax over the visible keys."""
    q, k = inputs.q[0, :, queries], inputs.k[0, :, keys]
    scores = (q.unflatten(0, (len(k), -1)) @ k[:, None].mT).flatten(0, 1) * inputs.scaling
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    return scores, scores.masked_fill(~visible, -torch.inf).softmax(-1)


def _stretch(mixer: Any, inputs: AttnInputs, layout: SequenceLayout) -> Float[Tensor, "B H T"] | None:
    """How much longer the normaliser makes the linear part's output of each token; None where it is linear in v."""
    if mixer.feature_map is None or isinstance(mixer.normalizer, SumNorm | NoNorm):
        return None
    linear = mixer.partials(inputs, layout)[1]
    assert linear is not None
    before = linear.num.double().norm(dim=-1)
    after = mixer.normalizer(linear, inputs, mixer.feature_map.min_denominator(before.dtype)).double().norm(dim=-1)
    return (after / before.clamp_min(torch.finfo(before.dtype).tiny)).to(inputs.v.dtype)


def _multiplied(
    mixer: Mixer, inputs: AttnInputs, layout: SequenceLayout
) -> Iterator[tuple[slice, slice, Float[Tensor, "H C K"]]]:
    """(keys, queries, weights) of each block of one row of an encoder; a norm of the output is left to `_stretch`."""
    part = LinearPart.of(mixer, inputs, layout)
    position, document, length = layout.query_position[0], layout.query_document[0], layout.length
    assert bool((position >= 0).all())
    for start in range(0, length, QUERIES):
        queries = slice(start, min(start + QUERIES, length))
        features = Features(part.phi_q[:, :, queries], part.phi_k, None, part.log_scale[:, :, queries])
        linear = part.partial(features, (document[queries, None] == document)[None, None])
        yield slice(0, length), queries, (mixer.normalized(linear, part.inputs) if mixer.config.sums else linear.num)[0]


def _probed(
    mixer: Any, inputs: AttnInputs, position: Int[Tensor, " T"], document: Int[Tensor, " T"]
) -> Iterator[tuple[slice, slice, Float[Tensor, "H C K"]]]:
    """(keys, queries, weights) of each block of one row of a causal mixer.

    Probe i has the values of keys i D .. i D + D - 1. Those whose keys no query sees any more are dropped.
    Its batch has two more rows: one without any values yet, which stands for all to come, and one with the tokens' own,
    whose eviction scores hold for all of them.
    """
    length, width, device = len(position), inputs.v.shape[-1], inputs.v.device
    mixer = copy.deepcopy(mixer)
    if mixer.feature_map is not None and not isinstance(mixer.normalizer, SumNorm | NoNorm):
        mixer.normalizer = NoNorm(NoNormalizer(), mixer.shape)
    if getattr(mixer, "scorer", None) is not None:
        mixer.scorer = _OfLastRow(mixer.scorer)
    if getattr(mixer.combine, "sink_value", None) is not None:  # a learned sink is no key
        mixer.combine.sink_value.data.zero_()
    state, before = None, range(0)
    for start in range(0, length, QUERIES):
        queries = slice(start, min(start + QUERIES, length))
        probes = range((start - int(position[start])) // width, (queries.stop - 1) // width + 1)
        if state is not None:
            index = [i - before.start if i in before else len(before) for i in probes]
            state = state.select(torch.tensor([*index, len(before), len(before) + 1], device=device))
        values = _one_hot([*probes, length], queries, width).to(inputs.v)
        values = values[:, None].expand(-1, inputs.v.shape[1], -1, -1)
        part = _row(inputs, 0, queries, torch.cat([values, inputs.v[:, :, queries]]))
        y, state = mixer.step(part, state, _own_layout(position, document, queries, device))
        before, keys = probes, slice(probes.start * width, queries.stop)
        yield keys, queries, y[:-2].permute(1, 2, 0, 3).flatten(2)[..., : keys.stop - keys.start]


class _OfLastRow(EvictionScorer):
    """Give every row of a batch whose rows differ in values alone the eviction scores of its last row."""

    def __init__(self, scorer: EvictionScorer) -> None:
        nn.Module.__init__(self)
        self.weight, self.recency = scorer.weight, scorer.recency

    def whole(self, of_keys: Tensor, v: Tensor, position: Tensor) -> Tensor:
        return super().whole(of_keys[-1:], v[-1:], position[-1:]).expand(len(v), -1, -1, -1)


def _one_hot(probes: list[int], slots: slice, width: int) -> Float[Tensor, "P C D"]:
    """Values of the slots in each probe: 1 in one place for the slots i D .. i D + D - 1 of probe i, else 0."""
    place = torch.arange(slots.start, slots.stop) - width * torch.tensor(probes)[:, None]
    return (place[..., None] == torch.arange(width)).float()


def _row(inputs: AttnInputs, row: int, slots: slice, values: Float[Tensor, "P G C D"]) -> AttnInputs:
    """The tokens in some slots of one row, once for each of P sets of values."""

    def one(x: Tensor) -> Tensor:
        x = x if len(x) == 1 else x[row : row + 1]
        return x.expand(len(values), *x.shape[1:])

    return replace(inputs.tokens(slots.start, slots.stop).map(one), v=values)


def _own_layout(
    position: Int[Tensor, " T"], document: Int[Tensor, " T"], slots: slice, device: torch.device
) -> SequenceLayout | None:
    """The layout of a piece of a row: document 0 is the one that went before; None where all of it goes on in that."""
    at, own = position[slots], document[slots] - document[max(slots.start - 1, 0)]
    if not own.any():
        return None
    at = torch.where(own == 0, at - at[0], at)
    return SequenceLayout(at[None].to(device), own[None].to(device), len(at))
