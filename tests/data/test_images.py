"""Images with classes, from folders and tables."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.data.images import ImageExamples, build_images
from linearize.data.labels import Classes
from linearize.data.rows import Rows

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}
PROCESSOR = ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def picture(colour: tuple[int, int, int], shade: int, size: int = 10) -> PIL.Image.Image:
    image = PIL.Image.new("RGB", (size, size), colour)
    image.putpixel((0, 0), (shade, shade, shade))
    return image


def parts(data: Any) -> tuple[Any, Any, Any]:
    return data.train, data.validation, data.test


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        (tmp_path / name).mkdir()
        for shade in range(24):
            picture(colour, shade).save(tmp_path / name / f"{shade:02}.png")
    return tmp_path


def built(config: DataConfig, names: dict[str, int] | None = None) -> Any:
    classes = Classes(names or {}, 2)
    return build_images(config, PROCESSOR, classes, positions=5, seed=0)


def config_of(dataset: object, **task: str) -> DataConfig:
    fields: dict[str, Any] = {"task": {"type": "image_classification", **task}, "validation_fraction": 0.5}
    return DataConfig(dataset=str(dataset), **fields)


@pytest.mark.parametrize("names", [None, {"blue": 1, "red": 0}], ids=["by name", "of the model"])
def test_folder(folder: Path, names: dict[str, int] | None) -> None:
    data = built(config_of(folder), names)
    assert isinstance(data.train, ImageExamples) and isinstance(data.train, Rows)
    assert data.documents == (24, 6, 18) and data.train.num_tokens == 24 * 5
    pixels = data.train.inputs()["pixel_values"]
    assert pixels.shape == (24, 3, 8, 8) and float(pixels.max()) == 1.0
    blue = (names or {"blue": 0})["blue"]
    is_blue = pixels[:, 2, 4, 4] == 1.0
    assert torch.equal(is_blue, data.train.targets() == blue)
    chosen = data.train.rows(torch.tensor([5, 2]))
    assert torch.equal(chosen.inputs()["pixel_values"], pixels[[5, 2]])
    assert torch.equal(chosen.targets(), data.train.targets()[[5, 2]])


def test_a_part_of_a_folder_has_all_classes(folder: Path) -> None:
    data = built(config_of(folder).model_copy(update={"max_documents": 40}))
    assert torch.cat([part.targets() for part in parts(data)]).bincount().tolist() == [20, 20]


@pytest.mark.parametrize("absolute", [True, False])
def test_table_of_paths(absolute: bool, folder: Path) -> None:
    """Relative ones start at the table's folder, wherever the run is."""
    paths = sorted(folder.glob("*/*.png"))
    start = folder if absolute else Path()
    rows = [{"img": str(start / path.relative_to(folder)), "kind": int(path.parent.name == "red")} for path in paths]
    table = folder / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = built(config_of(table, image_column="img", label_column="kind"))
    assert torch.equal(data.train.inputs()["pixel_values"][:, 0, 4, 4] == 1.0, data.train.targets() == 1)


def test_files_are_not_held_in_memory(folder: Path) -> None:
    data = built(config_of(folder))
    assert {type(image.source) for side in parts(data) for image in side.images} == {type(folder)}
    (folder / "red" / "03.png").unlink()
    with pytest.raises(UserError, match=r"red/03\.png: expected an image, found: No such file"):
        for side in parts(data):
            side.inputs()


def test_parquet_of_bytes(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = []
    for shade in range(40):
        buffer = io.BytesIO()
        picture(COLOURS["red"], shade).save(buffer, format="PNG")
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": shade % 2})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "images.parquet")
    data = built(config_of(tmp_path / "images.parquet"))
    assert sum(map(len, parts(data))) == 40
    assert data.fingerprint == built(config_of(tmp_path / "images.parquet")).fingerprint


def test_hidden_folders_are_no_classes(folder: Path) -> None:
    (folder / ".thumbnails").mkdir()
    picture((0, 255, 0), 0).save(folder / ".thumbnails" / "00.png")
    data = built(config_of(folder))
    assert sum(map(len, parts(data))) == 48
    for name in COLOURS:
        (folder / name).rename(folder / f".{name}")
    with pytest.raises(UserError, match="a folder of images"):
        built(config_of(folder))


def test_an_image_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "red" / "03.png").write_bytes(b"no image")
    data = built(config_of(folder))
    with pytest.raises(UserError, match=r"red/03\.png: expected an image that PIL can read"):
        for side in parts(data):
            side.inputs()


def test_what_cannot_be_read_is_said(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UserError, match="a folder of images"):
        built(config_of(empty))
    for path in (folder / "blue").glob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match="an image that PIL can read"):
        built(config_of(folder))
