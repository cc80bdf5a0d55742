"""The files of a stage: what is on the disk when writing fails, and what is refused on reading."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from linearize.base import UserError
from linearize.training import resumption as checkpoint
from linearize.training.resumption import MetricsLog, StageFolder

IDENTITY = {"lr": 0.1, "seed": 0}
TENSORS = {"weight": torch.arange(1000.0), "step": torch.tensor(3.0)}


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def full_disk(error: Exception) -> Callable[[dict[str, Tensor], Path], None]:
    def save(tensors: dict[str, Tensor], path: Path) -> None:
        path.write_bytes(b"half of it")
        raise error

    return save


FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL)
def test_a_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stage = StageFolder(tmp_path, IDENTITY)
    stage.save(4, TENSORS, {"step": 4})
    before = names(tmp_path)
    monkeypatch.setattr(checkpoint, "save_file", full_disk(error))
    with pytest.raises(UserError, match=f"^{tmp_path}: the disk is full: expected room for 4004 bytes"):
        stage.save(8, TENSORS, {"step": 8})
    with pytest.raises(UserError, match="the disk is full"):
        stage.finish(TENSORS, {"steps": 8})
    assert names(tmp_path) == before
    loaded = StageFolder(tmp_path, IDENTITY).latest({})
    assert loaded is not None
    assert loaded[1] == {"step": 4}
    assert torch.equal(loaded[0]["weight"], TENSORS["weight"])


@pytest.mark.parametrize("error", [OSError(errno.EIO, ""), SafetensorError("I/O error: oh (os error 5)")])
def test_a_broken_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stage = StageFolder(tmp_path, IDENTITY)
    monkeypatch.setattr(checkpoint, "save_file", full_disk(error))
    with pytest.raises(UserError, match=f"^{tmp_path}: expected to write 4004 bytes, found: Input/output error; mend "):
        stage.save(8, TENSORS, {"step": 8})
    assert names(tmp_path) == []


def test_a_bug_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = StageFolder(tmp_path, IDENTITY)
    monkeypatch.setattr(checkpoint, "save_file", full_disk(RuntimeError("no such thing")))
    with pytest.raises(RuntimeError, match="no such thing"):
        stage.save(8, TENSORS, {"step": 8})
    assert names(tmp_path) == []


def test_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    StageFolder(tmp_path, IDENTITY).save(999_999_999, TENSORS, {"step": 999_999_999})
    (tmp_path / "checkpoint-000000004").mkdir()  # not yet removed when the process died
    (tmp_path / "unfinished" / "checkpoint-1000000000").mkdir(parents=True)
    loaded = StageFolder(tmp_path, IDENTITY).latest({})
    assert loaded is not None
    assert loaded[1] == {"step": 999_999_999}
    assert not (tmp_path / "unfinished").exists()


def test_loaded_tensors_do_not_depend_on_their_file(tmp_path: Path) -> None:
    stage = StageFolder(tmp_path, IDENTITY)
    stage.save(4, TENSORS, {})
    loaded = stage.latest({})
    assert loaded is not None
    with (tmp_path / "checkpoint-000000004" / "tensors.safetensors").open("rb+") as file:
        file.write(bytes(4100))
    assert torch.equal(loaded[0]["weight"], TENSORS["weight"])


@pytest.mark.parametrize(
    ("file", "content"),
    [("result.json", b"{"), ("result.json", b"{}"), ("trained.safetensors", b"abc"), ("trained.safetensors", None)],
)
def test_unreadable_files_are_named(tmp_path: Path, file: str, content: bytes | None) -> None:
    StageFolder(tmp_path, IDENTITY).finish(TENSORS, {"steps": 8})
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=rf"{file}: expected .*, found .*; delete .* to train again"):
        StageFolder(tmp_path, IDENTITY).finished({})


def test_metrics_are_cut_back_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as metrics:
        metrics.write({"step": 1})
        written = metrics.sync()
        metrics.write({"step": 2})
    with pytest.raises(UserError, match=r"metrics.jsonl: expected the 12 bytes .*, found others; restore the file, or"):
        MetricsLog(path, written["length"], "0" * 64)
    with MetricsLog(path, **written) as metrics:
        metrics.write({"step": 3})
        with pytest.raises(ValueError, match="not JSON compliant"):
            metrics.write({"loss": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 3}]


def test_missing_metrics_are_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics.jsonl: expected the 10 bytes .*, found 0"):
        MetricsLog(tmp_path / "metrics.jsonl", 10)


def test_a_disk_that_fills_under_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """Takes a part of the line, as long as there is room."""

        room = 20

        def write(self, line: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = min(len(line) // 2 + 1, self.room)
            self.room -= written
            return written

    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as metrics, monkeypatch.context() as patch:
        patch.setattr(metrics, "_file", Full())
        metrics.write({"step": 12})
        with pytest.raises(UserError, match=f"^{path}: the disk is full: expected room for 13 bytes"):
            metrics.write({"step": 14})


@pytest.mark.parametrize("finished", [False, True])
def test_a_flipped_bit_is_named(tmp_path: Path, finished: bool) -> None:
    """Anywhere in what a stage has written: of numbers in JSON and of tensors' payload nothing else would tell."""
    stage = StageFolder(tmp_path, IDENTITY)
    stage.save(4, TENSORS, {"step": 4, "losses": {"a": 0.125}})
    if finished:
        stage.finish(TENSORS, {"steps": 8})
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        ours = range(8 * whole.find(b"sha256"), 8 * (whole.find(b"sha256") + 9))  # a key of the digests themselves
        for place in [*range(0, 8 * len(whole), 8 * len(whole) // 50 + 1), *(ours if path.suffix == ".json" else ())]:
            flipped = bytearray(whole)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            again = StageFolder(tmp_path, IDENTITY)
            if path.suffix == ".json" and _means_the_same(whole, bytes(flipped)):
                continue
            with pytest.raises(UserError, match=rf"{path.name}: .*; (delete|use another)"):
                again.finished({}) if finished else again.latest({})
        path.write_bytes(whole)
    stage = StageFolder(tmp_path, IDENTITY)
    assert stage.finished({}) if finished else stage.latest({})


@pytest.mark.parametrize("finished", [False, True])
def test_a_flipped_bit_in_rows_is_named(tmp_path: Path, finished: bool) -> None:
    """Rows of what is divided among processes lie in files of their own."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(TENSORS["weight"].view(10, 100), init_device_mesh("cpu", (1,)), [Shard(0)])
        tensors = TENSORS | {"weight": weight}
        stage = StageFolder(tmp_path, IDENTITY)
        stage.finish(tensors, {"steps": 8}) if finished else stage.save(4, tensors, {"step": 4})
        found = stage.finished({"weight": weight}) if finished else stage.latest({"weight": weight})
        assert found is not None and torch.equal(found[0]["weight"].full_tensor(), weight.full_tensor())
        (path,) = tmp_path.rglob("*/*-of-*.safetensors")
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(UserError, match=rf"{path.name}: expected the tensors that were written, .* delete"):
            stage.finished({"weight": weight}) if finished else stage.latest({"weight": weight})
    finally:
        torch.distributed.destroy_process_group()


def _means_the_same(whole: bytes, flipped: bytes) -> bool:
    """White space is not what a stage has said."""
    try:
        return json.loads(flipped) == json.loads(whole)
    except ValueError:
        return False


def test_what_was_written_before_there_were_digests_is_read(tmp_path: Path) -> None:
    stage = StageFolder(tmp_path, IDENTITY)
    stage.finish(TENSORS, {"steps": 8})
    found = json.loads((tmp_path / "result.json").read_text())
    del found["sha256"], found["tensors_sha256"]
    (tmp_path / "result.json").write_text(json.dumps(found))
    loaded = stage.finished({})
    assert loaded is not None and loaded[1] == {"steps": 8}
