"""Make AdamW with moments in fp32 or, by bitsandbytes, in 8 bits, convert its state to tensors, and make schedules."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from linearize.base import UserError
from linearize.configs.training import Constant, Cosine, Plateau, Schedule, TrainConfig

# Bytes of both moments per trained number; moments in 8 bits have a scale per 256 numbers.
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "paged_adamw_8bit": 2 + 8 / 256}


def make_optimizer(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer that `config` names.

    Raises:
        UserError: its library is not installed, or it is paged and parameters are on a CPU.
    """
    parameters = list(parameters)
    if config.optimizer.startswith("paged") and any(p.device.type == "cpu" for p in parameters):
        raise UserError("optimizer: expected a GPU to page moments out of, found a CPU; set optimizer=adamw_8bit")
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return AdamW(parameters, **options)
    try:
        library: Any = importlib.import_module("bitsandbytes")  # optional, and takes seconds to import
    except ImportError:
        raise UserError(
            "optimizer: expected bitsandbytes for moments in 8 bits, found none; "
            "pip install 'linearize[quantized]', or set optimizer=adamw"
        ) from None
    make = library.optim.AdamW8bit if config.optimizer == "adamw_8bit" else library.optim.PagedAdamW8bit
    return make(parameters, **options)


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return an optimizer's state of a parameter, numbers as tensors too; empty before its first gradient."""
    return {key: torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}


def load_state(optimizer: Optimizer, states: Mapping[int, dict[str, Tensor]]) -> None:
    """Restore the states of `state_of`, by the index of each parameter."""
    if isinstance(optimizer, AdamW):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(states)})
        return
    of_library: Any = optimizer
    (group,) = optimizer.param_groups
    for place, found in states.items():
        parameter = group["params"][place]
        of_library.init_state(group, parameter, 0, place)  # allocates paged memory, if the optimizer is paged
        state = optimizer.state[parameter]
        for key, value in found.items():
            if isinstance(state.get(key), Tensor):
                state[key].copy_(value)
            else:
                state[key] = value if value.ndim else value.item()


def build_schedule(config: Schedule, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Return the schedule of an optimizer whose current learning rate is the peak.

    Step a `ReduceLROnPlateau` after every evaluation, with the held-out loss; others after every optimizer step.
    """
    if isinstance(config, Plateau):
        return ReduceLROnPlateau(optimizer, factor=config.factor, patience=config.patience, min_lr=config.min_lr)
    (group,) = optimizer.param_groups
    if isinstance(config, Cosine):
        rate = partial(_cosine, config, group["lr"], total_steps)
    else:
        rate = partial(_constant, config, group["lr"])
    group["lr"] = 1.0  # the base that LambdaLR multiplies: `rate` is then exactly the learning rate
    return LambdaLR(optimizer, rate)


def _constant(config: Constant, peak: float, step: int) -> float:
    """Return 1/(w+1), 2/(w+1), ... of the peak in w warm-up steps, then the peak: no step has a learning rate of 0."""
    return peak * min(1.0, (step + 1) / (config.warmup_steps + 1))


def _cosine(config: Cosine, peak: float, total_steps: int, step: int) -> float:
    """Return a linear warm-up, then a cosine from the peak to `min_lr`, reached one step after the last."""
    if step < config.warmup_steps:
        return peak * ((step + 1) / (config.warmup_steps + 1))
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.min_lr + (peak - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2
