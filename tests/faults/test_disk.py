"""Disks that fill, break and take writes in parts, at every operation in turn; the same command afterwards goes on.

Faults accumulate: an attempt resumes what the attempt before left, so what all of them together leave behind must be
what an unbroken program writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import tiny_run, tiny_stage
from tests.faults.layer import KINDS, STAY_FULL, Driver

# What a program of every kind of file must have been through: operation, and the end of its path.
WAYS = {("open", ".incomplete"), ("write", ".incomplete"), ("fsync", ".incomplete"), ("mkdir", "unfinished")}
WAYS |= {("write", "metrics.jsonl"), ("fsync", "metrics.jsonl"), ("open", "metrics.jsonl"), ("truncate", "******")}
WAYS |= {("write", "******"), ("fsync", "tensors.safetensors"), ("write", "state.json"), ("fsync", "state.json")}
WAYS |= {("rename", "result.json"), ("rename", "trained.safetensors"), ("rename", "checkpoint-000000002")}


def reasons(kind: str) -> set[str]:
    """What a message may say of it: where nothing is written yet, in the system's words."""
    how, number = KINDS[kind]
    return {os.strerror(number), "the disk is full"} if how == STAY_FULL else {os.strerror(number)}


def break_and_resume(driver: Driver, kind: str, folder: Path, words: list[str]) -> list[str]:
    """All attempts, the last of which ends well; where each of the others was hit."""
    hits = []
    for attempt in driver.attempts(kind, folder, words):
        if not attempt.hit:
            assert attempt.status == 0, attempt
            break
        hits.append(attempt.hit)
        if kind == "kill":
            assert attempt.killed, attempt
        else:
            tiny_run.assert_said_in_one_line(attempt, folder, reasons(kind))
        if folder.exists():
            tiny_run.assert_whole(folder, scratch=kind == "kill")
    return hits


def ways(hits: list[str]) -> set[tuple[str, str]]:
    """Those of `WAYS` that were among the hits."""
    pairs = [hit.split(" #")[0].split(" ", 1) for hit in hits]
    return {(kind, end) for kind, end in WAYS for operation, path in pairs if operation == kind and path.endswith(end)}


@pytest.fixture(scope="module")
def unbroken_stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage") / "run"
    folder.mkdir()
    tiny_stage.run(folder)
    return folder


@pytest.fixture(scope="module")
def stage_driver() -> Iterator[Driver]:
    with Driver("tests.faults.tiny_stage") as driver:
        yield driver


SLOWER = [pytest.param(kind, marks=pytest.mark.faults) for kind in ("ENOSPC", "EDQUOT", "EROFS")]


@pytest.mark.parametrize("kind", ["EIO", "short", "kill", *SLOWER])
def test_every_operation_of_a_stage(stage_driver: Driver, kind: str, unbroken_stage: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    hits = break_and_resume(stage_driver, kind, folder, [str(folder)])
    assert ways(hits) == (set() if kind == "short" else WAYS)
    tiny_run.assert_as_if_unbroken(folder, unbroken_stage)


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_driver() -> Iterator[Driver]:
    with Driver("tests.faults.tiny_run") as driver:
        yield driver


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    tiny_run.finish(tiny_run.command(tiny_run.arguments(folder)))
    return folder


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "short", "kill"])
def test_every_operation_of_a_run(run_driver: Driver, kind: str, unbroken: Path, tmp_path: Path) -> None:
    """Stages, the model's folder, and all that is said of it at the end."""
    folder = tmp_path / "run"
    hits = break_and_resume(run_driver, kind, folder, tiny_run.arguments(folder))
    if kind != "short":
        assert ways(hits) == WAYS
        assert {f"rename /{name} #0" for name in ("recipe.yaml", "model", "evaluation.json", "report.html")} < set(hits)
        assert any(hit.startswith("write /.model.incomplete/") for hit in hits)
    tiny_run.assert_as_if_unbroken(folder, unbroken)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["ENOSPC", "kill"])
def test_every_operation_of_a_transfer_by_blocks(run_driver: Driver, kind: str, tmp_path: Path) -> None:
    """With activations between the blocks, claims, and what merges the blocks."""
    changes: dict[str, Any] = {"transfer__layers_per_block": 1}
    until = ("--until", "transfer")
    tiny_run.finish(tiny_run.command([*tiny_run.arguments(tmp_path / "unbroken", **changes), *until]))
    folder = tmp_path / "run"
    words = [*tiny_run.arguments(folder, **changes), *until]
    hits = break_and_resume(run_driver, kind, folder, words)
    for part in ("/transfer/activations/boundary-001/", "/transfer/claims", "/transfer/block-001/"):
        assert any(f" {part}" in hit for hit in hits), part
    assert "rename /transfer/metrics.jsonl #0" in hits
    tiny_run.assert_as_if_unbroken(folder, tmp_path / "unbroken")


@pytest.mark.faults
def test_every_operation_of_a_measured_budget(run_driver: Driver, tmp_path: Path) -> None:
    """Per-head KV budget allocation, which is measured once and kept; quotas."""
    memory = "{fraction: 0.5, reference_length: 64}"
    changes: dict[str, Any] = {"memory": memory, "transfer": "null", "finetune__max_tokens": 2 * 4 * 64}
    until = ("--until", "finetune")
    tiny_run.finish(tiny_run.command([*changed(tmp_path / "unbroken", changes), *until]))
    folder = tmp_path / "run"
    hits = break_and_resume(run_driver, "EDQUOT", folder, [*changed(folder, changes), *until])
    assert "rename /allocation.json #0" in hits
    tiny_run.assert_as_if_unbroken(folder, tmp_path / "unbroken")


def changed(folder: Path, changes: dict[str, Any]) -> list[str]:
    """The command line without what the changes leave no place for."""
    words = tiny_run.arguments(folder, **changes)
    dropped = [at for at, word in enumerate(words) if word.startswith("transfer.")]
    return [word for at, word in enumerate(words) if at not in dropped and at + 1 not in dropped]
