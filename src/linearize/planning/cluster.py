"""Find layouts in which a run fits the GPUs of a cluster, from the plan's forecast for one GPU.

Bytes are those of one of N GPUs. Layouts are: the whole model on each; divided weights (`distributed.shard=full`); and
block-wise transfer of one layer at a time (`transfer.layers_per_block=1`).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan
from linearize.configs.training import FinetuneConfig, LoRAConfig
from linearize.costs import FP32
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.planning.fit import parse_memory
from linearize.planning.plan import make_plan
from linearize.planning.results import Plan, StageCost, size
from linearize.recipe import Recipe
from linearize.training.optimizers import MOMENT_BYTES


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs, and the bytes of memory of each."""

    gpus: int
    memory: int

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Parse a text such as 8x80GiB; raise UserError if it has another form."""
        found = re.fullmatch(r"(\d+)x(.+)", text)
        if not found or not int(found[1]):
            raise UserError(f"--cluster: expected GPUs and the memory of each, as in 8x80GiB, found {text!r}")
        return cls(int(found[1]), parse_memory(found[2], "--cluster"))


@dataclass(frozen=True)
class Share:
    """The bytes of one GPU in one stage and one layout, by part."""

    stage: str
    layout: str
    weights: int
    trained: int
    gathered: int
    activations: int
    memory: int  # of the GPU

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"total": self.total, "fits": self.fits}

    @property
    def total(self) -> int:
        return self.weights + self.trained + self.gathered + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.memory


def shares(
    recipe: Recipe, teacher: TeacherShape, layers: LayerPlan, cluster: Cluster, *, dtype: torch.dtype = torch.bfloat16
) -> list[Share]:
    """Return the share of one GPU for every stage in each of its layouts.

    If a stage trains all weights, divided weights are fp32, the teacher's as well as trained ones, and their gradients
    are divided too; activations are then those of a step that trains adapters. Gathered weights are two of the largest
    layer, or all weights outside layers if these are more.

    Raises:
        UserError: the contents of the teacher's config.json make no model.
    """
    if recipe.transfer is not None:
        recipe = recipe.model_copy(update={"transfer": recipe.transfer.model_copy(update={"layers_per_block": None})})

    def planned(chosen: Recipe) -> Plan:
        return make_plan(chosen, teacher, layers, dtype=dtype, device=torch.device("cuda"), training_tokens=None)

    model = MetaModel.of(teacher)
    plan = planned(recipe)
    found: list[Share] = []
    unit = max(2 * max(model.layers), model.total - sum(model.layers)) * dtype.itemsize
    mixers, weights = plan.new_parameters * dtype.itemsize, plan.teacher_parameters * dtype.itemsize
    stages = {"transfer": "attention transfer", "adapt": "adapt", "finetune": "finetune"}
    configs = {name: getattr(recipe, name) for name in stages}
    every = {name: isinstance(x, FinetuneConfig) and x.all_weights for name, x in configs.items()}
    held = weights * FP32 // dtype.itemsize if any(every.values()) else weights
    for name, title in stages.items():
        cost, config = getattr(plan, name), configs[name]
        if cost is None:
            continue
        moments = MOMENT_BYTES[config.optimizer]
        trained = _trained(cost.trainable_parameters, moments)
        activations = _step(cost, weights + mixers + trained)
        found.append(Share(title, "whole model", weights + mixers, trained, 0, activations, cluster.memory))
        if cluster.gpus > 1 and not teacher.bidirectional:
            divided, of_mixers, taken = held, trained, activations
            if every[name]:
                divided += _trained(plan.teacher_parameters, FP32 + moments)
                of_mixers = _trained(plan.new_parameters, FP32 + moments)
                adapters = config.model_copy(update={"all_weights": False, "lora": LoRAConfig(), "mixers": True})
                less = getattr(planned(recipe.model_copy(update={name: adapters})), name)
                taken = _step(less, weights + mixers + _trained(less.trainable_parameters, moments))
            own = -(-divided // cluster.gpus) + mixers
            found.append(Share(title, "sharded", own, of_mixers, unit, taken, cluster.memory))
        if name == "transfer" and not teacher.bidirectional:
            one = recipe.model_copy(update={name: config.model_copy(update={"layers_per_block": 1})})
            block = planned(one).transfer
            assert block is not None and block.memory_bytes is not None
            held_once = block.memory_bytes - activations
            found.append(Share(title, "block-wise", held_once, 0, 0, activations, cluster.memory))
    return found


def _trained(parameters: int, further: float) -> int:
    """Return the bytes of trained parameters in fp32, plus `further` bytes per parameter."""
    return parameters * FP32 + int(parameters * further)


def _step(cost: StageCost, held: int) -> int:
    """Return the bytes of a step without the `held` bytes of weights and states."""
    assert cost.memory_bytes is not None
    return cost.memory_bytes - held


def render(found: list[Share], cluster: Cluster) -> Table:
    """Return the shares as a table for the terminal."""
    table = Table(title=f"on each of {cluster.gpus} GPUs of {size(cluster.memory)}, estimated", show_header=False)
    for share in found:
        parts = {"weights": share.weights, "trained": share.trained, "gathered": share.gathered}
        parts["activations"] = share.activations
        text = ", ".join(f"{name} {size(number)}" for name, number in parts.items() if number)
        fits = "fits" if share.fits else "does not fit"
        table.add_row(f"{share.stage}, {share.layout}", f"{size(share.total)}, {fits}: {text}")
    return table
