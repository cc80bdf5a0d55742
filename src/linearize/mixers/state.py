"""What a mixer carries from call to call: constant in size, whatever the number of tokens seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.ops import Layout, LinearState, Span
from linearize.ops.layout import context_positions


@dataclass(frozen=True)
class MixerState:
    """Key/value slots of the sinks and the window, the linear part's state, and how many tokens were seen.

    All tensors are batch-first and of fixed shape. Slots are ordered: `span.sinks` sinks, then the last `span.context`
    tokens; `seen` alone says which slots are filled, so padding leaves no trace.
    """

    keys: Float[Tensor, "B G S D"]
    values: Float[Tensor, "B G S D"]
    seen: Int[Tensor, " B"]
    linear: LinearState | None

    def map(self, fn: Callable[[Tensor], Tensor]) -> MixerState:
        """The state with `fn` applied to every tensor."""
        linear = self.linear
        if linear is not None:
            pending = (None if x is None else fn(x) for x in (linear.pending_S, linear.pending_z))
            linear = LinearState(fn(linear.S), fn(linear.z), *pending)
        return MixerState(fn(self.keys), fn(self.values), fn(self.seen), linear)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state."""
        found: list[Tensor] = []
        self.map(lambda x: (found.append(x), x)[1])
        return found

    def select(self, index: Int[Tensor, " N"]) -> MixerState:
        """Rows `index` of the batch (beam search, dropping finished rows)."""
        return self.map(lambda x: x.index_select(0, index.to(x.device)))

    def repeat(self, repeats: int) -> MixerState:
        """Every row `repeats` times, side by side."""
        return self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors())


def keep_slots(
    k: Float[Tensor, "B G K D"], v: Float[Tensor, "B G K D"], layout: Layout, span: Span
) -> tuple[Float[Tensor, "B G S D"], Float[Tensor, "B G S D"]]:
    """Keys and values that later queries can still see: each row's sinks and last tokens, zero where there are none."""
    wanted = context_positions(layout.count.expand(len(k)), span)
    same = (layout.key_document == layout.last_document)[:, None, :] & (layout.key_position >= 0)[:, None, :]
    match = same & (layout.key_position[:, None, :] == wanted[:, :, None])
    index, found = match.to(torch.uint8).argmax(-1), match.any(-1)

    def take(x: Tensor) -> Tensor:
        slots = index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, slots) * found[:, None, :, None]

    return take(k), take(v)
