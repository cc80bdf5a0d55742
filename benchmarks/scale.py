"""The tables of docs/scale.md: what fits a GPU of a certain memory, and what Llama 3.1 405B takes block by block.

    python benchmarks/scale.py > benchmarks/results/scale.md

By the forecasts of `linearize plan --gpu-memory`, on shapes alone: no weights are read. Hours are the plan's FLOPs over
`--tflops` a second and GPU, which is a guess: 40 % of what an H100 has in bf16.
"""

from __future__ import annotations

import argparse

import torch

from linearize.costs import softmax_flops
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.fit import fit, parse_memory
from linearize.planning.plan import make_plan
from linearize.planning.results import size
from linearize.recipe import Recipe
from linearize.training.blockwise import layer_blocks

ALL_WEIGHTS = {"finetune.lora": None, "finetune.all_weights": True}


def llama(layers: int, heads: int, hidden: int, inner: int) -> TeacherShape:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8}
    sizes |= {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": 128256}
    return TeacherShape.from_config({"model_type": "llama", "tie_word_embeddings": False, **sizes})


SHAPES = {
    "8B": llama(32, 32, 4096, 14336),
    "70B": llama(80, 64, 8192, 28672),
    "405B": llama(126, 128, 16384, 53248),
}
CASES = (
    ("8B", "lolcats", {}, ("transfer", "finetune")),
    ("8B", "lolcats", ALL_WEIGHTS, ("finetune",)),
    ("70B", "lolcats-70b", {}, ("transfer", "finetune")),
)


def fits() -> None:
    print("| model, recipe | GPU | what `linearize plan --gpu-memory` says |\n| --- | --- | --- |")  # noqa: T201
    for model, name, fields, stages in CASES:
        shape, recipe = SHAPES[model], Recipe.load(name, fields)
        for gpu in ("24GiB", "40GiB", "80GiB"):
            found = fit(recipe, shape, resolve(recipe, shape), dtype=torch.bfloat16, memory=parse_memory(gpu))
            for stage, line in zip(found.stages, found.lines(), strict=True):
                if stage.stage in stages:
                    what = f"{model}, `{name}`{', all weights' if fields else ''}"
                    print(f"| {what} | {gpu} | {line.replace('--set ', '')} |", flush=True)  # noqa: T201


def blocks(tflops: float) -> None:
    recipe, shape = Recipe.load("lolcats-405b"), SHAPES["405B"]
    assert recipe.transfer is not None and recipe.transfer.layers_per_block is not None
    count = len(layer_blocks(shape.num_layers, recipe.transfer))
    plan = make_plan(
        recipe, shape, resolve(recipe, shape), dtype=torch.float16, device=torch.device("cuda"), training_tokens=None
    )
    assert plan.transfer is not None and plan.transfer.flops is not None and plan.activation_bytes is not None
    tokens, model = plan.transfer.tokens or 0, MetaModel.of(shape)
    # The softmax layers of all blocks before a block compute its inputs, one after another.
    next_inputs = (
        tokens
        * recipe.transfer.layers_per_block
        * (2 * model.layers[0] + softmax_flops(shape, recipe.data.sequence_length // 2))
    )
    train, an_hour = plan.transfer.flops / count, tflops * 1e12 * 3600
    rows = {
        "memory of a job": size(plan.transfer.memory_bytes or 0),
        "weights of a block": size(2 * plan.teacher_parameters // count),
        "residual stream after a block": size(plan.activation_bytes // (count - 1)),
        "disk for all streams": size(plan.activation_bytes),
        "read: weights twice (to train, and to compute the next inputs), streams twice": size(
            2 * (2 * plan.teacher_parameters + plan.activation_bytes)
        ),
        "written: streams once": size(plan.activation_bytes),
        "FLOPs: training a block, computing the inputs of the next": f"{train:.2g}, {next_inputs:.2g}",
        "hours on one GPU": f"{(count * train + (count - 1) * next_inputs) / an_hour:.1f}",
        "hours on 8 nodes, a GPU of each": f"{((count - 1) * next_inputs + train) / an_hour:.1f}",
    }
    print("\n| Llama 3.1 405B by `lolcats-405b`, 14 blocks of 9 layers | |\n| --- | --- |")  # noqa: T201
    for what, value in rows.items():
        print(f"| {what} | {value} |")  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, default=400.0, help="a second and GPU (default: %(default)s)")
    arguments = parser.parse_args()
    fits()
    blocks(arguments.tflops)


if __name__ == "__main__":
    main()
