"""Softmax over all keys as a mixer, for heads that keep it beside heads that do not."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.configs.shape import LayerShape
from linearize.configs.spans import SlidingSpan
from linearize.mixers.cached import MOST_TOKENS
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer_state import GROWING, Clock, MixerState
from linearize.ops.full import full_softmax
from linearize.ops.layout import Layout, Tokens


class SoftmaxMixer(nn.Module):
    """Exact softmax attention; has no parameters. Its state has a slot for every slot seen: it grows."""

    causal = True
    wants_hidden = wants_unrotated = False
    config = feature_map = gate = combine = None

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape

    def reset_parameters(self) -> None:
        """Nothing: there are none."""

    def forward(self, inputs: AttnInputs, layout: Layout | None = None) -> Float[Tensor, "B H T D"]:
        """Outputs for whole documents, without a state. `layout` None: one full document per row."""
        layout = Layout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        return self._read(inputs, inputs.k, inputs.v, layout)

    def step(
        self, inputs: AttnInputs, state: MixerState | None, layout: Layout | None = None
    ) -> tuple[Float[Tensor, "B H T D"], MixerState]:
        """Outputs and the next state. `layout` None: every row's tokens are valid and go on in its document."""
        new, at = self._with_new(inputs, state, layout)
        y = self._read(inputs, new["all_keys"], new["all_values"], at)
        return y, self._state(inputs, new, at, state, layout)

    def absorb(self, inputs: AttnInputs, state: MixerState | None, layout: Layout | None = None) -> MixerState:
        """Return the state of `step` after these tokens, without their outputs."""
        return self._state(inputs, *self._with_new(inputs, state, layout), state, layout)

    def last_queries(self, inputs: AttnInputs, layout: Layout) -> Int[Tensor, "#B G K"]:
        """Return the position of the last query that reads each key: there is none after which a key is not read."""
        position = layout.key_position
        return position.new_full((len(position), inputs.k.shape[1], position.shape[1]), MOST_TOKENS)

    @staticmethod
    def _with_new(inputs: AttnInputs, state: MixerState | None, layout: Layout | None) -> tuple[Tokens, Layout]:
        """Return all slots with those of the inputs' tokens, and their layout."""
        new = {"all_keys": inputs.k, "all_values": inputs.v}
        at = own = Layout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        if state is not None and (kept := state.slots["all_keys"].shape[2]):
            at = own.with_context(state.seen, SlidingSpan(window_size=kept))
            new = {name: torch.cat([state.slots[name].to(x.dtype), x], dim=2) for name, x in new.items()}
        return new, at

    @staticmethod
    def _state(
        inputs: AttnInputs, new: Tokens, at: Layout, state: MixerState | None, layout: Layout | None
    ) -> MixerState:
        batch, length = len(inputs.q), inputs.q.shape[2]
        if layout is not None:
            return MixerState(_last_document(new, at), Clock(at.count.expand(batch).clone()))
        # They lie as they should: the last tokens last.
        if state is None:
            return MixerState(new, Clock(at.key_position.new_full((batch,), length)))
        return MixerState(new, state.clock.next() if length == 1 else Clock(state.seen + length))

    def state_like(self, inputs: AttnInputs) -> MixerState:
        """The empty state for inputs of this shape."""
        seen = inputs.k.new_zeros(len(inputs.k), dtype=torch.int64)
        return MixerState(
            {name: x[:, :, :0] for name, x in zip(GROWING, (inputs.k, inputs.v), strict=True)}, Clock(seen)
        )

    def _read(self, inputs: AttnInputs, k: Tensor, v: Tensor, layout: Layout) -> Float[Tensor, "B H T D"]:
        return full_softmax(inputs.q, k, v, scaling=inputs.scaling, softcap=inputs.softcap, layout=layout)


def _last_document(slots: Tokens, layout: Layout) -> Tokens:
    """The slots of each row's last document at the end, in order, behind zeros."""
    its = (layout.key_document == layout.last_document) & (layout.key_position >= 0)
    order = its.to(torch.uint8).argsort(dim=1, stable=True)

    def moved(x: Tensor) -> Tensor:
        index = order.expand(len(x), -1)[:, None, :, None].expand_as(x)
        return x.gather(2, index) * its.gather(1, order)[:, None, :, None]

    return {name: moved(x) for name, x in slots.items()}
