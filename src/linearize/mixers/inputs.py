"""What an attention layer hands its mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from linearize.ops.partial import accumulation_dtype


@dataclass(frozen=True)
class AttnInputs:
    """Queries, keys and values after the layer's own projections, QK-norm and RoPE, and what gates and maps ask for.

    `scaling` and `softcap` are the model's own; softmax scores are softcap * tanh(q.k * scaling / softcap). `hidden` is
    the layer's input; `unrotated` are q and k before RoPE and `rope` its cosines and sines (Llama's convention,
    R <= D), None where the model has no RoPE or the mixer does not ask.
    """

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B G T D"]
    v: Float[Tensor, "B G T D"]
    scaling: float
    softcap: float | None = None
    hidden: Float[Tensor, "B T E"] | None = None
    unrotated: tuple[Float[Tensor, "B H T D"], Float[Tensor, "B G T D"]] | None = None
    rope: tuple[Float[Tensor, "#B T R"], Float[Tensor, "#B T R"]] | None = None

    @property
    def autocast_device(self) -> str:
        """The kind of device whose autocast may be on; the meta device, where costs are counted, has none."""
        return "cpu" if self.q.is_meta else self.q.device.type

    def map(self, fn: Callable[[Tensor], Tensor]) -> AttnInputs:
        """The inputs with `fn` applied to every tensor."""

        def pair(tensors: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
            return None if tensors is None else (fn(tensors[0]), fn(tensors[1]))

        hidden = None if self.hidden is None else fn(self.hidden)
        tensors = {"hidden": hidden, "unrotated": pair(self.unrotated), "rope": pair(self.rope)}
        return replace(self, q=fn(self.q), k=fn(self.k), v=fn(self.v), **tensors)

    def accumulated(self) -> AttnInputs:
        """All of it in fp32, or fp64: what reads a tensor twice should not round its gradient twice."""
        dtype = accumulation_dtype(self.v.dtype)
        return self.map(lambda x: x.to(dtype))

    def tokens(self, start: int, stop: int) -> AttnInputs:
        """The inputs of some tokens."""
        q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
        hidden = None if self.hidden is None else self.hidden[:, start:stop]
        unrotated = None if self.unrotated is None else tuple(x[:, :, start:stop] for x in self.unrotated)
        rope = None if self.rope is None else tuple(x[:, start:stop] for x in self.rope)
        return replace(self, q=q, k=k, v=v, hidden=hidden, unrotated=unrotated, rope=rope)
