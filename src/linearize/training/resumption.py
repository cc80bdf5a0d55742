"""The files of one training stage: resume checkpoints, the result, and the metrics log. safetensors and JSON only.

Everything is written in one scratch folder and renamed once complete, and moved back there for deletion. So all
unfinished files of a killed process are in the scratch folder, which the next run clears.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from linearize.base import UserError, sync, writing
from linearize.distributed import barrier, is_sharded, read_rows, world
from linearize.hf.fingerprint import fingerprint

SCRATCH = "unfinished"
TENSORS, STATE = "tensors.safetensors", "state.json"
TRAINED, RESULT = "trained.safetensors", "result.json"


class StageFolder:
    """The folder of one stage.

    `identity` identifies the run: a flat dictionary for JSON, which is stored with all files. With several processes,
    all call `save` and `finish`. Tensors that belong to divided `parameters` are read divided.

    Raises:
        UserError: on reading, files belong to another run, cannot be read, or differ from their sha256; on writing, as
            `writing`.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = identity
        with writing(path, 0):
            path.mkdir(parents=True, exist_ok=True)
        if world().main:
            shutil.rmtree(path / SCRATCH, ignore_errors=True)

    def finished(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the trained tensors and the result, or None if the stage has not finished."""
        if not (self.path / RESULT).exists():
            return None
        tensors, result = self._read(self.path / TRAINED, self.path / RESULT, parameters)
        self._remove_checkpoints()  # left if the process died right after it wrote the result
        return tensors, result

    def finish(self, tensors: dict[str, Tensor], result: dict[str, Any]) -> None:
        """Write the result, then delete the resume checkpoint."""
        if not world().main:
            self._write_rows(TRAINED, tensors)
            return
        with self._scratch(_num_bytes(tensors)) as scratch:
            self._write_rows(TRAINED, tensors)
            self._write(scratch / TRAINED, tensors, scratch / RESULT, result)
            rows = _rows_of(self.path / TRAINED)
            if rows.exists():  # of a process that died before it wrote the result
                rows.replace(scratch / "older")
            if _rows_of(scratch / TRAINED).exists():
                _rows_of(scratch / TRAINED).replace(rows)
            (scratch / TRAINED).replace(self.path / TRAINED)
            (scratch / RESULT).replace(self.path / RESULT)  # last: its presence means that the stage has finished
        self._remove_checkpoints()

    def latest(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest checkpoint, or None."""
        checkpoints = self._checkpoints()
        if not checkpoints:
            return None
        return self._read(checkpoints[-1] / TENSORS, checkpoints[-1] / STATE, parameters)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, then delete older ones; if the disk is full, the previous one stays."""
        name = f"checkpoint-{step:09d}"
        if not world().main:
            self._write_rows(f"{name}/{TENSORS}", tensors)
            return
        with self._scratch(_num_bytes(tensors)) as scratch:
            folder = scratch / name
            folder.mkdir()
            self._write_rows(f"{name}/{TENSORS}", tensors)
            self._write(folder / TENSORS, tensors, folder / STATE, state)
            folder.replace(self.path / folder.name)
            for older in self._checkpoints()[:-1]:
                older.replace(scratch / older.name)

    def _write_rows(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write this process's rows of divided tensors in the scratch folder, which the main process has made."""
        divided = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, DTensor)}
        if not divided:
            return
        barrier()
        folder = _rows_of(self.path / SCRATCH / name)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with writing(self.path, _num_bytes(tensors)):
            try:
                save(divided, storage_writer=writer)
            except CheckpointException as error:
                raise next(iter(error.failures.values()))[0] from None

    def _checkpoints(self) -> list[Path]:
        return sorted(self.path.glob("checkpoint-*"))

    def _remove_checkpoints(self) -> None:
        checkpoints = self._checkpoints()
        if not checkpoints:
            return
        with self._scratch(0) as scratch:
            for checkpoint in checkpoints:
                checkpoint.replace(scratch / checkpoint.name)

    @contextmanager
    def _scratch(self, num_bytes: int) -> Iterator[Path]:
        scratch = self.path / SCRATCH
        try:
            with writing(self.path, num_bytes):
                scratch.mkdir()
                yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _write(self, tensors_file: Path, tensors: dict[str, Tensor], json_file: Path, data: dict[str, Any]) -> None:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        save_file(whole, tensors_file)
        sync(tensors_file)
        data = {**data, "identity": self.identity, "tensors_sha256": _file_digest(tensors_file)}
        data["rows_sha256"] = {path.name: _file_digest(path) for path in sorted(_rows_of(tensors_file).glob("*"))}
        data = json.loads(json.dumps(data, allow_nan=False))  # the digest is of the data as it will be read
        json_file.write_text(json.dumps({**data, "sha256": _digest(data)}, indent=1), encoding="utf-8")
        sync(json_file)

    def _read(
        self, tensors_file: Path, json_file: Path, parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, data = read_stage(tensors_file, json_file, parameters)
        found = data.pop("identity")
        for field in sorted(self.identity.keys() | found.keys()):
            if field == "model" and not (field in self.identity and field in found):
                continue  # older stages and models with divided weights lack it
            if self.identity.get(field) != found.get(field):
                raise UserError(
                    f"{json_file}: belongs to another run: expected {field} = {self.identity.get(field)}, "
                    f"found {field} = {found.get(field)}; use another output folder"
                )
        return tensors, data


def read_stage(
    tensors_file: Path, json_file: Path, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a stage's tensors, and their JSON data with the stage's identity.

    Args:
        parameters: by the last part of tensor names, after slashes. If one is divided, this process's rows of its
            tensors are read.

    Raises:
        UserError: a file is missing, cannot be read, or has changed since it was written.
    """
    folder = json_file.parent
    data = read_stage_json(json_file)
    expected, rows = data.pop("tensors_sha256", None), data.pop("rows_sha256", {})  # older checkpoints have none
    digests = {_rows_of(tensors_file) / name: digest for name, digest in rows.items()} | {tensors_file: expected}
    try:
        for path, digest in digests.items():
            if digest is not None and _file_digest(path) != digest:
                raise UserError(
                    f"{path}: expected the tensors that were written, found others (their sha256 differs): the file is "
                    f"damaged; delete {folder} to train again"
                )
        return _read_tensors(tensors_file, parameters), data
    except (OSError, SafetensorError):
        raise UserError(
            f"{tensors_file}: expected the tensors of a training stage, found no such file or one that cannot be read; "
            f"delete {folder} to train again"
        ) from None


def read_stage_json(path: Path) -> dict[str, Any]:
    """Return the JSON data of a stage.

    Raises:
        UserError: the file is missing, cannot be read, or has changed since it was written.
    """
    data, what = {}, "no such file or one that cannot be read"
    with suppress(OSError, ValueError, AttributeError, TypeError):
        data = json.loads(path.read_text(encoding="utf-8"))
        expected = data.pop("sha256", None)
        # Older files have neither digest; a file with only one is damaged.
        if (expected is None) != ("tensors_sha256" not in data) or expected not in (None, _digest(data)):
            what, data = "another (its sha256 differs)", {}
    if not isinstance(data, dict) or not isinstance(data.get("identity"), dict):
        raise UserError(
            f"{path}: expected the state of a training stage as it was written, found {what}; delete {path.parent} to "
            "train again"
        )
    return data


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    """Return the sha256 of a file that may not fit in memory."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def run_identity(
    tensors: Mapping[str, Tensor],
    rows: Iterable[Tensor],
    config: dict[str, Any],
    seed: int,
    model: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Return the values that must be equal for a run to resume from a checkpoint.

    These are the names, shapes and dtypes of `tensors`, the contents of `rows`, config and seed; and if `model` is
    given and undivided, its layer plan and the weights that this stage does not train.
    """
    shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    data = hashlib.sha256()
    for tensor in rows:
        data.update(str(list(tensor.shape)).encode())
        data.update(tensor.cpu().contiguous().numpy().data)
    parameters = hashlib.sha256(json.dumps(shapes).encode())
    identity = {**config, "seed": seed, "parameters": parameters.hexdigest()[:16], "data": data.hexdigest()[:16]}
    if model is not None and not is_sharded(model) and not any(x.is_meta for x in model.parameters()):
        trained = set(map(id, tensors.values()))
        weights = fingerprint(model, but=lambda name, x: id(x) in trained or ".mixer." in name)
        plan = json.dumps(getattr(model.config, "linearize", None), sort_keys=True)
        identity["model"] = hashlib.sha256(f"{plan} {weights}".encode()).hexdigest()[:16]
    return identity


def rng_state(devices: Iterable[str]) -> dict[str, Tensor]:
    """Return the states of torch's generators for the CPU and these CUDA devices."""
    on_cuda = {f"rng/{device}": torch.cuda.get_rng_state(device) for device in devices}
    return {"rng/cpu": torch.get_rng_state(), **on_cuda}


def restore_rng_state(tensors: dict[str, Tensor], devices: Iterable[str]) -> None:
    """Restore `rng_state` for the CPU and those devices that it contains."""
    torch.set_rng_state(tensors["rng/cpu"])
    for device in devices:
        if f"rng/{device}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng/{device}"], device)


class MetricsLog:
    """Append JSON lines to a file, after truncating it to the `length` bytes at the time of the checkpoint.

    Raises:
        UserError: there are fewer bytes, or their `sha256` (if given) differs; on writing, as `base.writing`.
    """

    def __init__(self, path: Path, length: int, sha256: str | None = None) -> None:
        self._path = path
        kept = path.read_bytes()[:length] if length and path.exists() else b""
        self._digest = hashlib.sha256(kept)
        if len(kept) < length or sha256 not in (None, self._digest.hexdigest()):
            found = len(kept) if len(kept) < length else "others"
            raise UserError(
                f"{path}: expected the {length} bytes written up to the checkpoint, found {found}; "
                f"restore the file, or delete {path.parent} to train again"
            )
        with writing(path, 0):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(length)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; ValueError for a value that is not valid JSON, such as NaN."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        self._digest.update(line)
        with writing(self._path, len(line)):
            while line:  # an unbuffered write may be partial; if the disk is full, the next call raises an error
                line = line[self._file.write(line) :]

    def sync(self) -> dict[str, Any]:
        """Write all lines to the disk; return the `length` and `sha256` of the file."""
        with writing(self._path, 0):
            os.fsync(self._file.fileno())
        return {"length": os.fstat(self._file.fileno()).st_size, "sha256": self._digest.hexdigest()}


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _rows_of(path: Path) -> Path:
    """Return the folder of divided tensors for the file `path` of all others."""
    return path.with_suffix("")


def _read_tensors(path: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in a file and its folder of divided tensors; of divided ones, this process's rows."""
    with safe_open(path, framework="pt") as file:
        # Cloned, because safetensors maps the file, and a mapped checkpoint would keep its disk space when deleted.
        names = file.keys()
        divided = {name for name in names if _like(name, parameters, file.get_slice(name).get_shape()) is not None}
        tensors = {name: file.get_tensor(name).clone() for name in names if name not in divided}
    if divided:
        tensors |= _read_rows(path.parent, parameters, divided)
    if _rows_of(path).is_dir():
        tensors |= _read_rows(_rows_of(path), parameters)
    return tensors


def _read_rows(
    folder: Path, parameters: Mapping[str, Tensor], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the tensors in a folder, all or those of some names: this process's rows of divided ones, others whole."""
    metadata: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name in metadata.keys() if names is None else names:
        size, dtype = metadata[name].size, metadata[name].properties.dtype
        like = _like(name, parameters, list(size))
        empty = torch.empty(size, dtype=dtype) if like is None else torch.empty_like(like, dtype=dtype, device="cpu")
        tensors[name] = empty
    read_rows(folder, tensors)
    return tensors


def _like(name: str, parameters: Mapping[str, Tensor], shape: list[int]) -> DTensor | None:
    """Return the divided parameter to which a tensor belongs, if shapes are equal, else None."""
    parameter = parameters.get(name.rpartition("/")[2])
    return parameter if isinstance(parameter, DTensor) and list(parameter.shape) == shape else None
