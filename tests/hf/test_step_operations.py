"""A step of one token is few operations, which is what it costs where models are small or a GPU waits for its host."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from linearize import Recipe, convert
from linearize.configs.mixer import HeadwiseConfig
from linearize.demo.corpus import teacher_path
from linearize.hf.convert import convert_layers
from linearize.training.memory import head_mixer
from tests.hf.decoders import DECODERS
from tests.hf.models import HEADS, Case, random_tokens, student_of, teacher_of

WINDOW = {"mixer.span": dict(type="sliding", window_size=6)}


MOST = {"opt": 1.65}  # whose own layers do least: no RoPE, no gate; 1.5 for all others


@torch.no_grad()
def operations_of_a_step(model: PreTrainedModel, prompt: int = 40, steps: int = 1) -> float:
    """What torch's profiler counts, views among them; of several steps, the mean."""
    cache = DynamicCache(config=model.config)
    model(random_tokens(1, prompt), past_key_values=cache)
    model(random_tokens(1, 1), past_key_values=cache)  # the layers share their counts from here on
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            model(random_tokens(1, 1), past_key_values=cache)
    return sum(event.name.startswith("aten::") for event in seen.events()) / steps


@pytest.mark.parametrize("architecture", sorted(DECODERS))
def test_a_window_costs_no_more_than_the_teacher(architecture: str) -> None:
    teacher = teacher_of(Case("", architecture))
    student = student_of(Case(f"{architecture}-window", architecture, window_only=True, overrides=WINDOW))
    found, softmax = operations_of_a_step(student), operations_of_a_step(teacher)
    assert found < 1.25 * softmax, (found, softmax)


@pytest.mark.parametrize("architecture", sorted(DECODERS))
def test_a_linear_part_costs_half_a_layer_at_most(architecture: str) -> None:
    teacher, student = teacher_of(Case("", architecture)), student_of(Case(architecture, architecture))
    found, softmax = operations_of_a_step(student), operations_of_a_step(teacher)
    assert found < MOST.get(architecture, 1.5) * softmax, (found, softmax)


def test_the_bundled_teacher_with_a_linear_part_in_every_layer() -> None:
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path(), dtype=torch.float32).eval()
    softmax = operations_of_a_step(teacher)
    found = operations_of_a_step(convert(teacher, Recipe.load("lolcats", {})))
    assert found < 1.5 * softmax, (found, softmax)


def test_the_bundled_teacher_with_allocated_memory() -> None:
    """As in the recipe `recommended`: a KV cache with eviction in every head, with a part for recall where needed."""
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path(), dtype=torch.float32).eval()
    recall = [192, 0, 0, 0, 0, 0, 0, 0, 0, 384, 192, 0]
    heads = [head_mixer(16, 41, 4, pairs) for pairs in recall]
    student = convert_layers(teacher, tuple(HeadwiseConfig.of(heads[2 * i : 2 * i + 2]) for i in range(6)))
    softmax, found = (operations_of_a_step(model, prompt=500, steps=16) for model in (teacher, student))
    assert found < 1.5 * softmax, (found, softmax)


@torch.no_grad()
def test_layers_share_token_counts_and_forget_them_with_what_was_seen() -> None:
    """What follows from the number of tokens seen is worked out once for all layers: of these tokens, not of others."""
    student = student_of(Case("llama-sliding"))
    cache, other = DynamicCache(config=student.config), DynamicCache(config=student.config)
    ids = random_tokens(2, 10)
    student(ids[:, 1:], past_key_values=cache)
    student(ids[:, :1], past_key_values=cache)
    assert len({id(layer.state.counts) for layer in cache.layers}) == 1
    cache.reset()
    # As many slots, and fewer tokens in one row.
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, :7] = 0
    for past in (cache, other):
        student(ids, attention_mask=mask[:, :10], past_key_values=past)
    found, expected = (student(ids[:, :1], attention_mask=mask, past_key_values=x).logits for x in (cache, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_groups_of_heads_share_token_counts() -> None:
    student = student_of(Case("llama-heads", overrides={"heads": HEADS}))
    cache = DynamicCache(config=student.config)
    student(random_tokens(1, 9), past_key_values=cache)
    counts = [part.counts for layer in cache.layers for part in getattr(layer.state, "parts", [layer.state])]
    assert len(counts) > len(cache.layers) and len(set(map(id, counts))) == 1
