"""What test_distributed.py runs in several processes: every stage on tiny fp64 models, each in a folder of its own.

torchrun --nproc-per-node 2 -m tests.training.processes [--shard | --both] [--stop STEP] [--mutant NAME] FOLDER ARCH...
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import linearize
from linearize.distributed import barrier, init_distributed, main_process_first, world
from linearize.hf import sharded_checkpoint
from linearize.hf.sharded_checkpoint import load_sharded
from linearize.hf.sharding import own_rows
from linearize.training import loop
from linearize.training.attention_transfer import attention_transfer
from linearize.training.finetune import finetune
from linearize.training.resumption import StageFolder
from tests import tiny
from tests.hf.models import make_teacher

STAGES = ("transfer", "all", "lora")
# 4 steps of 6 rows, of different documents; a held-out set that no number of processes divides.
TRAIN = tiny.packed([[24], [7, 17], [24]] * 8, seed=1, vocabulary=60)
VALIDATION = tiny.packed([[24], [1, 23]] * 3 + [[24]], seed=2, vocabulary=60)
_COMMON = {"batch_size": 6, "epochs": 1, "max_tokens": None, "eval_every": 2, "micro_batch_size": None}


def stages(architecture: str, folder: Path, shard: bool) -> None:
    """Attention transfer, all weights, and LoRA together with the mixers, each on what the one before has left."""
    teacher: Any = make_teacher(architecture)
    if shard and world().size > 1:
        with main_process_first():
            if world().main:
                teacher.save_pretrained(folder / "teacher")
        experts = getattr(teacher.config, "_experts_implementation", None)  # not every one knows fp64
        teacher = load_sharded(str(folder / "teacher"), dtype=torch.float64, device=torch.device("cpu"))
        teacher.config._experts_implementation_internal = experts
    recipe = tiny.recipe(mixer__span__window_size=4)
    student = linearize.convert(teacher, recipe)
    if MUTANT == "mixers":
        with torch.no_grad():
            next(p for name, p in student.named_parameters() if ".mixer." in name).mul_(1 + world().rank)
    assert recipe.transfer is not None and recipe.finetune is not None
    config = recipe.transfer.model_copy(update=_COMMON)
    attention_transfer(student, TRAIN, VALIDATION, config, output_dir=folder / "transfer")
    loss = recipe.finetune.loss.model_copy(update={"kl": 1.0})
    given = _COMMON | {"loss": loss, "lr": 1e-3}
    for stage, fields in {
        "all": {"lora": None, "all_weights": True, "wise_ft_alpha": 0.5},
        "lora": {"mixers": True, "batch_size": 8, "micro_batch_size": 2},
    }.items():
        tuned = recipe.finetune.model_copy(update=given | fields)
        finetune(student, TRAIN, VALIDATION, tuned, teacher=teacher, output_dir=folder / stage)


def _order_of_each() -> None:
    same = loop._permutation
    loop._permutation = lambda length, seed, epoch: same(length, seed + world().rank, epoch)  # type: ignore


def _no_reduction() -> None:
    loop.sum_gradients = lambda parameters: None  # type: ignore[assignment]


def _average() -> None:
    """FSDP2's own way with gradients of what is divided."""
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


def _swapped_rows() -> None:
    """Each process reads the rows of the one before it."""
    read = sharded_checkpoint.read_rows

    def swapped(folder: Path, tensors: dict[str, Any]) -> None:
        read(folder, tensors)
        for tensor in tensors.values():
            if isinstance(tensor, DTensor):
                whole = tensor.detach().full_tensor().roll(len(tensor) // 2, 0)
                tensor.detach().copy_(own_rows(whole, tensor))

    sharded_checkpoint.read_rows = swapped


class Stopped(Exception):
    """A stage was left behind its checkpoint of some step."""


def _stop_behind(step: int) -> None:
    """Leave the stage of all weights when its checkpoint of this step is written."""
    save = StageFolder.save

    def last(self: StageFolder, number: int, *state: Any) -> None:
        save(self, number, *state)
        if number == step and self.path.name == "all":
            barrier()
            raise Stopped

    StageFolder.save = last  # type: ignore[method-assign]


MUTANT = ""
MUTANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "order": _order_of_each,
    "reduction": _no_reduction,
    "average": _average,
    "rows": _swapped_rows,
    "mixers": lambda: None,  # in `stages`
}


def main() -> None:
    global MUTANT
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shard", action="store_true", help="weights divided among the processes")
    parser.add_argument("--both", action="store_true", help="first whole, then with divided weights, in FOLDER/sharded")
    parser.add_argument("--stop", type=int, help="behind the checkpoint of this step of all weights")
    parser.add_argument("--mutant", choices=MUTANTS, default="")
    parser.add_argument("architectures", nargs="+")
    arguments = parser.parse_args()
    MUTANT = arguments.mutant
    folders = {arguments.shard: arguments.folder} | ({True: arguments.folder / "sharded"} if arguments.both else {})
    torch.set_num_threads(1)
    with init_distributed(torch.device("cpu")):
        MUTANTS[MUTANT]()
        if arguments.stop is not None:
            _stop_behind(arguments.stop)
        for shard, folder in folders.items():
            for architecture in arguments.architectures:
                with suppress(Stopped):
                    stages(architecture, folder / architecture, shard)


if __name__ == "__main__":
    main()
