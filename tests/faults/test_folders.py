"""Folders as users have them: taken by another run, damaged, read-only, of any name, behind links; and clocks."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from linearize.run import folder as runs
from linearize.training import loop
from tests import tiny
from tests.commands import Command, Done, assert_refused, contents
from tests.faults import tiny_run
from tests.faults.layer import Driver


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


# --- two runs ---------------------------------------------------------------------------------------------------------


def test_the_second_run_in_a_folder_is_refused(command: Command, tmp_path: Path) -> None:
    """While the first one is at work, whichever came first to the folder; and nothing that it needs is touched."""
    folder = tmp_path / "run"
    with runs.alone_in(folder):
        before = contents(tmp_path)
        done = command(*tiny_run.arguments(folder))
        assert_refused(done, f"output folder {folder}: expected no active run, found another run at work; ")
        assert contents(tmp_path) == before
    assert not folder.exists(), "what stays empty goes"


def test_a_lock_that_a_killed_process_left_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / runs.LOCK).touch()
    (tmp_path / ".plan.json.0123abcd.incomplete").write_text("{")
    with runs.alone_in(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [runs.LOCK], "what it was writing is gone"
    assert contents(tmp_path) == {}


@pytest.mark.faults
def test_two_runs_at_once(tmp_path: Path) -> None:
    """Of two that are started together one is refused, and the other is what it would have been alone."""
    words = tiny_run.command(tiny_run.arguments(tmp_path / "run"))
    ended = [(process, process.communicate(timeout=900)[1]) for process in [tiny_run.start(words) for _ in range(2)]]
    (refused, line), (finished, said) = sorted(ended, key=lambda pair: -pair[0].returncode)
    assert (refused.returncode, finished.returncode) == (2, 0), said
    assert line.startswith("error: output folder ") and line.count("\n") == 1 and "another run at work" in line
    tiny_run.finish(tiny_run.command(tiny_run.arguments(tmp_path / "alone")))
    tiny_run.assert_as_if_unbroken(tmp_path / "run", tmp_path / "alone")


# --- names, links, clocks ---------------------------------------------------------------------------------------------


def test_any_names_links_and_a_clock_that_jumps(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny.run_arguments(tmp_path / "plain")
    assert command(*plain, "--until", "transfer").status == 0
    here = tmp_path / "with spaces, ünïcode 文 and 'quotes'"
    here.mkdir()
    shutil.copytree(tiny.teacher_folder(), here / "le modèle")
    shutil.copy(tiny.text_file(), here / "my text.jsonl")
    (here / "elsewhere").mkdir()
    (here / "link").symlink_to(here / "elsewhere")
    backwards = itertools.count(time.time(), -3600.0)
    monkeypatch.setattr(time, "time", lambda: next(backwards))
    given = ["--model", here / "le modèle", "--dataset", here / "my text.jsonl", "--until", "transfer"]
    done = command(*tiny.run_arguments(here / "link" / "out put"), *given)
    assert done.status == 0, done.err
    stages = here / "elsewhere" / "out put" / "transfer", tmp_path / "plain" / "transfer"
    assert stages[0].joinpath("trained.safetensors").read_bytes() == (stages[1] / "trained.safetensors").read_bytes()
    assert tiny.untimed_metrics(stages[0]) == tiny.untimed_metrics(stages[1])


LINKED = ["finetune/metrics.jsonl", "finetune", "finetune/unfinished", "controls", "model", "run.json", ".lock", "new"]


@pytest.mark.parametrize("name", LINKED)
def test_links_in_a_folder_of_somebody_else(name: str, command: Command, tmp_path: Path) -> None:
    """A run would write to what they lead to, or empty or remove it."""
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    shutil.copytree(tiny.finished_run().folder, folder)
    (theirs / "unfinished").mkdir(parents=True)
    for kept in ("kept", "unfinished/kept", ".kept.0123abcd.incomplete"):
        (theirs / kept).write_text("mine")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(theirs if "." not in name else theirs / "kept")
    before = contents(tmp_path)
    done = command(*tiny.run_arguments(folder))
    assert_refused(
        done, f"output folder {folder}: expected files and folders of its own, found the symbolic link {path}"
    )
    assert contents(tmp_path) == before


@pytest.mark.faults
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    with Driver("tests.faults.tiny_run") as driver:
        attempts = driver.attempts("EROFS", tmp_path / "run", tiny_run.arguments(tmp_path / "run"))
        (first, second), reason = itertools.islice(attempts, 2), "can be written"
        for attempt in (first, second):
            tiny_run.assert_said_in_one_line(attempt, tmp_path / "run", {"Read-only file system; use another"})
            assert reason in attempt.said
        assert not (tmp_path / "run").exists()


# --- damage -----------------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "missing": lambda data: None,
}


@contextmanager
def damaged(path: Path, how: str) -> Iterator[None]:
    whole = path.read_bytes()
    found = DAMAGE[how](whole)
    path.unlink() if found is None else path.write_bytes(found)
    yield
    path.write_bytes(whole)


def said(done: Done) -> str:
    """The line that names what is wrong."""
    assert done.status == 2, done.err
    assert "Traceback" not in done.err
    *before, last = done.err.splitlines()
    assert last.startswith("error: ") and all("held-out loss" in line for line in before)
    return last


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in fine-tuning: a finished stage, and one with a checkpoint."""
    folder, update = tmp_path_factory.mktemp("broken") / "run", loop.StageRun.update

    class Killed(BaseException):
        pass

    def dies(self: loop.StageRun) -> object:
        if self.step == 3 and self.batches.num_steps == 4:
            raise Killed
        return update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.StageRun, "update", dies)
        patch.setattr("sys.argv", ["linearize", *tiny_run.arguments(folder)])
        with pytest.raises(Killed):
            tiny_run.main()
    return folder


@pytest.mark.faults
@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_files_of_a_run_are_named(command: Command, broken_off: Path, tmp_path: Path, how: str) -> None:
    """Whatever a resume needs."""
    shutil.copytree(broken_off, tmp_path / "run")
    words = tiny_run.arguments(tmp_path / "run")
    checkpoint = "finetune/checkpoint-000000002"
    names = [f"{checkpoint}/tensors.safetensors", f"{checkpoint}/state.json", "finetune/metrics.jsonl"]
    names += ["transfer/trained.safetensors", "recipe.yaml", "run.json"]
    if how != "missing":  # a stage without a result is not finished, and is trained again
        names.append("transfer/result.json")
    for name in names:
        with damaged(path := tmp_path / "run" / name, how):
            line = said(command(*words))
            named = path if how != "missing" and name != "run.json" else tmp_path / "run"  # that speaks of the run
            assert str(named) in line, name


@pytest.mark.faults
@pytest.mark.parametrize("how", ["cut", "empty", "missing"])
def test_damaged_files_of_a_model_are_named(command: Command, tmp_path: Path, how: str) -> None:
    """A flipped bit among the numbers of a model's weights cannot be known: SECURITY.md."""
    model = tmp_path / "model"
    shutil.copytree(tiny.finished_run().folder / "model", model)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        with damaged(model / name, how):
            assert str(model) in said(command("generate", model, "--prompt", "a"))


@pytest.mark.faults
@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "missing"])
def test_damaged_files_of_a_report_are_named(command: Command, tmp_path: Path, how: str) -> None:
    shutil.copytree(tiny.finished_run().folder, tmp_path / "run")
    for name in ("evaluation.json", "recipe.yaml", "run.json", "plan.json", "transfer/result.json"):
        with damaged(tmp_path / "run" / name, how):
            done = command("report", tmp_path / "run", "--output", tmp_path / "page.html")
            if done.status == 0:  # it tells of less, or of another number
                assert how in ("missing", "flipped")
            else:
                assert str(tmp_path / "run") in said(done)
