"""The checks of generate() and of states can fail: each is run on a way to break what it guards."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.hf import cache, state
from linearize.hf.cache import LinearizedCacheLayer
from linearize.mixers import LinearMixer, MixerState, Recording
from tests.hf import generation_checks as rows
from tests.hf.test_mutants import (
    Guard,
    beams_not_reordered,
    carrying,
    linear_state_lost,
    nothing_carried,
    padding_ignored,
    reading,
)


def one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    """The first of the rejected tokens stays, though it is counted as gone."""
    take_back = Recording.take_back
    patch.setattr(Recording, "take_back", lambda self, n: take_back(self, n - 1) if n > 1 else take_back(self, n))


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    take_back = Recording.take_back
    patch.setattr(Recording, "take_back", lambda self, n: take_back(self, min(n + 1, self.length)))


def nothing_taken_back(patch: pytest.MonkeyPatch) -> None:
    """Rejected tokens are not counted any more, and that is all."""

    def wrong(layer: LinearizedCacheLayer, count: int) -> None:
        layer.length += count

    patch.setattr(LinearizedCacheLayer, "crop", wrong)


def padding_taken_back_as_tokens(patch: pytest.MonkeyPatch) -> None:
    """Whoever is fed once more is fed without the padding's layout."""
    run = LinearMixer.step
    patch.setattr("linearize.mixers.recording.Call.run", lambda call, state: run(call.mixer, call.inputs, state))


def layers_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "copy", SimpleNamespace(deepcopy=copy.copy))


def tensors_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinearizedCacheLayer, "__deepcopy__", lambda layer, memo: copy.copy(layer), raising=False)


def rows_not_chosen(patch: pytest.MonkeyPatch) -> None:
    """Every fork is one of the first row."""
    select = MixerState.select
    patch.setattr(MixerState, "select", lambda state, index: select(state, torch.zeros_like(index)))


def saved_without(name: str) -> Any:
    """A mutant that forgets one tensor of each state in a file."""

    def mutant(patch: pytest.MonkeyPatch) -> None:
        fill = cache.fill_layer

        def wrong(layer: Any, tensors: dict[str, Tensor], length: int) -> None:
            zeroed = {key: x.zero_() if key.endswith(name) else x for key, x in tensors.items()}
            fill(layer, zeroed, length)

        patch.setattr(state, "fill_layer", wrong)

    mutant.__name__ = f"saved_without_{name}"
    return mutant


GUARDS = [
    Guard(nothing_carried, rows.greedy_by_hand, "llama-mixed"),
    Guard(nothing_carried, rows.assisted, "llama-mixed"),
    Guard(nothing_carried, rows.saved, "llama-mixed", KeyError),
    Guard(carrying(linear_state_lost), rows.sampling_by_hand, "llama-none"),
    Guard(carrying(linear_state_lost), rows.prompt_lookup, "gated-delta-llama"),
    Guard(carrying(linear_state_lost), rows.forked, "llama-none"),
    Guard(reading(padding_ignored), rows.greedy_by_hand, "llama-mixed"),
    Guard(reading(padding_ignored), rows.saved, "llama-none"),
    Guard(beams_not_reordered, rows.beams_finished_early, "qwen3-sinks"),
    Guard(one_token_too_few, rows.assisted, "llama-mixed"),
    Guard(one_token_too_few, rows.prompt_lookup, "qwen3-sinks"),
    Guard(one_token_too_few, rows.taken_back, "gated-delta-llama"),
    Guard(one_token_too_many, rows.taken_back, "performer-qwen3"),
    Guard(nothing_taken_back, rows.assisting, "gated-delta-llama"),
    Guard(nothing_taken_back, rows.taken_back, "llama-mixed"),
    Guard(padding_taken_back_as_tokens, rows.taken_back, "llama-mixed"),
    Guard(layers_shared, rows.forked, "llama-none"),
    Guard(tensors_shared, rows.forked_static, "llama-sliding"),
    Guard(rows_not_chosen, rows.forked, "llama-mixed"),
    Guard(saved_without("linear.S"), rows.saved, "llama-none"),
    Guard(saved_without("seen"), rows.saved, "llama-sliding"),
    Guard(saved_without("maximum"), rows.saved, "performer-qwen3"),
    Guard(saved_without("values"), rows.saved, "llama-mixed"),
]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: f"{g.mutant.__name__}-{g.check.__name__}-{g.case}")
def test_what_is_broken_is_noticed(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    guard.hold(monkeypatch)
