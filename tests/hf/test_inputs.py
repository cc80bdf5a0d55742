"""What a layer hands its mixer: the teacher's own q, k, v to the bit, and the hidden states and RoPE on request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.hf import attention
from linearize.hf.attention import linearized_layers, observed, replaced_mixers, softmax_output
from linearize.hf.classes import ATTENTION_CLASSES
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer_state import MixerState, TokenCounts
from linearize.ops.layout import SequenceLayout
from tests.hf import checks
from tests.hf.models import ARCHITECTURES, Case, make_student, make_teacher, random_tokens, student_of, teacher_of

WITH_ROPE = [name for name in ARCHITECTURES if name != "gpt2"]
every = pytest.mark.parametrize("architecture", ARCHITECTURES)


class Recorder(nn.Module):
    """Keeps what it is handed; its output is a function of q and v, so that layers above see what they get."""

    def __init__(self, wants_hidden: bool, wants_unrotated: bool) -> None:
        super().__init__()
        self.wants_hidden, self.wants_unrotated = wants_hidden, wants_unrotated
        self.seen: list[AttnInputs] = []

    def forward(self, inputs: AttnInputs, layout: SequenceLayout | None = None) -> Tensor:
        self.seen.append(inputs)
        return inputs.q + inputs.v.repeat_interleave(inputs.q.shape[1] // inputs.v.shape[1], dim=1)

    def step(self, inputs: AttnInputs, state: Any, layout: SequenceLayout | None = None) -> tuple[Tensor, Any]:
        return self(inputs, layout), MixerState({}, TokenCounts(torch.zeros(len(inputs.q), dtype=torch.int64)))


@torch.no_grad()
def record(model: PreTrainedModel, *inputs: Tensor, wants: bool = True, **options: Any) -> list[AttnInputs]:
    """What each layer hands a mixer that wants everything, or nothing, in order of calls."""
    recorders: list[Recorder] = []

    def make(_: nn.Module) -> Any:
        recorders.append(Recorder(wants, wants))
        return recorders[-1]

    with replaced_mixers(model, make):
        model(*inputs, **options)
    return [inputs for recorder in recorders for inputs in recorder.seen]


def positions(*starts: int, length: int = 14) -> Tensor:
    return torch.stack([torch.arange(start, start + length) for start in starts])


@every
def test_hidden_states_are_what_enters_the_projections(architecture: str) -> None:
    student, ids, entered = make_student(Case("", architecture), make_teacher(architecture)), random_tokens(2, 9), []
    for layer in linearized_layers(student).values():
        projection = layer.c_attn if architecture == "gpt2" else layer.v_proj
        projection.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    found = record(student, ids)
    assert len(found) == len(entered) == 3
    assert all(torch.equal(inputs.hidden, x) for inputs, x in zip(found, entered, strict=True))


@pytest.mark.parametrize("architecture", WITH_ROPE)
def test_unrotated_inputs_are_before_rope_and_after_norms(architecture: str) -> None:
    student, ids = student_of(Case("", architecture)), random_tokens(2, 14)
    layers = linearized_layers(student).values()
    for layer, inputs in zip(layers, record(student, ids, position_ids=positions(0, 5)), strict=True):
        assert [x.shape for x in inputs.rope] == [(2, 14, 8)] * 2
        for unrotated, rotated, name in zip(inputs.unrotated, (inputs.q, inputs.k), "qk", strict=True):
            expected = getattr(layer, f"{name}_proj")(inputs.hidden).unflatten(-1, (-1, 8))
            if architecture == "qwen3":
                expected = getattr(layer, f"{name}_norm")(expected)
            assert torch.equal(unrotated, expected.transpose(1, 2))
            # RoPE as complex numbers: dimension d and d + 4 turn by the angle n 10000^(-d / 4).
            angle = positions(0, 5)[:, None, :, None] * 10000 ** (-torch.arange(4, dtype=torch.float64) / 4)
            turned = torch.complex(*unrotated.split(4, -1)) * torch.polar(torch.ones_like(angle), angle)
            # transformers takes the cosines in fp32.
            checks.assert_close(rotated, torch.cat([turned.real, turned.imag], -1), 1e-5)
            assert not torch.allclose(rotated, unrotated)


def test_a_model_without_rope_has_nothing_unrotated() -> None:
    for inputs in record(student_of(Case("", "gpt2")), random_tokens(2, 9)):
        assert inputs.hidden is not None
        assert inputs.unrotated is inputs.rope is None


def test_rope_is_not_applied_twice() -> None:
    """An attention that rotates by another name raises, where its mixer reads queries and keys before RoPE."""

    class Renamed(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    with pytest.raises(TypeError, match="Renamed: expected an attention whose forward calls apply_rotary_pos_emb"):
        attention._without_rope(Renamed.forward)(Renamed(), hidden=torch.zeros(1))


def test_another_name_of_the_cache_is_refused() -> None:
    """transformers 5.24 calls it `cache`."""

    class Newer(nn.Module):
        def forward(self, hidden_states: Tensor, cache: object = None) -> Tensor:
            return hidden_states

    with pytest.raises(UserError, match=r"transformers: expected 5\.17 to 5\.23, found \d.*; install another version"):
        type("LinearizedNewer", (attention.LinearizedAttention, Newer), {})


@every
def test_inputs_of_cached_steps_are_slices_of_all_inputs(architecture: str) -> None:
    student, ids = student_of(Case("", architecture)), random_tokens(2, 9)
    whole = record(student, ids)
    cache, found = DynamicCache(config=student.config), []
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        found.append(record(student, ids[:, start:stop], past_key_values=cache, use_cache=True))
    for index, expected in enumerate(whole):
        parts = [step[index] for step in found]
        checks.assert_close(torch.cat([part.hidden for part in parts], dim=1), expected.hidden)
        checks.assert_close(torch.cat([part.k for part in parts], dim=2), expected.k)
        if architecture != "gpt2":
            checks.assert_close(torch.cat([part.unrotated[1] for part in parts], dim=2), expected.unrotated[1])
            checks.assert_close(torch.cat([part.rope[0] for part in parts], dim=1), expected.rope[0])


@every
def test_arguments_by_name_and_in_order_are_the_same(architecture: str) -> None:
    """A layer finds hidden states, RoPE and the cache wherever they come."""
    student = student_of(Case("", architecture))
    layer = next(iter(linearized_layers(student).values()))
    hidden = torch.randn(1, 5, 32, dtype=torch.float64)
    rope = tuple(torch.randn(1, 5, 8, dtype=torch.float64) for _ in range(2))
    caches, recorder = [DynamicCache(config=student.config) for _ in range(3)], Recorder(True, True)
    with torch.no_grad(), replaced_mixers(student, lambda _: recorder):
        if architecture == "gpt2":
            layer(hidden, caches[0], None)
            layer(hidden, past_key_values=caches[1], attention_mask=None)
            layer(hidden_states=hidden, past_key_values=caches[2], attention_mask=None)
        else:
            layer(hidden, rope, None, caches[0])
            layer(hidden, rope, attention_mask=None, past_key_values=caches[1])
            layer(hidden_states=hidden, position_embeddings=rope, attention_mask=None, past_key_values=caches[2])
    assert [cache.get_seq_length() for cache in caches] == [5, 5, 5]
    for inputs in recorder.seen:
        assert inputs.hidden is hidden
        assert torch.equal(inputs.k, recorder.seen[0].k)
        if architecture != "gpt2":
            assert inputs.rope == rope


@every
def test_attention_transfer_s_target_is_the_teacher(architecture: str) -> None:
    """Softmax outputs of q and k that were rotated apart from the parent's forward."""
    case = Case("", architecture)
    student, ids = student_of(case), random_tokens(2, 20)
    with torch.no_grad(), replaced_mixers(student, lambda _: Recorder(True, True)), observed(student, softmax_output):  # type: ignore[arg-type]
        found = student(ids, use_cache=False).logits
    assert torch.equal(found, checks.uncached(teacher_of(case), ids))


@pytest.mark.parametrize("architecture", WITH_ROPE)
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_changes_no_bit(architecture: str, autocast: bool) -> None:
    teacher = make_teacher(architecture).float() if autocast else make_teacher(architecture).bfloat16()
    student, ids = linearize.convert(teacher, Case("", architecture).recipe()), random_tokens(2, 14)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        plain, asked = record(student, ids, wants=False), record(student, ids)
    for expected, found in zip(plain, asked, strict=True):
        assert found.q.dtype == expected.q.dtype
        assert torch.equal(found.q, expected.q) and torch.equal(found.k, expected.k)


# --- these tests can fail ---------------------------------------------------------------------------------------------


def rotated_twice(patch: pytest.MonkeyPatch) -> None:
    for linearized in ATTENTION_CLASSES.values():
        patch.setattr(linearized, "unrotated_forward", linearized.__mro__[2].forward)


def not_rotated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "_teacher_module", lambda _: SimpleNamespace(apply_rotary_pos_emb=lambda q, k, *_: (q, k)))


@pytest.mark.parametrize("mutant", [rotated_twice, not_rotated])
@pytest.mark.parametrize("architecture", WITH_ROPE)
def test_wrong_rotations_are_noticed(architecture: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    student_of(Case("", architecture))  # made before it is broken
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_unrotated_inputs_are_before_rope_and_after_norms(architecture)
