"""The comparison with kvpress, on a tiny model; its presses where `make bench-kvpress` has made their environment."""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from linearize.base import UserError
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import SlidingSpan
from linearize.hf.convert import convert_layers
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


def window_student(folder: Path, window: int) -> Path:
    """Write a model with a window of so many tokens, or per cents of the context's cache."""
    mixer = MixerConfig(span=SlidingSpan(window_size=window), feature_map=None, combine=WindowOnly())
    convert_layers(tiny.llama(), (mixer,) * 2).save_pretrained(folder)
    return folder


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return window_student(tmp_path / "student", 12)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Load the script's functions."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "kvpress.py")))


@pytest.fixture
def stub(tmp_path: Path) -> Any:
    """Write an executable in place of kvpress's Python: it keeps the job, prints results, and ends with a status."""

    def write(results: list[dict[str, Any]], status: int = 0) -> Path:
        (tmp_path / "printed.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\ncat > {tmp_path}/job.json\ncat {tmp_path}/printed.jsonl\nexit {status}\n")
        python.chmod(0o755)
        return python

    return write


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

    for where in ("contexts.measure", "turns.seconds_in_turns"):
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
        (
            ["--student", f"window and 4 sinks, 20 %={student}"],
            "--student: expected NAME=FOLDER with a name of its own",
        ),
        (
            ["--budgets", 0.2, 0.04],
            "--budgets: expected shares that keep more than 4 of 100 tokens, and at most all, found",
        ),
        (
            ["--budgets", 1.5],
            "--budgets: expected shares that keep more than 4 of 100 tokens, and at most all, found 1.5",
        ),
        (["--presses", "SnapKV", "--python", str(tmp_path / "none")], "--python: expected kvpress's Python, found no"),
    ):
        with pytest.raises(SystemExit, match="2"):
            compare("--presses", *arguments)
        printed = capsys.readouterr().err
        assert error in printed and len([line for line in printed.splitlines() if line.startswith("error")]) == 1


def test_a_name_belongs_to_one_layer_plan(
    compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], student: Path
) -> None:
    """Windows of different sizes have the same weights."""
    rows = compare("--presses", "--budgets", 0.2, "--student", f"mine={student}")
    larger = window_student(tmp_path / "larger", 20)
    with pytest.raises(SystemExit, match="2"):
        compare("--presses", "--budgets", 0.2, "--student", f"mine={larger}")
    assert "out.rows.jsonl: 'mine' was another model before; give this one another name" in capsys.readouterr().err
    assert compare("--presses", "--budgets", 0.2, "--student", f"mine={student}") == rows


@pytest.mark.parametrize(
    "contents, problem",
    [
        ('{"settings": {}}\n{"read": {"teacher": [[1.', r"line 2 cannot be read \("),
        ("<<<<<<< HEAD\n", r"line 1 cannot be read \("),
        ('{"weights": {}}\n', "other JSON"),
        ('{"settings": {}}\n[]\n', "other JSON"),
        ("", "other JSON"),
    ],
)
def test_a_damaged_file_of_rows(script: SimpleNamespace, tmp_path: Path, contents: str, problem: str) -> None:
    (tmp_path / "a.rows.jsonl").write_text(contents)
    with pytest.raises(UserError, match=f"a.rows.jsonl: expected a JSON .* found {problem}.*; restore the file, or"):
        script.Store(tmp_path / "a.rows.jsonl", {})
    assert (tmp_path / "a.rows.jsonl").read_text() == contents


@pytest.fixture
def half_read(script: SimpleNamespace, tmp_path: Path) -> Any:
    """A store with three rows of the teacher, one row of a press, and a press that does not run."""
    store = script.Store(tmp_path / "a.rows.jsonl", {})
    store.add(first=0, read={"teacher": [[2.0, True], [3.0, False], [4.0, True]]})
    results = [
        {"refused": {"DuoAttention, 20 %": "no pattern"}},
        {"bytes": {"teacher": [1, 2], "SnapKV, 20 %": [3, 4]}},
        {"first": 0, "read": {"teacher": [[2.0009, True]], "SnapKV, 20 %": [[2.5, True]]}},
    ]
    assert len(list(script.stored(store, results))) == 1
    return store


def test_results_of_presses_are_kept(script: SimpleNamespace, half_read: Any) -> None:
    again = script.Store(half_read.path, {})
    for store in (half_read, again):
        assert store.readings("SnapKV, 20 %") == {0: (2.5, True)} and len(store.readings("teacher")) == 3
        assert store.all("bytes") == {"SnapKV, 20 %": [3, 4]}  # the teacher's is not that of kvpress's environment
        assert store.all("refused") == {"DuoAttention, 20 %": "no pattern"}


def test_another_teacher_in_the_environment_of_presses(script: SimpleNamespace, half_read: Any) -> None:
    other = {"first": 1, "read": {"teacher": [[3.002, False]], "SnapKV, 20 %": [[3.5, False]]}}
    with pytest.raises(UserError, match=r"row 1: expected the teacher's loss to be 3\.0000 nats per token .* 3\.0020"):
        list(script.stored(half_read, [other]))
    assert script.Store(half_read.path, {}).readings("SnapKV, 20 %") == {0: (2.5, True)}


def test_presses_go_on_where_they_were_stopped(script: SimpleNamespace, half_read: Any) -> None:
    cases = [script.make_case(name, 0.2, "once") for name in ("SnapKV", "DuoAttention")]
    rows = [script.ContextRow([1], [2], 1)] * 3
    asked = SimpleNamespace(model="m", budgets=[0.2], repeats=2, threads=1)
    work = script.job(half_read, cases, rows, 1, asked)
    assert work["cases"] == [("SnapKV, 20 %", "SnapKV", 0.2)]
    assert work["missing"] == [1, 2] and work["timed"] == ["SnapKV, 20 %"]
    more = [
        {"first": 1, "read": {"teacher": [[3.0, False]], "SnapKV, 20 %": [[3.5, False]]}},
        {"first": 2, "read": {"teacher": [[4.0, True]], "SnapKV, 20 %": [[4.5, True]]}},
    ]
    assert len(list(script.stored(half_read, more))) == 2
    assert script.job(half_read, cases, rows, 1, asked)["missing"] == []
    assert len(list(script.stored(half_read, [{"seconds": {"teacher": 1.0, "SnapKV, 20 %": 2.0}}]))) == 1
    assert script.job(half_read, cases, rows, 1, asked) is None
    assert half_read.seconds("SnapKV, 20 %") == [(2.0, 1.0)]


def test_presses_in_the_table(
    compare: Any, stub: Any, script: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first run of presses stops after 5 of 19 rows; a second one finishes."""
    options = ["--budgets", 0.2, "--presses"]
    [teacher, window] = compare(*options)
    losses = script.Store(tmp_path / "out.rows.jsonl", {}).readings("teacher")
    name = "SnapKV, 20 %"
    read = [
        {"first": row, "read": {"teacher": [pair], name: [[pair[0] + 0.5, row == 18]]}} for row, pair in losses.items()
    ]
    begin = [
        {"refused": {"DuoAttention, 20 %": "no pattern"}},
        {"versions": {"kvpress": "1"}},
        {"bytes": {name: [3, 4]}},
    ]
    options += ["SnapKV", "DuoAttention", "--python", stub([*begin, *read[:5]], 3)]
    with pytest.raises(SystemExit, match="2"):
        compare(*options)
    assert "kvpress: expected presses.py to end well, found status 3; see above" in capsys.readouterr().err
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["missing"] == [*range(19)] and [case[0] for case in job["cases"]] == [name, "DuoAttention, 20 %"]

    seconds = [{"seconds": {"teacher": 2.0, name: ours}} for ours in (3.0, 5.0)]
    stub([*read[5:], *seconds])
    rows = compare(*options)
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["missing"] == [*range(5, 19)] and job["cases"] == [[name, "SnapKV", 0.2]] and job["timed"] == [name]
    press, refused = rows[1:3]
    assert rows[0]["loss"] == teacher["loss"] and rows[3] == window and refused["does_not_run"] == "no pattern"
    assert press["minus_teacher"]["mean"] == pytest.approx(0.5) and press["needles"]["mean"] == pytest.approx(1 / 3)
    assert press["times_teachers_seconds"]["median"] == 2 and press["bytes_after_continuation"] == 4
    assert json.loads((tmp_path / "out.json").read_text())["press_versions"] == {"kvpress": "1"}
    page = (tmp_path / "out.md").read_text()
    assert "| 20 % | DuoAttention | does not run: no pattern |" in page and "| 20 % | SnapKV | once, full" in page
    stub([], 3)
    assert compare(*options) == rows  # nothing is left for presses


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs kvpress's environment (`make bench-kvpress`)")
def test_presses(compare: Any) -> None:
    """Each press keeps what its budget says, and grows or is held. The script compares it with the press by itself."""
    rows = {row["name"]: row for row in compare("--budgets", 0.2, "--python", PYTHON)}
    assert len(rows) == 15 and len(set(rows) - {"teacher", "window and 4 sinks, 20 %"}) == 13
    assert rows["DuoAttention, 20 %"]["does_not_run"] == "kvpress has no attention pattern of this model's heads"
    teacher = rows["teacher"]
    token = teacher["bytes_after_context"] // 100
    for name in (name for name, row in rows.items() if row["method"] not in ("teacher", "DuoAttention")):
        row = rows[name]
        constant = row["method"] == "window and 4 sinks" or row["method"].endswith(", held")
        pairs = 20 if constant or row["method"] == "KVzip" else 19  # kvpress rounds 20 down
        assert row["bytes_after_context"] == pytest.approx(pairs * token, abs=token // 4)
        grown = row["bytes_after_continuation"] - row["bytes_after_context"]
        assert grown == (0 if constant else 20 * token)
        assert abs(row["minus_teacher"]["mean"]) > 1e-4
    assert rows["KVzip, 20 %"]["reads"] == "twice, full attention"
