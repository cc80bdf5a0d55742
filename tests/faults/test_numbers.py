"""Numbers that run away, in either stage: named by layer and step, with the last good checkpoint kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.commands import Command
from tests.faults import tiny_run


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


LAYER = r"model\.layers\.\d\.[\w.]+"
# Too large a step: what the stage says then.
RUNS_AWAY = {
    "transfer": ("1.0e38", rf"(loss|gradient norm|held-out loss) of {LAYER} is not finite at step \d: found (nan|inf)"),
    "finetune": ("1.0e38", rf"(loss|gradient norm|held-out loss) of model is not finite at step \d: found (nan|inf), "
                 rf"and first in (base_model\.model\.)?{LAYER}"),
}  # fmt: skip


@pytest.mark.parametrize("stage", RUNS_AWAY)
def test_what_is_no_number_is_named_and_the_last_checkpoint_kept(command: Command, tmp_path: Path, stage: str) -> None:
    lr, said = RUNS_AWAY[stage]
    changes = {f"{stage}__lr": lr} | ({"transfer__max_tokens": 4 * 64} if stage == "finetune" else {})
    words = tiny_run.arguments(tmp_path / "run", **changes)
    for _ in range(2):  # the same again says the same
        done = command(*words)
        assert done.status == 2
        last = done.err.splitlines()[-1]
        assert re.match(f"error: {said}.*; lower lr", last), last
        (checkpoint,) = (tmp_path / "run" / stage).glob("checkpoint-*")
        kept = load_file(checkpoint / "tensors.safetensors")
        assert all(tensor.isfinite().all() for name, tensor in kept.items() if name.startswith(("best", "parameter")))


@pytest.mark.parametrize("stage", ["transfer", "finetune"])
def test_a_spike_is_named(command: Command, tmp_path: Path, stage: str) -> None:
    """Finite, but far above where it began, and never below: nothing was learned."""
    lr = {"transfer": "30.0", "finetune": "3.0"}[stage]
    changes = {f"{stage}__lr": lr} | ({"transfer__max_tokens": 4 * 64} if stage == "finetune" else {})
    done = command(*tiny_run.arguments(tmp_path / "run", **changes))
    assert done.status == 2
    last, worst = done.err.splitlines()[-1], LAYER if stage == "transfer" else "model"
    assert re.search(rf"at step \d, most of it in {worst} \(.*\): diverged; lower lr", last), last
    assert list((tmp_path / "run" / stage).glob("checkpoint-*"))


def test_weights_that_are_no_numbers_are_named(command: Command, tmp_path: Path) -> None:
    """Of a teacher before anything is trained, and of a student that is measured."""
    for name, source in {"teacher": tiny.teacher_folder(), "student": tiny.finished_run().folder / "model"}.items():
        shutil.copytree(source, tmp_path / name)
        tensors = load_file(tmp_path / name / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    done = command(*tiny_run.arguments(tmp_path / "run"), "--model", tmp_path / "teacher")
    assert done.status == 2
    assert "is not finite at step 0: found nan; nothing is trained yet, so check the model" in done.err
    done = command("eval", tmp_path / "student", "--teacher", tiny.teacher_folder())
    assert done.status == 2 and done.err.splitlines()[-1].startswith("error: evaluation: expected finite outputs, ")
