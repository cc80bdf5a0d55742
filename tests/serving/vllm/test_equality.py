"""vLLM says what transformers does: greedy tokens and their probabilities, whatever the scheduler does to requests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.serving.vllm.served import (
    NEW_TOKENS,
    Generated,
    by_transformers,
    by_vllm,
    choices_by_vllm,
    count,
    differences,
    engine,
    plans,
    prompts,
    saved,
    student,
)

pytestmark = pytest.mark.vllm
NAMES = list(plans())
CLOSE = 1e-4
BLOCKS = {"kept-layers": 16, "kept-heads": 24}  # they also have pages of keys and values


@functools.cache
def model(name: str) -> PreTrainedModel:
    return student(plans()[name])


@functools.cache
def expected(name: str) -> list[Generated]:
    return by_transformers(model(name), prompts())


def assert_as_expected(found: list[Generated], name: str) -> None:
    wrong, far = differences(found, expected(name))
    assert wrong == 0
    assert far < CLOSE


@pytest.fixture(scope="module", params=NAMES)
def wide(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    """An engine that takes all prompts at once, whole."""
    with engine(saved(model(request.param), request.param)) as llm:
        yield request.param, llm


@pytest.fixture(scope="module", params=NAMES)
def narrow(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    """An engine that takes 16 tokens at a time, of prompts or of texts, and has little room."""
    options: dict[str, Any] = dict(max_num_batched_tokens=16, max_num_seqs=16, enable_prefix_caching=True)
    options |= dict(block_size=32, num_gpu_blocks_override=BLOCKS.get(request.param, 8))
    with engine(saved(model(request.param), request.param), **options) as llm:
        yield request.param, llm


def test_64_prompts_at_once(wide: tuple[str, Any]):
    name, llm = wide
    assert_as_expected(by_vllm(llm, prompts()), name)
    # Once more, in pages that other texts have used.
    assert_as_expected(by_vllm(llm, prompts()), name)


def test_n_choices_with_seeds(wide: tuple[str, Any]):
    _, llm = wide
    texts = prompts(6, seed=1)
    first, again = (choices_by_vllm(llm, texts, n=4, temperature=1.0, seed=7) for _ in range(2))
    assert [[c.tokens for c in its] for its in first] == [[c.tokens for c in its] for its in again]
    assert all(len({tuple(c.tokens) for c in its}) > 1 for its in first)


def test_pieces_of_prompts_and_preemption(narrow: tuple[str, Any]):
    name, llm = narrow
    assert_as_expected(by_vllm(llm, prompts()), name)
    assert count(llm, "num_preemptions") > 0, "expected too little room"


def test_a_prefix_in_the_cache_is_gone_on_from(narrow: tuple[str, Any]):
    name, llm = narrow
    texts = prompts(2, seed=3, lengths=[200])
    cold = by_vllm(llm, texts[:1])[0]
    reference = by_transformers(model(name), texts)
    for text, after in ((texts[0], reference[0]), (texts[0][:195] + texts[1][:5], None)):
        before = count(llm, "prefix_cache_hits")
        warm = by_vllm(llm, [text])[0]
        assert count(llm, "prefix_cache_hits") >= before + 32
        wrong, far = differences([warm], [after or by_transformers(model(name), [text])[0]])
        assert wrong == 0
        assert far < CLOSE
    assert differences([cold], reference[:1])[0] == 0


def test_sampled_tokens_have_their_own_probabilities(wide: tuple[str, Any]):
    """Each of the n continues in a state of its own: what it drew is as probable as transformers says."""
    name, llm = wide
    texts = prompts(3, seed=2)
    for text, choices in zip(texts, choices_by_vllm(llm, texts, n=4, temperature=1.0, seed=3), strict=True):
        rows = torch.tensor([text + choice.tokens for choice in choices])
        with torch.no_grad():
            logits = model(name)(rows).logits[:, -NEW_TOKENS - 1 : -1].float().log_softmax(-1)
        said = logits.gather(2, rows[:, -NEW_TOKENS:, None])[..., 0]
        assert (said - torch.tensor([choice.logprobs for choice in choices])).abs().max() < CLOSE


@pytest.mark.parametrize("name", ["lolcats", "gla", "supra", "kept-heads"])
def test_a_compiler_sees_whole_models(name: str, monkeypatch: pytest.MonkeyPatch):
    """vLLM compiles a model as one graph; the backend that runs it as it is will do."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    texts = prompts(8, seed=4, lengths=(5, 33))
    expected = by_transformers(model(name), texts)
    with engine(saved(model(name), name), enforce_eager=False) as llm:
        wrong, far = differences(by_vllm(llm, texts), expected)
    assert wrong == 0
    assert far < CLOSE
