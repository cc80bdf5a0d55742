"""Find settings with which a run fits a GPU, those that cost the least time first. No setting changes the result.

Moments in 8 bits would change it. They are suggested if nothing else fits, and never chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan, is_spread
from linearize.configs.training import FinetuneConfig, TransferConfig
from linearize.costs import mixer_costs
from linearize.data.load import row_length
from linearize.hf.meta import MetaModel
from linearize.hf.partial_model import stored_by_layer
from linearize.hf.teacher import TeacherShape
from linearize.planning.plan import AnyStage, stage_memory
from linearize.planning.results import TRAINING_STAGES, size
from linearize.recipe import Recipe

SHARE = 0.9  # share of a GPU's memory for the run; the rest is for CUDA and gaps between tensors
SETTINGS = ("micro_batch_size", "activation_checkpointing", "layers_per_block")
_UNITS = {"GIB": 2**30, "GB": 10**9, "MIB": 2**20, "MB": 10**6}


@dataclass(frozen=True)
class StageFit:
    """The settings of one stage.

    Attributes:
        settings: fields of the stage that differ from the recipe's; if nothing fits, those that take the least memory.
        memory_bytes: the forecast with these settings.
        eight_bits: the forecast also with moments in 8 bits; None: it fits without, or that saves nothing.
    """

    stage: str
    settings: dict[str, int | bool]
    memory_bytes: int
    fits: bool
    eight_bits: int | None = None

    def describe(self, memory: int) -> str:
        """Return one line about the stage."""
        chosen = " ".join(f"--set {self.stage}.{name}={str(value).lower()}" for name, value in self.settings.items())
        takes = f"about {size(self.memory_bytes)} of {size(memory)}"
        if self.fits:
            return f"{self.stage}: {chosen or 'as it is'}: {takes}"
        more = ""
        if self.eight_bits is not None:
            enough = "fits with" if self.eight_bits <= SHARE * memory else "with"
            eight_bits = f"{self.stage}.optimizer=adamw_8bit, which changes the gradients: {size(self.eight_bits)}"
            more = f"; {enough} --set {eight_bits}"
        return f"{self.stage}: nothing fits; nearest is {chosen or 'the recipe as it is'}: {takes}{more}"


@dataclass(frozen=True)
class Fit:
    """A recipe that fits, if there is one, and the settings of each stage."""

    recipe: Recipe
    memory: int
    stages: tuple[StageFit, ...]

    def to_json(self) -> dict[str, object]:
        return {"gpu_memory": self.memory, "stages": [asdict(stage) for stage in self.stages]}

    def lines(self) -> list[str]:
        return [stage.describe(self.memory) for stage in self.stages]


def parse_memory(text: str, option: str = "--gpu-memory") -> int:
    """Return the bytes of a text such as "24GiB" or "80GB"; raise UserError if it has another form."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise UserError(f"{option}: expected a size such as 24GiB or 80GB, found {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def fit(
    recipe: Recipe, teacher: TeacherShape, layers: LayerPlan, *, dtype: torch.dtype, memory: int, processes: int = 1
) -> Fit:
    """Choose settings for every stage of a recipe; fields that it sets itself are unchanged.

    Args:
        dtype: of the model.
        memory: bytes of the GPU.
        processes: their number; block-wise transfer is possible with one only.
    """
    model = MetaModel.of(teacher)
    mixers = mixer_costs(layers, teacher, dtype, model.rotary_dims)
    length, _ = row_length(recipe.data, teacher)
    options: dict[str, Any] = {"dtype": dtype, "length": length, "device": torch.device("cuda")}
    # Allocations and eviction scores are measured on the whole model.
    whole = recipe.memory is not None or is_spread(layers)
    blocks = not whole and processes == 1 and stored_by_layer(teacher.model_type)
    stages, changed = [], {}
    for name in TRAINING_STAGES:
        config: AnyStage | None = getattr(recipe, name)
        if config is None:
            continue
        least: StageFit | None = None
        for settings in _candidates(config, teacher.num_layers if blocks else 1):
            tried = config.model_copy(update=settings)
            found = stage_memory(tried, model, layers, mixers, **options)
            if least is None or found < least.memory_bytes:
                least = StageFit(name, settings, found, found <= SHARE * memory)
            if least.fits:
                break
        assert least is not None
        if not least.fits and config.optimizer == "adamw":
            smaller = config.model_copy(update=least.settings | {"optimizer": "adamw_8bit"})
            eight = stage_memory(smaller, model, layers, mixers, **options)
            if eight < 0.99 * least.memory_bytes:  # else too few parameters train to save memory
                least = StageFit(name, least.settings, least.memory_bytes, False, eight)
        stages.append(least)
        changed[name] = config.model_copy(update=least.settings)
    return Fit(recipe.model_copy(update=changed), memory, tuple(stages))


def _candidates(config: AnyStage, layers: int) -> Iterator[dict[str, int | bool]]:
    """Yield changes of a stage by the time that they cost: none, smaller micro batches, further settings."""
    free = {name for name in SETTINGS if name not in config.model_fields_set}
    divisors = [size for size in range(config.batch_size // 2, 0, -1) if config.batch_size % size == 0]
    sizes = [None, *divisors] if "micro_batch_size" in free else [None]
    smaller: list[dict[str, int | bool]] = [{} if size is None else {"micro_batch_size": size} for size in sizes]
    yield from smaller
    if isinstance(config, FinetuneConfig) and "activation_checkpointing" in free:
        yield from ({**one, "activation_checkpointing": True} for one in smaller)
    if isinstance(config, TransferConfig) and "layers_per_block" in free:
        while layers > 1:
            layers = -(-layers // 2)
            yield {**smaller[-1], "layers_per_block": layers}
