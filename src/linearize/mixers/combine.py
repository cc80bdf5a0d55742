"""How the window and the linear part become one output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linearize.config import SharedDenominator, WindowOnly
from linearize.ops import Partial

MIN_DENOMINATOR = 1e-6


class SharedDenominatorCombine(nn.Module):
    """y = (g num_w + num_l) / (g den_w + den_l), g = sigmoid(parameter) per query head (LoLCATs eq. 7)."""

    def __init__(self, config: SharedDenominator, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.window_factor = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init = self.config.window_factor_init
        self.window_factor.fill_(math.log(init / (1 - init)))

    def forward(self, window: Partial | None, linear: Partial) -> Float[Tensor, "B H T D"]:
        """Padding queries, which see no key, give zero."""
        num, den = linear.num, linear.den
        if window is not None:
            g = self.window_factor.to(num.dtype).sigmoid()[:, None]
            num, den = g[..., None] * window.num + num, g * window.den + den
        return num / den.clamp_min(MIN_DENOMINATOR)[..., None]


class WindowOnlyCombine(nn.Module):
    """Softmax over the span and nothing else: the control without a linear part."""

    def __init__(self, config: WindowOnly, num_heads: int) -> None:
        super().__init__()
        self.config = config

    def reset_parameters(self) -> None:
        """Nothing to set: this combination has no parameters."""

    def forward(self, window: Partial, linear: None) -> Float[Tensor, "B H T D"]:
        return window.num / window.den.clamp_min(MIN_DENOMINATOR)[..., None]


COMBINES: dict[type, Callable[..., Any]] = {
    SharedDenominator: SharedDenominatorCombine,
    WindowOnly: WindowOnlyCombine,
}
