"""From the sums of window and linear part to one output: scale, normalizer, combination."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linearize.mixers.config import (
    AbsoluteScale,
    Add,
    GroupNormalizer,
    Mix,
    MixerConfig,
    NoNormalizer,
    RmsNormalizer,
    SharedDenominator,
    SumNormalizer,
    WindowOnly,
)
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.shape import LayerShape
from linearize.ops import Partial

MIN_DENOMINATOR = 1e-6
MAX_LOG_SCALE = 30.0  # beyond e^30 one part is all there is, in fp32 too

SCALES: dict[str, Callable[[LayerShape, int], float]] = {
    "none": lambda shape, features: 1.0,
    "head_dim": lambda shape, features: shape.head_dim**-0.5,
    "regla": lambda shape, features: 1 / (math.e * math.sqrt(features * (math.e**2 - 1))),
}


def scale_of(config: MixerConfig, shape: LayerShape, feature_dim: int) -> float:
    """What phi_q . phi_k is multiplied by (`MixerConfig.scale`)."""
    return SCALES[config.scale](shape, feature_dim)


def _divided(num: Float[Tensor, "B H T D"], den: Float[Tensor, "B H T"]) -> Float[Tensor, "B H T D"]:
    """num / den, in place where no gradient is wanted: fresh memory can cost as much as the division."""
    return num / den[..., None] if num.requires_grad or den.requires_grad else num.div_(den[..., None])


# --- normalizers: of the linear part alone, so that a window that holds every key stays exact softmax -----------------


class NoParameters(nn.Module):
    """A part that its config says all about."""

    def __init__(self, config: Any, shape: LayerShape) -> None:
        super().__init__()
        self.config = config

    def reset_parameters(self) -> None:
        """Nothing to set."""


class SumNorm(NoParameters):
    """num / den."""

    def forward(self, linear: Partial, inputs: AttnInputs, min_denominator: float) -> Float[Tensor, "B H T D"]:
        return _divided(linear.num, linear.den.clamp_min(min_denominator))


class NoNorm(NoParameters):
    """num."""

    def forward(self, linear: Partial, inputs: AttnInputs, min_denominator: float) -> Float[Tensor, "B H T D"]:
        return linear.num


class GroupNorm(NoParameters):
    """Each head's values of a token, less their mean, over their standard deviation (SUPRA sec. 3; no affine)."""

    def forward(self, linear: Partial, inputs: AttnInputs, min_denominator: float) -> Float[Tensor, "B H T D"]:
        return _over_root_mean_square(linear.num - linear.num.mean(-1, keepdim=True), self.config.eps)


class RmsNorm(nn.Module):
    """Each head's values of a token over their root mean square, times a learned scale per head and value.

    With an output gate also times swish(W_g x), x the layer's input (GLA).
    """

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
    """x / sqrt(mean x^2 + eps), by way of x over its greatest value: unnormalised sums can be too large to square."""
    greatest = x.detach().abs().amax(-1, keepdim=True).clamp_min(1)
    x = x / greatest
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps / greatest.square())


NORMALIZERS: dict[type, Callable[[Any, LayerShape], nn.Module]] = {
    SumNormalizer: SumNorm,
    NoNormalizer: NoNorm,
    GroupNormalizer: GroupNorm,
    RmsNormalizer: RmsNorm,
}


# --- combinations -----------------------------------------------------------------------------------------------------

Normalize = Callable[[Partial], Tensor]


class SharedDenominatorCombine(nn.Module):
    """y = (g num_w + num_l) / (g den_w + den_l), g = sigmoid(parameter) per query head (LoLCATs eq. 7)."""

    def __init__(self, config: SharedDenominator, shape: LayerShape) -> None:
        super().__init__()
        self.config = config
        self.window_factor = nn.Parameter(torch.empty(shape.num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.window_factor.fill_(_logit(self.config.window_factor_init))

    def forward(
        self, window: Partial | None, linear: Partial, normalize: Normalize, has_linear: Bool[Tensor, "#B T"]
    ) -> Float[Tensor, "B H T D"]:
        """Padding queries, which see no key, give zero; here as in every combination."""
        num, den = linear.num, linear.den
        if window is not None:
            g = self.window_factor.to(num.dtype).sigmoid()[:, None]
            den = torch.addcmul(den, g, window.den)
            num = num.addcmul(g[..., None], window.num) if num.requires_grad else num.addcmul_(g[..., None], window.num)
        return _divided(num, den.clamp_min(MIN_DENOMINATOR))


class AbsoluteScaleCombine(nn.Module):
    """y = (num_w + e^(l - c) num_l) / (den_w + e^(l - c) den_l), l and c the log scales, l with a learned offset."""

    def __init__(self, config: AbsoluteScale, shape: LayerShape) -> None:
        super().__init__()
        self.config = config
        self.offset = nn.Parameter(torch.empty(shape.num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.offset.fill_(self.config.offset_init)

    def forward(
        self, window: Partial | None, linear: Partial, normalize: Normalize, has_linear: Bool[Tensor, "#B T"]
    ) -> Float[Tensor, "B H T D"]:
        """Without a window, its share is 0: the linear part alone."""
        if window is None:
            return normalize(linear)
        excess = linear.log_scale + self.offset.to(linear.num.dtype)[:, None] - window.log_scale
        far = excess.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp()
        num = torch.addcmul(window.num, far[..., None], linear.num)
        return _divided(num, torch.addcmul(window.den, far, linear.den).clamp_min(MIN_DENOMINATOR))


class MixCombine(nn.Module):
    """y = s window + (1 - s) linear, s = sigmoid(parameter) per query head, 1 without linear keys (LOLCAT eq. 8)."""

    def __init__(self, config: Mix, shape: LayerShape) -> None:
        super().__init__()
        self.config = config
        self.window_weight = nn.Parameter(torch.empty(shape.num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.window_weight.fill_(_logit(self.config.window_weight_init))

    def forward(
        self, window: Partial, linear: Partial, normalize: Normalize, has_linear: Bool[Tensor, "#B T"]
    ) -> Float[Tensor, "B H T D"]:
        s = self.window_weight.to(linear.num.dtype).sigmoid()[:, None]
        s = torch.where(has_linear[:, None], s, 1)[..., None]
        return torch.lerp(normalize(linear), _softmax(window), s)


class AddCombine(NoParameters):
    """y = window + linear, each normalised by itself."""

    def forward(
        self, window: Partial | None, linear: Partial, normalize: Normalize, has_linear: Bool[Tensor, "#B T"]
    ) -> Float[Tensor, "B H T D"]:
        return normalize(linear) if window is None else _softmax(window) + normalize(linear)


class WindowOnlyCombine(NoParameters):
    """Softmax over the span and nothing else: the control without a linear part."""

    def forward(
        self, window: Partial, linear: None, normalize: Normalize, has_linear: Bool[Tensor, "#B T"]
    ) -> Float[Tensor, "B H T D"]:
        return _softmax(window)


def _softmax(window: Partial) -> Tensor:
    return _divided(window.num, window.den.clamp_min(MIN_DENOMINATOR))


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


COMBINES: dict[type, Callable[[Any, LayerShape], nn.Module]] = {
    SharedDenominator: SharedDenominatorCombine,
    AbsoluteScale: AbsoluteScaleCombine,
    Mix: MixCombine,
    Add: AddCombine,
    WindowOnly: WindowOnlyCombine,
}
