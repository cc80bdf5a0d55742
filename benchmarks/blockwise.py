"""What a block-wise transfer of a model of 126 layers takes, block by block, beside what `linearize plan` says.

    python benchmarks/blockwise.py

The depth and the blocks of LoLCATs' Llama 3.1 405B (14 blocks of 9 layers), its width scaled down, random weights and
rows. Every block is a process of its own, as a job would be (`--block`): it runs the softmax layers of the block
before, writes the stream that leaves them, and trains the mixers of its own block on it.

Memory: the most that the process holds beyond what it held before (Linux' count of what is resident, weights included,
with a C library that gives back what was freed), beside the plan's for the largest block. Disk: what the process reads
of files that are no longer in memory, and what it writes; forecast are the weights of both blocks, the stream as often
as it is read, and for each number that trains two at the evaluation before the first step (itself and the best so far),
four at the one at the end (and its optimizer state), and one that is the result. FLOPs: of a block its layers' share of
the plan's, and of what it hands on a pass through softmax layers; if they say how long a block takes, all blocks
compute as many a second.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from needs import random_rows
from records import timing_arguments, write_results
from teachers import llama_config
from transformers import LlamaForCausalLM

from linearize.costs import FP32, softmax_flops
from linearize.hf.checkpoint import read_config
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.plan import make_plan
from linearize.recipe import Recipe
from linearize.training.blockwise import BlockwiseTransfer

LENGTH, BATCH = 256, 4
# Blocks of as many bytes are given back to the system once they are free (mallopt(3)). The C library keeps them
# otherwise, in the hope of more alike, and a process seems to hold what its program does not.
LIBC = ctypes.CDLL("libc.so.6")
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, GIVEN_BACK = -3, -1, 65536


@dataclass(frozen=True)
class Row:
    """One block: seconds, FLOPs by the plan, and bytes, those of the plan first."""

    block: int
    seconds: float
    flops: float
    memory_forecast: int
    memory: int
    read_forecast: int
    read: int
    written_forecast: int
    written: int


def new_model(folder: Path, layers: int, hidden: int) -> None:
    config = llama_config(hidden, layers, hidden // 64, max(1, hidden // 256), 11 * hidden // 4, 1024)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="50MB")


def transfer_of(model: Path, folder: Path, recipe: Recipe, rows: int) -> BlockwiseTransfer:
    shape = TeacherShape.from_config(read_config(str(model)))
    assert recipe.transfer is not None
    both = random_rows(1024, rows, LENGTH), random_rows(1024, 1, LENGTH)
    plan = resolve(recipe, shape)
    return BlockwiseTransfer(str(model), plan, recipe.transfer, *both, folder, torch.float32, torch.device("cpu"))


def status(field: str, file: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * (1024 if file == "status" else 1)


def forget(*folders: Path) -> None:
    """Let the system drop what it has in memory of these files, so that reading them is reading the disk."""
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def job(index: int, transfer: BlockwiseTransfer, warm_up: BlockwiseTransfer, found: Any) -> None:
    """In a process of its own: hand on what enters a block, and train it."""
    warm_up.train([1])  # pages of code that are read at their first use are not the block's
    forget(Path(transfer.model), transfer.folder)
    LIBC.malloc_trim(0)  # what was freed is given back, or it would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what is there
    before = status("VmRSS", "status"), status("read_bytes", "io"), status("wchar", "io")
    start = time.perf_counter()
    transfer.train([index])
    seconds = time.perf_counter() - start
    after = status("VmHWM", "status"), status("read_bytes", "io"), status("wchar", "io")
    found.put((seconds, *(b - a for a, b in zip(before, after, strict=True))))


def forecasts(transfer: BlockwiseTransfer, recipe: Recipe) -> list[tuple[float, int, int, int]]:
    """FLOPs and bytes of each job: of memory, read and written."""
    shape = TeacherShape.from_config(read_config(transfer.model))
    model, tokens = MetaModel.of(shape), transfer.train_rows.num_tokens
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "training_tokens": tokens}
    plan, held_out = make_plan(recipe, shape, transfer.plan, **options), transfer.validation_rows.num_tokens
    assert plan.transfer is not None and plan.transfer.flops is not None and plan.transfer.memory_bytes is not None
    layers, stream = len(transfer.plan), FP32 * shape.hidden_size
    per_layer = plan.transfer.flops / layers
    softmax = tokens * (2 * model.layers[0] + softmax_flops(shape, LENGTH // 2))
    trained = FP32 * plan.new_parameters // layers
    jobs = []
    for index, block in enumerate(transfer.blocks):
        handed_on = transfer.blocks[index - 1] if index else range(0)
        weights = FP32 * (sum(model.layers[i] for i in (*handed_on, *block)) + model.embeddings * (index < 2))
        # What enters the block before, once; what enters this one, in each epoch and at both evaluations.
        read = weights + stream * ((index > 1) * (tokens + held_out) + (index > 0) * (tokens + 2 * held_out))
        written = (index > 0) * stream * (tokens + held_out) + (2 + 4 + 1) * trained * len(block)
        flops = per_layer * len(block) + softmax * len(handed_on)
        jobs.append((flops, plan.transfer.memory_bytes, read, written))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126, help="(default: %(default)s)")
    parser.add_argument("--layers-per-block", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help=f"of {LENGTH} tokens (default: %(default)s)")
    timing_arguments(parser, repeats=1)
    a = parser.parse_args()
    for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        LIBC.mallopt(threshold, GIVEN_BACK)
    torch.set_num_threads(a.threads)
    torch.set_flush_denormal(True)
    load, rows, context = [os.getloadavg()[0]], list[Row](), multiprocessing.get_context("fork")
    fields = {"transfer.layers_per_block": a.layers_per_block, "data.sequence_length": LENGTH}
    fields |= {"transfer.batch_size": BATCH, "transfer.micro_batch_size": 1}
    recipe = Recipe.load("lolcats-405b", fields)
    one_layer = Recipe.load("lolcats-405b", fields | {"transfer.layers_per_block": 1})
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")  # noqa: T201 (the result)
    with tempfile.TemporaryDirectory() as folder:
        model, small = Path(folder) / "model", Path(folder) / "small"
        new_model(model, a.layers, a.hidden)
        new_model(small, 2, 64)
        transfer = transfer_of(model, Path(folder) / "run", recipe, a.rows)
        expected = forecasts(transfer, recipe)
        for index, forecast in enumerate(expected):
            found = context.Queue()
            warm_up = transfer_of(small, Path(folder) / f"warm-up-{index}", one_layer, a.rows)
            process = context.Process(target=job, args=(index, transfer, warm_up, found))
            process.start()
            seconds, memory, read, written = found.get()
            process.join()
            flops, *sizes = forecast
            row = Row(index, seconds, flops, sizes[0], memory, sizes[1], read, sizes[2], written)
            rows.append(row)
            pairs = (
                (row.memory_forecast, row.memory),
                (row.read_forecast, row.read),
                (row.written_forecast, row.written),
            )
            mib = [f"{x / 2**20:.0f}, {y / 2**20:.0f} ({x / max(1, y):.2f})" for x, y in pairs]
            print(f"| {index} | {seconds:.1f} | {flops / seconds / 1e9:.1f} | {' | '.join(mib)} |", flush=True)  # noqa: T201
        transfer.merge()
    load.append(os.getloadavg()[0])
    write_results(a, load, results=[asdict(row) for row in rows])


HEAD = (
    "block",
    "seconds",
    "GFLOP/s",
    "memory, MiB: plan, measured",
    "read, MiB: plan, measured",
    "written, MiB: plan, measured",
)

if __name__ == "__main__":
    main()
