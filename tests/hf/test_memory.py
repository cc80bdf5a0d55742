"""What generation holds does not grow: bytes after 100 tokens and after 10,000."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from linearize.evaluation.speed import cache_bytes
from linearize.hf.cache import LinearizedCacheLayer
from tests.hf.models import CASES, MIXER_CASES, Case, make_student, make_teacher, random_tokens

SHORT, LONG, CHUNK = 100, 10_000, 495


def held(model: PreTrainedModel) -> tuple[DynamicCache, list[tuple[int, list[int]]]]:
    """The cache, and at both lengths the bytes of all of it and of its linearized layers by their own account."""
    ids, cache, measured = random_tokens(1, LONG), DynamicCache(config=model.config), []
    # The last token before each measurement comes alone: a state out of a prompt is laid out more tightly.
    stops = [SHORT - 1, SHORT, *range(SHORT + CHUNK, LONG, CHUNK), LONG - 1, LONG]
    with torch.no_grad():
        for start, stop in zip([0, *stops], stops, strict=False):
            model(ids[:, start:stop], past_key_values=cache, use_cache=True, logits_to_keep=1)
            if stop in (SHORT, LONG):
                own = [layer.nbytes for layer in cache.layers if isinstance(layer, LinearizedCacheLayer)]
                measured.append((cache_bytes(cache), own))
    assert cache.get_seq_length() == LONG
    return cache, measured


def student(case: Case) -> PreTrainedModel:
    teacher = make_teacher(case.architecture, num_hidden_layers=2, hidden_size=16, num_attention_heads=2, head_dim=8)
    return make_student(case, teacher.float())


# With slots of every kind, a running maximum and totals.
MIXED = [case for case in MIXER_CASES if case.name in {"gated-delta-llama", "mix-llama"}]


@pytest.mark.parametrize("case", CASES[:5] + MIXED, ids=lambda case: case.name)
def test_a_linearized_model_s_state_is_constant(case: Case) -> None:
    cache, (short, long) = held(student(case))
    assert short == long
    total, layers = long
    # The layers share what says how many tokens were seen. A step leaves its own slot's storage behind it, at most.
    own = sum(layers) - cache.layers[0].state.seen.nbytes * (len(cache.layers) - 1)
    slots = [x for layer in cache.layers for x in layer.state.slots.values()]
    assert own <= total <= own + sum(x.shape[1] * x.shape[3] * x.element_size() for x in slots)
    assert all(
        layer.nbytes == sum(t.numel() * t.element_size() for t in layer.state.tensors()) for layer in cache.layers
    )


def test_only_the_softmax_layers_of_a_mixed_model_grow() -> None:
    _, ((short, linearized_short), (long, linearized_long)) = held(student(replace(CASES[1], keep_softmax=(0,))))
    assert linearized_short == linearized_long
    assert len(linearized_long) == 1
    kv_bytes_per_token = 2 * 2 * 8 * 4  # keys and values, KV heads, head dimension, fp32
    assert long - short == (LONG - SHORT) * kv_bytes_per_token
