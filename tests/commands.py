"""What a command printed, and with which status it ended; `command` of conftest runs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Done:
    status: Any
    out: str
    err: str


Command = Callable[..., Done]


def assert_refused(done: Done, message: str = "") -> None:
    """Status 2 and one line that says so."""
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert done.err.count("\n") == 1 and done.err.endswith("\n")


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All files below a folder by path, and the folders below it, which have no bytes."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
