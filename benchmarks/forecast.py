"""The memory that `linearize plan` forecasts for a training step's activations, beside the most that one takes.

    python benchmarks/forecast.py

Small Llama shapes with random weights, each in every stage, with and without activation checkpointing. Measured is the
most memory held at once beyond what stood before a step's gradients; forecast is the plan's figure without weights,
optimizer states and masters, but with the gradients.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass

import torch
from records import timing_arguments, write_results
from teachers import llama_config
from transformers import LlamaForCausalLM, PreTrainedModel

from linearize.costs import FP32
from linearize.data.rows import PackedRows
from linearize.evaluation.speed import peak_bytes
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.plan import make_plan
from linearize.recipe import Recipe
from linearize.training.attention_transfer import TransferObjective
from linearize.training.finetune import OutputObjective, prepared

# Layers, hidden size, size of the vocabulary, rows and their length.
SHAPES = [(4, 256, 259, 2, 512), (8, 128, 259, 4, 256), (4, 256, 8192, 2, 256)]
ALL_WEIGHTS = {"finetune.lora": None, "finetune.all_weights": True}
AGAIN = {"finetune.activation_checkpointing": True}
CASES: dict[str, dict[str, object]] = {
    "LoRA": {},
    "LoRA, checkpointing": AGAIN,
    "LoRA, KL": {"finetune.loss.kl": 1.0},
    "all weights": ALL_WEIGHTS,
    "all weights, checkpointing": ALL_WEIGHTS | AGAIN,
}


@dataclass(frozen=True)
class Row:
    """Bytes of one step of a stage."""

    layers: int
    hidden_size: int
    vocabulary: int
    rows: int
    length: int
    stage: str
    forecast: int
    measured: int


def packed_rows(vocabulary: int, rows: int, length: int) -> PackedRows:
    """Two documents of random tokens in each row."""
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    position = torch.arange(length // 2).repeat(2)
    return PackedRows(ids, position.expand(rows, -1).contiguous(), ids)


def sizes(teacher: PreTrainedModel, rows: PackedRows, recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Forecast and measured bytes of transfer and of fine-tuning."""
    shape = TeacherShape.from_config(teacher.config.to_dict())
    layers, cpu = resolve(recipe, shape), torch.device("cpu")
    plan = make_plan(recipe, shape, layers, dtype=torch.float32, device=cpu, training_tokens=rows.num_tokens)
    assert plan.transfer is not None and plan.finetune is not None
    assert recipe.transfer is not None and recipe.finetune is not None
    weights = FP32 * (plan.teacher_parameters + plan.new_parameters)
    forecast = [x.memory_bytes - weights - 3 * FP32 * x.trainable_parameters for x in (plan.transfer, plan.finetune)]
    student = convert_layers(teacher, layers)
    transfer = TransferObjective(student, recipe.transfer)
    measured = [peak_bytes(lambda: transfer.backward([rows]), cpu)]
    with prepared(student, recipe.finetune, seed=0) as (module, autocast, _):
        finetune = OutputObjective(module, recipe.finetune, teacher, autocast)
        measured.append(peak_bytes(lambda: finetune.backward([rows]), cpu))
    return dict(zip(("transfer", "finetune"), zip(forecast, measured, strict=True), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing_arguments(parser, repeats=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load, found = [os.getloadavg()[0]], list[Row]()
    head = (
        "layers",
        "hidden size",
        "vocabulary",
        "rows",
        "stage",
        "forecast, MiB",
        "measured, MiB",
        "forecast over measured",
    )
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")  # noqa: T201 (the result)
    for layers, hidden, vocabulary, count, length in SHAPES:
        config = llama_config(hidden, layers, hidden // 64, hidden // 128, 11 * hidden // 4, vocabulary)
        teacher = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
        rows = packed_rows(vocabulary, count, length)
        every = {"data.sequence_length": length, "transfer.batch_size": count, "finetune.batch_size": count}
        for stage, fields in CASES.items():
            both = sizes(teacher, rows, Recipe.load("lolcats", every | fields))
            for name, key in [("transfer", "transfer")] * (stage == "LoRA") + [(stage, "finetune")]:
                row = Row(layers, hidden, vocabulary, count, length, name, *both[key])
                found.append(row)
                mib = f"{row.forecast / 2**20:.1f} | {row.measured / 2**20:.1f} | {row.forecast / row.measured:.2f}"
                print(f"| {layers} | {hidden} | {vocabulary:,} | {count} of {length} | {name} | {mib} |", flush=True)  # noqa: T201
    load.append(os.getloadavg()[0])
    write_results(arguments, load, results=[asdict(row) for row in found])


if __name__ == "__main__":
    main()
