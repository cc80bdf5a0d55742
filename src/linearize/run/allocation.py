"""What the KV heads of a teacher are measured to need, and what each gets of a recipe's budget of memory."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from linearize.base import UserError, read_json
from linearize.data.packing import Dataset
from linearize.data.repeats import without_repeats
from linearize.data.rows import PackedRows
from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import LayerPlan
from linearize.run.folder import Run
from linearize.training.allocation import allocate, measured_losses
from linearize.training.memory import MemoryConfig, candidate_bytes

ALLOCATION = "allocation.json"


def allocation(
    run: Run,
    memory: MemoryConfig,
    shape: TeacherShape,
    layers: LayerPlan,
    teacher: PreTrainedModel,
    dataset: Dataset,
) -> dict[str, Any]:
    """What each KV head gets of a budget, by what it is measured to need; read from the run's folder if it is there.

    As it stands in allocation.json, which the caller writes: the `budget`, in bytes; each of the `candidates`; the
    `bytes` of each in one head; `losses`, nats per token, of every layer's heads with each candidate; and which one is
    `chosen`. Layers that `layers` leaves as they are have none.

    Raises:
        UserError: no language model, or a budget too small for any memory at all.
    """
    rows, candidates, path = dataset.train, memory.candidates(), run.folder / ALLOCATION
    if not isinstance(rows, PackedRows):
        raise UserError(f"memory: expected a language model, found {run.recipe.data.task.type}; set memory=null")
    if path.is_file():
        return stored_allocation(run)
    how: dict[str, Any] = {"tokens": memory.tokens, "recall": memory.recall, "seed": run.recipe.seed}
    text = without_repeats(rows, run.recipe.data.repeats, seed=run.recipe.seed)
    losses = measured_losses(teacher, text, candidates, **how)
    losses = {layer: heads for layer, heads in losses.items() if layers[layer] is not None}
    sizes, budget = candidate_bytes(candidates, shape, run.dtype, memory.of_cache_at), memory.budget(shape, run.dtype)
    return {
        "budget": budget,
        "candidates": [choice and choice.model_dump(mode="json") for choice in candidates],
        "bytes": sizes,
        "losses": losses,
        "chosen": allocate(losses, sizes, budget),
    }


def stored_allocation(run: Run) -> dict[str, Any]:
    """The allocation in the run's folder."""
    found = read_json(run.folder / ALLOCATION)
    by_layer = {key: {int(layer): heads for layer, heads in found[key].items()} for key in ("losses", "chosen")}
    return found | by_layer
