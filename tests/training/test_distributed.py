"""Several processes train what one trains: real ones, started by torchrun, talking over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from linearize.training.resumption import read_stage
from tests import tiny
from tests.training.processes import STAGES

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ["llama", "qwen3", "gpt2", "gemma3_text", "mixtral"]
LOSS, GRADIENT = 1e-6, 1e-5


def torchrun(processes: int, module: str, *arguments: object) -> list[str]:
    """The command line."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, "-m", module, *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def finish(command: list[str], status: int = 0) -> str:
    """What the command wrote on standard error."""
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == status, done.stderr
    return done.stderr


def train(folder: Path, processes: int, architectures: Iterable[str], *options: str) -> Path:
    finish(torchrun(processes, "tests.training.processes", folder, *options, *architectures))
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process trains, an architecture when it is first asked for."""
    return tmp_path_factory.mktemp("alone")


def assert_alike(found: Path, expected: Path) -> None:
    """The folders of a stage: losses, gradient norms, and what was trained."""
    lines = [tiny.untimed_metrics(folder) for folder in (found, expected)]
    assert len(lines[0]) == len(lines[1])
    for one, other in zip(*lines, strict=True):
        assert one["step"] == other["step"] and one["tokens"] == other["tokens"]
        for name, unit in one["units"].items():
            for key, value in unit.items():
                tolerance = GRADIENT if key == "grad_norm" else LOSS
                assert value == pytest.approx(other["units"][name][key], rel=tolerance), (found, name, key)
    one, other = (
        read_stage(folder / "trained.safetensors", folder / "result.json", {})[0] for folder in (found, expected)
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=GRADIENT, atol=1e-8)


def expected(alone: Path, architecture: str) -> Path:
    if not (alone / architecture).exists():
        train(alone, 1, [architecture])
    return alone / architecture


@pytest.mark.parametrize(
    ("processes", "architectures"),
    [
        pytest.param(2, ["llama"], id="2"),
        pytest.param(2, ARCHITECTURES, id="2-all", marks=pytest.mark.slow),
        pytest.param(4, ARCHITECTURES, id="4-all", marks=pytest.mark.slow),
    ],
)
def test_every_stage_equals_that_of_one_process(
    processes: int, architectures: list[str], alone: Path, tmp_path: Path
) -> None:
    """Each process with the whole model, then with its part of the weights."""
    train(tmp_path, processes, architectures, "--both")
    for folder in tmp_path, tmp_path / "sharded":
        for architecture in architectures:
            assert (folder / architecture / "teacher").exists() == (folder != tmp_path), "which weights are divided"
            for stage in STAGES:
                assert_alike(folder / architecture / stage, expected(alone, architecture) / stage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        pytest.param("transfer", ["--mutant", "order"], id="order"),
        pytest.param("transfer", ["--mutant", "reduction"], id="reduction"),
        pytest.param("transfer", ["--mutant", "mixers"], id="mixers"),
        pytest.param("transfer", ["--shard", "--mutant", "order"], id="sharded-order"),
        pytest.param("transfer", ["--shard", "--mutant", "reduction"], id="sharded-reduction"),
        pytest.param("transfer", ["--shard", "--mutant", "mixers"], id="sharded-mixers"),
        pytest.param("transfer", ["--shard", "--mutant", "rows"], id="sharded-rows"),
        pytest.param("all", ["--shard", "--mutant", "average"], id="sharded-average"),
    ],
)
def test_what_goes_wrong_between_processes_is_seen(stage: str, options: list[str], alone: Path, tmp_path: Path) -> None:
    train(tmp_path, 2, ["llama"], *options)
    with pytest.raises(AssertionError):
        assert_alike(tmp_path / "llama" / stage, expected(alone, "llama") / stage)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_stage_goes_on_with_another_number_of_parts(architecture: str, alone: Path, tmp_path: Path) -> None:
    """All weights train: in two processes up to a checkpoint, in one up to the next, and in four to the end."""
    train(tmp_path, 2, [architecture], "--shard", "--stop", "0")
    (checkpoint,) = (tmp_path / architecture / "all").glob("checkpoint-*")
    assert len(list((checkpoint / "tensors").iterdir())) == 2
    train(tmp_path, 1, [architecture], "--shard", "--stop", "2")
    (checkpoint,) = (tmp_path / architecture / "all").glob("checkpoint-*")
    assert checkpoint.name.endswith("2") and not (checkpoint / "tensors").exists()
    train(tmp_path, 4, [architecture], "--shard")
    assert_alike(tmp_path / architecture / "all", expected(alone, architecture) / "all")


# --- the command ------------------------------------------------------------------------------------------------------


def run_command(output: Path, processes: int | None, *more: str) -> list[str]:
    """A tiny run, in so many processes, or in one of its own (None)."""
    arguments = tiny.run_arguments(output)
    if processes is None:
        return [sys.executable, "-m", "linearize", *arguments, *more]
    return torchrun(processes, "linearize", *arguments, *more)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    finish(run_command(folder, None))
    return folder


def assert_same_run(found: Path, expected: Path) -> None:
    """What all stages and controls trained, and what was measured of the result."""
    for stage in ("transfer", "finetune", "controls/teacher_finetuned", "controls/window_finetuned"):
        assert_near_losses(tiny.untimed_metrics(found / stage), tiny.untimed_metrics(expected / stage))
    losses = [json.loads((folder / "evaluation.json").read_text()) for folder in (found, expected)]
    for mine, other in zip(*(evaluation["measured"] for evaluation in losses), strict=True):
        assert mine["quality"]["loss"]["mean"] == pytest.approx(other["quality"]["loss"]["mean"], rel=1e-4)
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (found, expected))
    assert one.keys() == other.keys() and losses[0].keys() == losses[1].keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-4)


def assert_near_losses(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """In fp32, through steps of AdamW."""
    assert [(x["event"], x["step"]) for x in found] == [(x["event"], x["step"]) for x in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


FULL = ("--set", "distributed.shard=full")


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param((), id="whole"), pytest.param(FULL, id="sharded")])
def test_a_run_of_two_processes(more: tuple[str, ...], one: Path, tmp_path: Path) -> None:
    """The same folder as of one process: trained and measured by all, written by the main one; nothing said twice."""
    said = finish(run_command(tmp_path / "two", 2, *more))
    assert_same_run(tmp_path / "two", one)
    assert said.count("run folder:") == 1 and said.count("attention transfer: step 0 ") == 1


@pytest.mark.slow
def test_an_evaluation_by_two_processes_is_that_of_one(one: Path, tmp_path: Path) -> None:
    """Bit for bit, on a CPU: the same batches, each by one of them. Of speed what does not depend on the machine."""
    options = {"examine": "true", "prompts": 32, "new_tokens": 8, "recall_trials": 8}
    given = [word for name, value in options.items() for word in ("--set", f"evaluation.{name}={value}")]
    given += [
        "--set",
        "data.validation_rows=64",
        "--dataset",
        str(tiny.write_text(tmp_path / "more.jsonl", documents=260)),
    ]
    found = []
    for number, start in enumerate(([sys.executable, "-m", "linearize"], torchrun(2, "linearize"))):
        output = tmp_path / f"again-{number}.json"
        finish([*start, "eval", str(one), *given, "--output", str(output)])
        found.append(tiny.untimed(json.loads(output.read_text())))
    assert found[0]["generations"] is not None and found[0]["agreement"] is not None
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param((), id="whole"), pytest.param(FULL, id="sharded")])
def test_the_rest_of_a_run_on_another_number_of_processes(more: tuple[str, ...], one: Path, tmp_path: Path) -> None:
    finish(run_command(tmp_path / "run", 2, "--until", "transfer", *more))
    finish(run_command(tmp_path / "run", None, "--until", "finetune"))
    finish(run_command(tmp_path / "run", 4, *more))
    assert_same_run(tmp_path / "run", one)


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    said = finish(run_command(tmp_path, 2, "--set", "transfer.layers_per_block=1"), status=1)  # torchrun's own status
    assert said.count("error: transfer.layers_per_block: expected one process, found 2") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param((), id="whole"), pytest.param(FULL, id="sharded")])
def test_when_one_process_is_killed_the_others_end_and_the_run_goes_on(
    more: tuple[str, ...], one: Path, tmp_path: Path
) -> None:
    """Without torchrun's agent, which would end the others itself."""
    command = [sys.executable, "-m", "linearize", *tiny.run_arguments(tmp_path / "run"), *more]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    first, second = (
        subprocess.Popen(command, env=environment() | address | {"RANK": rank}, cwd=ROOT, stderr=subprocess.PIPE)
        for rank in "01"
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "transfer").glob("checkpoint-*")):
        assert time.monotonic() < deadline and first.poll() is None, "no checkpoint came"
        time.sleep(0.01)
    second.kill()
    _, said = first.communicate(timeout=60)
    second.communicate()
    assert first.returncode == 2
    assert "error: process 0 of 2: another process has ended" in said.decode() and "Traceback" not in said.decode()
    finish(run_command(tmp_path / "run", 2, *more))
    assert_same_run(tmp_path / "run", one)
