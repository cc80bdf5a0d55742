"""Take tokens back: keep a state from before the last tokens, and the inputs of the mixer since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer_state import State
from linearize.ops.layout import SequenceLayout

RECORDED = 512  # the least number of tokens that can be taken back; assistants propose some tens at a time


@dataclass(frozen=True)
class Call:
    """The inputs of `mixer` in one call."""

    mixer: Any  # a LinearMixer, or an object with its `step` and `absorb`
    inputs: AttnInputs
    layout: SequenceLayout | None

    @property
    def length(self) -> int:
        return self.inputs.q.shape[2]

    def tokens(self, start: int, stop: int) -> Call:
        """Return a copy of a part of the call's tokens."""
        layout = (
            None if self.layout is None else SequenceLayout.from_valid(self.layout.key_position[:, start:stop] >= 0)
        )
        return Call(self.mixer, self.inputs.tokens(start, stop).map(Tensor.clone), layout)

    def run(self, state: State | None) -> tuple[Float[Tensor, "B H T D"], State]:
        return self.mixer.step(self.inputs, state, self.layout)

    def absorb(self, state: State | None) -> State:
        return self.mixer.absorb(self.inputs, state, self.layout)


@dataclass
class Replay:
    """An earlier state, and the calls since."""

    before: State | None
    calls: list[Call] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(call.length for call in self.calls)


class Recording:
    """The last tokens of one layer, at least `RECORDED` of them, so that they can be taken back exactly.

    A token cannot be subtracted from a state. So an earlier state is kept with the inputs of all tokens since, and the
    tokens that stay are computed again from there. Only the last two such states are kept, so memory does not grow with
    the tokens. A copy starts with no recorded tokens.
    """

    def __init__(self) -> None:
        self.replays: list[Replay] = []

    def __reduce__(self) -> tuple[type[Recording], tuple[()]]:
        return Recording, ()

    @property
    def length(self) -> int:
        """Return the number of tokens that can be taken back."""
        return sum(replay.length for replay in self.replays)

    def step(
        self, mixer: Any, inputs: AttnInputs, state: State | None, layout: SequenceLayout | None
    ) -> tuple[Float[Tensor, "B H T D"], State]:
        """Return `mixer.step`, and record these tokens; of a long prompt only the last ones."""
        call = Call(mixer, inputs, layout)
        if call.length <= RECORDED:
            return self._recorded(call, state)
        cut = call.length - RECORDED
        head, state = call.tokens(0, cut).run(state)
        self.replays.clear()
        tail, state = self._recorded(call.tokens(cut, call.length), state)
        return torch.cat([head, tail], dim=2), state

    def absorb(self, mixer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> State:
        """Return the state after the first tokens of a document, without outputs, and record them as `step` does."""
        call, cut = Call(mixer, inputs, layout), max(0, inputs.q.shape[2] - RECORDED)
        state = call.tokens(0, cut).absorb(None) if cut else None
        call = call.tokens(cut, call.length) if cut else call
        self.replays.clear()
        self._record(call, state)
        return call.absorb(state)

    def _recorded(self, call: Call, state: State | None) -> tuple[Float[Tensor, "B H T D"], State]:
        self._record(call, state)
        return call.run(state)

    def _record(self, call: Call, state: State | None) -> None:
        if not self.replays or self.replays[-1].length >= RECORDED:
            self.replays = [*self.replays[-1:], Replay(state)]
        self.replays[-1].calls.append(call)

    def take_back(self, tokens: int) -> State | None:
        """Return the state without the last `tokens` tokens (1 to `length`); no more can be taken back after that."""
        assert 0 < tokens <= self.length
        stay, replay = self.length - tokens, self.replays[0]
        if stay >= replay.length:
            stay, replay = stay - replay.length, self.replays[1]
        self.replays.clear()
        state = replay.before
        for call in replay.calls:
            kept = min(call.length, stay)
            if kept:
                state = (call if kept == call.length else call.tokens(0, kept)).absorb(state)
            stay -= kept
        return state
