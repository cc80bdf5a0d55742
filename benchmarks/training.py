"""Training a whole model: time and memory of an optimizer step of each stage of a recipe, and of the teacher.

    python benchmarks/training.py --model src/linearize/demo/teacher --length 512
    python benchmarks/training.py --model llama-1b --dtype bfloat16 --device cuda --batch 8

Attention transfer is compared with the teacher's forward pass without its head, which transfer does not compute.
Fine-tuning (LoRA or all weights) is compared with the same fine-tuning of the teacher. Steps are those of `linearize
run`, optimizer included, on the same rows of random tokens. Evaluations and checkpoints are not counted. `--model` is
that of models.py.

Student and teacher take turns: "times the teacher's" is the median over rounds, with minimum and maximum. MiB is the
peak memory of a step minus the memory held before it, so models, adapters and optimizer states are not counted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from needs import random_rows
from records import timing_arguments, write_results
from rich.console import Console
from rich.progress import Progress
from teachers import make_student, make_teacher, model_arguments
from transformers import PreTrainedModel
from turns import seconds_in_turns

from linearize.base import UserError
from linearize.configs.training import TrainConfig
from linearize.data.rows import PackedRows, on_device
from linearize.evaluation.speed import peak_bytes, require_positions
from linearize.evaluation.timings import Spread
from linearize.hf.convert import to_softmax
from linearize.recipe import Recipe
from linearize.training.attention_transfer import TransferObjective
from linearize.training.finetune import OutputObjective, prepared
from linearize.training.loop import Batches, StageRun

Stage = TypeVar("Stage", bound=TrainConfig)


@dataclass(frozen=True)
class Row:
    """A stage and the teacher; times in seconds, of all rows of a step together."""

    recipe: str
    stage: str
    times: Spread
    student: Spread
    teacher: Spread
    student_peak_bytes: int
    teacher_peak_bytes: int


def forward_call(teacher: PreTrainedModel, rows: PackedRows) -> Callable[[], object]:
    """The teacher over all rows, without its head."""

    def call() -> object:
        with torch.no_grad():
            return teacher.base_model(**on_device(rows.inputs(), teacher.device))

    return call


def all_rows_a_step(config: Stage, rows: PackedRows, steps: int) -> Stage:
    """The stage with all rows in each of so many steps."""
    sizes = {"batch_size": len(rows), "micro_batch_size": None, "epochs": steps, "max_tokens": None}
    return config.model_copy(update=sizes)


def measure(
    recipe: Recipe, teacher: PreTrainedModel, rows: PackedRows, repeats: int, advance: Callable[[], object]
) -> list[Row]:
    """Attention transfer and fine-tuning, those of them that the recipe has."""
    student, seed, found = make_student(teacher, recipe), recipe.seed, []

    def compare(stage: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        seconds = seconds_in_turns({"student": ours, "teacher": theirs}, repeats, advance)
        times = Spread.of([x / y for x, y in zip(seconds["student"], seconds["teacher"], strict=True)])
        peaks = [peak_bytes(call, teacher.device) for call in (ours, theirs)]
        found.append(Row(recipe.name, stage, times, *(Spread.of(x) for x in seconds.values()), *peaks))

    steps = repeats + 2  # one is not counted, one is of the bytes
    if recipe.transfer is not None:
        config = all_rows_a_step(recipe.transfer, rows, steps)
        run = StageRun(TransferObjective(student, config), Batches(rows, config, seed), rows, config)
        compare("transfer", run.update, forward_call(teacher, rows))
    if recipe.finetune is not None:
        config, control = all_rows_a_step(recipe.finetune, rows, steps), to_softmax(student)
        with prepared(student, config, seed) as ours, prepared(control, config, seed) as theirs:
            objectives = [OutputObjective(module, config, teacher, autocast) for module, autocast, _ in (ours, theirs)]
            runs = [StageRun(x, Batches(rows, config, seed), rows, config) for x in objectives]
            compare("LoRA" if config.lora else "all weights", *(run.update for run in runs))
    return found


def markdown_row(row: Row, tokens: int) -> str:
    """Tokens per second of both, at the median time."""
    x, speeds = row.times, [f"{tokens / seconds.median:,.0f}" for seconds in (row.student, row.teacher)]
    peaks = [f"{size / 2**20:,.0f}" for size in (row.student_peak_bytes, row.teacher_peak_bytes)]
    cells = row.recipe, row.stage, f"{x.median:.2f} [{x.low:.2f}, {x.high:.2f}]", *speeds, *peaks
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser)
    parser.add_argument("--length", type=int, default=1024, metavar="T", help="tokens of a row (default: 1024)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows of a step (default: 1)")
    timing_arguments(parser, repeats=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # as the command line does
    torch.manual_seed(0)
    load, found, console = [os.getloadavg()[0]], list[Row](), Console(stderr=True)
    head = "recipe", "stage", "times the teacher's", "tokens/s", "the teacher's", "MiB", "the teacher's"
    try:
        teacher = make_teacher(arguments.model, getattr(torch, arguments.dtype), torch.device(arguments.device))
        require_positions(arguments.model, teacher.config, arguments.length)
        rows = random_rows(teacher.config.vocab_size, arguments.batch, arguments.length)
        recipes = [Recipe.load(name) for name in arguments.recipes]
        print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")  # noqa: T201 (the result)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            stages = sum((recipe.transfer is not None) + (recipe.finetune is not None) for recipe in recipes)
            task = progress.add_task("training", total=stages * 2 * (arguments.repeats + 1))
            for recipe in recipes:
                its = measure(recipe, teacher, rows, arguments.repeats, lambda: progress.advance(task))
                print("\n".join(markdown_row(row, rows.num_tokens) for row in its), flush=True)  # noqa: T201
                found += its
                load.append(os.getloadavg()[0])
                write_results(arguments, load, results=[asdict(row) for row in found])
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
