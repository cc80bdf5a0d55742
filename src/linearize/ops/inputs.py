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
    """The blocks of each row, in order: [B, J], B being 1 where all rows are alike.

    Attributes:
        slots: [B, J, w], the slot of each of a block's keys, -1 where there is none.
        leaves: whether the block `span.blocks` before leaves the window now.
        fresh: whether a document begins with the block, whose cache is empty.
    """

    slots: Int[Tensor, "B J w"]
    leaves: Bool[Tensor, "B J"]
    fresh: Bool[Tensor, "B J"]


@dataclass(frozen=True)
class CachedPairs:
    """Pairs that a KV cache with eviction holds for each block of queries.

    Attributes:
        keys, values: a pool of P pairs.
        blocks: which queries each block has.
        held: places in the pool, -1 where there is none.
    """

    keys: Float[Tensor, "B G P D"]
    values: Float[Tensor, "B G P D"]
    blocks: Blocks
    held: Int[Tensor, "B G J C"]


@dataclass(frozen=True)
class SoftmaxInputs:
    """Softmax of softcap * tanh(q.k * scaling / softcap) over the keys that `span` gives each query to its window.

    Attributes:
        cached: pairs that a query reads besides, from a KV cache with eviction.
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
    """S and z as of the last key that the last query could read, at lo(n) - 1, with the decays up to that step.

    For terraced spans `next_S` and `next_z` are the same recurrence some keys further: they become readable as a whole
    when the next block of queries begins, and one key is added to them per step, so a step costs the same at any
    position.
    """

    S: Float[Tensor, "B Hk F D"]
    z: Float[Tensor, "B Hk F"]
    next_S: Float[Tensor, "B Hk F D"] | None = None
    next_z: Float[Tensor, "B Hk F"] | None = None

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state, by the name of its field."""
        following = {} if self.next_S is None or self.next_z is None else {"next_S": self.next_S, "next_z": self.next_z}
        return {"S": self.S, "z": self.z} | following


@dataclass(frozen=True)
class LinearInputs:
    """Linear attention over the keys that `span` gives each query to the linear part (`reference.linear_scan`).

    Attributes:
        phi_q: None where only the state after the last token is wanted.
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
        """Return whether features or values decay each at their own rate."""
        return self.log_decay_v is not None or (self.log_decay_k is not None and self.log_decay_k.shape[-1] > 1)

    def queries(self) -> Float[Tensor, "B H T F"]:
        """phi_q, which there must be."""
        assert self.phi_q is not None
        return self.phi_q

    def with_values(self, v: Float[Tensor, "B Hk K D"]) -> LinearInputs:
        """The inputs with what the delta rule writes in the place of v."""
        return replace(self, v=v, beta=None)


class Parts(NamedTuple):
    """The parts of an output, None where there is none, and the state after the last token where it is kept."""

    window: Partial | None
    linear: Partial | None
    state: LinearState | None


class Quotient(NamedTuple):
    """An output (g num_w + num_l) / (g den_w + den_l) of window and linear part (LoLCATs eq. 7), or of one alone.

    Attributes:
        factor: g before the sigmoid, where there are both.
        least: the denominator is no less.
    """

    factor: Float[Tensor, " H"] | None
    least: float
