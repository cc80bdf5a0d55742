"""Whether weights are divided: what the recipe wants, what the model is, and what the GPUs hold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from linearize.base import UserError
from linearize.distributed import World
from linearize.hf.checkpoint import read_config
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.plan import make_plan
from linearize.report.load import RunRecord
from linearize.run import pipeline
from linearize.run.folder import Run, check_output, write_json, write_text
from tests import tiny

FULL = {"distributed__shard": "full"}


def sharded(
    monkeypatch: pytest.MonkeyPatch, *, size: int = 2, device: str = "cpu", model: str = "", **fields: Any
) -> bool:
    """Whether so many processes divide the weights."""
    monkeypatch.setattr(pipeline, "world", lambda: World(0, size))
    monkeypatch.setattr(pipeline, "all_reduce_min", lambda number: number)
    run = Run(tiny.recipe(**fields), model or tiny.teacher_folder(), Path("out"), torch.float32, torch.device(device))
    shape = TeacherShape.from_config(read_config(run.model))
    layers = resolve(run.recipe, shape) if not shape.bidirectional else ()
    return pipeline.laid_out(run, shape, layers).sharded


def test_on_a_cpu_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sharded(monkeypatch)
    assert sharded(monkeypatch, **FULL)
    assert not sharded(monkeypatch, size=1, **FULL)


def test_where_a_gpu_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, shape = tiny.recipe(), TeacherShape.from_config(read_config(tiny.teacher_folder()))
    on = {"dtype": torch.float32, "device": torch.device("cuda")}
    plan = make_plan(recipe, shape, resolve(recipe, shape), **on, training_tokens=None)
    assert plan.transfer is not None and plan.finetune is not None
    needed = max(plan.transfer.memory_bytes or 0, plan.finetune.memory_bytes or 0)
    for memory, too_small in ((int(needed / pipeline.ROOM) + 1, False), (int(needed / pipeline.ROOM) - 1, True)):
        found = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        assert sharded(monkeypatch, device="cuda") is too_small
        assert not sharded(monkeypatch, device="cuda", distributed__shard="none")


def test_what_cannot_be_divided_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"distributed\.shard: expected a decoder, found 'bert'"):
        sharded(monkeypatch, model=tiny.encoder_folder(), **FULL)
    with pytest.raises(UserError, match=r"distributed\.shard: expected pretrained weights"):
        sharded(monkeypatch, weights="random", transfer=None, **FULL)


def test_a_run_goes_on_with_another_layout(tmp_path: Path) -> None:
    def run(**fields: Any) -> Run:
        return Run(tiny.recipe(**fields), "teacher", tmp_path, torch.float32, torch.device("cpu"))

    write_text(tmp_path / "recipe.yaml", run(**FULL).recipe.to_yaml())
    record = RunRecord(model="teacher", dtype="float32", device="cpu", data="0" * 64, versions={})
    write_json(tmp_path / "run.json", record.to_json())
    check_output(run())
    with pytest.raises(UserError, match="expected a run of this recipe"):
        check_output(run(seed=1))
