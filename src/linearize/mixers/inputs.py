"""The inputs of a mixer, from its attention layer; and RoPE in Llama's convention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.ops.partial import accumulation_dtype

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AttnInputs:
    """Queries, keys and values after the layer's own projections, QK-norm and RoPE, and further inputs of some mixers.

    Attributes:
        scaling, softcap: the model's own; softmax scores are softcap * tanh(q.k * scaling / softcap).
        hidden: the layer's input; None: the mixer does not read it.
        unrotated: q and k before RoPE; None: the model has no RoPE, or the mixer does not read them.
        rope: cosines and sines of RoPE (Llama's convention, R <= D), or None like `unrotated`.
    """

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B G T D"]
    v: Float[Tensor, "B G T D"]
    scaling: float
    softcap: float | None = None
    hidden: Float[Tensor, "B T E"] | None = None
    unrotated: tuple[Float[Tensor, "B H T D"], Float[Tensor, "B G T D"]] | None = None
    rope: tuple[Float[Tensor, "#B T R"], Float[Tensor, "#B T R"]] | None = None

    def outside_autocast(self) -> AbstractContextManager[object]:
        """Return a context manager that disables autocast; the meta device has no autocast of its own."""
        device = "cpu" if self.q.is_meta else self.q.device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

    def map(self, fn: Callable[[Tensor], Tensor]) -> AttnInputs:
        """Return the inputs with `fn` applied to every tensor."""
        hidden = None if self.hidden is None else fn(self.hidden)
        unrotated, rope = (pair and (fn(pair[0]), fn(pair[1])) for pair in (self.unrotated, self.rope))
        return replace(self, q=fn(self.q), k=fn(self.k), v=fn(self.v), hidden=hidden, unrotated=unrotated, rope=rope)

    def accumulated(self) -> AttnInputs:
        """Return the inputs in fp32, or fp64, so that gradients of tensors that are read twice are rounded once."""
        dtype = accumulation_dtype(self.v.dtype)
        return self.map(lambda x: x.to(dtype))

    def tokens(self, start: int, stop: int) -> AttnInputs:
        """Return the inputs of the tokens start..stop."""
        q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
        hidden = None if self.hidden is None else self.hidden[:, start:stop]
        unrotated = None if self.unrotated is None else tuple(x[:, :, start:stop] for x in self.unrotated)
        rope = None if self.rope is None else tuple(x[:, start:stop] for x in self.rope)
        return replace(self, q=q, k=k, v=v, hidden=hidden, unrotated=unrotated, rope=rope)

    def heads(self, kv_heads: Sequence[int]) -> AttnInputs:
        """Return the inputs of some KV heads and of the query heads that read them."""
        some = partial(some_heads, kv_heads=kv_heads, num_kv_heads=self.k.shape[1])
        unrotated = self.unrotated and (some(self.unrotated[0]), some(self.unrotated[1]))
        return replace(self, q=some(self.q), k=some(self.k), v=some(self.v), unrotated=unrotated)

    def divided(self, partition: Sequence[Sequence[int]]) -> list[AttnInputs]:
        """Return the inputs of each part of a partition of the KV heads."""
        groups = self.k.shape[1]
        if [head for heads in partition for head in heads] != list(range(groups)):
            return [self.heads(heads) for heads in partition]

        def parts(x: Tensor) -> Sequence[Tensor]:  # views, by one operation
            return x.split([len(heads) * x.shape[1] // groups for heads in partition], dim=1)

        alone = [None] * len(partition)
        unrotated = alone if self.unrotated is None else zip(*map(parts, self.unrotated), strict=True)
        tensors = zip(*map(parts, (self.q, self.k, self.v)), unrotated, strict=True)
        return [replace(self, q=q, k=k, v=v, unrotated=pair) for q, k, v, pair in tensors]


def some_heads(x: Float[Tensor, "B h T X"], kv_heads: Sequence[int], num_kv_heads: int) -> Float[Tensor, "B n T X"]:
    """Return the heads of `x` that belong to `kv_heads`, which are in order; a view if they are adjacent."""
    group, runs = x.shape[1] // num_kv_heads, list[tuple[int, int]]()
    for head in kv_heads:
        start = runs.pop()[0] if runs and runs[-1][1] == head else head
        runs.append((start, head + 1))
    slices = [x[:, group * start : group * stop] for start, stop in runs]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)


def apply_rope(x: Float[Tensor, "B h T D"], rope: Rope) -> Float[Tensor, "B h T D"]:
    """Return `x` rotated by cosines and sines [B or 1, T, R], in two halves; dimensions from R on are unchanged."""
    return rotated(x, rope[0][:, None], rope[1][:, None])


def rotated(
    x: Float[Tensor, "B h T D"], cos: Float[Tensor, "#B #h T R"], sin: Float[Tensor, "#B #h T R"]
) -> Float[Tensor, "B h T D"]:
    """Return `x` rotated; each head has its own cosines and sines, or all share them."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = cos.shape[-1] // 2
    first, second = turned[..., :half], turned[..., half:]
    y = turned * cos
    # In place, to save memory: the features of all heads are large.
    y[..., :half].addcmul_(second, sin[..., :half], value=-1)
    y[..., half:].addcmul_(first, sin[..., half:])
    return torch.cat([y, rest], dim=-1) if rest.shape[-1] else y


def map_inputs(rotation: Literal["before", "after", "none"], inputs: AttnInputs) -> tuple[Tensor, Tensor]:
    """Return the queries and keys that a feature map reads: before RoPE unless `rotation` is "before"."""
    if rotation == "before" or inputs.unrotated is None:
        return inputs.q, inputs.k
    return inputs.unrotated
