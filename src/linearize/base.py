"""The base class of configs, errors for users, progress bars, and atomic files."""

from __future__ import annotations

import errno
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from typing_extensions import dataclass_transform

T = TypeVar("T")
AnyRecord = TypeVar("AnyRecord", bound="Record")

LARGEST_INTEGER = 2**63 - 1  # in a config; larger ones do not fit a tensor or, from 2**1024 on, a float
QUIET_SECONDS = 2.0  # shorter work shows no progress
LOG_SECONDS = 30.0  # between two lines of a log


class UserError(ValueError):
    """Bad input: one line that names the field or file, what was expected, what was found, and what to do.

    The command line prints the message and exits with status 2. Other exceptions are bugs (status 1).
    """


class DivergedError(UserError):
    """A loss or gradient is not finite, or the held-out loss has risen far above its initial value."""


def check_text(text: str, where: str) -> str:
    """Return the text if it can be encoded.

    Raises:
        UserError: it has a lone surrogate, which JSON can escape, but no tokenizer can read.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[max(0, error.start - 20) : error.end]
        raise UserError(f"{where}: expected text, found an incomplete character in {found!a}") from None
    return text


# Control characters, which terminals can interpret as commands, and those that reorder text; not line breaks and tabs.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """Return a text with its control characters, except line breaks and tabs, escaped (as ``\\x1b``)."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class _Immutable(type(BaseModel)):
    """Tell type checkers that models of a class with a frozen `model_config` are immutable and can be hashed."""


class Config(BaseModel, metaclass=_Immutable):
    """Base of every recipe component: immutable, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _small_enough(cls, value: object) -> object:
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise ValueError(f"expected a whole number of at most {LARGEST_INTEGER}, found a larger one")
        return value


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Yield `items`, `total` of them (by default their length), with a progress bar if stderr is a terminal.

    Otherwise print a line every `LOG_SECONDS` on stderr. Standard output is only for results.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(items, title, total=total, console=console, transient=True)
        return
    total, log = len(items) if total is None else total, Log()  # type: ignore[arg-type]
    for number, item in enumerate(items, 1):
        yield item
        log.say(f"{title}: {number} of {total}")


class Log:
    """Progress lines on stderr if it is no terminal: the first after `QUIET_SECONDS`, then every `LOG_SECONDS`."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._due = time.monotonic() + QUIET_SECONDS

    def say(self, line: str) -> None:
        """Print the line if enough time has passed since the last one."""
        if not self._console.is_terminal and time.monotonic() >= self._due:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
            self._due = time.monotonic() + LOG_SECONDS


def step_progress() -> Progress:
    """Return a progress bar of steps on stderr, which is disabled if stderr is no terminal."""
    console = Console(stderr=True)
    status = TextColumn("{task.fields[status]}", markup=False)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), status
    return Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, redirect_stdout=False
    )


# --- files ----------------------------------------------------------------------------------------------------------

os.umask(_UMASK := os.umask(0))  # the only way to read the umask is to set it
_AGAIN = "run the same command again, which goes on from the last checkpoint"


@contextmanager
def writing(path: Path, num_bytes: int, advice: str = _AGAIN) -> Iterator[None]:
    """Convert errors of the operating system from writing `num_bytes` bytes to `path` into a UserError.

    Raises:
        UserError: the disk is full or broken, a folder is read-only, ...; `advice` says what to do after the repair.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Libraries written in Rust (safetensors, tokenizers) report the operating system's error as text only.
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if number is None:
            raise
        if number in {errno.ENOSPC, errno.EDQUOT}:
            found = f"the disk is full: expected room for {num_bytes} bytes, found less; free some space and {advice}"
        else:
            found = f"expected to write {num_bytes} bytes, found: {os.strerror(number)}; mend that and {advice}"
        raise UserError(f"{path}: {found}") from None


@contextmanager
def atomic_file(path: Path, num_bytes: int, advice: str = _AGAIN) -> Iterator[Path]:
    """Yield a temporary file for `num_bytes` bytes, renamed to `path` after the block, or deleted if the block fails.

    Raises:
        UserError: as in `writing`.
    """
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.incomplete")  # jobs may share a folder
    try:
        with writing(path, num_bytes, advice):
            yield scratch
            sync(scratch)
            scratch.replace(path)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        UserError: it does not exist, cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected JSON, found a file that cannot be read ({error}); write it again") from None


class Record(BaseModel, metaclass=_Immutable):
    """Base class of the contents of a JSON file: immutable, with strict types and no unknown fields.

    The types of all fields, also within dataclasses, are checked when a record is made and when it is read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, revalidate_instances="always")

    @classmethod
    def read(cls: type[AnyRecord], path: Path, advice: str) -> AnyRecord:
        """Return the record in a JSON file; `advice` says what to do if reading fails.

        Raises:
            UserError: it cannot be read, is not JSON, or has a missing or unknown field or one of another type.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path}: expected JSON, found a file that cannot be read ({error}); {advice}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "contents"
            problem = f"{first['msg'].replace('Input should be', 'expected')}, found {first['input']!r:.80}"
            match first["type"]:
                case "json_invalid":
                    problem = f"expected JSON, found other text ({first['msg']})"
                case "missing":
                    problem = "expected a value, found none"
                case "extra_forbidden" | "unexpected_keyword_argument":
                    problem = "expected no such field, found one"
                case "value_error":
                    problem = first["msg"].removeprefix("Value error, ")
            raise UserError(f"{path}: {field}: {problem}; {advice}") from None

    def to_json(self) -> dict[str, object]:
        """Return the contents of the file."""
        return self.model_dump(mode="json")


def sync(path: Path) -> None:
    """Wait until the file is on the disk, so that after a power failure a renamed file has its contents.

    Also set the permissions of a new file, because safetensors lets only the owner read its files.
    """
    with path.open("rb+") as file:
        if hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), 0o666 & ~_UMASK)
        os.fsync(file.fileno())
