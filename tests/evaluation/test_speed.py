from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GPT2Config, GPT2LMHeadModel

import linearize
from linearize.base import UserError
from linearize.evaluation import speed
from linearize.evaluation.speed import bench, cache_bytes, generation_speed
from linearize.evaluation.timings import Crossover, Speed, Spread, even, growth, memory_break_even
from linearize.recipe import Recipe
from tests import tiny
from tests.fake_compiler import Compiler


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
    cache: Any = Cache(layers=[])
    cache.layers = [layer, SimpleNamespace(part=torch.zeros(50)[:5])]
    assert cache_bytes(cache) == 400 + 40 + 200


def test_memory_is_even_where_two_straight_lines_meet() -> None:
    """Whether that is within the lengths measured or not."""
    teacher, student = {100: 540, 200: 1040}, {100: 1000, 200: 1000}
    assert growth(teacher) == 5 and growth(student) == 0
    assert memory_break_even(student, teacher) == 193  # 40 bytes and 5 per token: 1000 after 192
    assert memory_break_even({100: 90, 200: 90}, teacher) == 11
    assert memory_break_even({100: 1000, 200: 1200}, teacher) == 254  # 800 and 2 per token
    assert memory_break_even({100: 1000, 200: 1500}, teacher) is None


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(median=2.5, low=1.0, high=10.0)


def test_models_take_turns_and_the_first_run_does_not_count(llama, monkeypatch) -> None:
    """With a scripted clock: the n-th run takes n s for the prompt and 2n s for four tokens; runs 3 to 6 count."""
    calls: list[str] = []

    models = {name: deepcopy(llama) for name in ("t", "s")}
    for name, model in models.items():
        model.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: calls.append(f"{name}{kwargs['input_ids'].shape[1]}"),
            with_kwargs=True,
        )
    runs = iter(step for n in range(3, 7) for step in (0.0, n, 3.0 * n))
    monkeypatch.setattr(speed, "now", lambda: next(runs))
    teacher, student = generation_speed(models, [12], new_tokens=4, repeats=2)
    one = [["t12", *["t1"] * 4], ["s12", *["s1"] * 4]]
    first = ["t12", *one[0], "s12", *one[1]]  # a prompt more, so that what is kept of it is no part of the bytes
    assert calls == [*first, *one[1], *one[0], *one[0], *one[1]]
    assert (teacher.model, student.model) == ("t", "s")
    assert teacher.prefill == Spread(4.5, 4.0, 5.0) and student.prefill == Spread(4.5, 3.0, 6.0)
    assert teacher.decode == Spread(2.25, 2.0, 2.5)


def test_compiled_steps_are_compiled_before_they_are_timed(compiler: Compiler, monkeypatch) -> None:
    """With a scripted clock: two steps take n s, then two more n; the first two, for CUDA graphs, do not count.

    Every length begins anew, or its graph would be another's.
    """
    teacher = tiny.llama()
    models = {"teacher": teacher, "student": linearize.convert(teacher, Recipe.load("elu"))}
    linearize.compile_steps(*models.values())
    resets: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(compiler.steps)))
    compiler.steps.clear()
    runs = iter(step for n in range(1, 9) for step in (0.0, n, 2.0 * n, 3.0 * n))
    monkeypatch.setattr(speed, "now", lambda: next(runs))
    found = generation_speed(models, [5, 7], new_tokens=4, repeats=2)
    # Of each length and model an uncounted run and two counted ones, four steps each; prompts are not compiled.
    assert [step["input_ids"].shape for step in compiler.steps] == [(1, 1)] * (2 * 2 * 3 * 4)
    assert resets == [0, len(compiler.steps) // 2]
    assert [(s.prefill.median, s.decode.median) for s in found] == [(2.5, 1.25)] * 2 + [(6.5, 3.25)] * 2
    assert all(s.compiling is not None and s.compiling > 0 for s in found)
    # The teacher's cache has room for prompt and new tokens, and holds one number: how many it has.
    assert [s.cache_bytes for s in found if s.model == "teacher"] == [
        2 * (2 * 2 * 8 * 4 * (length + 4) + 8) for length in (5, 7)
    ]


def test_every_batch_size_meets_every_length(llama, monkeypatch) -> None:
    """A batch's seconds are not divided by it."""
    seen: list[tuple[int, ...]] = []
    model = deepcopy(llama)
    model.register_forward_pre_hook(lambda *_: seen.append(tuple(_[2]["input_ids"].shape)), with_kwargs=True)
    runs = iter(step for n in range(1, 7) for step in (0.0, n, 3.0 * n))
    monkeypatch.setattr(speed, "now", lambda: next(runs))
    found = generation_speed({"s": model}, [5, 7], batch_sizes=[1, 3, 2], new_tokens=2, repeats=1)
    sizes = [(batch, length) for batch in (1, 3, 2) for length in (5, 7)]
    assert [(s.batch_size, s.prompt_length) for s in found] == sizes and {s.new_tokens for s in found} == {2}
    assert seen == [shape for b, n in sizes for shape in [(b, n), *[(b, n), (b, 1), (b, 1)] * 2]]
    assert [s.prefill.median for s in found] == [s.decode.median for s in found] == [1, 2, 3, 4, 5, 6]


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
        assert s.prefill_bytes is not None and s.prefill_bytes > 2 * 2 * 2 * 8 * 4 * s.prompt_length


def test_lengths_beyond_learned_positions_are_refused_beyond_rotary_ones_not(llama) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UserError, match=r"student: expected .* 16 learned positions, found 17"):
        generation_speed({"teacher": llama, "student": gpt2}, [4, 14], new_tokens=3, repeats=1)
    assert len(generation_speed({"student": gpt2}, [4, 13], new_tokens=3, repeats=1)) == 2
    assert len(generation_speed({"teacher": llama}, [260], new_tokens=1, repeats=1)) == 1


def test_bytes_of_a_batch_of_two_are_the_formulas() -> None:
    """A teacher's keys and values grow; the student's sums (D x D and D) and window of keys and values do not.

    All layers share the position.
    """
    teacher = tiny.llama()
    layers, batch, heads, kv_heads, dim, fp32, position = 2, 2, 4, 2, 8, 4, 8
    sums = dim * (dim + 1) * fp32
    token = 2 * dim * fp32  # key and value of a head
    per_layer = {
        "elu": batch * kv_heads * sums,
        "lolcats": batch * (heads * sums + kv_heads * 8 * token),
    }
    for recipe, held in per_layer.items():
        overrides = {"mixer.span.window_size": 8} if recipe == "lolcats" else {}
        models = {"teacher": teacher, "student": linearize.convert(teacher, Recipe.load(recipe, overrides))}
        found = generation_speed(models, [16, 32], batch_sizes=[batch], new_tokens=2, repeats=1)
        assert [(s.model, s.cache_bytes) for s in found] == [
            ("teacher", layers * batch * 2 * kv_heads * dim * fp32 * (16 + 2)),
            ("student", layers * held + batch * position),
            ("teacher", layers * batch * 2 * kv_heads * dim * fp32 * (32 + 2)),
            ("student", layers * held + batch * position),
        ]


@pytest.mark.parametrize(
    "ours, theirs, expected",
    [
        ([5, 5, 5], [1, 3, 7], 30),  # half way between 20 and 40
        ([5, 6, 7], [1, 4, 15], 24),  # 2 behind, then 8 ahead: a fifth of the way
        ([5, 4, 5], [1, 4, 7], 20),  # even where it was measured
        ([1, 2, 3], [2, 3, 4], 10),  # ahead everywhere
        ([5, 1, 5, 5], [1, 3, 4, 6], 60),  # ahead, behind, and then ahead for good: half way between 40 and 80
        ([1, 1, 4], [2, 2, 3], None),  # ahead, but not at the longest
        ([1, 1, 1], [1, 1, 1], None),  # never ahead
        ([5, 6, 7], [1, 2, 3], None),
    ],
)
def test_even_on_made_up_curves(ours, theirs, expected) -> None:
    lengths = (10, 20, 40, 80)
    curves = [dict(zip(lengths, map(float, curve), strict=False)) for curve in (ours, theirs)]
    assert even(*curves) == expected
    backwards = [dict(reversed(curve.items())) for curve in curves]
    assert even(*backwards) == expected


def made_up(model: str, length: int, prefill: float, decode: float, held: int) -> Speed:
    spreads = Spread(prefill, prefill / 2, 99.0), Spread(decode, decode / 2, 99.0)
    return Speed(model, length, *spreads, held, new_tokens=8)


def test_crossovers_by_hand() -> None:
    """Medians alone count. Of 8 new tokens, 4 are behind the average step."""
    speeds = [
        made_up("student", 100, 5.0, 1.0, 1000),
        made_up("teacher", 100, 4.0, 0.5, 540),
        made_up("student", 200, 10.0, 1.0, 1000),
        made_up("teacher", 200, 13.0, 0.75, 1040),
    ]
    found = Crossover.of(speeds)
    # prefill: 1 behind, 3 ahead, a quarter of the way
    assert found == Crossover(125, None)
    assert Crossover.of(speeds[2:]) == Crossover(200, None)


def test_bench_of_two_batch_sizes_has_a_crossover_for_each() -> None:
    teacher = tiny.llama()
    student = linearize.convert(teacher, Recipe.load("elu"))
    found = bench(teacher, student, batch_sizes=[2, 1, 2], prompt_lengths=[40, 8], new_tokens=2, repeats=2, seed=0)
    order = [(b, n, m) for b in (1, 2) for n in (8, 40) for m in ("teacher", "student")]
    assert [(s.batch_size, s.prompt_length, s.model) for s in found.speed] == order
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [c["batch_size"] for c in data["crossovers"]] == [1, 2] and len(data["speed"]) == 8
    assert data["speed"][0].keys() >= {"batch_size", "new_tokens", "prefill_bytes"}
