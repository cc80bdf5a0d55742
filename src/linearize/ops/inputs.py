"""Inputs of the operations: the softmax part and the linear part of one call.

Axes: B rows, T queries, K key slots whose last T are the queries' own, H query heads, G KV heads, Hk heads of phi_k,
D head dimension, F features, X 1 or F numbers of a decay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.configs.spans import Span
from linearize.ops.kernel import Kernel
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import Partial


@dataclass(frozen=True)
class Blocks:
    """The blocks of each row, in order. B is 1 if all rows have the same.

    Attributes:
        slots: the slot of each key of a block, -1 for none.
        leaves: whether the block `span.blocks` earlier leaves the window when this one begins.
        fresh: whether a document begins with the block, so that the cache is empty.
    """

    slots: Int[Tensor, "B J w"]
    leaves: Bool[Tensor, "B J"]
    fresh: Bool[Tensor, "B J"]


@dataclass(frozen=True)
class CachedPairs:
    """Pairs that a KV cache with eviction holds for each block of queries.

    Attributes:
        keys, values: a pool of P pairs.
        blocks: the queries of each block.
        held: places in the pool of the pairs in the cache, -1 for none.
    """

    keys: Float[Tensor, "B G P D"]
    values: Float[Tensor, "B G P D"]
    blocks: Blocks
    held: Int[Tensor, "B G J C"]


@dataclass(frozen=True)
class SoftmaxInputs:
    """Softmax of softcap * tanh(q.k * scaling / softcap) over each query's window and sinks, as `span` defines them.

    Attributes:
        cached: further pairs that queries read, from a KV cache with eviction.
    """

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K D"]
    span: Span
    layout: SequenceLayout
    scaling: float
    softcap: float | None = None
    cached: CachedPairs | None = None


@dataclass(frozen=True)
class LinearState:
    """S and z up to lo(n) - 1, the last key that the last query n could read, with the decays up to that step.

    For terraced spans `next_S` and `next_z` are the same sums some keys further. They replace S and z when the next
    block of queries begins. Each step adds one key to them, so all steps cost the same.
    """

    S: Float[Tensor, "B Hk F D"]
    z: Float[Tensor, "B Hk F"]
    next_S: Float[Tensor, "B Hk F D"] | None = None
    next_z: Float[Tensor, "B Hk F"] | None = None

    def named_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state, by the name of its field."""
        following = {} if self.next_S is None or self.next_z is None else {"next_S": self.next_S, "next_z": self.next_z}
        return {"S": self.S, "z": self.z} | following


@dataclass(frozen=True)
class LinearInputs:
    """Linear attention over the keys below each query's window, as `span` defines them (`reference.linear_scan`).

    Attributes:
        phi_q: None if only the state after the last token is wanted.
        beta: of the delta rule (`reference.delta_values`); None: keys are added.
        log_decay_k, log_decay_v: of each step, <= 0, on the axis of features and of values.
        kernel: makes features of phi_q and phi_k; then there are no decays.
        state: of the keys before the first slot.
    """

    phi_q: Float[Tensor, "B H T F"] | None
    phi_k: Float[Tensor, "B Hk K F"]
    v: Float[Tensor, "B _ K D"]
    span: Span
    layout: SequenceLayout
    beta: Float[Tensor, "B Hk K 1"] | None = None
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None
    log_decay_v: Float[Tensor, "#B Hk K D"] | None = None
    kernel: Kernel | None = None
    state: LinearState | None = None

    @property
    def vector_decays(self) -> bool:
        """Return whether each feature or each value decays at a rate of its own."""
        return self.log_decay_v is not None or (self.log_decay_k is not None and self.log_decay_k.shape[-1] > 1)

    def queries(self) -> Float[Tensor, "B H T F"]:
        """Return phi_q, which must not be None."""
        assert self.phi_q is not None
        return self.phi_q

    def with_values(self, v: Float[Tensor, "B Hk K D"]) -> LinearInputs:
        """Return the inputs with the values that the delta rule writes in place of v, and without beta."""
        return replace(self, v=v, beta=None)


class Parts(NamedTuple):
    """The parts of an output, and the state after the last token; None for a missing part and a state not kept."""

    window: Partial | None
    linear: Partial | None
    state: LinearState | None


class Quotient(NamedTuple):
    """An output (g num_w + num_l) / (g den_w + den_l) of window and linear part (LoLCATs eq. 7), or of one alone.

    Attributes:
        factor: g before the sigmoid; None: there is only one part.
        least: lower bound of the denominator.
    """

    factor: Float[Tensor, " H"] | None
    least: float
