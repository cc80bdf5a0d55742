"""The tiny run that is killed and broken here, as a program and as an unbroken folder; and when two runs are equal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file

import linearize_cli
from linearize.evaluation.measure import NEW_TOKENS
from linearize.run.rows import ROWS
from tests import tiny
from tests.faults.layer import ROOT, Attempt, environment

# Less is measured, and no controls are trained: they are written by what writes the stages.
CHANGES = {"evaluation.trained_controls": False, "evaluation.bootstrap_samples": 8}
PROGRESS = re.compile(r".*held-out loss.*|.+: [\d,]+ (of \d+|documents)|block \d+ of \d+: running .*")
SCRATCH = re.compile(r"unfinished|\.incomplete$|^\.tmp|^\.lock$")


def arguments(output_dir: Path, **changes: Any) -> list[str]:
    """Its command line; two underscores in a name stand for a dot."""
    fields = CHANGES | {name.replace("__", "."): value for name, value in changes.items()}
    return tiny.run_arguments(output_dir, **fields)


def main() -> None:
    """The program: the command line, quick where that changes nothing that it writes."""
    with tiny.quick_measures(NEW_TOKENS):
        linearize_cli.main()


def command(words: list[str]) -> list[str]:
    """As its user types it."""
    return [sys.executable, "-m", "linearize", *words]


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment(**variables),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(command: list[str]) -> None:
    """Run a command to its end, which must be a good one."""
    process = start(command)
    _, said = process.communicate(timeout=1200)
    assert process.returncode == 0, said


def assert_said_in_one_line(attempt: Attempt, folder: Path, reasons: set[str]) -> None:
    """Exit 2, and a last line that names a file or folder below `folder`, and why; no other error before it."""
    assert attempt.status == 2, attempt
    assert "Traceback" not in attempt.said
    *progress, last = attempt.said.splitlines()
    assert last.startswith("error: ") and str(folder) in last, attempt
    assert any(reason in last for reason in reasons), attempt
    assert all(PROGRESS.fullmatch(line) for line in progress), attempt


def assert_whole(folder: Path, *, scratch: bool) -> None:
    """Every file that a resume may take for whole is; `scratch`: a killed process may have left what it was at."""
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if any(SCRATCH.search(part) for part in relative.parts):
            assert scratch, f"left behind: {relative}"
        elif path.parent.name == "claims":
            assert not path.stat().st_size, f"a lock holds nothing: {relative}"
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.is_file() and path.name != "metrics.jsonl":  # whose end a checkpoint vouches for
            assert path.stat().st_size, relative


def assert_as_if_unbroken(found: Path, expected: Path) -> None:
    """The same files, weights bit for bit, and the same metrics and measurements, timings apart."""
    names = {path.relative_to(expected) for path in expected.rglob("*")}
    left = {path.relative_to(found) for path in found.rglob("*")}
    assert left == names, (sorted(left - names), sorted(names - left))
    for name in sorted(names):
        one, other = found / name, expected / name
        if name.name == "metrics.jsonl":
            assert tiny.untimed_metrics(one.parent) == tiny.untimed_metrics(other.parent), name
        elif name.name == "evaluation.json":
            assert tiny.untimed(json.loads(one.read_text())) == tiny.untimed(json.loads(other.read_text()))
        elif name.name == "result.json":
            assert _untimed_result(one) == _untimed_result(other), name
        elif name.name == ROWS:  # safetensors writes its metadata in any order
            assert _metadata(one) == _metadata(other), name
            tensors = load_file(one), load_file(other)
            assert tensors[0].keys() == tensors[1].keys(), name
            assert all(tensor.equal(tensors[1][key]) for key, tensor in tensors[0].items()), name
        elif one.is_file() and name.suffix not in {".md", ".html"}:  # which tell of the folder and of timings
            assert one.read_bytes() == other.read_bytes(), name


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def _untimed_result(path: Path) -> dict[str, Any]:
    timed = {"seconds", "sha256"}
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in timed}
