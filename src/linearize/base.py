"""The base of configs, errors that a user can act on, progress bars, and atomic files."""

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

LARGEST_INTEGER = 2**63 - 1  # of a config: larger ones fit neither a tensor nor, from 2**1024 on, a float
QUIET_SECONDS = 2.0  # work that takes no longer shows no progress
LOG_SECONDS = 30.0  # between two lines of a log


class UserError(ValueError):
    """Bad input: one line that names the field or file, what was expected, what was found, and what to do.

    The command line prints the message and exits with status 2. Everything else that is raised is a bug (status 1).
    """


class DivergedError(UserError):
    """A loss or gradient that is not finite, or a held-out loss that training has driven far above where it began."""


def check_text(text: str, where: str) -> str:
    """The text, which can be encoded.

    Raises:
        UserError: it has an incomplete character (a lone surrogate, which JSON can escape and no tokenizer reads).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[max(0, error.start - 20) : error.end]
        raise UserError(f"{where}: expected text, found an incomplete character in {found!a}") from None
    return text


# Control characters, which a terminal takes for commands, and those that reorder text; not line breaks and tabs.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """Return a text with escape sequences (as ``\\x1b``) for its control characters, but for line breaks and tabs."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class _Immutable(type(BaseModel)):
    """Tell type checkers that the models of a base whose `model_config` says so are immutable, and can be hashed."""


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
    """Go through `items`, of which there are `total` (by default their length), with a bar where stderr is a terminal.

    Elsewhere, in a log, with a line now and then. Standard output is left alone: it is for results.
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
    """Lines on a standard error that is no terminal, of work that takes long: the first after `QUIET_SECONDS`."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._due = time.monotonic() + QUIET_SECONDS

    def say(self, line: str) -> None:
        """Print the line, if one is due."""
        if not self._console.is_terminal and time.monotonic() >= self._due:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
            self._due = time.monotonic() + LOG_SECONDS


def step_progress() -> Progress:
    """A bar of steps on standard error, if that is a terminal; standard output is left to the command's result."""
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
    """Turn what the operating system has against writing `num_bytes` bytes to `path` into a UserError.

    Raises:
        UserError: the disk is full or broken, a folder is read-only, ...; `advice` says what to do once it is not.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Libraries written in Rust (safetensors, tokenizers) pass the operating system's error on as text only.
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
    """A temporary file to write `num_bytes` bytes to: it becomes `path` when the block ends well, else disappears.

    Raises:
        UserError: as `writing`.
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
    """The contents of a JSON file.

    Raises:
        UserError: it is not there, cannot be read, or holds something else.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected JSON, found a file that cannot be read ({error}); write it again") from None


class Record(BaseModel, metaclass=_Immutable):
    """Base of what a JSON file holds whole: immutable, with strict types and no unknown fields.

    The types of all fields, also those within dataclasses, are checked when a record is made and when it is read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, revalidate_instances="always")

    @classmethod
    def read(cls: type[AnyRecord], path: Path, advice: str) -> AnyRecord:
        """Read a JSON file; `advice` says what to do if that fails.

        Raises:
            UserError: it cannot be read, is not JSON, or has a field that is missing, unknown or of another type.
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
    """Wait until the file is on the disk: a rename must not overtake the contents when the power fails.

    Also set the permissions of a new file; safetensors lets only the owner read its files.
    """
    with path.open("rb+") as file:
        if hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), 0o666 & ~_UMASK)
        os.fsync(file.fileno())
