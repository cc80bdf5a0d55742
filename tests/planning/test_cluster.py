"""What of a run fits the GPUs of a cluster: parts that add up to the plan's forecast, or to what stands in the docs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import linearize_cli
from linearize.base import UserError
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.cluster import Cluster, Share, shares
from linearize.planning.plan import make_plan
from tests import tiny

SHAPE = TeacherShape.from_config(tiny.llama(layers=3).config.to_dict())
N, CUDA = 4, torch.device("cuda")


def laid_out(**fields: Any) -> dict[tuple[str, str], Share]:
    recipe = tiny.recipe(**fields)
    found = shares(recipe, SHAPE, resolve(recipe, SHAPE), Cluster(N, 10**6))
    return {(share.stage, share.layout): share for share in found}


def test_the_whole_model_takes_what_the_plan_says() -> None:
    recipe = tiny.recipe()
    plan = make_plan(recipe, SHAPE, resolve(recipe, SHAPE), device=CUDA, training_tokens=None)
    assert plan.transfer is not None and plan.finetune is not None
    found = laid_out()
    assert found["attention transfer", "whole model"].total == plan.transfer.memory_bytes
    assert found["finetune", "whole model"].total == plan.finetune.memory_bytes
    blockwise = tiny.recipe(transfer__layers_per_block=1)
    plan = make_plan(blockwise, SHAPE, resolve(blockwise, SHAPE), device=CUDA, training_tokens=None)
    assert plan.transfer is not None
    assert found["attention transfer", "block-wise"].total == plan.transfer.memory_bytes


@pytest.mark.parametrize(
    ("fields", "per_weight"), [({}, 2), ({"finetune__lora": None, "finetune__all_weights": True}, 20)]
)
def test_a_part_of_the_weights(fields: dict[str, Any], per_weight: int) -> None:
    """bf16, or fp32 with gradients, moments and the teacher; mixers (fp32 where they train) are whole."""
    recipe = tiny.recipe(**fields)
    new = make_plan(recipe, SHAPE, resolve(recipe, SHAPE), training_tokens=None).new_parameters
    share, whole = laid_out(**fields)["finetune", "sharded"], laid_out(**fields)["finetune", "whole model"]
    assert share.weights == per_weight * MetaModel.of(SHAPE).total // N + new * torch.bfloat16.itemsize
    assert share.activations == whole.activations if not fields else share.activations < whole.activations
    assert share.total < whole.total or not fields


def test_the_command_says_what_fits() -> None:
    arguments = ["plan", "lolcats", "--model", tiny.teacher_folder(), "--set", "data.sequence_length=64", "--json"]
    done = CliRunner().invoke(linearize_cli.app, [*arguments, "--cluster", "8x1GiB"])
    found = json.loads(done.stdout)["cluster"]
    assert {share["layout"] for share in found} == {"whole model", "sharded", "block-wise"}
    assert all(share["memory"] == 2**30 and share["fits"] == (share["total"] <= 2**30) for share in found)
    with pytest.raises(UserError, match="--cluster: expected GPUs and the memory of each, as in 8x80GiB, found '8'"):
        Cluster.parse("8")
    for memory in ("0GiB", "80"):
        with pytest.raises(UserError, match=f"--cluster: expected a size such as 24GiB or 80GB, found '{memory}'"):
            Cluster.parse(f"8x{memory}")
    assert Cluster.parse("8x80GiB") == Cluster(8, 80 << 30)


def test_one_gpu_has_nothing_to_divide() -> None:
    recipe = tiny.recipe()
    found = shares(recipe, SHAPE, resolve(recipe, SHAPE), Cluster(1, 10**9))
    assert {share.layout for share in found} == {"whole model", "block-wise"}
