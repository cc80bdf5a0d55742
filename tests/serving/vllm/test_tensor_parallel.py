"""Two processes that divide the heads of a model: each has the states of its own, and both say what one says."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from linearize.configs.mixer import LayerPlan
from tests.serving.vllm.served import (
    by_transformers,
    by_vllm,
    differences,
    engine,
    of_recipe,
    plans,
    prompts,
    saved,
    student,
)

pytestmark = pytest.mark.vllm
CLOSE = 1e-4
TWO: dict[str, Any] = dict(tensor_parallel_size=2, distributed_executor_backend="mp")
NARROW: dict[str, Any] = dict(max_num_batched_tokens=16, max_num_seqs=16, enable_prefix_caching=True, block_size=32)


PLANS = plans() | {"supra per head": of_recipe("supra", mixer__feature_map__per="query_head")}
CASES: list[tuple[str, dict[str, Any]]] = [
    (name, {}) for name in ("lolcats", "recommended", "regla", "gated-deltanet", "supra per head", "kept-layers")
]
CASES += [(name, NARROW | dict(num_gpu_blocks_override=16)) for name in ("recommended", "kept-layers")]


@pytest.mark.parametrize("name, options", CASES, ids=[name + "-narrow" * bool(options) for name, options in CASES])
def test_two_processes_say_what_one_says(name: str, options: dict[str, Any]):
    model, texts = student(PLANS[name]), prompts(24, seed=5)
    with engine(saved(model, name), **TWO, **options) as llm:
        wrong, far = differences(by_vllm(llm, texts), by_transformers(model, texts))
    assert wrong == 0
    assert far < CLOSE


def test_heads_that_are_not_alike_in_number_are_refused():
    def asked(plan: LayerPlan, name: str, size: int) -> None:
        EngineArgs(model=saved(student(plan), name), dtype="float32", tensor_parallel_size=size).create_engine_config()

    with pytest.raises(ValueError, match="tensor_parallel_size: expected as many heads that stay softmax in each of 2"):
        asked(plans()["kept-heads"], "kept-heads", 2)
    with pytest.raises(ValueError, match="tensor_parallel_size: expected a divisor of the 2 KV heads"):
        asked(plans()["lolcats"], "lolcats", 4)
    with pytest.raises(ValueError, match=r"expected weights of single heads, found .*per: model"):
        asked(plans()["supra"], "supra", 2)
