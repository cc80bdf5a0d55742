"""The process behind `layer.Driver`, with the layer preloaded: python -m tests.faults.in_turn MODULE

Each line on its standard input asks for an attempt, and is answered by one on standard output.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable

import torch

from tests.faults.layer import KINDS

SECONDS = 300  # an attempt that takes longer hangs


def main() -> None:
    program = importlib.import_module(sys.argv[1]).main
    layer = ctypes.CDLL(None)
    layer.faults_hit.restype = ctypes.c_char_p
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["forget"]:
            layer.faults_forget()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                sys.argv = ["linearize", *asked["words"]]
                signal.alarm(SECONDS)
                layer.faults_arm(os.fsencode(asked["folder"]), *KINDS[asked["kind"]])
                os._exit(run(program))
            _, status = os.waitpid(child, 0)
            said.seek(0)
            found = {"hit": layer.faults_hit().decode(), "status": os.waitstatus_to_exitcode(status)}
            sys.stdout.write(json.dumps(found | {"said": said.read()}) + "\n")
            sys.stdout.flush()


def run(program: Callable[[], None]) -> int:
    """What the program returns to the shell."""
    status: object = 1
    try:
        program()
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else 0 if status is None else 1


if __name__ == "__main__":
    main()
