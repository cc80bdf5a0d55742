"""The folder of a run: what it is about, whose it is, and the files in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedModel

from linearize.base import UserError, atomic_file
from linearize.data.packing import Dataset
from linearize.hf.checkpoint import load_model, new_model
from linearize.recipe import Recipe


@dataclass(frozen=True)
class Run:
    """A run folder and what it is about: enough to start, resume or evaluate it."""

    recipe: Recipe
    model: str
    folder: Path
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Run:
        """The run that `folder` holds, on this machine's device."""
        recipe = Recipe.parse(yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")))
        model = json.loads((folder / "run.json").read_text(encoding="utf-8"))["model"]
        return cls(recipe, model, folder, dtype, device)

    def load_teacher(self) -> PreTrainedModel:
        """The softmax model with its task's head: as it is saved, or new where the recipe starts from scratch."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        options["auto_class"] = self.recipe.data.task.auto_class
        if self.recipe.weights == "random":
            return new_model(self.model, seed=self.recipe.seed, **options)
        return load_model(self.model, **options)

    @property
    def controls(self) -> dict[str, Path]:
        """Folders of the trained controls, by the name of their candidate."""
        return {name: self.folder / "controls" / name for name in self.recipe.controls}


def check_output(run: Run) -> None:
    """See that the folder is empty or holds this very recipe and model.

    Raises:
        UserError: the folder holds something else.
    """
    recipe_file, run_file = run.folder / "recipe.yaml", run.folder / "run.json"
    if recipe_file.is_file() and run_file.is_file():
        found = json.loads(run_file.read_text(encoding="utf-8"))
        if _written(recipe_file) != run.recipe.to_yaml():
            raise UserError(
                f"output folder {run.folder}: expected a run of this recipe, found one of another ({recipe_file}); "
                "use another folder"
            )
        for name, expected in _identity(run).items():
            if found.get(name) != expected:
                raise UserError(
                    f"output folder {run.folder}: {name}: expected {expected}, found {found.get(name)}; "
                    "use another folder"
                )
    elif not _unclaimed(run):
        raise UserError(f"output folder {run.folder}: expected an empty folder or a run to resume, found other files")


def _unclaimed(run: Run) -> bool:
    """Whether there is no folder, an empty one, or one in which `claim` was killed before its last file."""
    if not run.folder.is_dir():
        return not run.folder.exists()
    recipe = run.folder / "recipe.yaml"
    found = set(run.folder.iterdir()) - set(run.folder.glob(".*.incomplete"))
    return not found or (found == {recipe} and recipe.read_text(encoding="utf-8") == run.recipe.to_yaml())


def _written(recipe_file: Path) -> str | None:
    """A run's recipe as it is written today, perhaps without a field of an earlier version; None: there is none."""
    try:
        return Recipe.parse(yaml.safe_load(recipe_file.read_text(encoding="utf-8"))).to_yaml()
    except (UserError, yaml.YAMLError):
        return None


def claim(run: Run, dataset: Dataset) -> None:
    """Make the folder this run's own, and see that a resumed run has the same data.

    Raises:
        UserError: the data have changed, or the folder cannot be written to.
    """
    run_file = run.folder / "run.json"
    if run_file.is_file():
        found = json.loads(run_file.read_text(encoding="utf-8")).get("data")
        if found != dataset.fingerprint:
            raise UserError(
                f"output folder {run.folder}: data: expected tokens with sha256 {dataset.fingerprint[:12]}, found a "
                f"run on {str(found)[:12]}; use the same data or another folder"
            )
        return
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / "recipe.yaml", run.recipe.to_yaml())
        write_json(run_file, _identity(run) | {"data": dataset.fingerprint, "versions": versions()})
    except OSError as error:
        raise UserError(
            f"output folder {run.folder}: expected one that can be written to, found: {error.strerror}; use another"
        ) from None


def _identity(run: Run) -> dict[str, str]:
    return {"model": run.model, "dtype": str(run.dtype).removeprefix("torch."), "device": run.device.type}


def versions() -> dict[str, str]:
    return {"linearize": version("linearize"), "torch": torch.__version__, "transformers": transformers.__version__}


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        UserError: the disk is full.
    """
    with atomic_file(path, len(text)) as scratch:
        scratch.write_text(text, encoding="utf-8")
