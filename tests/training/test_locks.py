"""Claims of jobs that share a folder: one holds, a dead one's ends, and of many that want it one gets it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from linearize.base import UserError
from linearize.training import locks
from linearize.training.locks import claimed

HOLD = """
import sys
from pathlib import Path
from linearize.training.locks import claimed
with claimed(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    input()
"""


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "block.claim"
    for _ in range(2):
        with claimed(path) as first, claimed(path) as second:
            assert (first, second) == (True, False)


def test_an_error_ends_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed(tmp_path / "block.claim"):
        raise ZeroDivisionError
    with claimed(tmp_path / "block.claim") as mine:
        assert mine


def test_a_killed_job_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "block.claim"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes) as job:
        assert job.stdout is not None and job.stdout.readline() == "True\n"
        with claimed(path) as mine:
            assert not mine
        job.send_signal(signal.SIGKILL)
        job.wait()
        with claimed(path) as mine:
            assert mine


def test_of_many_that_want_it_one_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "block.claim"
    for _ in range(50):
        start, done, won = threading.Barrier(8), threading.Barrier(8), []

        def want(start: threading.Barrier = start, done: threading.Barrier = done, won: list[bool] = won) -> None:
            start.wait()
            with claimed(path) as mine:
                won.append(mine)
                done.wait()

        threads = [threading.Thread(target=want) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(won) == 1


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(locks.FileLock, "acquire", none)
    with pytest.raises(UserError, match="expected a file that can be written and locked"), claimed(tmp_path / "claim"):
        pass
