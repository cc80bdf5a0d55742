"""What of a run fits the GPUs of a cluster, and laid out how: the parts of the plan's forecast for one, divided.

Bytes of one GPU, with N of them: a model in one piece on each; its weights divided (`distributed.shard=full`); or block
by block, one layer of the transfer at a time (`transfer.layers_per_block=1`).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from linearize.base import UserError
from linearize.costs import FP32
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import LayerPlan
from linearize.plan import _TRAINED, StageCost, _size, make_plan
from linearize.recipe import Recipe

_UNITS = {"GB": 10**9, "GiB": 2**30}


@dataclass(frozen=True)
class Cluster:
    """So many GPUs, with so many bytes of memory each."""

    gpus: int
    memory: int

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """As in 8x80GiB.

        Raises:
            UserError: it says something else.
        """
        found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)(GB|GiB)", text)
        if not found or not int(found[1]):
            raise UserError(f"--cluster: expected GPUs and the memory of each, as in 8x80GiB, found {text!r}")
        return cls(int(found[1]), int(float(found[2]) * _UNITS[found[3]]))


@dataclass(frozen=True)
class Share:
    """What one GPU holds in one stage, laid out in one way; bytes by part."""

    stage: str
    layout: str
    weights: int
    trained: int
    gathered: int
    activations: int
    memory: int  # of the GPU

    def to_json(self) -> dict[str, Any]:
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
    """Every stage in every layout that there is for it.

    Where a stage trains all weights, divided ones are held in fp32, the teacher's beside those that train. Of what is
    gathered, two of the largest layer are there at a time, or all that is outside of the layers where that is more.

    Raises:
        UserError: the contents of the teacher's config.json make no model.
    """
    model, found = MetaModel.of(teacher), list[Share]()
    if recipe.transfer is not None:
        recipe = recipe.model_copy(update={"transfer": recipe.transfer.model_copy(update={"layers_per_block": None})})
    plan = make_plan(recipe, teacher, layers, dtype=dtype, training_tokens=None)
    unit = max(2 * max(model.layers), model.total - sum(model.layers)) * dtype.itemsize
    mixers, weights = plan.new_parameters * dtype.itemsize, plan.teacher_parameters * dtype.itemsize
    stages: list[tuple[str, StageCost | None, bool]] = [("attention transfer", plan.transfer, False)]
    for name in ("adapt", "finetune"):
        config = getattr(recipe, name)
        stages.append((name, getattr(plan, name), config is not None and config.all_weights))
    held = weights * FP32 // dtype.itemsize if any(every for _, _, every in stages) else weights
    for name, cost, every in stages:
        if cost is None:
            continue
        trained = cost.trainable_parameters * _TRAINED
        activations = cost.memory_bytes - weights - mixers - trained
        found.append(Share(name, "whole model", weights + mixers, trained, 0, activations, cluster.memory))
        if cluster.gpus > 1 and not teacher.bidirectional:
            of_mixers = plan.new_parameters * _TRAINED if every else trained
            divided = held + trained - of_mixers
            found.append(
                Share(
                    name, "sharded", -(-divided // cluster.gpus) + mixers, of_mixers, unit, activations, cluster.memory
                )
            )
        if name == "attention transfer" and not teacher.bidirectional:
            assert recipe.transfer is not None
            one = recipe.transfer.model_copy(update={"layers_per_block": 1})
            block = make_plan(
                recipe.model_copy(update={"transfer": one}), teacher, layers, dtype=dtype, training_tokens=None
            ).transfer
            assert block is not None
            held_once = block.memory_bytes - activations
            found.append(Share(name, "block-wise", held_once, 0, 0, activations, cluster.memory))
    return found


def render(found: list[Share], cluster: Cluster) -> Table:
    """The shares as a table for the terminal."""
    table = Table(title=f"on each of {cluster.gpus} GPUs of {_size(cluster.memory)}, about", show_header=False)
    for share in found:
        parts = {"weights": share.weights, "what trains": share.trained, "gathered": share.gathered}
        parts["activations"] = share.activations
        text = ", ".join(f"{name} {_size(number)}" for name, number in parts.items() if number)
        fits = "fits" if share.fits else "does not fit"
        table.add_row(f"{share.stage}, {share.layout}", f"{_size(share.total)}, {fits}: {text}")
    return table
