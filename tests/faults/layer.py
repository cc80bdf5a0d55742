"""Faults under all writes of real processes, one operation after another: the fault layer (layer.c) as tests use it."""

from __future__ import annotations

import atexit
import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAIL, STAY_FULL, SHORT, KILL = range(1, 5)  # of layer.c

KINDS = {
    "ENOSPC": (STAY_FULL, errno.ENOSPC),
    "EDQUOT": (STAY_FULL, errno.EDQUOT),
    "EIO": (FAIL, errno.EIO),
    "EROFS": (FAIL, errno.EROFS),
    "short": (SHORT, 0),
    "kill": (KILL, 0),
}
"""By what goes wrong: how, and the error that the operating system gives."""


@dataclass(frozen=True)
class Attempt:
    """One command that met one fault: where, how it ended (negative: by that signal), and what it said on stderr."""

    hit: str  # "operation path #time"; empty: there was no operation left that had not failed before
    status: int
    said: str

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


@functools.cache
def library() -> Path:
    """The layer, compiled."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    folder = Path(tempfile.mkdtemp(prefix="linearize-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, made = Path(__file__).with_name("layer.c"), folder / "layer.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


def environment(**more: str) -> dict[str, str]:
    """Of a child process that runs this working tree."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"} | more


class Driver:
    """A process with a program imported and the layer preloaded, which forks one that runs it for each attempt.

    The program is a module with a `main` that reads its command line.
    """

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", "tests.faults.in_turn", module]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            command, env=environment(LD_PRELOAD=str(library())), cwd=ROOT, text=True, **pipes
        )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def attempts(self, kind: str, folder: Path, words: Sequence[str]) -> Iterator[Attempt]:
        """Run the program with these words again and again, until nothing it writes below `folder` is left to fail.

        Each attempt meets the fault at the first operation that has not had it yet; the last one meets none.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"kind": kind, "folder": str(folder), "words": list(words), "forget": True}
        while True:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            found = Attempt(**json.loads(self._process.stdout.readline()))
            yield found
            if not found.hit:
                return
            asked["forget"] = False
