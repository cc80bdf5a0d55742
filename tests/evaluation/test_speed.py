from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from linearize.errors import UserError
from linearize.evaluation import speed
from linearize.evaluation.speed import Spread, break_even, cache_bytes, generation_speed


def test_cache_bytes_of_a_growing_cache_is_the_formula(llama) -> None:
    cache = DynamicCache(config=llama.config)
    assert cache_bytes(cache) == 0
    with torch.no_grad():
        llama(input_ids=torch.zeros(3, 17, dtype=torch.long), past_key_values=cache, use_cache=True)
    layers, batch, kv_heads, length, head_dim, fp32 = 2, 3, 2, 17, 8, 4
    assert cache_bytes(cache) == 2 * layers * batch * kv_heads * length * head_dim * fp32


def test_cache_bytes_finds_nested_tensors_once_and_whole_storages() -> None:
    @dataclass
    class State:
        S: Tensor
        pending: Tensor | None
        more: dict[str, list[Tensor]]

    shared = torch.zeros(100)  # 400 bytes
    layer = SimpleNamespace(state=State(shared, None, {"a": [torch.zeros(10)]}), same=shared, view=shared[:3], n=7)
    assert cache_bytes(SimpleNamespace(layers=[layer, SimpleNamespace(part=torch.zeros(50)[:5])])) == 400 + 40 + 200


def test_break_even_is_the_first_length_where_the_cache_is_larger() -> None:
    assert break_even(state_bytes=1000, kv_bytes_per_token=100) == 11
    assert break_even(state_bytes=999, kv_bytes_per_token=100) == 10
    assert break_even(state_bytes=0, kv_bytes_per_token=100) == 1
    with pytest.raises(ValueError, match="positive"):
        break_even(1000, 0)


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(median=2.5, low=1.0, high=10.0)


def test_models_take_turns_and_the_first_run_does_not_count(llama, monkeypatch) -> None:
    """With a scripted clock: the n-th run of all takes n s for the prompt and 2n s for four tokens."""
    calls: list[str] = []

    models = {name: deepcopy(llama) for name in ("t", "s")}
    for name, model in models.items():
        model.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: calls.append(f"{name}{kwargs['input_ids'].shape[1]}"),
            with_kwargs=True,
        )
    runs = iter(step for n in range(1, 7) for step in (0.0, n, 3.0 * n))
    monkeypatch.setattr(speed, "_now", lambda: next(runs))
    teacher, student = generation_speed(models, [12], new_tokens=4, repeats=2)
    one = [["t12", *["t1"] * 4], ["s12", *["s1"] * 4]]
    assert calls == [*one[0], *one[1], *one[1], *one[0], *one[0], *one[1]]
    assert (teacher.model, student.model) == ("t", "s")
    assert teacher.prefill == Spread(4.5, 4.0, 5.0) and student.prefill == Spread(4.5, 3.0, 6.0)
    assert teacher.decode == Spread(2.25, 2.0, 2.5)


def test_real_runs_report_every_model_at_every_length(llama) -> None:
    speeds = generation_speed({"teacher": llama, "student": llama}, [8, 40], new_tokens=3, repeats=2)
    assert [(s.model, s.prompt_length) for s in speeds] == [
        ("teacher", 8),
        ("student", 8),
        ("teacher", 40),
        ("student", 40),
    ]
    for s in speeds:
        assert 0 < s.prefill.low <= s.prefill.median <= s.prefill.high
        assert 0 < s.decode.low <= s.decode.median <= s.decode.high
        assert s.cache_bytes == 2 * 2 * 2 * 8 * 4 * (s.prompt_length + 3)
    json.dumps([s.to_json() for s in speeds], allow_nan=False)


def test_lengths_beyond_learned_positions_are_refused_beyond_rotary_ones_not(llama) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UserError, match=r"student: expected .* 16 learned positions, found 17"):
        generation_speed({"teacher": llama, "student": gpt2}, [4, 14], new_tokens=3, repeats=1)
    assert len(generation_speed({"student": gpt2}, [4, 13], new_tokens=3, repeats=1)) == 2
    assert len(generation_speed({"teacher": llama}, [260], new_tokens=1, repeats=1)) == 1
