"""Decide whether a run's weights are divided among its processes."""

from __future__ import annotations

from dataclasses import replace

import torch

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan
from linearize.distributed import all_reduce_min, world
from linearize.hf.teacher import TeacherShape
from linearize.planning.plan import make_plan
from linearize.run.folder import Run

ROOM = 0.9  # share of a GPU's memory for the run; the rest is for the driver and parts that the forecast leaves out


def laid_out(run: Run, shape: TeacherShape, layers: LayerPlan) -> Run:
    """Return the run with `sharded` set by `distributed.shard`; all processes call this.

    `auto` divides weights if the smallest GPU has less memory than the plan's largest stage takes with the whole model.
    It does not on CPUs, whose memory the processes of a machine share anyway.

    Raises:
        UserError: `full`, for a model that cannot be divided.
    """
    wanted = run.recipe.distributed.shard
    if world().size == 1 or wanted == "none" or (wanted == "auto" and fits(run, shape, layers)):
        return run
    reasons = {
        f"a decoder, found {shape.model_type!r}": shape.bidirectional,
        f"a language model, found the task {run.recipe.data.task.type}": not run.recipe.data.task.language,
        "pretrained weights, found weights=random": run.recipe.weights == "random",
    }
    for reason, holds in reasons.items():
        if holds and wanted == "full":
            raise UserError(f"distributed.shard: expected {reason}; set distributed.shard=none")
    return replace(run, sharded=not any(reasons.values()))


def fits(run: Run, shape: TeacherShape, layers: LayerPlan) -> bool:
    """Return whether the device of every process has room for the whole model in every stage."""
    if run.device.type != "cuda":
        return True
    plan = make_plan(run.recipe, shape, layers, dtype=run.dtype, device=run.device, training_tokens=None)
    needed = max((stage.memory_bytes or 0 for stage in (plan.transfer, plan.adapt, plan.finetune) if stage), default=0)
    return needed <= ROOM * all_reduce_min(torch.cuda.get_device_properties(run.device).total_memory)
