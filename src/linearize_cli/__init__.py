"""The command line.

Modules that import torch are imported when a command needs them, so ``--help`` and errors in a recipe are fast.
"""

from __future__ import annotations

import os
import sys
import time
from io import StringIO
from typing import TextIO

import typer

from linearize.base import UserError
from linearize_cli.commands import app
from linearize_cli.options import note

__all__ = ["app", "main"]

RESUMED = {"run", "convert", "frontier", "demo"}  # commands that resume an interrupted run
CLOSED_PIPE = 141  # 128 + SIGPIPE, as shells report it


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out: on a GPU, on a CPU (torch has no error class for it), or in Python."""
    words = ("not enough memory", "can't allocate memory", "Storage size calculation overflowed")
    out = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return out or (isinstance(error, RuntimeError) and any(x in str(error) for x in words))


def _is_closed(out: TextIO) -> bool:
    """Flush the output and return whether its reader closed it; if so, further output is dropped."""
    try:
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # the interpreter flushes once more when it ends
        return True
    return False


def main() -> None:
    """Run the command line, and exit with a status.

    0: done. 2: an error that the user can fix, in one line. 1: a bug, with its traceback. 130: Ctrl-C. 141: the reader
    of the output closed it.
    """
    # torch's threads busy-wait for each other, by default 100 times as long. If another program uses a core, they only
    # busy-wait. torch reads the variable when it is loaded; see benchmarks/neighbours.py.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    out, errors = sys.stdout, sys.stderr
    main_process = os.environ.get("RANK", "0") == "0"  # set by torchrun
    if not main_process:  # only the main process shows progress and results
        sys.stdout = sys.stderr = StringIO()
    try:
        app()
    except (ValueError, RuntimeError, MemoryError) as error:
        if _is_out_of_memory(error):
            reason = " ".join(str(error).split())[:200]
            error = UserError(
                f"memory: expected enough free memory, found none left ({reason}); `linearize plan` with "
                "--gpu-memory prints what it takes, and a smaller micro_batch_size takes less for the same steps"
            )
        elif not isinstance(error, UserError):
            raise
        if not main_process:
            time.sleep(15)  # if all processes fail, the main one reports the error, and torchrun ends the others
        # One line, even if it quotes untrusted text.
        line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(error))
        typer.echo(f"error: {line}", file=errors)
        sys.exit(2)
    except SystemExit as status:
        if status.code == 130:  # typer's own for Ctrl-C
            resumes = any(name in RESUMED for name in sys.argv[1:2])
            note(f"interrupted{'; run the same command again to resume' if resumes else ''}")
        elif _is_closed(out) or status.code == 1:  # 1 is typer's own if the reader closed the output, as `| head` does
            sys.exit(CLOSED_PIPE)
        raise
    finally:
        sys.stdout, sys.stderr = out, errors
