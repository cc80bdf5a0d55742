"""The checks of conversion and generation can fail: each is run on a way to break what it guards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.configs.spans import SlidingSpan, TerracedSpan
from linearize.hf import attention, cache, conversation, convert, layouts
from linearize.hf.cache import LinearizedCacheLayer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer_state import MixerState, TokenCounts
from linearize.mixers.recording import Recording
from linearize.ops.step import StepContext
from tests.hf import checks
from tests.hf import generation_checks as generation
from tests.hf.models import CASE, student_of

Mutant = Callable[[pytest.MonkeyPatch], None]


def carrying(change: Callable[[MixerState], MixerState]) -> Mutant:
    """A mutant that carries `change(state)` instead of the state."""

    def mutant(patch: pytest.MonkeyPatch) -> None:
        advance = LinearizedCacheLayer.advance
        patch.setattr(
            LinearizedCacheLayer, "advance", lambda layer, state, tokens: advance(layer, change(state), tokens)
        )

    mutant.__name__ = change.__name__
    return mutant


def linear_state_lost(state: MixerState) -> MixerState:
    return replace(state, linear=state.map(torch.zeros_like).linear)


def window_lost(state: MixerState) -> MixerState:
    return replace(state, slots=state.map(torch.zeros_like).slots)


def position_lost(state: MixerState) -> MixerState:
    return replace(state, counts=TokenCounts(torch.zeros_like(state.seen)))


def sinks_lost(state: MixerState) -> MixerState:
    keys = state.slots["keys"].clone()
    keys[:, :, :2] = 0
    return replace(state, slots=state.slots | {"keys": keys})


def pending_lost(state: MixerState) -> MixerState:
    return replace(state, linear=replace(state.linear, next_S=torch.zeros_like(state.linear.next_S)))


def nothing_carried(patch: pytest.MonkeyPatch) -> None:
    """Tokens are counted, and that is all."""

    def wrong(layer: LinearizedCacheLayer, state: MixerState, tokens: int) -> None:
        layer.length += tokens

    patch.setattr(LinearizedCacheLayer, "advance", wrong)


def slot_lost(name: str) -> Callable[[MixerState], MixerState]:
    def change(state: MixerState) -> MixerState:
        return replace(state, slots=state.slots | {name: torch.zeros_like(state.slots[name])})

    change.__name__ = f"{name}_lost"
    return change


def maximum_lost(state: MixerState) -> MixerState:
    return replace(state, maximum=torch.full_like(state.maximum, -torch.inf))


def hidden_states_late(patch: pytest.MonkeyPatch) -> None:
    """Gates read the token before."""
    patch.setattr(attention, "AttnInputs", lambda *args: AttnInputs(*args[:5], args[5].roll(1, dims=1), *args[6:]))


def one_step_window_late(patch: pytest.MonkeyPatch) -> None:
    """The window is off by one, but only where a token comes alone."""
    one_token = LinearMixer._one_token

    def wrong(mixer: LinearMixer, *args: Any) -> Any:
        base = type(mixer.span)
        late = type("Late", (base,), {"lo": lambda span, position: base.lo(span, position) + 1})
        config, span = mixer.config, late(**vars(mixer.span))
        mixer.config = config.model_copy(update={"span": span})
        try:
            return one_token(mixer, *args)
        finally:
            mixer.config = config

    patch.setattr(LinearMixer, "_one_token", wrong)
    patch.setattr(StepContext, "_reads_window", lambda self: False)  # a full window is read whole, whatever `lo` says


def window_late(patch: pytest.MonkeyPatch) -> None:
    """The window is off by one everywhere: consistent with itself, so only softmax attention can tell."""
    for span in (SlidingSpan, TerracedSpan):
        lo = span.lo
        patch.setattr(span, "lo", lambda span, position, lo=lo: lo(span, position) + 1)


def reading(change: Callable[..., dict[str, Any]]) -> Mutant:
    """A mutant that reads padding and documents from changed arguments."""

    def mutant(patch: pytest.MonkeyPatch) -> None:
        read = layouts.read_layout
        patch.setattr(layouts, "read_layout", lambda *args: read(*change(*args)))

    mutant.__name__ = change.__name__
    return mutant


def padding_ignored(mask: Tensor | None, position_ids: Tensor | None, batch: int, length: int) -> tuple:
    return None, None, batch, length


def first_turn_s_mask_read(mask: Tensor | None, position_ids: Tensor | None, batch: int, length: int) -> tuple:
    return None if mask is None else mask[:, :length], position_ids, batch, length


def padding_counted(patch: pytest.MonkeyPatch) -> None:
    """Padding is not attended to, but counts as distance."""
    from_valid = attention.SequenceLayout.from_valid

    def wrong(valid: Tensor) -> Any:
        slot = torch.arange(valid.shape[1]).expand_as(valid)
        return replace(from_valid(valid), key_position=torch.where(valid, slot, -1))

    patch.setattr(attention.SequenceLayout, "from_valid", wrong)


def documents_ignored(mask: Tensor | None, position_ids: Tensor | None, batch: int, length: int) -> tuple:
    return mask, None, batch, length


def beams_not_reordered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinearizedCacheLayer, "reorder_cache", lambda layer, index: None)


def first_rows_selected(patch: pytest.MonkeyPatch) -> None:
    select = MixerState.select
    patch.setattr(MixerState, "select", lambda state, index: select(state, torch.arange(len(index)).clamp_max(2)))


def rows_tiled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MixerState, "repeat", lambda state, repeats: state.map(lambda x: torch.cat([x] * repeats)))


def copies_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinearizedCacheLayer, "__deepcopy__", lambda layer, memo: layer, raising=False)


def reset_forgets_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinearizedCacheLayer, "reset", lambda layer: setattr(layer, "length", 0))


def masks_sized_after_linearized_layers(is_sliding: bool) -> Mutant:
    def mutant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(LinearizedCacheLayer, "is_sliding", is_sliding)

    mutant.__name__ = f"counts_as_{'sliding' if is_sliding else 'full'}"
    return mutant


def softmax_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "linearized_layers", lambda model: {})


def teacher_converted(patch: pytest.MonkeyPatch) -> None:
    """The student is the teacher itself."""

    def itself(teacher: PreTrainedModel, memo: dict[int, Any]) -> PreTrainedModel:
        student_config = memo[id(teacher.config)]
        for module in teacher.modules():
            if hasattr(module, "config"):
                module.config = student_config
        return teacher

    patch.setattr(convert, "copy", SimpleNamespace(deepcopy=itself))


def storage_copied(patch: pytest.MonkeyPatch) -> None:
    def copied(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(parameter.data.clone(), parameter.requires_grad)

    patch.setattr(convert, "_over_the_same_storage", copied)


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
    patch.setattr(conversation, "copy", SimpleNamespace(deepcopy=copy.copy))


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

        def wrong(layer: Any, tensors: dict[str, Tensor], *lengths: int | None) -> None:
            zeroed = {key: x.zero_() if key.endswith(name) else x for key, x in tensors.items()}
            fill(layer, zeroed, *lengths)

        patch.setattr(conversation, "fill_layer", wrong)

    mutant.__name__ = f"saved_without_{name}"
    return mutant


@dataclass(frozen=True)
class Guard:
    """`mutant` must make `check` fail on `case`."""

    mutant: Mutant
    check: checks.Check
    case: str
    error: type[Exception] = AssertionError

    def hold(self, patch: pytest.MonkeyPatch) -> None:
        case = CASE[self.case]
        student_of(case)  # made before it is broken
        patch.setattr(layouts, "first_with_state", lambda _: None)  # by which a mask that does not fit raises at once
        self.mutant(patch)
        with pytest.raises(self.error):
            self.check(case)


WHOLE = replace(CASE["llama-sliding"], overrides={"mixer.span.window_size": 30})
GUARDS = [
    Guard(nothing_carried, generation.in_chunks, "llama-sliding"),
    Guard(nothing_carried, generation.token_by_token, "gpt2-mixed"),
    Guard(nothing_carried, generation.greedy_by_hand, "llama-none"),
    Guard(nothing_carried, generation.next_turn, "llama-sliding"),
    Guard(carrying(linear_state_lost), generation.in_chunks, "qwen3-sinks"),
    Guard(carrying(linear_state_lost), generation.sampling_by_hand, "llama-none"),
    Guard(carrying(window_lost), generation.in_chunks, "llama-window-only"),
    Guard(carrying(window_lost), generation.chunked_prefill, "llama-sliding"),
    Guard(carrying(position_lost), generation.in_chunks, "llama-sliding"),
    Guard(carrying(sinks_lost), generation.in_chunks, "qwen3-sinks"),
    Guard(carrying(pending_lost), generation.token_by_token, "llama-terraced"),
    Guard(carrying(slot_lost("map_keys")), generation.in_chunks, "cosformer-llama"),
    Guard(carrying(slot_lost("map_keys")), generation.token_by_token, "performer-qwen3"),
    Guard(carrying(slot_lost("sin")), generation.token_by_token, "gated-delta-mistral"),
    Guard(carrying(slot_lost("beta")), generation.token_by_token, "gated-delta-gpt2"),
    Guard(carrying(slot_lost("log_decay_k")), generation.beams, "gated-delta-llama"),
    Guard(carrying(slot_lost("log_decay_v")), generation.in_chunks, "fast-decay-llama"),
    Guard(carrying(slot_lost("input_scale")), generation.two_turns, "mix-llama"),
    Guard(carrying(slot_lost("offset")), generation.token_by_token, "performer-gpt2"),
    Guard(carrying(maximum_lost), generation.token_by_token, "regla-llama"),
    Guard(hidden_states_late, generation.token_by_token, "gla-llama"),
    Guard(hidden_states_late, generation.left_padded, "rfa-gpt2"),
    Guard(one_step_window_late, generation.token_by_token, "llama-sliding"),
    Guard(one_step_window_late, generation.token_by_token, "llama-terraced"),
    Guard(one_step_window_late, generation.greedy_by_hand, "gpt2-sliding"),
    Guard(reading(padding_ignored), generation.left_padded, "llama-none"),
    Guard(reading(padding_ignored), generation.interior_padding, "llama-sliding"),
    Guard(reading(first_turn_s_mask_read), generation.two_turns, "llama-sliding"),
    Guard(reading(first_turn_s_mask_read), generation.next_turn, "qwen3-sinks"),
    Guard(padding_counted, generation.interior_padding, "llama-sliding"),
    Guard(reading(documents_ignored), generation.packed, "llama-sliding"),
    Guard(reading(documents_ignored), generation.packed, "gpt2-mixed"),
    Guard(beams_not_reordered, generation.beams, "llama-terraced"),
    Guard(first_rows_selected, generation.rows_selected, "llama-terraced"),
    Guard(rows_tiled, generation.rows_repeated, "llama-terraced"),
    Guard(copies_shared, generation.copied, "llama-sliding"),
    Guard(reset_forgets_the_state, generation.emptied, "llama-sliding"),
    # Here it is torch that notices: the mask does not fit.
    Guard(masks_sized_after_linearized_layers(True), generation.in_chunks, "qwen3-sliding-kept", RuntimeError),
    Guard(masks_sized_after_linearized_layers(False), generation.static_cache, "llama-mixed", RuntimeError),
    Guard(softmax_not_restored, checks.softmax_restored, "llama-sliding"),
    Guard(teacher_converted, checks.teacher_left_alone, "llama-sliding"),
    Guard(storage_copied, checks.teacher_left_alone, "gpt2-sliding"),
    Guard(nothing_carried, generation.greedy_by_hand, "llama-mixed"),
    Guard(nothing_carried, generation.assisted, "llama-mixed"),
    Guard(nothing_carried, generation.saved, "llama-mixed", KeyError),
    Guard(carrying(linear_state_lost), generation.sampling_by_hand, "llama-none"),
    Guard(carrying(linear_state_lost), generation.prompt_lookup, "gated-delta-llama"),
    Guard(carrying(linear_state_lost), generation.forked, "llama-none"),
    Guard(reading(padding_ignored), generation.greedy_by_hand, "llama-mixed"),
    Guard(reading(padding_ignored), generation.saved, "llama-none"),
    Guard(beams_not_reordered, generation.beams_finished_early, "qwen3-sinks"),
    Guard(one_token_too_few, generation.assisted, "llama-mixed"),
    Guard(one_token_too_few, generation.prompt_lookup, "qwen3-sinks"),
    Guard(one_token_too_few, generation.taken_back, "gated-delta-llama"),
    Guard(one_token_too_many, generation.taken_back, "performer-qwen3"),
    Guard(nothing_taken_back, generation.assisting, "gated-delta-llama"),
    Guard(nothing_taken_back, generation.taken_back, "llama-mixed"),
    Guard(padding_taken_back_as_tokens, generation.taken_back, "llama-mixed"),
    Guard(layers_shared, generation.forked, "llama-none"),
    Guard(tensors_shared, generation.forked_static, "llama-sliding"),
    Guard(rows_not_chosen, generation.forked, "llama-mixed"),
    Guard(saved_without("linear.S"), generation.saved, "llama-none"),
    Guard(saved_without("seen"), generation.saved, "llama-sliding"),
    Guard(saved_without("maximum"), generation.saved, "performer-qwen3"),
    Guard(saved_without("values"), generation.saved, "llama-mixed"),
]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: f"{g.mutant.__name__}-{g.check.__name__}-{g.case}")
def test_what_is_broken_is_noticed(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    guard.hold(monkeypatch)


@pytest.mark.parametrize("mutant", [window_late, reading(padding_ignored), reading(documents_ignored)])
def test_what_differs_from_softmax_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.whole_window(WHOLE)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        checks.whole_window(WHOLE)
