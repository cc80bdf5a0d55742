"""The comparison with kvpress, on a tiny model; its presses where `make bench-kvpress` has made their environment."""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from linearize import convert_layers
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import MixerConfig
from linearize.ops.layout import SlidingSpan
from tests import tiny

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PYTHON = BENCHMARKS.parent / ".venv-kvpress/bin/python"
SIZES = ["--texts", 16, "--needles", 3, "--context", 100, "--continuation", 20, "--repeats", 2]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the script; it gives the rows of the table."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    (tmp_path / "text.txt").write_text("".join(random.Random(0).choices("abcdefgh ", k=12_000)), encoding="utf-8")
    files = ["--text", tmp_path / "text.txt", "--json", tmp_path / "out.json"]

    def call(*arguments: object) -> list[dict[str, Any]]:
        command = ["kvpress", "--model", tiny.teacher_folder(), *files, *SIZES, *arguments]
        monkeypatch.setattr(sys, "argv", [*map(str, command)])
        runpy.run_path(str(BENCHMARKS / "kvpress.py"), run_name="__main__")
        return json.loads((tmp_path / "out.json").read_text())["results"]

    return call


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """Write a model with a window of 12 tokens, 12 % of the context's cache."""
    teacher = tiny.llama()
    mixer = MixerConfig(span=SlidingSpan(window_size=12), feature_map=None, combine=WindowOnly())
    convert_layers(teacher, (mixer,) * 2).save_pretrained(tmp_path / "student")
    return tmp_path / "student"


def test_windows_and_students_beside_the_teacher(
    compare: Any, student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = compare("--presses", "--student", f"mine={student}")
    assert [(row["name"], row["budget"]) for row in rows] == [
        ("teacher", 1.0),
        ("window and 4 sinks, 20 %", 0.2),
        ("window and 4 sinks, 11 %", 0.11),
        ("mine", 0.11),
        ("mine, prefill in full", 0.11),
        ("window and 4 sinks, 6 %", 0.06),
    ]
    assert [round(row["share"], 3) for row in rows] == [1.0, 0.2, 0.11, 0.12, 0.12, 0.06]
    grown = [row["bytes_after_continuation"] / row["bytes_after_context"] for row in rows]
    assert grown == pytest.approx([1.2, 1, 1, 1, 1, 1])
    assert rows[0]["minus_teacher"] == {"mean": 0, "low": 0, "high": 0}
    for row in rows[1:]:
        difference = row["minus_teacher"]
        assert difference["low"] <= difference["mean"] <= difference["high"] and difference["mean"] != 0
        assert difference["mean"] == pytest.approx(row["loss"]["mean"] - rows[0]["loss"]["mean"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[-3].startswith("| 11 % | mine | once, streaming | 12.0 % | 3 | 3 | ")
    assert lines[-2].startswith("| 11 % | mine, prefill in full | once, full attention | 12.0 % | 3 | 3 | ")
    assert (tmp_path / "out.md").read_text().splitlines() == lines

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    for where in ("linearize.evaluation.continuation.measure", "linearize.evaluation.speed.seconds_in_turns"):
        monkeypatch.setattr(where, again)
    assert compare("--presses", "--student", f"mine={student}") == rows


def test_measurements_of_another_model_or_other_rows_are_not_mixed(
    compare: Any, student: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    compare("--presses", "--budgets", 0.2)
    for arguments, error in (
        (["--seed", 1], "out.rows.jsonl: expected rows '"),
        (["--model", tiny.gpt2_folder()], "out.rows.jsonl: expected weights '"),
        (["--student", str(student)], "--student: expected NAME=FOLDER with a name of its own, found"),
        (["--student", f"teacher={student}"], "--student: expected NAME=FOLDER with a name of its own, found"),
        (["--context", 900], "held-out text: expected at least 14,704 tokens for 16 rows of 900 + 20 tokens"),
        (["--presses", "SnapKV", "--python", str(tmp_path / "none")], "--python: expected kvpress's Python, found no"),
    ):
        with pytest.raises(SystemExit, match="2"):
            compare("--presses", *arguments)
        printed = capsys.readouterr().err
        assert error in printed and len([line for line in printed.splitlines() if line.startswith("error")]) == 1


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs kvpress's environment (`make bench-kvpress`)")
def test_presses(compare: Any) -> None:
    """Each press keeps what its budget says, and grows. The script compares them with each press by itself."""
    rows = {row["name"]: row for row in compare("--budgets", 0.2, "--python", PYTHON)}
    assert len(rows) == 12 and len(set(rows) - {"teacher", "window and 4 sinks, 20 %"}) == 10
    assert rows["DuoAttention, 20 %"]["does_not_run"] == "kvpress has no attention pattern of this model's heads"
    teacher = rows["teacher"]
    token = teacher["bytes_after_context"] // 100
    for name in (name for name, row in rows.items() if row["method"] not in ("teacher", "DuoAttention")):
        row = rows[name]
        pairs = 20 if row["method"] in ("KVzip", "window and 4 sinks") else 19  # kvpress rounds 20 down
        assert row["bytes_after_context"] == pytest.approx(pairs * token, abs=token // 4)
        grown = row["bytes_after_continuation"] - row["bytes_after_context"]
        assert grown == (0 if row["method"] == "window and 4 sinks" else 20 * token)
        assert abs(row["minus_teacher"]["mean"]) > 1e-4
    assert rows["KVzip, 20 %"]["reads"] == "twice, full attention"
