"""The rows of a run: made when it begins, and kept in its folder for every other start."""

from __future__ import annotations

from typing import Any

from linearize.data.load import load_dataset
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.data.selection import reach_by
from linearize.data.stored import read_dataset, source_identity, write_dataset
from linearize.run.folder import Run

ROWS = "rows.safetensors"


def rows_of(run: Run, processor: Any, config: dict[str, Any]) -> Dataset:
    """What the run trains and is measured on: from its folder where it is there, else from the sources.

    Raises:
        UserError: data that cannot be used, or a damaged file of rows.
    """
    path = run.folder / ROWS
    if path.is_file() and (found := read_dataset(path, _identity(run, processor))) is not None:
        return found
    return load_dataset(run.recipe.data, processor, config, reach_by(run.load_teacher), seed=run.recipe.seed)


def kept(run: Run, processor: Any, dataset: Dataset) -> Dataset:
    """The same rows, packed ones in the run's folder from now on.

    Args:
        processor: the tokenizer that made them; None: they were not made by this run, and are not kept.

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
