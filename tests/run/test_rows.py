"""Rows are made once for a run, and read from its folder, mapped, by every other start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from linearize.base import UserError
from linearize.data.load import load_processor
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.data.stored import read_dataset, write_dataset
from linearize.hf.checkpoint import read_config
from linearize.run import rows as keeping
from linearize.run.folder import Run
from linearize.run.pipeline import run
from linearize.run.rows import ROWS, rows_of
from tests import tiny


@pytest.fixture
def begun(tmp_path: Path) -> Run:
    """A run whose rows are made, and whose source can be changed."""
    source = tmp_path / "text.jsonl"
    source.write_bytes(Path(tiny.text_file()).read_bytes())
    recipe = tiny.recipe(data__dataset=str(source), transfer__max_tokens=1)
    started = Run(recipe, tiny.teacher_folder(), tmp_path / "run", torch.float32, torch.device("cpu"))
    run(started, until="transfer")
    return started


def again(begun: Run) -> Dataset:
    return rows_of(begun, load_processor(begun.recipe.data.task, begun.model), read_config(begun.model))


@pytest.fixture
def no_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(keeping, "load_dataset", load)


def test_a_second_start_does_not_tokenise(begun: Run, no_tokenising: None) -> None:
    found = again(begun)
    run(begun, until="transfer")
    assert isinstance(found.train, PackedRows) and len(found.train)


def test_the_rows_are_the_same(begun: Run) -> None:
    found, made = again(begun), tiny.load_data(begun)
    assert found.fingerprint == made.fingerprint and found.documents == made.documents
    assert torch.equal(found.test.documents, made.test.documents)  # type: ignore[attr-defined]
    pairs = zip(found.test_documents, made.test_documents, strict=True)
    assert all(torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels) for a, b in pairs)


def test_a_changed_source_is_read_again(begun: Run) -> None:
    source = Path(str(begun.recipe.data.dataset))
    source.write_text("\n".join(reversed(source.read_text().splitlines())) + "\n")
    assert again(begun).fingerprint != read_dataset_as_it_is(begun).fingerprint
    with pytest.raises(UserError, match="use the same data or another folder"):
        run(begun, until="transfer")


def test_a_damaged_file_is_named(begun: Run) -> None:
    path = begun.folder / ROWS
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.safetensors: expected the rows that were written there"):
        again(begun)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"rows\.safetensors"):
        again(begun)


def test_rows_are_mapped_not_read(tmp_path: Path) -> None:
    """40 MB of rows take next to nothing of this process's own memory."""
    parts = [PackedRows(*torch.zeros(3, 100, 6_000, dtype=torch.int64)) for _ in range(3)]
    parts = [PackedRows(*(x.clone() for x in rows.tensors())) for rows in parts]
    write_dataset(tmp_path / ROWS, Dataset(*parts, (1, 1, 1)), "these")
    assert read_dataset(tmp_path / ROWS, "others") is None
    found = read_dataset(tmp_path / ROWS, "these")
    assert found is not None
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    ours = next(part for part in maps if str(tmp_path / ROWS) in part)
    private = sum(int(line.split()[1]) for line in ours.splitlines() if line.startswith("Private_Dirty"))
    assert private == 0, "kB of the mapped file that were copied"


def read_dataset_as_it_is(begun: Run) -> Dataset:
    from safetensors import safe_open

    with safe_open(begun.folder / ROWS, framework="pt") as file:
        found = read_dataset(begun.folder / ROWS, file.metadata()["identity"])
    assert found is not None
    return found
