"""A step of training in several processes, one core each: how long it takes, and how many bytes they exchange.

    torchrun --nproc-per-node 1 benchmarks/processes.py --model src/linearize/demo/teacher
    torchrun --nproc-per-node 2 benchmarks/processes.py --model src/linearize/demo/teacher

The same rows in every case, of random tokens, divided among the processes; each is pinned to a core of its own and has
one thread. `--model` is as in models.py. Bytes are those that a process hands to reductions in a step, as counted
while it runs; gradients alone are 4 bytes for each number that trains.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from needs import random_rows
from records import timing_arguments, write_results
from teachers import make_student, make_teacher, model_arguments
from torch import Tensor
from training import all_rows_a_step

from linearize.base import UserError
from linearize.distributed import barrier, init_distributed, world
from linearize.evaluation.timings import Spread
from linearize.recipe import Recipe
from linearize.training.attention_transfer import TransferObjective
from linearize.training.finetune import OutputObjective, prepared
from linearize.training.loop import Batches, StageRun


@dataclass(frozen=True)
class Row:
    """One stage; times in seconds of a whole step."""

    recipe: str
    stage: str
    processes: int
    seconds: Spread
    trained: int  # numbers
    exchanged: int  # bytes in a step


class Counted:
    """`torch.distributed.all_reduce`, with the bytes that it was given."""

    def __init__(self) -> None:
        self.bytes, self._reduce = 0, dist.all_reduce

    def __call__(self, tensor: Tensor, *rest: object) -> object:
        self.bytes += tensor.nbytes
        return self._reduce(tensor, *rest)


def measure(recipe: str, stage: str, run: StageRun, repeats: int) -> Row:
    """One step that is not counted, then `repeats`."""
    seconds = []
    counted = Counted()
    run.update()
    dist.all_reduce = counted
    for _ in range(repeats):
        barrier()
        started = time.perf_counter()
        run.update()
        seconds.append(time.perf_counter() - started)
    dist.all_reduce = counted._reduce
    trained = sum(p.numel() for unit in run.units for p in unit.parameters.values())
    return Row(recipe, stage, world().size, Spread.of(seconds), trained, counted.bytes // repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser)
    parser.add_argument("--length", type=int, default=512, metavar="T", help="tokens of a row (default: 512)")
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="rows of a step, of all processes together")
    timing_arguments(parser, repeats=7)
    arguments = parser.parse_args()
    rank, device = int(os.environ.get("RANK", 0)), torch.device(arguments.device)
    if device.type == "cpu":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as the command line does
    torch.manual_seed(0)
    load, found = [os.getloadavg()[0]], list[Row]()
    try:
        with init_distributed(device):
            teacher = make_teacher(arguments.model, getattr(torch, arguments.dtype), device)
            rows = random_rows(teacher.config.vocab_size, arguments.batch, arguments.length)
            for name in arguments.recipes:
                recipe = Recipe.load(name)
                student, steps = make_student(teacher, recipe), arguments.repeats + 1
                if recipe.transfer is not None:
                    config = all_rows_a_step(recipe.transfer, rows, steps)
                    batches = Batches(rows, config, recipe.seed)
                    run = StageRun(TransferObjective(student, config), batches, rows, config)
                    found.append(measure(name, "transfer", run, arguments.repeats))
                if recipe.finetune is not None:
                    config = all_rows_a_step(recipe.finetune, rows, steps)
                    with prepared(student, config, recipe.seed) as (module, autocast, _):
                        batches = Batches(rows, config, recipe.seed)
                        objective = OutputObjective(module, config, teacher, autocast)
                        run = StageRun(objective, batches, rows, config)
                        stage = "LoRA" if config.lora else "all weights"
                        found.append(measure(name, stage, run, arguments.repeats))
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    if rank == 0:
        head = "recipe", "stage", "processes", "ms a step", "numbers that train", "bytes exchanged", "bytes a number"
        print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")  # noqa: T201 (the result)
        for row in found:
            x = row.seconds
            times = f"{1e3 * x.median:,.0f} ({1e3 * x.low:,.0f}-{1e3 * x.high:,.0f})"
            cells = row.recipe, row.stage, str(row.processes), times, f"{row.trained:,}", f"{row.exchanged:,}"
            print(f"| {' | '.join(cells)} | {row.exchanged / row.trained:.3f} |")  # noqa: T201
        load.append(os.getloadavg()[0])
        write_results(arguments, load, results=[asdict(row) for row in found])


if __name__ == "__main__":
    main()
