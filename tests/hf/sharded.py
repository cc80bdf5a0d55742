"""What test_sharding.py runs in several processes: a model read in parts, looked at, and written again.

torchrun --nproc-per-node 2 -m tests.hf.sharded FOLDER...
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import linearize
from linearize.distributed import init_distributed, world
from linearize.hf import sharded_checkpoint
from linearize.hf.checkpoint import load_model
from linearize.hf.sharded_checkpoint import load_sharded, save_sharded
from linearize.hf.sharding import local
from tests import tiny

EXACT: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most that there ever were."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    torch.set_num_threads(1)
    ids = torch.arange(24)[None]
    with init_distributed(EXACT["device"]), torch.no_grad():
        for folder in map(Path, sys.argv[1:]):
            before = resident()
            model = load_sharded(str(folder), **EXACT)
            found: dict[str, Any] = {"grown": peak() - before}
            found["held"] = sum(local(p).nbytes for p in model.parameters())
            logits = model(input_ids=ids).logits
            student = linearize.convert(model, tiny.recipe())
            weights = dict(model.named_parameters())
            divided = {name: p for name, p in student.named_parameters() if isinstance(p, DTensor)}
            assert divided.keys() == weights.keys()
            found["shared"] = all(local(p).data_ptr() == local(weights[key]).data_ptr() for key, p in divided.items())
            save_sharded(model, folder / "one file")
            usual, sharded_checkpoint.FILE_SIZE = sharded_checkpoint.FILE_SIZE, "20MB"
            save_sharded(model, folder / "files")
            sharded_checkpoint.FILE_SIZE = usual
            whole = load_model(str(folder), **EXACT)
            found["equal"] = torch.equal(logits, whole(input_ids=ids).logits)
            (folder / f"found-{world().rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
