"""A step of one token is few operations, which is what it costs where models are small or a GPU waits for its host."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from tests.hf.decoders import DECODERS
from tests.hf.models import HEADS, Case, random_tokens, student_of, teacher_of

WINDOW = {"mixer.span": dict(type="sliding", window_size=6)}


class Operations(TorchDispatchMode):
    """Counts what reaches torch's kernels, views among them."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def operations_of_a_step(model: PreTrainedModel) -> int:
    cache = DynamicCache(config=model.config)
    model(random_tokens(1, 40), past_key_values=cache)
    model(random_tokens(1, 1), past_key_values=cache)  # the layers' clocks are one from here on
    with Operations() as operations:
        model(random_tokens(1, 1), past_key_values=cache)
    return operations.count


@pytest.mark.parametrize("architecture", sorted(DECODERS))
def test_a_window_costs_no_more_than_the_teacher(architecture: str) -> None:
    teacher = teacher_of(Case("", architecture))
    student = student_of(Case(f"{architecture}-window", architecture, window_only=True, overrides=WINDOW))
    found, softmax = operations_of_a_step(student), operations_of_a_step(teacher)
    assert found < 1.5 * softmax, (found, softmax)


@pytest.mark.parametrize("architecture", sorted(DECODERS))
def test_a_linear_part_costs_little_more(architecture: str) -> None:
    teacher, student = teacher_of(Case("", architecture)), student_of(Case(architecture, architecture))
    found, softmax = operations_of_a_step(student), operations_of_a_step(teacher)
    assert found < 2.7 * softmax, (found, softmax)


@torch.no_grad()
def test_layers_share_a_clock_and_forget_it_with_what_was_seen() -> None:
    """What follows from the number of tokens seen is worked out once for all layers: of these tokens, not of others."""
    student = student_of(Case("llama-sliding"))
    cache, other = DynamicCache(config=student.config), DynamicCache(config=student.config)
    ids = random_tokens(2, 10)
    student(ids[:, 1:], past_key_values=cache)
    student(ids[:, :1], past_key_values=cache)
    assert len({id(layer.state.clock) for layer in cache.layers}) == 1
    cache.reset()
    # As many slots, and fewer tokens in one row.
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, :7] = 0
    for past in (cache, other):
        student(ids, attention_mask=mask[:, :10], past_key_values=past)
    found, expected = (student(ids[:, :1], attention_mask=mask, past_key_values=x).logits for x in (cache, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_groups_of_heads_share_a_clock() -> None:
    student = student_of(Case("llama-heads", overrides={"heads": HEADS}))
    cache = DynamicCache(config=student.config)
    student(random_tokens(1, 9), past_key_values=cache)
    clocks = [part.clock for layer in cache.layers for part in getattr(layer.state, "parts", [layer.state])]
    assert len(clocks) > len(cache.layers) and len(set(map(id, clocks))) == 1
