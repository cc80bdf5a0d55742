"""Measure the teacher before conversion: the allocation of the KV budget, eviction scores and learned sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, atomic_file
from linearize.configs.mixer import LayerPlan, each_mixer
from linearize.data.packing import Dataset
from linearize.data.repeats import without_repeats
from linearize.data.rows import PackedRows
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import convertible_layers
from linearize.recipe import Recipe
from linearize.run.folder import Run, write_json
from linearize.training.allocation import Allocation, allocate
from linearize.training.eviction_scores import EvictionScores, context_length, contexts, measure_attention
from linearize.training.layer_allocation import LayerAllocation, allocate_layers, measure_layers
from linearize.training.learned_sinks import LEARNED_SINKS, SINK_CONTEXTS, WINDOW, LearnedSinks, measure_first_tokens

SCORES = "eviction_scores.safetensors"
_AGAIN = "delete it, and the run measures again"
# By `memory.per`: the file of an allocation, and its class.
ALLOCATIONS: dict[str, tuple[str, type[Allocation] | type[LayerAllocation]]] = {
    "kv_head": ("allocation.json", Allocation),
    "layer": ("layer_allocation.json", LayerAllocation),
}


@dataclass(frozen=True)
class MeasuredPlan:
    """A layer plan, with what was measured of the teacher for it.

    Attributes:
        layers: the layer plan.
        allocation: of the recipe's KV budget; None where the recipe has none.
        scores: of the plan's KV caches with eviction; None where it has none.
        sinks: the plan's learned sinks; None where it has none.
    """

    layers: LayerPlan
    allocation: Allocation | LayerAllocation | None = None
    scores: EvictionScores | None = None
    sinks: LearnedSinks | None = None

    def convert(self, teacher: PreTrainedModel, seed: int) -> PreTrainedModel:
        """Return a student by the plan, with its eviction scores and learned sinks."""
        student = convert_layers(teacher, self.layers, seed=seed)
        if self.scores is not None:
            self.scores.apply(student)
        if self.sinks is not None:
            self.sinks.apply(student)
        return student

    def save(self, run: Run) -> None:
        """Write the measurements to the run's folder."""
        if self.allocation is not None:
            name = next(name for name, kind in ALLOCATIONS.values() if isinstance(self.allocation, kind))
            write_json(run.folder / name, self.allocation.to_json())
        if self.sinks is not None:
            write_json(run.folder / LEARNED_SINKS, self.sinks.to_json())
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
    tokenizer: Tokenizer,
    dtype: torch.dtype,
) -> MeasuredPlan:
    """Measure what the recipe's plan depends on: what recall needs of each KV head, and eviction scores; or layers.

    Learned sinks of a plan without `memory` are measured too. They stay at 0 if the teacher's weights are not used, or
    its task is not language modelling.

    Args:
        layers: the plan by the recipe alone; its softmax layers stay softmax.
        dtype: of keys and values, by which bytes are counted.

    Raises:
        UserError: no language model, a budget too small for any window, or too little text.
    """
    memory, rows, sinks = recipe.memory, dataset.train, None
    if memory is None and has_learned_sinks(layers):
        sinks = LearnedSinks(logits={}, values={})
        if isinstance(rows, PackedRows) and recipe.weights == "pretrained":
            text = without_repeats(rows, recipe.data.repeated_span_fraction, seed=recipe.seed)
            sinks = measure_sinks(teacher, layers, text, tokenizer, seed=recipe.seed)
    if memory is None and all(mixer.cache is None for mixer in each_mixer(layers)):
        return MeasuredPlan(layers, sinks=sinks)
    if not isinstance(rows, PackedRows):
        raise UserError(f"memory: expected a language model, found {recipe.data.task.type}; set memory=null")
    text = without_repeats(rows, recipe.data.repeated_span_fraction, seed=recipe.seed)
    if memory is not None and memory.per == "layer":
        converted = convertible_layers(recipe, shape)
        losses, first_tokens = measure_layers(teacher, converted, memory, text, tokenizer, seed=recipe.seed)
        per_layer = allocate_layers(memory, losses, shape, dtype)
        sinks = first_tokens if memory.learned_sink else None
        return MeasuredPlan(per_layer.plan(shape.num_layers), per_layer, sinks=sinks)
    quantiles, scores = measure_attention(teacher, text, tokenizer, seed=recipe.seed)
    if memory is None:
        return MeasuredPlan(layers, None, scores, sinks)
    needs = {
        layer: [[round(x, 3) for x in head] for head in of_layer.tolist()]
        for layer, of_layer in quantiles.items()
        if layers[layer] is not None
    }
    allocation = allocate(memory, needs, shape, dtype)
    return MeasuredPlan(allocation.plan(shape.num_layers), allocation, scores)


def measure_sinks(
    teacher: PreTrainedModel, layers: LayerPlan, rows: PackedRows, tokenizer: Tokenizer, *, seed: int
) -> LearnedSinks:
    """Measure the first token of texts in every layer of a plan, for the learned sinks of its mixers.

    Costs SINK_CONTEXTS forward passes of at most 640 tokens.

    Args:
        rows: training text.

    Raises:
        UserError: the model has too few positions, or there is too little text.
    """
    longest = context_length(TeacherShape.from_config(teacher.config.to_dict()), 0)
    texts = list(contexts(rows, tokenizer, longest=longest, seed=seed, count=SINK_CONTEXTS))
    return measure_first_tokens(convert_layers(teacher, layers, seed=seed), texts, min(WINDOW, longest // 4))


def has_learned_sinks(layers: LayerPlan) -> bool:
    """Return whether any mixer of a plan has a learned sink."""
    return any(mixer.learned_sink for mixer in each_mixer(layers))


def stored(run: Run, shape: TeacherShape, layers: LayerPlan) -> MeasuredPlan | None:
    """Return what a run's folder has of its measurements; None where it has not all of them.

    Raises:
        UserError: a file is damaged, or of an earlier version.
    """
    allocation: Allocation | LayerAllocation | None = None
    if run.recipe.memory is not None:
        name, kind = ALLOCATIONS[run.recipe.memory.per]
        path = run.folder / name
        if not path.is_file():
            return None
        allocation = kind.read(path, advice=_AGAIN)
        layers = allocation.plan(shape.num_layers)
    sinks: LearnedSinks | None = None
    if has_learned_sinks(layers):
        if not (run.folder / LEARNED_SINKS).is_file():
            return None
        sinks = LearnedSinks.read(run.folder / LEARNED_SINKS, advice=_AGAIN)
    if all(mixer.cache is None for mixer in each_mixer(layers)):
        return MeasuredPlan(layers, allocation, sinks=sinks)
    path = run.folder / SCORES
    if not path.is_file():
        return None
    try:
        scores = EvictionScores.from_named_tensors(load_file(path))
    except (OSError, SafetensorError, KeyError, ValueError):
        raise UserError(
            f"{path}: expected eviction scores of each layer for recall and text, found something else; {_AGAIN}"
        ) from None
    return MeasuredPlan(layers, allocation, scores, sinks)
