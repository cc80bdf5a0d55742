"""Store the residual stream before a layer on disk: written file by file, read row by row."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from linearize.base import UserError, atomic_file, writing
from linearize.data.rows import Indices, PackedRows

FILE_BYTES = 2**28  # approximate; a killed process loses one file
_TENSOR = "residual_stream"


@dataclass(frozen=True)
class Activations:
    """The residual stream [N, L, E] of `num_rows` rows, in files ``<side>-<number>.safetensors`` of `rows_per_file`.

    Files are written under another name and renamed, so an existing file is whole. A killed process loses one file, and
    several processes may write the same files at the same time. `identity` describes the model and data of the files.
    Reading raises UserError if a file cannot be read or has another identity.
    """

    folder: Path
    side: str
    num_rows: int
    rows_per_file: int
    identity: Mapping[str, str]

    @property
    def complete(self) -> bool:
        return all(path.is_file() for path in self._files)

    @property
    def _files(self) -> list[Path]:
        return [self._file(number) for number in range(-(-self.num_rows // self.rows_per_file))]

    def _file(self, number: int) -> Path:
        return self.folder / f"{self.side}-{number:05d}.safetensors"

    def write(self, compute: Callable[[slice], Float[Tensor, "N L E"]], row_bytes: int) -> None:
        """Write the missing files; `compute` returns the residual stream of some rows.

        Raises:
            UserError: too little room on the disk.
        """
        with writing(self.folder, 0):
            self.folder.mkdir(parents=True, exist_ok=True)
        missing = [number for number, path in enumerate(self._files) if not path.is_file()]
        needed = min(len(missing) * self.rows_per_file, self.num_rows) * row_bytes
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"{self.folder}: expected room for {needed} bytes of activations between blocks, found {free} free; "
                "free some space, or start again with a larger transfer.layers_per_block or less data"
            )
        for number in missing:
            path = self._file(number)
            if path.is_file():  # another job has written it meanwhile
                continue
            start = number * self.rows_per_file
            stream = compute(slice(start, min(start + self.rows_per_file, self.num_rows))).cpu().contiguous()
            with atomic_file(path, stream.nbytes) as scratch:
                save_file({_TENSOR: stream}, scratch, metadata=self._metadata)

    @property
    def _metadata(self) -> dict[str, str]:
        return {**self.identity, "rows_per_file": str(self.rows_per_file)}

    def read(self, rows: Sequence[int]) -> Float[Tensor, "N L E"]:
        """Return these rows, in this order; no other rows are read."""
        parts = []
        for number, group in groupby(rows, lambda row: row // self.rows_per_file):
            path = self._file(number)
            try:
                with safe_open(path, framework="pt") as file:
                    self._check(path, file.metadata())
                    stored = file.get_slice(_TENSOR)
                    places = [row % self.rows_per_file for row in group]
                    parts += [stored[place : place + 1] for place in places]
            except (OSError, SafetensorError):
                raise UserError(
                    f"{path}: expected activations between blocks, found no such file or one that cannot be read; "
                    f"delete {self.folder} and run the same command again, which makes them again"
                ) from None
        return torch.cat(parts)

    def _check(self, path: Path, found: Mapping[str, str]) -> None:
        for field, expected in self._metadata.items():
            if found.get(field) != expected:
                raise UserError(
                    f"{path}: belongs to another run: expected {field} = {expected}, found {field} = "
                    f"{found.get(field)}; use another output folder"
                )


@dataclass(frozen=True)
class StoredRows(PackedRows):
    """Rows whose input is a stored residual stream instead of token embeddings."""

    activations: Activations
    numbers: Int64[Tensor, " N"]  # row indices in `activations`

    def rows(self, indices: Indices) -> StoredRows:
        chosen = super().rows(indices)
        numbers = self.numbers[indices]
        return StoredRows(chosen.input_ids, chosen.position_ids, chosen.labels, self.activations, numbers)

    def inputs(self) -> dict[str, Any]:
        inputs = super().inputs()
        del inputs["input_ids"]
        return inputs | {"inputs_embeds": self.activations.read(self.numbers.tolist())}
