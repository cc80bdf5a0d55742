"""Store packed rows in a file, which is mapped into memory: later starts do not tokenise again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from linearize.base import UserError, atomic_file
from linearize.configs.data import DataConfig
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.data.sources import files_of
from linearize.data.templates import TokenDocument

_PARTS = ("train", "validation", "test")
_FIELDS = ("input_ids", "position_ids", "labels", "first_document")


def source_identity(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> str:
    """Return the sha256 of the sources of rows: settings, tokenizer, and names, sizes and times of local files."""
    named = [name for name in (config.dataset, config.validation_dataset) if name is not None]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for name in named for path in files_of(name)]
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    told = {
        "config": config.model_dump(mode="json"),
        "seed": seed,
        "files": files,
        "tokenizer": tokenizer.get_vocab() if backend is None else backend.to_str(),
        "special": tokenizer.all_special_ids,
        "template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def write_dataset(path: Path, dataset: Dataset, identity: str) -> None:
    """Write packed rows, whole or not at all.

    Raises:
        UserError: the disk is full.
    """
    tensors = dict(_tensors(dataset))
    about = {"identity": identity, "fingerprint": dataset.fingerprint, "documents": json.dumps(dataset.documents)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, sum(tensor.nbytes for tensor in tensors.values())) as scratch:
        save_file(tensors, scratch, metadata=about)


def read_dataset(path: Path, identity: str | None) -> Dataset | None:
    """Return the stored rows, mapped into memory; None: there are none, or they have other sources.

    Args:
        identity: required `source_identity`; None: any.

    Raises:
        UserError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
        if identity is not None and about.get("identity") != identity:
            return None
        tensors = load_file(path)
        parts = [PackedRows(**_fields(tensors, part)) for part in _PARTS]  # type: ignore[arg-type]
        ids, labels = (x.split(tensors["lengths"].tolist()) for x in (tensors["ids"], tensors["labels"]))
        documents = tuple(TokenDocument(*both) for both in zip(ids, labels, strict=True))
        train, validation, test = parts
        sizes: Any = tuple(json.loads(about["documents"]))
        dataset = Dataset(train, validation, test, sizes, documents)
        whole = dataset.fingerprint == about["fingerprint"]
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError):
        whole, dataset = False, None
    if not whole:
        raise UserError(
            f"{path}: expected the rows that were written there, found others; delete it, to make them again"
        )
    return dataset


def _tensors(dataset: Dataset) -> Iterator[tuple[str, Tensor]]:
    for part in _PARTS:
        rows = getattr(dataset, part)
        for field in _FIELDS:
            if (tensor := getattr(rows, field)) is not None:
                yield f"{part}/{field}", tensor.contiguous()
    documents, nothing = dataset.test_documents, torch.empty(0, dtype=torch.int64)
    yield "ids", torch.cat([nothing, *(document.input_ids for document in documents)])
    yield "labels", torch.cat([nothing, *(document.labels for document in documents)])
    yield "lengths", torch.tensor([len(document) for document in documents], dtype=torch.int64)


def _fields(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {field: tensors[f"{part}/{field}"] for field in _FIELDS if f"{part}/{field}" in tensors}
