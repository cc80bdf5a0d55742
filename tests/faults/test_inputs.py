"""Input that nobody meant ends in exit 0, or in exit 2 with one line: no traceback, no hang, nothing written.

All through the command line's own entry, in this process. `make test-faults` draws 5,000 inputs, the quick tests a few.
"""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import linearize_cli
from linearize.recipe import Recipe
from tests import tiny
from tests.commands import contents
from tests.faults import inputs

SECONDS = 60
FEW, MANY = 4, 720  # of each kind: 7 * 720 > 5,000


@contextmanager
def ends_soon() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise AssertionError(f"it takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ends_well(words: list[str], folder: Path, written: tuple[str, ...] = ()) -> None:
    """Run a command line that may read `folder`, and write there only what `written` names, if it ends in 0."""
    before = contents(folder)
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors), ends_soon():
        patch.setattr(sys, "argv", ["linearize", *words])
        patch.setenv("COLUMNS", "200")
        try:
            linearize_cli.main()
            status: Any = 0
        except SystemExit as end:
            status = end.code or 0
    said = errors.getvalue()
    assert status in (0, 2), said
    after = contents(folder)
    if status == 2:
        usage = "Usage: " in said or "─ Error ─" in said  # typer's own words
        assert usage or (said.startswith("error: ") and said.count("\n") == 1), said
        assert after == before
    changed = {path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed <= set(written)


def copied(source: str | Path, folder: Path, *, weights: bool) -> Path:
    """A model's folder without its weights, so that a run ends where they would be read."""
    ignored = None if weights else shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(source, folder / "model", ignore=ignored))


def a_recipe(data: bytes, folder: Path) -> list[str]:
    (folder / "mine.yaml").write_bytes(data)
    return ["plan", str(folder / "mine.yaml"), "--model", tiny.teacher_folder()]


def a_config(data: bytes, folder: Path) -> list[str]:
    model = copied(tiny.teacher_folder(), folder, weights=False)
    (model / "config.json").write_bytes(data)
    return ["plan", "lolcats", "--model", str(model)]


def a_dataset(named: tuple[str, bytes], folder: Path) -> list[str]:
    name, data = named
    (folder / name).write_bytes(data)
    words = tiny.run_arguments(folder / "run")
    model = copied(tiny.teacher_folder(), folder, weights=False)
    return [*words, "--model", str(model), "--dataset", str(folder / name)]


def a_tokenizer(named: tuple[str, bytes], folder: Path) -> list[str]:
    model = copied(tiny.teacher_folder(), folder, weights=False)
    (model / named[0]).write_bytes(named[1])
    return [*tiny.run_arguments(folder / "run"), "--model", str(model)]


def some_weights(data: bytes, folder: Path) -> list[str]:
    model = copied(tiny.finished_run().folder / "model", folder, weights=True)
    (model / "model.safetensors").write_bytes(data)
    return ["generate", str(model), "--prompt", "a", "--max-new-tokens", "1"]


def an_evaluation(named: tuple[str, bytes], folder: Path) -> list[str]:
    run = tiny.finished_run().folder
    for name in ("evaluation.json", "run.json", "plan.json", "recipe.yaml"):
        shutil.copy(run / name, folder)
    (folder / named[0]).write_bytes(named[1])
    return ["report", str(folder)]


def words_alone(words: list[str], folder: Path) -> list[str]:
    return [word.replace("FOLDER", str(folder)) for word in words]


def json_of(path: Path) -> st.SearchStrategy[tuple[str, bytes]]:
    return inputs.json_files(json.loads(path.read_text(encoding="utf-8"))).map(lambda data: (path.name, data))


def tokenizers() -> st.SearchStrategy[tuple[str, bytes]]:
    folder = Path(tiny.teacher_folder())
    return json_of(folder / "tokenizer.json") | json_of(folder / "tokenizer_config.json")


def evaluations() -> st.SearchStrategy[tuple[str, bytes]]:
    run = tiny.finished_run().folder
    files = [json_of(run / "evaluation.json")] * 3 + [json_of(run / "run.json"), json_of(run / "plan.json")]
    recipe = inputs.yaml_files((run / "recipe.yaml").read_text()).map(lambda data: ("recipe.yaml", data))
    return st.one_of(*files, recipe)


KINDS: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], Callable[[Any, Path], list[str]], tuple[str, ...]]] = {
    "recipe": (lambda: inputs.yaml_files(Recipe.load("lolcats").to_yaml()), a_recipe, ()),
    "config": (lambda: json_of(Path(tiny.teacher_folder()) / "config.json").map(lambda pair: pair[1]), a_config, ()),
    "dataset": (inputs.datasets, a_dataset, ()),
    "tokenizer": (tokenizers, a_tokenizer, ()),
    "weights": (
        lambda: inputs.safetensors_files((tiny.finished_run().folder / "model" / "model.safetensors").read_bytes()),
        some_weights,
        (),
    ),
    "evaluation": (evaluations, an_evaluation, ("report.html",)),
    "command line": (
        lambda: inputs.command_lines(["FOLDER", "FOLDER/none", "lolcats", "recommended", "float32", "cpu", "transfer"]),
        words_alone,
        (),
    ),
}


def fuzz(kind: str, examples: int) -> None:
    strategy, words_of, written = KINDS[kind]
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

    @settings(max_examples=examples, suppress_health_check=quiet, derandomize=True, database=None, phases=PHASES)
    @given(strategy())
    def ends(found: Any) -> None:
        with tempfile.TemporaryDirectory() as given_:
            folder = Path(given_)
            ends_well(words_of(found, folder), folder, written)

    with tiny.quick_measures():
        ends()


PHASES = (Phase.explicit, Phase.generate, Phase.shrink)


@pytest.mark.parametrize("kind", KINDS)
def test_some_input(kind: str) -> None:
    fuzz(kind, FEW)


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_much_input(kind: str) -> None:
    fuzz(kind, MANY)
