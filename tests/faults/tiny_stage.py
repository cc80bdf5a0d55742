"""The smallest program that writes as a stage of a run does: metrics, checkpoints, a result, and a text at the end.

python -m tests.faults.tiny_stage FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from linearize.base import UserError, atomic_file
from linearize.run.folder import alone_in
from linearize.training.resumption import MetricsLog, StageFolder


def main() -> None:
    """Exit status and last line are those of the command line."""
    try:
        with alone_in(Path(sys.argv[1])):
            run(Path(sys.argv[1]))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def run(folder: Path) -> None:
    stage = StageFolder(folder / "stage", {"seed": 0})
    if stage.finished({}) is None:
        train(stage)
    with atomic_file(folder / "text.md", 11) as scratch:
        scratch.write_text("a last word")


def train(stage: StageFolder) -> None:
    tensors, state = stage.latest({}) or ({"weight": torch.zeros(100)}, {"step": 0, "metrics": {"length": 0}})
    with MetricsLog(stage.path / "metrics.jsonl", **state["metrics"]) as metrics:
        for step in range(state["step"] + 1, 4):
            tensors = {"weight": tensors["weight"] * 0.5 + step}
            metrics.write({"step": step})
            stage.save(step, tensors, {"step": step, "metrics": metrics.sync()})
    stage.finish(tensors, {"steps": 3})


if __name__ == "__main__":
    main()
