"""Read rows of a local file, a folder of files, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from linearize.base import UserError
from linearize.configs.data import DataConfig

Row = dict[str, Any]
LocatedRow = tuple[str, Row]  # with its place, for messages: "data row 3", of a folder "data b.jsonl row 3"
logger = logging.getLogger(__name__)

DOCUMENT_SEPARATOR = "<|endoftext|>"
_NAMED = 5  # the most files named in a message
_LINES = 100  # line breaks in a csv cell above which there is a warning
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_rows(config: DataConfig) -> Iterator[LocatedRow]:
    """Yield the rows of `config.dataset`, lazily and in a fixed order: local if the path exists, else from the hub.

    A text file is one row, with its text in `config.text_column`; a .txt file is cut at `DOCUMENT_SEPARATOR` into
    several rows. A folder is read with all files of a known suffix below it, without hidden ones, in order of paths; it
    has either text files or tables. Links to files are read, links to folders are not. Warnings name the other files of
    a folder, and csv cells of more than `_LINES` line breaks, which a stray quotation mark may have made. A hub dataset
    is streamed.

    Raises:
        UserError: nothing there, an unknown or unreadable file, a mixed or empty folder, columns of one name, an
            unreachable hub dataset, or one whose reading nothing limits.
    """
    name = config.dataset
    if not name:
        raise UserError(
            "data.dataset: expected a hub id, or a local file or folder, found none; pass --dataset or set data.dataset"
        )
    path = _local(name)
    if path.is_dir():
        return _folder_rows(path, config)
    if path.is_file():
        if _suffix(path) not in _SUFFIXES:
            raise UserError(
                f"data.dataset: expected a file that ends in {', '.join(_SUFFIXES)}, found {name!r}; unpack other "
                "compressed files, and convert the rest"
            )
        return _located(_file_rows(path, config), "data")
    if _suffix(path) in _SUFFIXES or not _HUB_ID.fullmatch(name):
        raise UserError(
            f"data.dataset: expected a local file or folder or a hub id, found nothing at {name!r}; check the path"
        )
    if config.max_tokens is None and config.max_documents is None:
        raise UserError(
            f"data.max_tokens: expected a limit, because {name!r} is no local file or folder and would be "
            "streamed from the hub, found none; set data.max_tokens (or data.max_documents), or check the path"
        )
    return _located(_hub_rows(name, config.subset, config.split), "data")


def _located(rows: Iterator[Row], source: str) -> Iterator[LocatedRow]:
    return ((f"{source} row {number}", row) for number, row in enumerate(rows, 1))


def on_disk(name: str) -> bool:
    """Return whether `read_rows` reads a dataset of this name from disk, not from the hub."""
    return _local(name).exists()


def _suffix(path: Path) -> str:
    """Return a file's suffix, by which its reader is chosen; for compressed files, both suffixes."""
    both = "".join(path.suffixes[-2:]).lower()
    return both if both in _COMPRESSED else path.suffix.lower()


def _local(name: str) -> Path:
    return Path(name).expanduser()


def files_of(name: str) -> list[Path]:
    """Return the local files of a dataset of this name; empty for a hub id."""
    path = _local(name)
    return sorted(_files_below(path)[0]) if path.is_dir() else [path] if path.is_file() else []


def _files_below(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """Return the readable files below a folder, and all other files that are not hidden, by the reason."""
    files: list[Path] = []
    others: dict[str, list[Path]] = {}
    for path in folder.rglob("*"):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.is_file():
            if _suffix(path) in _SUFFIXES:
                files.append(path)
            else:
                others.setdefault(_UNKNOWN, []).append(path)
        elif path.is_symlink():
            others.setdefault(_LINK if path.is_dir() else _BROKEN, []).append(path)
        elif not path.is_dir():
            others.setdefault(_SPECIAL, []).append(path)
    return files, others


def _some(paths: list[Path], folder: Path) -> str:
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _folder_rows(folder: Path, config: DataConfig) -> Iterator[LocatedRow]:
    files, others = _files_below(folder)
    if not files:
        advice = [f"unpack or convert {_some(others.pop(_UNKNOWN), folder)}"] if _UNKNOWN in others else []
        advice += [f"not read, because {reason}: {_some(paths, folder)}" for reason, paths in others.items()]
        found = "; ".join([f"found none in {folder}", *advice])
        raise UserError(f"data.dataset: expected files that end in {', '.join(_SUFFIXES)}, {found}")
    tables = [path for path in files if _suffix(path) not in _TEXT_READERS]
    texts = [path for path in files if _suffix(path) in _TEXT_READERS]
    if tables and texts:
        # Either kind could be meant (tables with a README, sources with a JSON file), so this is an error.
        raise UserError(
            f"data.dataset: expected either text files or tables in {folder}, found both ({min(texts)} and "
            f"{min(tables)}); name one file or a subfolder"
        )
    for reason, paths in others.items():
        logger.warning("%s: not read, because %s: %s", folder, reason, _some(paths, folder))
    for path in sorted(files, key=lambda path: path.relative_to(folder).as_posix()):
        yield from _located(_file_rows(path, config), f"data {path.relative_to(folder).as_posix()}")


def _file_rows(path: Path, config: DataConfig) -> Iterator[Row]:
    suffix = _suffix(path)
    if suffix in _TEXT_READERS:
        for text in _TEXT_READERS[suffix](path):
            yield {config.text_column: text}
    elif suffix in _SEPARATORS:
        yield from _separated_rows(path, _SEPARATORS[suffix], config.columns)
    else:
        for number, row in enumerate(_TABLE_READERS[suffix](path), 1):
            if not isinstance(row, dict):
                raise UserError(f"{path}: expected an object with named columns, found {row!r:.60} in row {number}")
            yield row


def _whole_text(path: Path) -> Iterator[str]:
    with _readable(path):
        yield path.read_text(encoding="utf-8-sig")


def _separated_text(path: Path) -> Iterator[str]:
    for text in _whole_text(path):
        documents = text.split(DOCUMENT_SEPARATOR)
        # The line breaks around a separator belong to the file's layout, not to the documents.
        yield from (
            documents if len(documents) == 1 else (document.strip("\n") for document in documents if document.strip())
        )


def _json_rows(path: Path) -> Iterator[Any]:
    with _readable(path):
        text = path.read_text(encoding="utf-8-sig")
    try:
        data = json.loads(text)
    except RecursionError:
        raise UserError(f"{path}: expected rows of text, found JSON nested too deeply") from None
    except json.JSONDecodeError as error:
        advice = "; a file with one object per line must end in .jsonl" if error.msg == "Extra data" else ""
        raise UserError(f"{path} line {error.lineno}: not valid JSON: {error.msg}{advice}") from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{path}: not readable: {error}") from None
    if isinstance(data, dict):
        lists = [value for value in data.values() if isinstance(value, list)]
        data = lists[0] if len(lists) == 1 else None
    if not isinstance(data, list):
        raise UserError(f"{path}: expected a list of rows, or an object with exactly one list in it")
    yield from data


def _jsonl_rows(path: Path) -> Iterator[Any]:
    with _readable(path), path.open(encoding="utf-8-sig") as lines:
        yield from _rows_of_lines(path, lines)


def _compressed_rows(kind: str, path: Path) -> Iterator[Any]:
    """Yield the rows of JSON lines in a compressed file of this kind; unpack only as much as is read."""
    import pyarrow

    with _readable(path), path.open("rb") as file:
        try:
            with pyarrow.CompressedInputStream(file, kind) as unpacked:
                yield from _rows_of_lines(path, io.TextIOWrapper(unpacked, encoding="utf-8-sig"))
        except OSError as error:
            if error.errno is not None:  # of the operating system, not of the contents
                raise
            raise UserError(
                f"{path}: expected a whole {kind} file, found a damaged one ({_one_line(error)}); copy it again, "
                "or unpack it with its own program"
            ) from None


def _rows_of_lines(path: Path, lines: Iterable[str]) -> Iterator[Any]:
    """Yield the value of each line of a JSON lines file that is not empty.

    Raises:
        UserError: a line is not JSON.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except RecursionError:
                raise UserError(f"{path} line {number}: expected rows of text, found JSON nested too deeply") from None
            except ValueError as error:  # or a number of thousands of digits
                raise UserError(f"{path} line {number}: not valid JSON: {getattr(error, 'msg', error)}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with _readable(path), pyarrow.parquet.ParquetFile(path) as table:
            _require_different(table.schema_arrow.names, str(path))
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable parquet file: {_one_line(error)}") from None


def _separated_rows(path: Path, separator: str, columns: tuple[str, ...] | None) -> Iterator[Row]:
    # Tab-separated files of public benchmarks have literal quotation marks; spreadsheets' csv quotes cells.
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    csv.field_size_limit(2**31 - 1)  # a document is one field
    with _readable(path), path.open(encoding="utf-8-sig", newline="") as lines:
        table = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
        rows = _checked_rows(path, table)
        names = list(columns) if columns else next(rows, [])
        _require_different(names, "data.columns" if columns else f"{path} line 1")
        warned = False
        for cells in filter(None, rows):
            if len(cells) != len(names):
                wanted = f"{len(names)} column{'s' * (len(names) != 1)} ({', '.join(names):.100})"
                quote = "" if separator == "\t" else "put quotation marks around a cell with commas, or "
                raise UserError(
                    f"{path} line {table.line_num}: expected {wanted}, found {len(cells)}; {quote}name the columns "
                    "of a file without a first line of names in data.columns"
                )
            breaks = [cell.count("\n") for cell in cells]
            if max(breaks) > _LINES and not warned:
                warned = True
                logger.warning(
                    "%s line %d: a cell of %d lines begins in this row; if it is not one text, correct the "
                    "quotation mark in front of it, or convert the file to .jsonl",
                    *(path, table.line_num - sum(breaks), max(breaks) + 1),
                )
            yield dict(zip(names, cells, strict=True))


def _require_different(names: Sequence[str], where: str) -> None:
    """Raise UserError if two columns have one name: all but the last of them would be lost."""
    repeated = sorted(name for name, count in Counter(names).items() if name and count > 1)
    if repeated:
        raise UserError(
            f"{where}: expected columns of different names, found {repeated[0]!r:.100} {names.count(repeated[0])} "
            "times; rename all but one"
        )


def _checked_rows(path: Path, table: Any) -> Iterator[list[str]]:
    """Yield the rows of a strict csv reader.

    Raises:
        UserError: a quotation mark is not closed or stands within a cell, so many rows could be read as one.
    """
    begins = 1
    try:
        for cells in table:
            yield cells
            begins = table.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path} line {begins}: expected quotation marks around whole cells, doubled within them, found others "
            f"({error}); correct them, or convert the file to .jsonl"
        ) from None


_TEXT_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": _separated_text,
    ".md": _whole_text,
    ".py": _whole_text,
}
_TABLE_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".json": _json_rows,
    ".jsonl": _jsonl_rows,
    ".jsonl.gz": partial(_compressed_rows, "gzip"),
    ".jsonl.zst": partial(_compressed_rows, "zstd"),
    ".parquet": _parquet_rows,
}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = (".jsonl.gz", ".jsonl.zst")
_SUFFIXES = (*_TEXT_READERS, *_TABLE_READERS, *_SEPARATORS)
# Why something in a folder is not read.
_UNKNOWN = f"they do not end in {', '.join(_SUFFIXES)}"
_LINK = "they are links to folders, which may lead back or out of the folder (copy what they hold, or name it yourself)"
_BROKEN = "they are links to nothing"
_SPECIAL = "they are no files"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected UTF-8 text, found byte {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _hub_rows(name: str, subset: str | None, split: str) -> Iterator[Row]:
    import datasets

    try:
        yield from datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # the network, the hub and each dataset's files raise different errors
        raise UserError(
            f"data.dataset: found no file or folder {name!r}, and reading it from the hub (data.subset {subset!r}, "
            f"data.split {split!r}) failed: {type(error).__name__}: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
