"""Taking tokens back: a state from before the last ones, and what the mixer was fed since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.mixers.inputs import AttnInputs
from linearize.mixers.state import MixerState
from linearize.ops import Layout

RECORDED = 512  # tokens that can be taken back, at the least; assistants propose some tens at a time


@dataclass(frozen=True)
class Step:
    """What one call fed `mixer`."""

    mixer: Any  # a LinearMixer, or what has its `step`
    inputs: AttnInputs
    layout: Layout | None

    @property
    def length(self) -> int:
        return self.inputs.q.shape[2]

    def tokens(self, start: int, stop: int) -> Step:
        """A part of the step's tokens, in storage of its own."""
        layout = None if self.layout is None else Layout.from_valid(self.layout.key_position[:, start:stop] >= 0)
        return Step(self.mixer, self.inputs.tokens(start, stop).map(Tensor.clone), layout)

    def run(self, state: MixerState | None) -> tuple[Float[Tensor, "B H T D"], MixerState]:
        return self.mixer.step(self.inputs, state, self.layout)


@dataclass
class Stretch:
    """Successive steps, and the state before them."""

    before: MixerState | None
    steps: list[Step] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(step.length for step in self.steps)


class Recording:
    """The last tokens of one layer, at least `RECORDED` of them, so that they can be taken back exactly.

    No state can be turned back: a token that was added to it cannot be told from the others. So an earlier state is
    kept beside the inputs of the tokens since, and those that stay are fed to it once more, q, k, v and all, whatever
    the mixer makes of them. Only the last two stretches are kept: memory does not grow with the tokens. A copy starts
    with nothing recorded.
    """

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []

    def __reduce__(self) -> tuple[type[Recording], tuple[()]]:
        return Recording, ()

    @property
    def length(self) -> int:
        """Tokens that can be taken back."""
        return sum(stretch.length for stretch in self.stretches)

    def step(
        self, mixer: Any, inputs: AttnInputs, state: MixerState | None, layout: Layout | None
    ) -> tuple[Float[Tensor, "B H T D"], MixerState]:
        """As `mixer.step`, and recorded: of a long prompt its end."""
        step = Step(mixer, inputs, layout)
        if step.length <= RECORDED:
            return self._recorded(step, state)
        cut = step.length - RECORDED
        head, state = step.tokens(0, cut).run(state)
        self.stretches.clear()
        tail, state = self._recorded(step.tokens(cut, step.length), state)
        return torch.cat([head, tail], dim=2), state

    def _recorded(self, step: Step, state: MixerState | None) -> tuple[Float[Tensor, "B H T D"], MixerState]:
        if not self.stretches or self.stretches[-1].length >= RECORDED:
            self.stretches = [*self.stretches[-1:], Stretch(state)]
        self.stretches[-1].steps.append(step)
        return step.run(state)

    def take_back(self, tokens: int) -> MixerState | None:
        """The state without the last `tokens` tokens, from 1 to `length`; nothing else can be taken back after that."""
        assert 0 < tokens <= self.length
        stay, stretch = self.length - tokens, self.stretches[0]
        if stay >= stretch.length:
            stay, stretch = stay - stretch.length, self.stretches[1]
        self.stretches.clear()
        state = stretch.before
        for step in stretch.steps:
            kept = min(step.length, stay)
            if kept:
                state = (step if kept == step.length else step.tokens(0, kept)).run(state)[1]
            stay -= kept
        return state
