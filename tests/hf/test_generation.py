"""Cached = uncached, in fp64 to 1e-10, whatever way the tokens come in."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.hf import checks
from tests.hf.models import CASES, SLIDING_TEACHERS, Case, random_tokens, student_of, teacher_of

BY_HAND = [checks.in_chunks, checks.token_by_token, checks.left_padded, checks.two_turns, checks.packed]
OF_CACHES = [checks.copied, checks.rows_selected, checks.rows_repeated]
BY_GENERATE = [checks.sampling, checks.beams, checks.chunked_prefill, checks.next_turn]
# Every span, every architecture, and softmax layers of both kinds.
SOME = [
    case for case in CASES if case.name in {"llama-none", "llama-terraced", "llama-mixed", "qwen3-sinks", "gpt2-mixed"}
]


def pairs(cases: list[Case], tables: list[checks.Check]) -> pytest.MarkDecorator:
    rows = [pytest.param(case, check, id=f"{case.name}-{check.__name__}") for case in cases for check in tables]
    return pytest.mark.parametrize("case, check", rows)


@pairs(CASES + SLIDING_TEACHERS, BY_HAND + OF_CACHES)
def test_fed_by_hand(case: Case, check: checks.Check) -> None:
    check(case)


@pairs(CASES, [checks.greedy])
def test_generate(case: Case, check: checks.Check) -> None:
    check(case)


@pairs(SOME + SLIDING_TEACHERS, BY_GENERATE)
def test_generate_in_every_way(case: Case, check: checks.Check) -> None:
    check(case)


# Softmax layers that slide count padding as distance, and not all caches of softmax layers can be emptied.
@pairs(CASES, [checks.interior_padding])
def test_padding_within_a_row(case: Case, check: checks.Check) -> None:
    check(case)


@pairs([case for case in CASES if not case.keep_softmax], [checks.emptied])
def test_reset(case: Case, check: checks.Check) -> None:
    check(case)


@pairs([CASES[1], CASES[5], *SLIDING_TEACHERS], [checks.static_cache])
def test_static(case: Case, check: checks.Check) -> None:
    check(case)


def test_a_cache_without_a_config_will_do() -> None:
    for case in (CASES[1], CASES[5]):
        model, ids = student_of(case), random_tokens(2, 20)
        found = checks.cached(model, ids, (0, 14, 15, 20), cache=DynamicCache())
        checks.assert_close(found, checks.uncached(model, ids))


def test_bfloat16_keeps_the_state_in_float32() -> None:
    case = CASES[1]
    model = checks.make_student(case, checks.make_teacher("llama").bfloat16())
    ids, cache = random_tokens(2, 30), DynamicCache(config=model.config)
    found, expected = checks.cached(model, ids, range(31), cache=cache), checks.uncached(model, ids)
    # The reference is the same model in fp64: rounding must not grow with the tokens that came one at a time.
    exact = checks.uncached(checks.make_student(case, checks.make_teacher("llama").bfloat16().double()), ids)
    assert cache.layers[0].state.linear.S.dtype == torch.float32
    assert (found - exact).abs().mean() < 1.5 * (expected - exact).abs().mean() < 0.5


# --- what a linearized model refuses ----------------------------------------------------------------------------------


def test_a_softmax_model_s_cache() -> None:
    student, teacher, ids = student_of(CASES[1]), teacher_of(CASES[1]), random_tokens(1, 6)
    cache = DynamicCache(config=teacher.config)
    checks.cached(teacher, ids, (0, 5), cache=cache)
    with pytest.raises(ValueError, match=r"found DynamicLayer with 5 tokens.*cannot be continued"):
        checks.cached(student, ids, (5, 6), cache=cache)
    with pytest.raises(ValueError, match="cannot be continued"):
        student.generate(ids, past_key_values=cache, max_new_tokens=2)


def test_a_linearized_cache_in_a_softmax_model() -> None:
    student, teacher, ids = student_of(CASES[1]), teacher_of(CASES[1]), random_tokens(1, 6)
    cache = DynamicCache(config=student.config)
    checks.cached(student, ids, (0, 5), cache=cache)
    with pytest.raises(RuntimeError, match="keeps a state, not keys and values"):
        checks.cached(teacher, ids, (5, 6), cache=cache)


@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=lambda case: case.name)
def test_arguments_it_cannot_honour(case: Case) -> None:
    model, ids = student_of(case), random_tokens(1, 6)
    with pytest.raises(ValueError, match=r"expected a 2D mask .*found 4D"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="found dict"):
        model(ids, attention_mask={"full_attention": None})
    with pytest.raises(ValueError, match="without is_causal=False"):
        model(ids, is_causal=False)
    with pytest.raises(ValueError, match="without s_aux"):
        model(ids, s_aux=torch.zeros(4))


def test_taking_tokens_back() -> None:
    """Out of a cache that was not told to record them."""
    model, ids = student_of(CASES[1]), random_tokens(1, 6)
    cache = DynamicCache(config=model.config)
    checks.cached(model, ids, (0, 6), cache=cache)
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"cannot take 2 tokens back.*fork_state"):
        cache.crop(-2)
    assert cache.get_seq_length() == 6
