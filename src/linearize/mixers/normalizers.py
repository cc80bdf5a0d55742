"""Modules that normalize the linear part's sums, by config. H query heads, D head dimension.

They leave the window alone, so that a window with every key is exactly softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linearize.configs.mixer_parts import GroupNormalizer, NoNormalizer, NormalizerConfig, RmsNormalizer, SumNormalizer
from linearize.configs.shape import LayerShape
from linearize.mixers.inputs import AttnInputs
from linearize.ops.partial import Partial


class NoParameters(nn.Module):
    """A part without parameters."""

    def __init__(self, config: Any, shape: LayerShape) -> None:
        super().__init__()
        self.config = config

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""


def divided(num: Float[Tensor, "B H T D"], den: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T D"]:
    """Return num / den, in place unless a gradient is wanted: fresh memory can cost as much as the division."""
    return num / den[..., None] if num.requires_grad or den.requires_grad else num.div_(den[..., None])


class SumNorm(NoParameters):
    def forward(self, linear: Partial, inputs: AttnInputs, min_denominator: float) -> Float[Tensor, "B H T D"]:
        den = linear.den.clamp_min(min_denominator)
        if den.requires_grad:  # without keys 0 / 1: the gradient of 0 / min_denominator would be too large
            den = torch.where(linear.den == 0, 1, den)
        return divided(linear.num, den)


class NoNorm(NoParameters):
    def forward(self, linear: Partial, inputs: AttnInputs, min_denominator: float) -> Float[Tensor, "B H T D"]:
        return linear.num


class GroupNorm(NoParameters):
    def forward(self, linear: Partial, inputs: AttnInputs, min_denominator: float) -> Float[Tensor, "B H T D"]:
        return _over_root_mean_square(linear.num - linear.num.mean(-1, keepdim=True), self.config.eps)


class RmsNorm(nn.Module):
    def __init__(self, config: RmsNormalizer, shape: LayerShape) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(shape.num_heads, shape.head_dim))
        self.gate_weight = None
        if config.output_gate:
            self.gate_weight = nn.Parameter(torch.empty(shape.hidden_size, shape.num_heads * shape.head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1)
        if self.gate_weight is not None:
            bound = len(self.gate_weight) ** -0.5
            self.gate_weight.uniform_(-bound, bound)

    def forward(self, linear: Partial, inputs: AttnInputs, min_denominator: float) -> Float[Tensor, "B H T D"]:
        num = linear.num
        y = _over_root_mean_square(num, self.config.eps) * self.weight.to(num.dtype)[:, None]
        if self.gate_weight is None:
            return y
        if inputs.hidden is None:
            raise ValueError("AttnInputs.hidden: expected the layer's input, which the output gate reads; found None")
        gate = inputs.hidden.to(num.dtype) @ self.gate_weight.to(num.dtype)
        return y * nn.functional.silu(gate.unflatten(-1, (num.shape[1], -1)).transpose(1, 2))


def _over_root_mean_square(x: Float[Tensor, "B H T D"], eps: float) -> Float[Tensor, "B H T D"]:
    """Return x / sqrt(mean x^2 + eps), dividing x by its greatest value first, since its squares could overflow."""
    greatest = x.detach().abs().amax(-1, keepdim=True).clamp_min(1)
    x = x / greatest
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps / greatest.square())


NORMALIZERS: dict[type[NormalizerConfig], Callable[[Any, LayerShape], nn.Module]] = {
    SumNormalizer: SumNorm,
    NoNormalizer: NoNorm,
    GroupNormalizer: GroupNorm,
    RmsNormalizer: RmsNorm,
}
