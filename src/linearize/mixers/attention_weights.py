"""Compute the attention weights of a mixer and of softmax, for a block of queries at a time: no T x T matrix.

A weight is the factor of a value in the mixer's output. The mixer's own combination computes it from partials whose
`num` holds the unnormalised weight of each key instead of a sum of values. Weights are differentiable in the parameters
of the linear part and the combination. Softmax weights, and the window's terms, depend on the teacher's q and k alone.

Axes: B batch, H query heads, Hs heads of the state, T slots, C queries of a block, K keys of a block, F features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linearize.configs.feature_maps import RfaMap
from linearize.configs.spans import NoSpan
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer import Mixer
from linearize.ops.block_sizes import kind
from linearize.ops.decays import cumulative
from linearize.ops.heads import repeat_kv
from linearize.ops.layout import SequenceLayout, Tokens
from linearize.ops.partial import Partial
from linearize.ops.reference import exponentials, kernel_weights, softmax_scores, visible_keys

BLOCK_WEIGHTS = {"cpu": 2**18, "cuda": 2**24}  # weights of one block, roughly
MIN_QUERIES = 16  # the least queries of a block, however long the rows are


@dataclass(frozen=True)
class QueryBlock:
    """C adjacent slots as queries, and the K slots that hold all their keys.

    If the mixer is causal, the last C of the K slots are the queries' own.

    Attributes:
        near, far: masks of the keys that each query reads through the window and through the linear part.
        visible: mask of the keys that the teacher's softmax sees.
        has_linear: mask of the queries with far keys.
    """

    queries: slice
    keys: slice
    near: Bool[Tensor, "#B 1 C K"]
    far: Bool[Tensor, "#B 1 C K"]
    visible: Bool[Tensor, "#B 1 C K"]
    has_linear: Bool[Tensor, "#B C"]


def query_blocks(mixer: Mixer, layout: SequenceLayout, batch: int, reach: int | None) -> Iterator[QueryBlock]:
    """Yield blocks of all queries of whole documents, in order.

    Args:
        reach: number of keys that a query of the teacher's softmax sees, its own included; None: all of its document.
    """
    numbers = BLOCK_WEIGHTS[kind(layout.key_position.device)]
    size = max(MIN_QUERIES, numbers // (batch * mixer.shape.num_heads * layout.length))
    yield from (_blocks_below if mixer.causal else _blocks_of_documents)(mixer, layout, size, reach)


def _blocks_below(mixer: Mixer, layout: SequenceLayout, size: int, reach: int | None) -> Iterator[QueryBlock]:
    """Yield blocks of a causal mixer: keys are those of the query's document up to its own."""
    position, document, length = layout.key_position, layout.key_document.contiguous(), layout.length
    first = [0] * length  # for each slot, the first slot of its document in any row
    if not layout.uniform:
        first = torch.searchsorted(document, document).amin(0).tolist()
    for start in range(0, length, size):
        queries, keys = slice(start, min(start + size, length)), slice(first[start], min(start + size, length))
        own = SequenceLayout(position[:, keys], document[:, keys], queries.stop - start)
        near, far = (mask[:, None] for mask in visible_keys(mixer.span, own))
        visible = near | far
        if reach is not None:
            visible &= (own.query_position[:, None, :, None] - own.key_position[:, None, None]) < reach
        yield QueryBlock(queries, keys, near, far, visible, far.any(-1).squeeze(1))


def _blocks_of_documents(mixer: Mixer, layout: SequenceLayout, size: int, reach: int | None) -> Iterator[QueryBlock]:
    """Yield blocks of a bidirectional mixer, whose linear part reads all keys of the query's document."""
    position, document, length = layout.key_position[:, None, None], layout.key_document[:, None, None], layout.length
    for start in range(0, length, size):
        queries = slice(start, min(start + size, length))
        at, own = (x[..., queries].mT for x in (position, document))
        far = (own == document) & (at >= 0) & (position >= 0)
        visible = far if reach is None else far & ((at - position).abs() < reach)
        has_linear = far.any(-1).squeeze(1)
        yield QueryBlock(queries, slice(0, length), torch.zeros_like(far), far, visible, has_linear)


# --- softmax ----------------------------------------------------------------------------------------------------------


def block_scores(inputs: AttnInputs, block: QueryBlock) -> Float[Tensor, "B H C K"]:
    """Return the teacher's logits, scaled and soft-capped, also of keys that a query does not see."""
    k = repeat_kv(inputs.k[:, :, block.keys], inputs.q.shape[1])
    return softmax_scores(inputs.q[:, :, block.queries], k, inputs.scaling, inputs.softcap)


def softmax_weights(scores: Float[Tensor, "B H C K"], mask: Bool[Tensor, "#B 1 C K"]) -> Float[Tensor, "B H C K"]:
    """Return softmax over the keys where `mask` is true; all 0 for queries without such keys."""
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0)


# --- the mixer --------------------------------------------------------------------------------------------------------


def no_distribution(mixer: Mixer) -> str | None:
    """Return the part of the mixer due to which weights are no distribution over keys; None if they are one."""
    config = mixer.config
    if not config.sums:
        return f"normalizer `{config.normalizer.type}`, which makes no weighted mean of the values"
    if isinstance(config.feature_map, RfaMap):
        return "feature_map `rfa`, whose weights can be negative"
    if config.decay is not None and config.decay.per_feature:
        return f"decay `{config.decay.type}`, which weighs every feature of a key differently"
    return None


class Features(NamedTuple):
    """The inputs of the linear part's weights. With decays, the queries' slots are the last C of the K slots.

    Attributes:
        log_decay_sums: cumulative log decays, fp64; a query reads a key times exp of their difference. None: no decay.
        log_scale: logarithm of the factor by which a query's weights were divided; 0 if the combination ignores it.
    """

    phi_q: Float[Tensor, "B H C F"]
    phi_k: Float[Tensor, "B Hs K F"]
    log_decay_sums: Float[Tensor, "B Hs K X"] | None
    log_scale: Float[Tensor, "B H C"]


@dataclass(frozen=True)
class LinearPart:
    """The features and gates of a mixer's linear part on whole documents.

    Attributes:
        tokens: the mixer's slots.
        phi_q, phi_k: features of queries, and of keys as they are written to the state.
        log_scale: as in `Features`.
    """

    mixer: Mixer
    inputs: AttnInputs
    layout: SequenceLayout
    tokens: Tokens
    phi_q: Float[Tensor, "B H T F"]
    phi_k: Float[Tensor, "B Hs T F"]
    log_scale: Float[Tensor, "B H T"]

    @classmethod
    def of(cls, mixer: Mixer, inputs: AttnInputs, layout: SequenceLayout) -> LinearPart:
        """Compute the linear part of a mixer that has one. Call it outside autocast."""
        inputs = inputs.accumulated()
        return cls(mixer, inputs, layout, *mixer.linear_features(inputs, layout))

    def features(self) -> Features:
        """Return the inputs of the weights, for all tokens."""
        log_decay = self.tokens.get("log_decay_k")
        # Steps of sinks count too: weights over all keys need them, and they cancel in other weights.
        sums = None if log_decay is None else cumulative(log_decay, NoSpan(), self.layout)
        return Features(self.phi_q, self.phi_k, sums, self.log_scale)

    def partial(self, features: Features, mask: Bool[Tensor, "#B 1 C K"]) -> Partial:
        """Return the partial of the keys where `mask` is true; `num` are their unnormalised weights, [B, H, C, K]."""
        phi_q, phi_k, sums, log_scale = features
        phi_k = repeat_kv(phi_k, phi_q.shape[1])
        num = kernel_weights(phi_q, phi_k, None if sums is None else repeat_kv(sums, phi_q.shape[1]), mask)
        return Partial(num, num.sum(-1), log_scale)

    def combined(
        self,
        block: QueryBlock,
        scores: Float[Tensor, "B H C K"],
        features: Features,
        linear: Partial,
        parameters: dict[str, Tensor],
    ) -> Float[Tensor, "B H C K"]:
        """Return the mixer's weights on all keys.

        The weight of a learned sink is added to that of the first token of the query's document.

        Args:
            linear: the partial of the far keys, which may be overwritten.
            parameters: those of `mixer.combine`, by name.
        """
        mixer, window = self.mixer, None
        if mixer.span.max_softmax_keys:
            weights, top = exponentials(scores, block.near)
            window = Partial(weights, weights.sum(-1), top)
        if mixer.config.learned_sink:  # one more column, after the keys
            window = None if window is None else _one_column_more(window)
            linear = _one_column_more(linear)
            column = torch.arange(linear.num.shape[-1], device=linear.num.device) == linear.num.shape[-1] - 1
            parameters = parameters | {"sink_value": column.to(linear.num).expand(mixer.shape.num_kv_heads, -1)}
        arguments = window, linear, lambda sums: mixer.normalized(sums, self.inputs), lambda: block.has_linear
        y = torch.func.functional_call(mixer.combine, parameters, arguments)
        if not mixer.config.learned_sink:
            return y
        first = (block.near | block.far).to(torch.uint8).argmax(-1, keepdim=True)
        return y[..., :-1].scatter_add(-1, first.expand_as(y[..., -1:]), y[..., -1:])


def _one_column_more(part: Partial) -> Partial:
    return replace(part, num=torch.nn.functional.pad(part.num, (0, 1)))
