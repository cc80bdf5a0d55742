"""The tests of equality can fail: with each of these mistakes in our code, what they compare is not equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.mixers import linear
from linearize.mixers.mixer_state import MixerState, TokenCounts
from linearize.ops.step import StepContext
from linearize.serving.vllm.layer import LinearizeMetadataBuilder
from linearize.serving.vllm.pages import PageLayout
from tests.serving.vllm.served import by_transformers, by_vllm, differences, engine, plans, prompts, saved, student

pytestmark = pytest.mark.vllm


def of_another(patch: pytest.MonkeyPatch) -> None:
    """Every sequence goes on from the page beside its own."""
    read = PageLayout.read

    def mutant(self: PageLayout, views: Any, slots: Tensor, counts: TokenCounts) -> list[MixerState]:
        return read(self, views, (slots + 1) % len(views[0]), counts)

    patch.setattr(PageLayout, "read", mutant)


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A step leaves the keys of the window one place further than they belong."""
    write = StepContext.written
    patch.setattr(StepContext, "written", lambda *given: write(*given).roll(1, dims=2))
    keep = linear.keep_slots
    patch.setattr(linear, "keep_slots", lambda *given: {k: x.roll(1, dims=2) for k, x in keep(*given).items()})


def not_reset(patch: pytest.MonkeyPatch) -> None:
    """A new sequence goes on in what the last one left in its page, which has seen as much as it has."""
    build = LinearizeMetadataBuilder.build

    def mutant(self: LinearizeMetadataBuilder, *given: Any) -> Any:
        found = build(self, *given)
        assert found.step is not None
        found.step.pieces = [
            (start, stop, slot, TokenCounts(torch.full((1,), 64)) if counts is None else counts)
            for start, stop, slot, counts in found.step.pieces
        ]
        return found

    patch.setattr(LinearizeMetadataBuilder, "build", mutant)


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [of_another, off_by_one, not_reset]
NARROW: dict[str, Any] = dict(max_num_batched_tokens=16, max_num_seqs=16, enable_prefix_caching=True, block_size=32)


@pytest.mark.parametrize("options", [{}, NARROW | dict(num_gpu_blocks_override=8)], ids=["wide", "narrow"])
def test_a_mistake_is_seen(options: dict[str, Any]):
    model, texts = student(plans()["lolcats"]), prompts(24, seed=5)
    expected = by_transformers(model, texts)
    long = prompts(1, seed=6, lengths=[200])
    after = by_transformers(model, long)
    with engine(saved(model, "lolcats"), **options) as llm:
        assert differences(by_vllm(llm, texts), expected)[0] == 0
        assert differences(by_vllm(llm, long), after)[0] == 0
        for mutate in MUTANTS:
            with pytest.MonkeyPatch.context() as patch:
                mutate(patch)
                assert differences(by_vllm(llm, texts), expected)[0] > 0, mutate.__name__
                if options and mutate is not not_reset:  # the prefix is in the cache: nothing is reset
                    by_vllm(llm, long, max_tokens=1)
                    assert differences(by_vllm(llm, long), after)[0] > 0, mutate.__name__
            llm.reset_prefix_cache()
        assert differences(by_vllm(llm, texts), expected)[0] == 0
