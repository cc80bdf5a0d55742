"""The causal mixer: softmax over a span and linear attention below it, combined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linearize import config as cfg
from linearize.config import MixerConfig
from linearize.mixers.combine import COMBINES
from linearize.mixers.feature_maps import FEATURE_MAPS
from linearize.mixers.state import MixerState, keep_slots
from linearize.ops import (
    Layout,
    LinearState,
    NoSpan,
    SlidingSpan,
    Span,
    TerracedSpan,
    linear_scan,
    linear_state,
    linear_step,
    window_softmax,
    window_step,
)
from linearize.ops.layout import context_positions
from linearize.ops.partial import accumulation_dtype


@dataclass(frozen=True)
class AttnInputs:
    """What an attention layer hands its mixer, after its own projections, QK-norm and RoPE.

    `scaling` and `softcap` are the model's own; softmax scores are softcap * tanh(q.k * scaling / softcap).
    """

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B G T D"]
    v: Float[Tensor, "B G T D"]
    scaling: float
    softcap: float | None = None


class LinearMixer(nn.Module):
    """Window + linear attention, or either alone, as its config says.

    With a window of at least T tokens the output equals softmax attention exactly.
    """

    def __init__(self, config: MixerConfig, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.span = build_span(config.span)
        self.feature_map = None
        if config.feature_map is not None:
            feature_map = FEATURE_MAPS[type(config.feature_map)]
            self.feature_map = feature_map(config.feature_map, num_heads, num_kv_heads, head_dim)
        self.combine = COMBINES[type(config.combine)](config.combine, num_heads)

    def reset_parameters(self) -> None:
        """Initialise every parameter as the config says."""
        if self.feature_map is not None:
            self.feature_map.reset_parameters()
        self.combine.reset_parameters()

    def forward(self, inputs: AttnInputs, layout: Layout | None = None) -> Float[Tensor, "B H T D"]:
        """Outputs for whole documents, without a state. `layout` None: one full document per row."""
        layout = Layout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        with torch.autocast(inputs.q.device.type, enabled=False):
            phi_k = None if self.feature_map is None else self.feature_map.k(inputs.k)
            return self._attend(inputs, inputs.k, inputs.v, phi_k, layout, None)

    def step(
        self, inputs: AttnInputs, state: MixerState | None, layout: Layout | None = None
    ) -> tuple[Float[Tensor, "B H T D"], MixerState]:
        """Outputs and the next state. Any number of tokens; a single one costs the same at every position.

        `layout` None: every row's tokens are valid and go on in its document.
        """
        with torch.autocast(inputs.q.device.type, enabled=False):
            if state is not None and layout is None and inputs.q.shape[2] == 1:
                return self._one_token(inputs, state)
            return self._prefill(inputs, state, layout)

    def _attend(
        self, inputs: AttnInputs, k: Tensor, v: Tensor, phi_k: Tensor | None, layout: Layout, state: LinearState | None
    ) -> Tensor:
        window = linear = None
        if self.span.max_lag or self.span.sinks:
            window = window_softmax(
                inputs.q, k, v, span=self.span, scaling=inputs.scaling, softcap=inputs.softcap, layout=layout
            )
        if self.feature_map is not None:
            phi_q = self.feature_map.q(inputs.q)
            linear = linear_scan(phi_q, phi_k, v, span=self.span, layout=layout, state=state)
        return self.combine(window, linear).to(inputs.v.dtype)

    def _prefill(
        self, inputs: AttnInputs, state: MixerState | None, layout: Layout | None
    ) -> tuple[Tensor, MixerState]:
        k, v = inputs.k, inputs.v
        layout = Layout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        if state is not None:
            layout = layout.with_context(state.seen, self.span)
            k, v = torch.cat([state.keys.to(k.dtype), k], dim=2), torch.cat([state.values.to(v.dtype), v], dim=2)
        phi_k = linear = before = None
        if self.feature_map is not None:
            before = None if state is None else state.linear
            phi_k = self.feature_map.k(k)
            linear = linear_state(phi_k, v, span=self.span, layout=layout, state=before)
        y = self._attend(inputs, k, v, phi_k, layout, before)
        keys, values = keep_slots(k, v, layout, self.span)
        return y, MixerState(keys, values, layout.count.expand(len(k)).clone(), linear)

    def _one_token(self, inputs: AttnInputs, state: MixerState) -> tuple[Tensor, MixerState]:
        span, sinks, position = self.span, self.span.sinks, state.seen
        k, v = (
            torch.cat([x.to(new.dtype), new], dim=2) for x, new in ((state.keys, inputs.k), (state.values, inputs.v))
        )
        window = linear = None
        if span.max_lag or sinks:
            slots = torch.cat([context_positions(position, span), position[:, None]], dim=1)
            seen = (slots >= 0) & ((slots >= span.lo(position)[:, None]) | (slots < sinks))
            window = window_step(inputs.q, k, v, seen=seen, scaling=inputs.scaling, softcap=inputs.softcap)
        after = state.linear
        if self.feature_map is not None:
            assert state.linear is not None
            entering = k.shape[2] - 1 - span.fold_lag
            k_in, v_in = k[:, :, entering : entering + 1], v[:, :, entering : entering + 1]
            phi_q, phi_k = self.feature_map.q(inputs.q), self.feature_map.k(k_in)
            linear, after = linear_step(phi_q, phi_k, v_in, span=span, position=position, state=state.linear)
        keys, values = (_shift(x, sinks, position - span.context) for x in (k, v))
        y = self.combine(window, linear).to(inputs.v.dtype)
        return y, MixerState(keys, values, state.seen + 1, after)

    def state_like(self, inputs: AttnInputs) -> MixerState:
        """The empty state for inputs of this shape: what stands before the first token."""
        batch, groups, _, head_dim = inputs.k.shape
        slots = self.span.sinks + self.span.context
        empty = inputs.k.new_zeros(batch, groups, slots, head_dim)
        seen = torch.zeros(batch, dtype=torch.int64, device=inputs.k.device)
        linear = None
        if self.feature_map is not None:
            heads = len(self.feature_map.key_weight)
            dtype = accumulation_dtype(inputs.v.dtype)
            S = inputs.v.new_zeros(batch, heads, self.feature_map.feature_dim, head_dim, dtype=dtype)
            pending = (S, S[..., 0]) if isinstance(self.span, TerracedSpan) else (None, None)
            linear = LinearState(S, S[..., 0], *pending)
        return MixerState(empty, empty, seen, linear)


def _shift(x: Float[Tensor, "B G S D"], sinks: int, leaving: Tensor) -> Tensor:
    """Slots after one more token; the token that leaves the recent ones fills its sink slot if it is a sink."""
    kept = x[:, :, sinks + 1 :]
    if not sinks:
        return kept
    is_slot = (torch.arange(sinks, device=x.device) == leaving[:, None])[:, None, :, None]
    return torch.cat([torch.where(is_slot, x[:, :, sinks : sinks + 1], x[:, :, :sinks]), kept], dim=2)


def build_span(config: cfg.NoSpan | cfg.SlidingSpan | cfg.TerracedSpan) -> Span:
    """The ops-level span that a span config describes."""
    return SPANS[type(config)](**config.model_dump(exclude={"type"}))


SPANS: dict[type, type[NoSpan] | type[SlidingSpan] | type[TerracedSpan]] = {
    cfg.NoSpan: NoSpan,
    cfg.SlidingSpan: SlidingSpan,
    cfg.TerracedSpan: TerracedSpan,
}
