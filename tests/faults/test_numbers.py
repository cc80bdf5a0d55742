"""Numbers that run away, in either stage: named by layer and step, with the last good checkpoint kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from linearize.training import loop
from tests import tiny
from tests.commands import Command
from tests.faults import tiny_run


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


LAYER = r"(base_model\.model\.)?model\.layers\.\d\.[\w.]+"


@pytest.mark.parametrize("stage", ["transfer", "finetune"])
def test_what_is_no_number_is_named_and_the_last_checkpoint_kept(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A weight goes bad in the third step; the same command goes on from before, and does not where it did not."""
    folder, update = tmp_path / "run", loop.StageRun.update
    words = tiny_run.arguments(folder, **({} if stage == "transfer" else {"transfer__max_tokens": 4 * 64}))

    def goes_bad(self: loop.StageRun) -> object:
        record = update(self)
        if self.step == 3:
            name, parameter = list(self.units[-1].parameters.items())[-1]
            bad.append(name)
            parameter.data.view(-1)[-1] = torch.nan
        return record

    bad: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(loop.StageRun, "update", goes_bad)
        done = command(*words)
    assert done.status == 2
    last = done.err.splitlines()[-1]
    named = re.match(
        rf"error: loss of ({LAYER}|model) is not finite at step 4: found nan, and first in (.*); lower", last
    )
    assert named and re.fullmatch(LAYER, bad[0]) and named[3] == bad[0], last
    (checkpoint,) = (folder / stage).glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-000000002"
    assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "tensors.safetensors").values())
    done = command(*words, "--until", stage)
    assert done.status == 0 and ": step 4 of " in done.err and ": step 2 of " not in done.err


def test_a_spike_is_named(command: Command, tmp_path: Path) -> None:
    """Finite, but far above where it began, and never below: nothing was learned. (Each layer's own: test_loop.py.)"""
    spike = {"finetune__lora": "null", "finetune__all_weights": True, "finetune__lr": 10}
    words = tiny_run.arguments(tmp_path / "run", transfer__max_tokens=4 * 64, **spike)
    done = command(*words)
    assert done.status == 2
    last = done.err.splitlines()[-1]
    assert re.search(r"at step 4, most of it in model \(.*\): diverged; lower lr \(it began at 10\)", last), last
    assert [path.name for path in (tmp_path / "run" / "finetune").glob("checkpoint-*")] == ["checkpoint-000000004"]


def test_a_teacher_of_no_numbers_is_refused(command: Command, tmp_path: Path) -> None:
    """At step 0, before anything is trained. (A student's: tests/test_folders.py.)"""
    shutil.copytree(tiny.teacher_folder(), tmp_path / "teacher")
    tensors = load_file(tmp_path / "teacher" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "teacher" / "model.safetensors", {"format": "pt"})
    done = command(*tiny_run.arguments(tmp_path / "run"), "--model", tmp_path / "teacher")
    assert done.status == 2
    assert "is not finite at step 0: found nan; nothing is trained yet, so check the model" in done.err
