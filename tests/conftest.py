"""What every test needs."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import settings

import linearize_cli
from linearize import base
from tests.commands import Command, Done
from tests.fake_compiler import Compiler

# Tiny tensors gain nothing from threads, and the tests run in several processes.
torch.set_num_threads(1)

# As the command line does: on a CPU, numbers that are all but 0 would take most of the time.
torch.set_flush_denormal(True)

# How long one example takes says something about the machine, not about the code.
settings.register_profile("linearize", deadline=None)
settings.load_profile("linearize")

# Likewise, whether work takes long enough to say how far it is.
base.QUIET_SECONDS = math.inf


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `linearize` with these arguments, in this process."""

    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: Any) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["linearize", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            linearize_cli.main()
        return Done(exit_.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """In the place of torch.compile, which takes long and does not know the tests' shape checks."""
    made = Compiler()
    monkeypatch.setattr(torch, "compile", made)
    return made
