"""The rows of a run: made when it begins, and kept in its folder for every resumption."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.data.load import load_dataset
from linearize.data.packing import Dataset
from linearize.data.rows import IGNORED, PackedRows
from linearize.data.selection import reach_by
from linearize.data.sources import on_disk
from linearize.data.stored import read_dataset, source_identity, write_dataset
from linearize.hf.checkpoint import check_tokens
from linearize.hf.teacher import TeacherShape
from linearize.run.folder import Run

ROWS = "rows.safetensors"
SOURCES = ("dataset", "validation_dataset")  # the fields of a recipe that name data


def rows_of(run: Run, processor: Any, config: dict[str, Any]) -> Dataset:
    """Return the rows of a run, from its folder if it has them, else from the sources.

    Raises:
        UserError: data that cannot be used, or a damaged file of rows.
    """
    path = run.folder / ROWS
    if path.is_file() and (found := read_dataset(path, _identity(run, processor))) is not None:
        return found
    return load_dataset(run.recipe.data, processor, config, reach_by(run.load_teacher), seed=run.recipe.seed)


def stored_rows(run: Run, teacher: TeacherShape) -> Dataset | None:
    """Return the rows in a run's folder, even if their sources have changed; None: there are none.

    Raises:
        UserError: they are damaged, or have tokens or positions that the model does not have.
    """
    path = run.folder / ROWS
    found = read_dataset(path, None)
    if found is None:
        return None
    for rows in (found.train, found.validation, found.test):
        assert isinstance(rows, PackedRows)
        check_tokens(rows.input_ids, teacher.vocab_size)
        if not ((rows.position_ids >= 0) & (rows.position_ids < teacher.max_positions)).all():
            raise UserError(f"{path}: expected positions below the model's {teacher.max_positions}, found others")
        if not ((rows.labels == IGNORED) | ((rows.labels >= 0) & (rows.labels < teacher.vocab_size))).all():
            raise UserError(f"{path}: expected labels below the model's vocab_size {teacher.vocab_size}, found others")
    for document in found.test_documents:
        check_tokens(document.input_ids, teacher.vocab_size)
    return found


def refuse_local_sources(run: Run | None, data: DataConfig, named: Collection[str]) -> None:
    """Check that a folder's recipe, which may be a stranger's, does not name local files of the user.

    An evaluation quotes its text, and is made to be shared.

    Args:
        run: the run of the folder; None: the user wrote the whole recipe.
        data: of the recipe.
        named: the fields of `data` that the user named.

    Raises:
        UserError: a field that the user did not name is a local file or folder.
    """
    for field in SOURCES:
        name = getattr(data, field)
        if run is not None and name is not None and field not in named and on_disk(name):
            raise UserError(
                f"data.{field}: expected data that you name, found {name!r} on this machine, as "
                f"{run.folder / 'recipe.yaml'} names it; pass --dataset {name} to measure on it, or other data"
            )


def kept(run: Run, processor: Any, dataset: Dataset) -> Dataset:
    """Write packed rows to the run's folder, unless it has them, and return the rows.

    Args:
        processor: the tokenizer that made them; None: this run did not make them, and they are not written.

    Raises:
        UserError: the disk is full, or a damaged file of rows.
    """
    packed = all(isinstance(rows, PackedRows) for rows in (dataset.train, dataset.validation, dataset.test))
    if processor is None or not packed:
        return dataset
    path, identity = run.folder / ROWS, _identity(run, processor)
    if (found := read_dataset(path, identity)) is not None:
        return found
    write_dataset(path, dataset, identity)
    return read_dataset(path, identity) or dataset


def _identity(run: Run, processor: Any) -> str:
    return source_identity(run.recipe.data, processor, seed=run.recipe.seed)
