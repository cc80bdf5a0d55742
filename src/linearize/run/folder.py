"""The folder of a run: its recipe and model, its lock, and its files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from linearize.base import UserError, atomic_file
from linearize.configs.training import DistributedConfig
from linearize.data.packing import Dataset
from linearize.distributed import world
from linearize.hf.checkpoint import load_model, new_model
from linearize.hf.sharded_checkpoint import load_sharded
from linearize.recipe import Recipe
from linearize.report.load import RunRecord
from linearize.training.locks import claimed
from linearize.training.resumption import RESULT, read_stage_json

LOCK = ".lock"


@dataclass(frozen=True)
class Run:
    """A run folder with recipe, model, dtype and device: enough to start, resume or evaluate the run."""

    recipe: Recipe
    model: str
    folder: Path
    dtype: torch.dtype
    device: torch.device
    sharded: bool = False  # weights are divided among the processes

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Run:
        """Return the run recorded in `folder`, a run folder or the folder of its model.

        Raises:
            UserError: a file is missing or damaged.
        """
        recipe = Recipe.load(str(folder / "recipe.yaml"))
        return cls(recipe, run_record(folder).model, folder, dtype, device)

    @classmethod
    def of_model(cls, model: str, dtype: torch.dtype, device: torch.device) -> Run | None:
        """Return the run that made a model, from the folder around the model or its own; None: no run made it.

        A model that was moved has the recipe and the name of the teacher, but not the controls and stages.

        Raises:
            UserError: as `read`.
        """
        found = run_folder(model)
        return None if found is None else cls.read(found, dtype, device)

    def load_teacher(self) -> PreTrainedModel:
        """Load the softmax model with its task's head, or make a new one if the recipe starts from scratch.

        With divided weights each process loads its part; all call this.
        """
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        options["auto_class"] = self.recipe.data.task.auto_class
        if self.recipe.weights == "random":
            return new_model(self.model, seed=self.recipe.seed, **options)
        if self.sharded:
            stages = self.recipe.adapt, self.recipe.finetune
            masters = any(stage is not None and stage.all_weights for stage in stages)
            stored = torch.promote_types(self.dtype, torch.float32) if masters else self.dtype
            return load_sharded(self.model, stored=stored, **options)
        return load_model(self.model, **options)

    def training_tokens(self, *stages: str) -> int | None:
        """Return the sum of the training tokens of those stages that are finished, over all epochs; None: none is."""
        results = [x for stage in stages if (x := self.folder / stage / RESULT).is_file()]
        return sum(read_stage_json(x)["tokens"] for x in results) if results else None

    @property
    def controls(self) -> dict[str, Path]:
        """Return the folders of the trained controls, by the name of their candidate."""
        return {name: self.folder / "controls" / name for name in self.recipe.controls}


def run_folder(model: str) -> Path | None:
    """Return the folder with the run.json of a model: its parent folder, its own folder, or None."""
    folder = Path(model).resolve()
    return next((place for place in (folder.parent, folder) if (place / "run.json").is_file()), None)


def student_folder(given: str) -> str:
    """Return the model in a run folder; a model's own folder or hub id is returned unchanged.

    Raises:
        UserError: a run that has no model yet.
    """
    folder = Path(given)
    if (folder / "config.json").is_file() or not (folder / "run.json").is_file():
        return given
    if not (folder / "model").is_dir():
        raise UserError(
            f"run folder {given}: expected its model, found none yet; the command that began the run continues it"
        )
    return str(folder / "model")


def run_record(folder: Path) -> RunRecord:
    """Read the run.json of a folder."""
    return RunRecord.read(folder / "run.json", advice="restore it")


def check_output(run: Run) -> None:
    """Raise UserError unless the folder is empty or has a run of this recipe and model, without symbolic links."""
    _refuse_links(run.folder)
    recipe_file, run_file = run.folder / "recipe.yaml", run.folder / "run.json"
    if recipe_file.is_file() and run_file.is_file():
        found = run_record(run.folder)
        if _written(recipe_file) != _results_by(run.recipe):
            raise UserError(
                f"output folder {run.folder}: expected a run of this recipe, found one of another ({recipe_file}); "
                "use another folder"
            )
        for name, expected in _identity(run).items():
            if getattr(found, name) != expected:
                raise UserError(
                    f"output folder {run.folder}: {name}: expected {expected}, found {getattr(found, name)}; "
                    "use another folder"
                )
    elif not _unclaimed(run):
        raise UserError(f"output folder {run.folder}: expected an empty folder or a run to resume, found other files")


def _refuse_links(folder: Path) -> None:
    """Raise UserError if a run's folder contains symbolic links: a run would write and delete files through them."""
    for place, folders, files in os.walk(folder):
        for path in (Path(place) / name for name in sorted((*folders, *files))):
            if path.is_symlink():
                raise UserError(
                    f"output folder {folder}: expected files and folders of its own, found the symbolic link {path} to "
                    f"{path.readlink()}; replace it by what it leads to, or use another folder"
                )


def _unclaimed(run: Run) -> bool:
    """Return whether there is no folder, an empty one, or one in which `claim` was killed before its last file."""
    if not run.folder.is_dir():
        return not run.folder.exists()
    recipe = run.folder / "recipe.yaml"
    found = set(run.folder.iterdir()) - set(run.folder.glob(".*.incomplete")) - {run.folder / LOCK}
    return not found or (found == {recipe} and _written(recipe) == _results_by(run.recipe))


def _written(recipe_file: Path) -> str | None:
    """Return `_results_by` of a recipe file, perhaps of an earlier version; None: it cannot be read."""
    try:
        return _results_by(Recipe.load(str(recipe_file)))
    except UserError:
        return None


def _results_by(recipe: Recipe) -> str:
    """Return the recipe as YAML without `distributed`: a run may be resumed with other processes."""
    return recipe.model_copy(update={"distributed": DistributedConfig()}).to_yaml()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock `folder` for one run in the `with` block. The folder is made if needed, and removed if it stays empty.

    With several processes of one run, the main process locks. Locks of killed processes do not count, and their
    unfinished files are removed.

    Raises:
        UserError: another run is active in it, or it cannot be written to.
    """
    if not world().main:
        yield
        return
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with _can_be_written_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with claimed(folder / LOCK) as mine:
            if not mine:
                raise UserError(
                    f"output folder {folder}: expected no active run, found another run at work; wait for "
                    "its end, or use another folder"
                )
            try:
                for pattern in (".*.incomplete", "*/.*.incomplete", ".tmp??????"):  # the last are safetensors' own
                    for left in folder.glob(pattern):
                        with suppress(OSError):  # folders are removed by the code that writes them
                            left.unlink()
                yield
            finally:
                with suppress(OSError):
                    (folder / LOCK).unlink()
    finally:
        for place in made:
            with suppress(OSError):  # it is not empty
                place.rmdir()


def claim(run: Run, dataset: Dataset) -> None:
    """Write recipe.yaml and run.json to a new run's folder; check that a resumed run has the same data.

    Raises:
        UserError: the data have changed, or the folder cannot be written to.
    """
    run_file = run.folder / "run.json"
    if run_file.is_file():
        found = run_record(run.folder).data
        if found != dataset.fingerprint:
            raise UserError(
                f"output folder {run.folder}: data: expected tokens with sha256 {dataset.fingerprint[:12]}, found a "
                f"run on {found[:12]}; use the same data or another folder"
            )
        return
    with _can_be_written_to(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / "recipe.yaml", run.recipe.to_yaml())
    record = RunRecord(**_identity(run), data=dataset.fingerprint, versions=versions())
    write_json(run_file, record.to_json())


@contextmanager
def _can_be_written_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"output folder {folder}: expected one that can be written to, found: {error.strerror}; use another"
        ) from None


def _identity(run: Run) -> dict[str, str]:
    return {"model": run.model, "dtype": str(run.dtype).removeprefix("torch."), "device": run.device.type}


def versions() -> dict[str, str]:
    return {"linearize": version("linearize"), "torch": torch.__version__, "transformers": transformers.__version__}


def write_json(path: Path, data: object) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        UserError: the disk is full.
    """
    with atomic_file(path, len(text)) as scratch:
        scratch.write_text(text, encoding="utf-8")
