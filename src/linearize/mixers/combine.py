"""Modules that combine window and linear part, by config. H query heads, G KV heads, D head dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linearize.base import Config
from linearize.configs.mixer_parts import AbsoluteScale, Add, Mix, SharedDenominator, WindowOnly
from linearize.configs.shape import LayerShape
from linearize.mixers.feature_maps.base import MIN_DENOMINATOR
from linearize.mixers.normalizers import NoParameters, divided
from linearize.ops.heads import repeat_kv
from linearize.ops.partial import Partial, in_dtype

Normalize = Callable[[Partial], Tensor]
HasLinear = Callable[[], Bool[Tensor, "#B T"]]  # returns which queries read keys through the linear part


class WithSink(nn.Module):
    """Base class of combinations that can have a learned sink.

    Attributes:
        sink_logit: [H], None where there is no learned sink.
        sink_value: [G, D], None where there is no learned sink.
    """

    def __init__(self, config: SharedDenominator | WindowOnly, shape: LayerShape) -> None:
        super().__init__()
        self.sink_logit: nn.Parameter | None = None
        self.sink_value: nn.Parameter | None = None
        if config.learned_sink:
            self.sink_logit = nn.Parameter(torch.empty(shape.num_heads))
            self.sink_value = nn.Parameter(torch.empty(shape.num_kv_heads, shape.head_dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the sink to 0; it is later measured on the teacher (`training/learned_sinks`), or trained."""
        for parameter in (self.sink_logit, self.sink_value):
            if parameter is not None:
                parameter.zero_()

    def with_sink(self, part: Partial, sees: Bool[Tensor, "#B #H T"]) -> Partial:
        """Return `part` with the sink as one more key of the queries where `sees` is true. There must be a sink.

        The larger of the sink's logit and log_scale has weight 1, so that no exponential overflows.
        """
        assert self.sink_logit is not None and self.sink_value is not None
        dtype = part.den.dtype
        excess = torch.where(sees, in_dtype(self.sink_logit, dtype)[:, None] - part.log_scale, -torch.inf)
        top = excess.clamp_min(0)
        near, sink = (-top).exp(), (excess - top).exp()
        value = repeat_kv(in_dtype(self.sink_value, dtype)[None, :, None], part.num.shape[1])
        num = torch.addcmul(near[..., None] * part.num, sink[..., None], value)
        return Partial(num, torch.addcmul(sink, near, part.den), part.log_scale + top)


def share_sinks(source: Any, target: Any) -> None:
    """Let a mixer with the same groups of heads share the learned sinks of `source`, if it has sinks."""
    for (_, trained), (_, mixer) in zip(source.parts(), target.parts(), strict=True):
        if isinstance(mixer.combine, WithSink) and mixer.combine.sink_logit is not None:
            mixer.combine.sink_logit, mixer.combine.sink_value = trained.combine.sink_logit, trained.combine.sink_value


class SharedDenominatorCombine(WithSink):
    def __init__(self, config: SharedDenominator, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.config = config
        self.window_factor = nn.Parameter(torch.empty(shape.num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.window_factor.fill_(_logit(self.config.window_factor_init))

    def forward(
        self, window: Partial | None, linear: Partial, normalize: Normalize, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        """Return the combined output; 0 for padding queries, which see no key, as in every combination."""
        if window is None:
            return normalize(linear if self.sink_logit is None else self.with_sink(linear, has_linear()[:, None]))
        window = window if self.sink_logit is None else self.with_sink(window, window.den > 0)
        num, factor = linear.num, self.window_factor
        factor = factor if factor.dtype == num.dtype else factor.to(num.dtype)
        g = factor.sigmoid().view(-1, 1)
        den = torch.addcmul(linear.den, g, window.den)
        g = g[..., None]
        num = num.addcmul(g, window.num) if num.requires_grad else num.addcmul_(g, window.num)
        return normalize(Partial(num, den, linear.log_scale))


class AbsoluteScaleCombine(nn.Module):
    def __init__(self, config: AbsoluteScale, shape: LayerShape) -> None:
        super().__init__()
        self.config = config
        self.offset = nn.Parameter(torch.empty(shape.num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.offset.fill_(self.config.offset_init)

    def forward(
        self, window: Partial | None, linear: Partial, normalize: Normalize, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        """Return the log-sum-exp merge of both parts; without a window, the linear part alone."""
        if window is None:
            return normalize(linear)
        excess = linear.log_scale + self.offset.to(linear.num.dtype)[:, None] - window.log_scale
        excess = torch.where(linear.den > 0, excess, -torch.inf)
        # The larger part keeps its scale, so that no exponential overflows.
        top = (excess + linear.den.clamp_min(torch.finfo(linear.den.dtype).tiny).log()).clamp_min(0).detach()
        near, far = (-top).exp(), (excess - top).exp()
        num = torch.addcmul(near[..., None] * window.num, far[..., None], linear.num)
        return divided(num, torch.addcmul(near * window.den, far, linear.den).clamp_min(MIN_DENOMINATOR))


class MixCombine(nn.Module):
    def __init__(self, config: Mix, shape: LayerShape) -> None:
        super().__init__()
        self.config = config
        self.window_weight = nn.Parameter(torch.empty(shape.num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.window_weight.fill_(_logit(self.config.window_weight_init))

    def forward(
        self, window: Partial, linear: Partial, normalize: Normalize, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        s = self.window_weight.to(linear.num.dtype).sigmoid()[:, None]
        s = torch.where(has_linear()[:, None], s, 1)[..., None]
        return torch.lerp(normalize(linear), _softmax(window), s)


class AddCombine(NoParameters):
    def forward(
        self, window: Partial | None, linear: Partial, normalize: Normalize, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        return normalize(linear) if window is None else _softmax(window) + normalize(linear)


class WindowOnlyCombine(WithSink):
    """Softmax over the window, and over the learned sink if there is one."""

    def __init__(self, config: WindowOnly, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.config = config
        self.reset_parameters()

    def forward(
        self, window: Partial, linear: None, normalize: Normalize, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        return _softmax(window if self.sink_logit is None else self.with_sink(window, window.den > 0))


def _softmax(window: Partial) -> Tensor:
    # den is at least 1, its largest term, except for queries that see no key.
    return divided(window.num, window.den.clamp_min(MIN_DENOMINATOR))


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


COMBINES: dict[type[Config], Callable[[Any, LayerShape], nn.Module]] = {
    SharedDenominator: SharedDenominatorCombine,
    AbsoluteScale: AbsoluteScaleCombine,
    Mix: MixCombine,
    Add: AddCombine,
    WindowOnly: WindowOnlyCombine,
}
