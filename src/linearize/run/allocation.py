"""What a run measures on the teacher before it converts: the allocation of its KV budget, and eviction scores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from linearize.base import UserError, atomic_file, read_json
from linearize.data.packing import Dataset
from linearize.data.repeats import without_repeats
from linearize.data.rows import PackedRows
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import LayerPlan, each_mixer
from linearize.recipe import Recipe
from linearize.run.folder import Run, write_json
from linearize.training.allocation import Allocation, allocate
from linearize.training.eviction_scores import EvictionScores, measure_attention

ALLOCATION, SCORES = "allocation.json", "eviction_scores.safetensors"


@dataclass(frozen=True)
class Measured:
    """What is known of a teacher once it has been measured.

    Attributes:
        layers: the layer plan.
        allocation: of the recipe's KV budget; None where the recipe has none.
        scores: of the plan's KV caches with eviction; None where it has none.
    """

    layers: LayerPlan
    allocation: Allocation | None = None
    scores: EvictionScores | None = None

    def convert(self, teacher: PreTrainedModel, seed: int) -> PreTrainedModel:
        """Return a student by the plan, with its eviction scores."""
        student = convert_layers(teacher, self.layers, seed=seed)
        if self.scores is not None:
            self.scores.apply(student)
        return student

    def save(self, run: Run) -> None:
        """Write what was measured to the run's folder."""
        if self.allocation is not None:
            write_json(run.folder / ALLOCATION, asdict(self.allocation))
        if self.scores is not None:
            named, path = self.scores.named_tensors(), run.folder / SCORES
            with atomic_file(path, sum(x.nbytes for x in named.values()), "start the run again") as scratch:
                save_file(named, scratch)


def measure(
    recipe: Recipe,
    shape: TeacherShape,
    layers: LayerPlan,
    teacher: PreTrainedModel,
    dataset: Dataset,
    tokenizer: Any,
    dtype: torch.dtype,
) -> Measured:
    """Measure what the recipe's plan depends on: what recall needs of each KV head, and eviction scores.

    Args:
        layers: the plan as the recipe alone has it; layers that it leaves as they are stay so.
        dtype: of keys and values, in which bytes are counted.

    Raises:
        UserError: no language model, a budget too small for any window, or too little text.
    """
    memory, rows = recipe.memory, dataset.train
    if memory is None and all(mixer.cache is None for mixer in each_mixer(layers)):
        return Measured(layers)
    if not isinstance(rows, PackedRows):
        raise UserError(f"memory: expected a language model, found {recipe.data.task.type}; set memory=null")
    text = without_repeats(rows, recipe.data.repeats, seed=recipe.seed)
    quantiles, scores = measure_attention(teacher, text, tokenizer, seed=recipe.seed)
    if memory is None:
        return Measured(layers, None, scores)
    needs = {
        layer: [[round(x, 3) for x in head] for head in of_layer.tolist()]
        for layer, of_layer in quantiles.items()
        if layers[layer] is not None
    }
    allocation = allocate(memory, needs, shape, dtype)
    return Measured(allocation.plan(shape.num_layers), allocation, scores)


def stored(run: Run, shape: TeacherShape, layers: LayerPlan) -> Measured | None:
    """Return what a run's folder has of its measurements; None where it has not all of them.

    Raises:
        UserError: a file is damaged, or of an earlier version.
    """
    path, allocation = run.folder / ALLOCATION, None
    if path.is_file():
        data = read_json(path)
        try:
            allocation = Allocation.of(data)
            layers = allocation.plan(shape.num_layers)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _not_measured(path, "window, text, recall, needs, sinks, budget and held") from None
    elif run.recipe.memory is not None:
        return None
    if all(mixer.cache is None for mixer in each_mixer(layers)):
        return Measured(layers, allocation)
    path = run.folder / SCORES
    if not path.is_file():
        return None
    try:
        scores = EvictionScores.from_named_tensors(load_file(path))
    except (OSError, SafetensorError, KeyError, ValueError):
        raise _not_measured(path, "eviction scores of each layer for recall and text") from None
    return Measured(layers, allocation, scores)


def _not_measured(path: Path, expected: str) -> UserError:
    return UserError(f"{path}: expected {expected}, found something else; delete it, and the run measures again")
