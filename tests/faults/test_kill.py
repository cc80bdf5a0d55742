"""Runs that are killed by SIGKILL at random moments, and go on by the same command as if nothing had been.

In the middle of every single file operation: test_disk.py. One of several processes alone: test_distributed.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults import tiny_run
from tests.training.test_distributed import assert_same_run, torchrun

KILLS = 30
STARTS, TAKES = 300, 20  # seconds: until a run must have begun to write; up to which it is killed after that


def family(process: int) -> list[int]:
    """A process and all that it has started: torchrun's are in groups of their own."""
    found = [process]
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        found += [each for child in task.read_text().split() for each in family(int(child))]
    return found


def killed(process: subprocess.Popen[str], folder: Path, delay: float) -> bool:
    """Whether a run could be killed, with all its processes, so long after it had begun to write in its folder."""
    deadline = time.monotonic() + STARTS
    while process.poll() is None and not (folder / ".lock").exists():
        assert time.monotonic() < deadline, "it does not begin"
        time.sleep(0.01)
    try:
        _, said = process.communicate(timeout=delay)
    except subprocess.TimeoutExpired:
        for each in family(process.pid):
            os.kill(each, signal.SIGKILL)
        process.communicate()
        return True
    assert process.returncode == 0, said
    return False


def kill_and_resume(command: list[str], folder: Path, kills: int) -> None:
    """Start a run again and again, killed so often; begun anew when it is done. In the end it is left to finish."""
    source, done = random.Random(0), 0
    while done < kills:
        (folder / ".lock").unlink(missing_ok=True)  # of the one that was killed: the next one's is to be seen
        if killed(tiny_run.start(command), folder, source.uniform(0, TAKES) * source.random()):
            tiny_run.assert_whole(folder, scratch=True)
            done += 1
        elif done < kills:
            shutil.rmtree(folder)
    tiny_run.finish(command)


@pytest.mark.faults
def test_one_process_killed_at_random_times(tmp_path: Path) -> None:
    """Bit for bit."""
    commands = [tiny_run.command(tiny_run.arguments(tmp_path / name)) for name in ("unbroken", "run")]
    tiny_run.finish(commands[0])
    kill_and_resume(commands[1], tmp_path / "run", KILLS)
    tiny_run.assert_as_if_unbroken(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.faults
def test_two_processes_killed_at_random_times(tmp_path: Path) -> None:
    """To the tolerance that one and two processes are compared by."""
    unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
    commands = [
        torchrun(2, "linearize", *tiny_run.arguments(at, evaluation__trained_controls=True))
        for at in (unbroken, folder)
    ]
    tiny_run.finish(commands[0])
    kill_and_resume(commands[1], folder, KILLS)
    assert_same_run(folder, unbroken)


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_processes_killed(tmp_path: Path, rank: int) -> None:
    """The main one or the other: the one that is left ends within a minute, with one clear line.

    Without torchrun's agent, which would end it itself. That the run then goes on: test_distributed.py.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = tiny_run.command(tiny_run.arguments(tmp_path / "run"))
    processes = [tiny_run.start(command, **address, RANK=number) for number in "01"]
    deadline = time.monotonic() + STARTS
    while not list((tmp_path / "run" / "transfer").glob("checkpoint-*")):
        assert time.monotonic() < deadline and processes[0].poll() is None, "no checkpoint came"
        time.sleep(0.01)
    processes[rank].kill()
    left = processes[1 - rank]
    _, said = left.communicate(timeout=60)
    processes[rank].communicate()
    assert left.returncode == 2 and "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and f"process {1 - rank} of 2: another process has ended" in lines[0]
