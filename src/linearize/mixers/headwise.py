"""Mixers of layers whose KV heads are divided among several mixers, and a mixer of softmax over all keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.configs.mixer import HeadwiseConfig
from linearize.configs.shape import LayerShape
from linearize.configs.spans import SlidingSpan
from linearize.mixers.eviction_cache import MOST_TOKENS
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer_state import GROWING, HeadwiseState, MixerState, TokenCounts
from linearize.ops.backend import backend_for
from linearize.ops.full import full_softmax
from linearize.ops.layout import SequenceLayout, Tokens


class SoftmaxMixer(nn.Module):
    """Softmax attention over all keys, without parameters. Its state grows by a slot for every slot seen."""

    causal = softmax_alone = True
    wants_hidden = wants_unrotated = False
    config = feature_map = gate = combine = None

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""

    def forward(self, inputs: AttnInputs, layout: SequenceLayout | None = None) -> Float[Tensor, "B H T D"]:
        """Return outputs for whole documents, without a state. `layout` None: one full document per row."""
        layout = SequenceLayout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        return self._read(inputs, inputs.k, inputs.v, layout)

    def step(
        self, inputs: AttnInputs, state: MixerState | None, layout: SequenceLayout | None = None
    ) -> tuple[Float[Tensor, "B H T D"], MixerState]:
        """Return outputs and the next state. `layout` None: every row's tokens are valid and continue its document."""
        new, at = self._with_new(inputs, state, layout)
        y = self._read(inputs, new["all_keys"], new["all_values"], at)
        return y, self._state(inputs, new, at, state, layout)

    def absorb(self, inputs: AttnInputs, state: MixerState | None, layout: SequenceLayout | None = None) -> MixerState:
        """Return the state of `step` after these tokens, without their outputs."""
        return self._state(inputs, *self._with_new(inputs, state, layout), state, layout)

    def last_queries(self, inputs: AttnInputs, layout: SequenceLayout) -> Int[Tensor, "#B G K"]:
        """Return, for each key, a position beyond all queries: every later query reads it."""
        position = layout.key_position
        return position.new_full((len(position), inputs.k.shape[1], position.shape[1]), MOST_TOKENS)

    @staticmethod
    def _with_new(
        inputs: AttnInputs, state: MixerState | None, layout: SequenceLayout | None
    ) -> tuple[Tokens, SequenceLayout]:
        """Return the state's slots followed by those of the inputs' tokens, and their layout."""
        new = {"all_keys": inputs.k, "all_values": inputs.v}
        at = own = SequenceLayout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        if state is not None and (kept := state.slots["all_keys"].shape[2]):
            at = own.with_context(state.seen, SlidingSpan(window_size=kept))
            new = {name: torch.cat([state.slots[name].to(x.dtype), x], dim=2) for name, x in new.items()}
        return new, at

    @staticmethod
    def _state(
        inputs: AttnInputs, new: Tokens, at: SequenceLayout, state: MixerState | None, layout: SequenceLayout | None
    ) -> MixerState:
        batch, length = len(inputs.q), inputs.q.shape[2]
        if layout is not None:
            return MixerState(_last_document(new, at), TokenCounts(at.count.expand(batch).clone()))
        # The slots are in order already.
        if state is None:
            return MixerState(new, TokenCounts(at.key_position.new_full((batch,), length)))
        return MixerState(new, state.counts.next() if length == 1 else TokenCounts(state.seen + length))

    def state_like(self, inputs: AttnInputs) -> MixerState:
        """Return the empty state for inputs of this shape."""
        seen = inputs.k.new_zeros(len(inputs.k), dtype=torch.int64)
        return MixerState(
            {name: x[:, :, :0] for name, x in zip(GROWING, (inputs.k, inputs.v), strict=True)}, TokenCounts(seen)
        )

    def _read(self, inputs: AttnInputs, k: Tensor, v: Tensor, layout: SequenceLayout) -> Float[Tensor, "B H T D"]:
        return full_softmax(inputs.q, k, v, scaling=inputs.scaling, softcap=inputs.softcap, layout=layout)


def _last_document(slots: Tokens, layout: SequenceLayout) -> Tokens:
    """Move the slots of each row's last document to the end, in order, after zeros."""
    its = (layout.key_document == layout.last_document) & (layout.key_position >= 0)
    order = its.to(torch.uint8).argsort(dim=1, stable=True)

    def moved(x: Tensor) -> Tensor:
        index = order.expand(len(x), -1)[:, None, :, None].expand_as(x)
        return x.gather(2, index) * its.gather(1, order)[:, None, :, None]

    return {name: moved(x) for name, x in slots.items()}


class HeadwiseMixer(nn.Module):
    """Groups of KV heads, each with its own mixer, which reads q, k and v of these heads alone.

    The projections of the layer are shared. The parameters of a group are named `groups.<index>.*`.
    """

    causal = True

    def __init__(self, config: HeadwiseConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.kv_heads = [group.kv_heads for group in config.groups]
        found = sum(map(len, self.kv_heads))
        if found != shape.num_kv_heads:
            raise ValueError(f"groups: expected {shape.num_kv_heads} KV heads, found {found}")
        per_kv_head = shape.num_heads // shape.num_kv_heads
        self.groups = nn.ModuleList()
        for group in config.groups:
            heads = len(group.kv_heads)
            own = replace(shape, num_heads=heads * per_kv_head, num_kv_heads=heads)
            self.groups.append(SoftmaxMixer(own) if group.mixer is None else LinearMixer(group.mixer, own))
        in_groups = [head for heads in self.kv_heads for head in heads]
        self.softmax_alone = all(mixer.softmax_alone for _, mixer in self.parts())
        self._order = [in_groups.index(head) for head in range(found)]

    def reset_parameters(self) -> None:
        """Initialise every parameter as the configs say."""
        for _, mixer in self.parts():
            mixer.reset_parameters()

    def parts(self) -> Iterator[tuple[tuple[int, ...], LinearMixer | SoftmaxMixer]]:
        """Yield the KV heads and the mixer of each group."""
        for heads, mixer in zip(self.kv_heads, self.groups, strict=True):
            assert isinstance(mixer, LinearMixer | SoftmaxMixer)
            yield heads, mixer

    @property
    def wants_hidden(self) -> bool:
        """Return whether `AttnInputs.hidden` is read."""
        return any(mixer.wants_hidden for _, mixer in self.parts())

    @property
    def wants_unrotated(self) -> bool:
        """Return whether `AttnInputs.unrotated` and `.rope` are read, in a model with RoPE."""
        return any(mixer.wants_unrotated for _, mixer in self.parts())

    def forward(self, inputs: AttnInputs, layout: SequenceLayout | None = None) -> Float[Tensor, "B H T D"]:
        """Return outputs for whole documents, without a state. `layout` None: one full document per row."""
        if (y := self._all_heads(inputs, layout)) is not None:
            return y
        each = zip(self.parts(), inputs.divided(self.kv_heads), strict=True)
        return self._joined([mixer(its, layout) for (_, mixer), its in each])

    def step(
        self, inputs: AttnInputs, state: HeadwiseState | None, layout: SequenceLayout | None = None
    ) -> tuple[Float[Tensor, "B H T D"], HeadwiseState]:
        """Return outputs and the next state, from the `step` of each group's mixer."""
        if state is None and (y := self._all_heads(inputs, layout)) is not None:
            return y, self.absorb(inputs, None, layout)
        found = [
            mixer.step(its, None if state is None else state.parts[index], layout)
            for index, ((_, mixer), its) in enumerate(zip(self.parts(), inputs.divided(self.kv_heads), strict=True))
        ]
        return self._joined([y for y, _ in found]), HeadwiseState(tuple(after for _, after in found))

    def _all_heads(self, inputs: AttnInputs, layout: SequenceLayout | None) -> Float[Tensor, "B H T D"] | None:
        """Return the outputs of all heads by one masked softmax; None if this is slower or a group has another part.

        Without linear parts, heads differ only in the last query that reads each key.
        """
        if not (self.softmax_alone and backend_for(inputs.q.device).masks_whole_rows(inputs.q)):
            return None
        layout = SequenceLayout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        with inputs.outside_autocast():
            found = []
            for (_, mixer), own in zip(self.parts(), inputs.divided(self.kv_heads), strict=True):
                found.append(mixer.last_queries(own, layout).expand(len(inputs.k), -1, -1))
            dtype, inputs = inputs.v.dtype, inputs.accumulated() if torch.is_grad_enabled() else inputs
            y = full_softmax(
                inputs.q,
                inputs.k,
                inputs.v,
                scaling=inputs.scaling,
                softcap=inputs.softcap,
                layout=layout,
                last_query=torch.cat(found, dim=1)[:, self._order],
            )
        return y.to(dtype)

    def absorb(
        self, inputs: AttnInputs, state: HeadwiseState | None, layout: SequenceLayout | None = None
    ) -> HeadwiseState:
        """Return the state of `step` after these tokens, without their outputs."""
        before = [None] * len(self.groups) if state is None else state.parts
        each = zip(self.parts(), inputs.divided(self.kv_heads), before, strict=True)
        return HeadwiseState(tuple(mixer.absorb(own, part, layout) for (_, mixer), own, part in each))

    def state_like(self, inputs: AttnInputs) -> HeadwiseState:
        """Return the empty state for inputs of this shape: the state before the first token."""
        return HeadwiseState(tuple(mixer.state_like(inputs.heads(heads)) for heads, mixer in self.parts()))

    def _joined(self, outputs: list[Tensor]) -> Float[Tensor, "B H T D"]:
        """Return the outputs of all groups, in the order of the heads."""
        y = torch.cat(outputs, dim=1)
        if self._order == sorted(self._order):
            return y
        group = self.shape.num_heads // self.shape.num_kv_heads
        return torch.cat([y[:, group * at : group * (at + 1)] for at in self._order], dim=1)
