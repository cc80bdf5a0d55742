"""A server in a process of its own, as a user starts it, and bundled models to serve."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize
from linearize.demo.corpus import teacher_path
from linearize.hf.checkpoint import save_student
from tests.byte_tokenizer import CHATML

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(linearize.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
    "BROWSER": "true",  # a program that does nothing
}


def bundled_student(folder: Path, *, template: str | None = None) -> Path:
    """The bundled teacher, converted by `lolcats` without training, in `folder`; with a chat template, or none."""
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path(), dtype=torch.float32)
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(teacher_path())
    tokenizer.chat_template = template
    save_student(linearize.convert(teacher, linearize.Recipe.load("lolcats")), tokenizer, {}, folder)
    return folder


def chatting_student(folder: Path) -> Path:
    """The same with a chat template."""
    return bundled_student(folder, template=CHATML)


@dataclass
class Server:
    """A running `linearize serve`: where it answers, and what it has said so far."""

    process: subprocess.Popen[str]
    address: str = ""
    said: list[str] = field(default_factory=list)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it, and wait for its status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=120)

    def _listen(self, answers: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if "server answers at " in line:
                self.address = line.split("server answers at ")[1].split("/v1")[0]
            if "docs/serving.md" in line:  # the last of what it says when it starts
                answers.set()
        answers.set()


@contextmanager
def serving(*words: Any) -> Iterator[Server]:
    """`linearize serve` with these arguments, at a free port, until the block ends."""
    command = [sys.executable, "-m", "linearize", "serve", *map(str, words), "--port", "0", "--engine", "transformers"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    server, answers = Server(process), threading.Event()
    listener = threading.Thread(target=functools.partial(server._listen, answers), daemon=True)
    listener.start()
    try:
        assert answers.wait(timeout=180) and server.address, "".join(server.said)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        listener.join()
        assert process.stderr is not None
        process.stderr.close()
