"""Learning-rate schedules, one per unit, as torch's schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from linearize.configs.training import Constant, Cosine, Plateau, Schedule


def build_schedule(config: Schedule, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Return the schedule of an optimizer whose current learning rate is the peak.

    Step a `ReduceLROnPlateau` after every evaluation, with the held-out loss; others after every optimizer step.
    """
    if isinstance(config, Plateau):
        return ReduceLROnPlateau(optimizer, factor=config.factor, patience=config.patience, min_lr=config.min_lr)
    (group,) = optimizer.param_groups
    rate = partial(_RATES[type(config)], config, group["lr"], total_steps)
    group["lr"] = 1.0  # the base that LambdaLR multiplies: `rate` is then exactly the learning rate
    return LambdaLR(optimizer, rate)


def _constant(config: Constant, peak: float, total_steps: int, step: int) -> float:
    """Return 1/(w+1), 2/(w+1), ... of the peak in w warm-up steps, then the peak: no step has a learning rate of 0."""
    return peak * min(1.0, (step + 1) / (config.warmup_steps + 1))


def _cosine(config: Cosine, peak: float, total_steps: int, step: int) -> float:
    """Return a linear warm-up, then a cosine from the peak to `min_lr`, reached one step after the last."""
    if step < config.warmup_steps:
        return peak * ((step + 1) / (config.warmup_steps + 1))
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.min_lr + (peak - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


_RATES: dict[type, Callable[[Any, float, int, int], float]] = {
    Constant: _constant,
    Cosine: _cosine,
}
