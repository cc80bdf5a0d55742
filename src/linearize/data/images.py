"""Read images with classes from a folder with a subfolder per class, or from a table or hub dataset."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.configs.tasks import ImageClassification
from linearize.data.examples import examples_dataset, split_examples
from linearize.data.labels import Classes, cell
from linearize.data.packing import Dataset, document_progress
from linearize.data.rows import Indices
from linearize.data.sources import read_rows

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True)
class Image:
    """One image, its class, its place for messages, and the digest of its file's bytes.

    A file is read again whenever it is decoded, since large folders do not fit in memory.
    """

    source: bytes | Path
    digest: bytes
    label: int
    where: str

    @classmethod
    def read(cls, source: bytes | Path, label: int, where: str) -> Image:
        return cls(source, hashlib.blake2b(_data(source), digest_size=16).digest(), label, where)

    def decoded(self) -> Any:
        """Return the PIL image, in RGB.

        Raises:
            UserError: the file does not exist any more, or PIL cannot read it.
        """
        import PIL.Image

        try:
            return PIL.Image.open(io.BytesIO(_data(self.source))).convert("RGB")
        except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
            raise UserError(f"{self.where}: expected an image that PIL can read, found: {error}") from None


@dataclass(frozen=True)
class ImageExamples:
    """N images, which `inputs` decodes and scales for the model.

    Attributes:
        processor: of transformers: from PIL images to `pixel_values` [N, channels, height, width].
        positions: of the model's sequence for one image: special tokens and patches.
    """

    images: Sequence[Image]
    processor: Any
    positions: int

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_tokens(self) -> int:
        return len(self.images) * self.positions

    def target_counts(self) -> Int64[Tensor, " N"]:
        return torch.ones(len(self.images), dtype=torch.int64)

    def rows(self, indices: Indices) -> ImageExamples:
        chosen = torch.arange(len(self.images))[indices].tolist()
        return replace(self, images=[self.images[index] for index in chosen])

    def inputs(self) -> dict[str, Tensor]:
        decoded = [image.decoded() for image in self.images]
        return {"pixel_values": self.processor(decoded, return_tensors="pt")["pixel_values"]}

    def tensors(self) -> Iterator[Tensor]:
        yield torch.tensor([int.from_bytes(image.digest[:7], "big") for image in self.images])
        yield self.targets()

    def compared(self, outputs: Any) -> Float[Tensor, "N C"]:
        return outputs.logits

    def targets(self) -> Int64[Tensor, " N"]:
        return torch.tensor([image.label for image in self.images])


def build_images(config: DataConfig, processor: Any, classes: Classes, *, positions: int, seed: int) -> Dataset:
    """Read and split images as `examples.build_examples` does texts.

    Raises:
        UserError: no images, one that cannot be read, or a class that the model does not have.
    """
    read = partial(_read, classes=classes)
    parts = split_examples(config, read, lambda image: image.digest, seed)
    return examples_dataset(*(ImageExamples(part, processor, positions) for part in parts))


def _read(config: DataConfig, classes: Classes) -> list[Image]:
    folder = Path(config.dataset or "").expanduser()
    found = _folder(folder, classes) if config.dataset and folder.is_dir() else _table(config, classes)
    found = islice(found, config.max_documents)
    images = list(document_progress(found, "reading images", size=lambda _: 1))
    if images:
        images[0].decoded()
    return images


def _folder(folder: Path, classes: Classes) -> Iterator[Image]:
    """Yield the images FOLDER/CLASS/IMAGE; unknown classes are numbered in the order of their names."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    by_class: dict[str, list[Path]] = {name: [] for name in names}
    for path in sorted(folder.glob("*/*")):
        if path.suffix.lower() in _SUFFIXES and path.parent.name in by_class:
            by_class[path.parent.name].append(path)
    if not any(by_class.values()):
        raise UserError(
            f"data.dataset: expected a folder with a folder of images ({', '.join(_SUFFIXES)}) for each class, found "
            f"none in {folder}"
        )
    known = set(names) <= set(classes.numbers)
    # Evenly from all classes, so that the first `data.max_documents` images have all classes.
    for of_each in zip_longest(*by_class.values()):
        for place, path in enumerate(of_each):
            if path is not None:
                label: object = path.parent.name if known else place
                yield Image.read(path, classes.number(label, str(path)), str(path))


def _table(config: DataConfig, classes: Classes) -> Iterator[Image]:
    """Yield the images of a table; relative paths start at the table's folder."""
    task = config.task
    assert isinstance(task, ImageClassification)
    table = Path(config.dataset or "").expanduser()
    folder = table.parent if table.is_file() else Path()
    for where, row in read_rows(config):
        value = cell(row, task.image_column, where, "data.task.image_column")
        label = classes.number(cell(row, task.label_column, where, "data.task.label_column"), where)
        yield Image.read(_source(value, folder, where), label, where)


def _source(value: Any, folder: Path, where: str) -> bytes | Path:
    """Return the bytes or the path of an image's file; an image decoded by `datasets` becomes PNG bytes."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return folder / Path(value).expanduser()
    if hasattr(value, "save"):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return buffer.getvalue()
    raise UserError(f"{where}: expected an image, its file's bytes or its path, found {type(value).__name__}")


def _data(source: bytes | Path) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise UserError(f"{source}: expected an image, found: {error.strerror}") from None
