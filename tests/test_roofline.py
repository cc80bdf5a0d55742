"""Count the kernels of prompts and steps on a GPU, without one (`make test-kernels` installs triton and runs this)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` installs it")
BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def roofline() -> Any:
    sys.path.insert(0, BENCHMARKS)
    try:
        import roofline as found
    finally:
        sys.path.remove(BENCHMARKS)
    return found


@pytest.fixture(scope="module")
def teacher(roofline: Any) -> LlamaForCausalLM:
    with torch.device("meta"):
        config = roofline.SHAPES["llama-1b"]
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


# Operations of a pass over 2,048 tokens, or behind them, over the teacher's: at most.
MOST = [
    ("prefill", "lolcats", 1.3),
    ("prefill", "recommended", 3.7),
    ("prefill", "recommended:full", 2.3),
    ("decode", "lolcats", 1.1),
    ("decode", "recommended", 2.5),
]


@pytest.mark.parametrize("what, name, most", MOST)
def test_few_operations_are_launched(roofline: Any, teacher: Any, what: str, name: str, most: float) -> None:
    theirs, ours = (
        roofline.cost_of(model, what, 2048).operations for model in (teacher, roofline.student_of(teacher, name))
    )
    assert theirs.total() < ours.total() < most * theirs.total()
    long = roofline.cost_of(roofline.student_of(teacher, name), what, 8192).operations
    assert long.total() < 1.15 * ours.total()  # they do not grow with the prompt


def test_an_estimate_is_near_what_an_h100_took(roofline: Any, teacher: Any) -> None:
    """The 1B teacher's prompt of 2,048 tokens, 13 ms, and its captured step, 3.6 ms (benchmarks/README.md)."""
    assert 0.009 < roofline.cost_of(teacher, "prefill", 2048).total < 0.018
    assert 0.002 < roofline.cost_of(teacher, "decode", 2048).total < 0.0045
