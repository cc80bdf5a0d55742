"""Learning-rate schedules, one per unit. `step` counts the optimizer steps already taken, so the first one is 0."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from linearize.training.config import Constant, Cosine, Linear, Plateau, Schedule


class LRSchedule(ABC):
    """Sets the learning rate of its optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.peak = self.lr

    @property
    def lr(self) -> float:
        return self._optimizer.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer.param_groups[0]["lr"] = value

    @abstractmethod
    def before_step(self, step: int) -> None:
        """Called before every optimizer step."""

    @abstractmethod
    def after_evaluation(self, loss: float) -> None:
        """Called with the unit's held-out loss, the one before the first step included."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """What a resumed run needs, as plain JSON."""

    @abstractmethod
    def load(self, state: dict[str, float]) -> None:
        """Take `state` back."""


class PlateauSchedule(LRSchedule):
    """torch's ReduceLROnPlateau (relative threshold 1e-4): `patience` bad evaluations pass, the next one reduces."""

    def __init__(self, config: Plateau, optimizer: Optimizer, total_steps: int) -> None:
        super().__init__(optimizer)
        self._plateau = ReduceLROnPlateau(
            optimizer, factor=config.factor, patience=config.patience, min_lr=config.min_lr
        )

    def before_step(self, step: int) -> None:
        pass

    def after_evaluation(self, loss: float) -> None:
        self._plateau.step(loss)

    def state(self) -> dict[str, float]:
        # Of torch's state only these two change; the rest is the config, and an infinity that JSON cannot hold.
        return {"lr": self.lr, "best": self._plateau.best, "num_bad_epochs": self._plateau.num_bad_epochs}

    def load(self, state: dict[str, float]) -> None:
        self.lr = state["lr"]
        self._plateau.load_state_dict({name: state[name] for name in ("best", "num_bad_epochs")})


class StepSchedule(LRSchedule):
    """A learning rate that depends on the step alone, so that there is nothing to save."""

    @abstractmethod
    def lr_at(self, step: int) -> float:
        """The learning rate of the step that follows `step` others."""

    def before_step(self, step: int) -> None:
        self.lr = self.lr_at(step)

    def after_evaluation(self, loss: float) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def load(self, state: dict[str, float]) -> None:
        pass


def warmup_factor(step: int, warmup_steps: int) -> float:
    """1/(w+1), 2/(w+1), ... and 1 from step w on: no step is spent on a learning rate of 0."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


class ConstantSchedule(StepSchedule):
    """Linear warm-up, then the learning rate as it is."""

    def __init__(self, config: Constant, optimizer: Optimizer, total_steps: int) -> None:
        super().__init__(optimizer)
        self._warmup_steps = config.warmup_steps

    def lr_at(self, step: int) -> float:
        return self.peak * warmup_factor(step, self._warmup_steps)


class FallingSchedule(StepSchedule):
    """Linear warm-up, then from the peak down to `min_lr`, which would be reached one step after the last."""

    def __init__(self, config: Cosine | Linear, optimizer: Optimizer, total_steps: int) -> None:
        super().__init__(optimizer)
        self._config = config
        self._total_steps = total_steps

    def lr_at(self, step: int) -> float:
        warmup_steps, min_lr = self._config.warmup_steps, self._config.min_lr
        if step < warmup_steps:
            return self.peak * warmup_factor(step, warmup_steps)
        return min_lr + (self.peak - min_lr) * self.left((step - warmup_steps) / (self._total_steps - warmup_steps))

    @abstractmethod
    def left(self, progress: float) -> float:
        """What is left of the way down, from 1 to 0, at this share of the steps after warm-up."""


class CosineSchedule(FallingSchedule):
    """Half a cosine."""

    def left(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


class LinearSchedule(FallingSchedule):
    """A straight line."""

    def left(self, progress: float) -> float:
        return 1 - progress


SCHEDULES: dict[type, Callable[[Any, Optimizer, int], LRSchedule]] = {
    Plateau: PlateauSchedule,
    Cosine: CosineSchedule,
    Linear: LinearSchedule,
    Constant: ConstantSchedule,
}


def build_schedule(config: Schedule, optimizer: Optimizer, total_steps: int) -> LRSchedule:
    """The schedule of one optimizer, whose learning rate at this moment is the peak."""
    return SCHEDULES[type(config)](config, optimizer, total_steps)
