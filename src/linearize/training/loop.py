"""The training loop of every stage: optimizer steps, held-out evaluations, best snapshots, resume."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import PreTrainedModel

from linearize.base import DivergedError, UserError, step_progress
from linearize.configs.training import TrainConfig
from linearize.data.rows import Rows
from linearize.distributed import barrier, clip_gradients, main_process_first, sum_gradients, world
from linearize.training.optimizers import build_schedule, load_state, make_optimizer, state_of
from linearize.training.resumption import (
    RESULT,
    TRAINED,
    MetricsLog,
    StageFolder,
    read_stage,
    restore_rng_state,
    rng_state,
    run_identity,
)

DIVERGED = 2.75  # factor of the first held-out loss above which a stage that was never below it has diverged
SMALL_LOSS = 1e-3  # a loss below it is no divergence: a student that equals its teacher has a first loss of 0


@dataclass(frozen=True)
class Unit:
    """Parameters (by their names in the model) with their own clipping, schedule and best snapshot."""

    name: str
    parameters: dict[str, nn.Parameter]


@runtime_checkable
class Objective(Protocol):
    """Losses, and the parameters that they train. It also sets mixed precision and train / eval mode."""

    @property
    def units(self) -> Sequence[Unit]: ...

    def backward(self, micro_batches: list[Rows]) -> dict[str, float]:
        """Add the gradients of the mean loss over one optimizer step's rows; return the loss per unit.

        With several processes, each adds the gradients of its rows (`distributed.shard_batches`). The loss is that of
        all rows.
        """
        ...

    def evaluate(self, rows: Rows) -> dict[str, float]:
        """Return the held-out loss per unit."""
        ...


@dataclass(frozen=True)
class TrainResult:
    """The result of a stage. Losses are held-out losses per unit; `initial_loss` is before the first step."""

    steps: int
    tokens: int
    best_loss: dict[str, float]
    initial_loss: dict[str, float]
    seconds: float
    stopped_early: bool


def train(
    objective: Objective,
    train_rows: Rows,
    validation_rows: Rows,
    config: TrainConfig,
    *,
    output_dir: Path,
    seed: int,
    title: str,
    model: PreTrainedModel | None = None,
) -> TrainResult:
    """Train the parameters of `objective` in place; each unit ends with those of its lowest held-out loss.

    Every epoch is a new permutation of the rows, cut into steps of `batch_size` rows (of all rows, if there are fewer);
    remaining rows are dropped. `max_tokens` shortens the stage to whole steps, at least one. Held-out losses are
    measured before the first step, every `eval_every` steps and after the last. A unit that has not improved for
    `early_stopping` evaluations stops; the stage ends when all units have stopped. Seeds torch's global generator.

    `output_dir` receives ``metrics.jsonl`` (an object per step and per evaluation, with its kind in ``event``; ``loss``
    is the mean over its units, in steps over those that still train), a checkpoint at each evaluation, and at the end
    ``trained.safetensors`` and ``result.json``. Another call resumes from the checkpoint (on a CPU: with equal bits); a
    finished stage is loaded and returned. Several processes (`distributed`) all call this with the same weights; the
    main process writes, and each process writes its rows of divided weights.

    Raises:
        DivergedError: a loss or gradient is not finite; or the mean held-out loss was never below the first one, and
            ends above `DIVERGED` times it.
        UserError: a full disk, or an `output_dir` of another run or, if given, another `model`.
        ValueError: no rows.
    """
    parameters = _parameters(objective.units)
    rows = [tensor for r in (train_rows, validation_rows) for tensor in r.tensors()]
    identity = run_identity(parameters, rows, config.identity(), seed, model)
    with main_process_first():
        stage = StageFolder(output_dir, identity)
        finished = stage.finished(parameters)
        checkpoint = stage.latest(parameters) if finished is None else None
    if finished is not None:
        _copy_into(parameters, finished[0])
        return TrainResult(**finished[1])

    rank, main = world().rank, world().main
    torch.manual_seed(seed + rank)
    run = StageRun(objective, Batches(train_rows, config, seed), validation_rows, config)
    if checkpoint is not None:
        try:
            run.load(*checkpoint)
            if not main:  # the checkpoint has the main process's generator
                torch.manual_seed(random.Random(f"{seed}, step {run.step}, rank {rank}").getrandbits(63))
        except KeyError as missing:
            raise UserError(
                f"{output_dir}: expected a checkpoint of this version of linearize, found one without {missing}; "
                "delete the folder to train the stage again"
            ) from None
    vouched = (0, None) if checkpoint is None else (checkpoint[1]["metrics_bytes"], checkpoint[1].get("metrics_sha256"))
    log = MetricsLog(output_dir / "metrics.jsonl", *vouched) if main else nullcontext()
    with log as metrics, step_progress() as progress:
        bar = progress.add_task(title, total=run.batches.num_steps, completed=run.step, status="")

        def evaluate() -> None:
            progress.update(bar, status="evaluating")
            record = run.evaluate()
            vouched = {}
            if metrics is not None:
                metrics.write(record)
                written = metrics.sync()
                vouched = {"metrics_bytes": written["length"], "metrics_sha256": written["sha256"]}
            tensors, state = run.state()
            stage.save(run.step, tensors, state | vouched)
            held_out = f"held-out loss {record['loss']:.5g}"
            progress.update(bar, status=held_out)
            line = f"{title}: step {run.step} of {run.batches.num_steps}, {held_out}"
            progress.console.print(f"{line}, {run.seconds:.0f} s", soft_wrap=True, markup=False, highlight=False)

        if checkpoint is None:
            evaluate()
        while not run.done:
            record = run.update()
            if metrics is not None:
                metrics.write(record)
            status = f"loss {record['loss']:.5g}, {record['tokens_per_second']:,.0f} tokens/s"
            progress.update(bar, completed=run.step, status=status)
            if run.step % config.eval_every == 0 or run.step == run.batches.num_steps:
                evaluate()

    run.check_divergence(title)
    best = {name: tensor for unit in run.units for name, tensor in unit.best.items()}
    result = run.result()
    stage.finish(best, asdict(result))
    barrier()  # later code may read the files
    _copy_into(parameters, best)
    return result


def load_trained(units: Sequence[Unit], output_dir: Path) -> None:
    """Load the tensors of a finished stage into the parameters of `units`, which may be a part of the stage's.

    Raises:
        UserError: the stage is missing, unfinished, or of other parameters.
    """
    parameters = _parameters(units)
    if not (output_dir / TRAINED).is_file():
        raise UserError(f"{output_dir}: expected a finished stage, found no {TRAINED}; run it to the end")
    tensors, _ = read_stage(output_dir / TRAINED, output_dir / RESULT, parameters)
    if missing := parameters.keys() - tensors.keys():
        raise UserError(f"{output_dir}: expected the parameters of this model, found none for {min(missing)}")
    _copy_into(parameters, tensors)


class Batches:
    """The rows of each step, in micro batches. They depend on the seed and the step alone."""

    def __init__(self, rows: Rows, config: TrainConfig, seed: int) -> None:
        if not len(rows):
            raise ValueError("there are no rows to train on")
        self._rows, self._seed = rows, seed
        self._batch_size = min(config.batch_size, len(rows))
        # Several processes divide the rows of a step.
        share = -(-self._batch_size // world().size)
        self._micro_batch_size = min(config.micro_batch_size or config.batch_size, share)
        self._steps_per_epoch = len(rows) // self._batch_size
        self.tokens_per_step = self._batch_size * rows.num_tokens // len(rows)
        self.num_steps = config.epochs * self._steps_per_epoch
        if config.max_tokens is not None:
            self.num_steps = max(1, min(self.num_steps, config.max_tokens // self.tokens_per_step))

    def at(self, step: int) -> list[Rows]:
        epoch, index = divmod(step, self._steps_per_epoch)
        order = _permutation(len(self._rows), self._seed, epoch)
        chosen = order[index * self._batch_size : (index + 1) * self._batch_size]
        starts = range(0, self._batch_size, self._micro_batch_size)
        return [self._rows.rows(chosen[start : start + self._micro_batch_size]) for start in starts]


@lru_cache(maxsize=1)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}, epoch {epoch}").sample(range(length), length)


class _UnitRun:
    """One unit with its optimizer, schedule and best snapshot."""

    def __init__(self, unit: Unit, config: TrainConfig, num_steps: int) -> None:
        self.name, self.parameters, self._clip_norm = unit.name, unit.parameters, config.clip_norm
        self.peak, self._early_stopping, self._stale_evaluations = config.lr, config.early_stopping, 0
        self.optimizer = make_optimizer(config, unit.parameters.values())
        self.schedule = build_schedule(config.schedule, self.optimizer, num_steps)
        self._on_plateau = isinstance(self.schedule, ReduceLROnPlateau)
        self.initial_loss = self.best_loss = math.inf
        self.best: dict[str, Tensor] = {}

    @property
    def stopped(self) -> bool:
        """Return whether the unit stops: it has not improved for `early_stopping` evaluations, or its loss is 0."""
        if self.best_loss <= 0:
            return True
        return self._early_stopping is not None and self._stale_evaluations >= self._early_stopping

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def update(self, step: int) -> dict[str, float]:
        """Take one optimizer step on the gradients; return the learning rate and the gradient norm."""
        norm = clip_gradients(self.parameters.values(), self._clip_norm)
        grad_norm = self.finite(norm, "gradient norm", step + 1)
        self.optimizer.step()
        record = {"lr": self.lr, "grad_norm": grad_norm}
        if not self._on_plateau:
            self.schedule.step()
        return record

    def observe(self, loss: float) -> None:
        """Record a held-out loss; if it is the lowest so far, keep a copy of the parameters."""
        if self._on_plateau:
            self.schedule.step(loss)  # type: ignore[arg-type]
        if math.isinf(self.initial_loss):
            self.initial_loss = loss
        self._stale_evaluations += 1
        if loss < self.best_loss:
            self.best_loss, self._stale_evaluations = loss, 0
            self.best = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}

    def finite(self, value: float, what: str, step: int) -> float:
        if not math.isfinite(value):
            advice = f"lower lr (now {self.lr:g})" if step else "nothing is trained yet, so check the model"
            where = f", and first in {bad}" if (bad := self._first_not_finite()) else ""
            raise DivergedError(f"{what} of {self.name} is not finite at step {step}: found {value}{where}; {advice}")
        return value

    def _first_not_finite(self) -> str | None:
        """Return the first parameter with a number that is not finite, else the first with such a gradient, or None."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        both = (*self.parameters.items(), *gradients.items())
        return next((name for name, tensor in both if not tensor.isfinite().all()), None)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"best/{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.parameters.items():
            tensors[f"parameter/{name}"] = parameter.detach()
            tensors |= {f"{key}/{name}": value for key, value in state_of(self.optimizer, parameter).items()}
        losses = {"initial_loss": self.initial_loss, "best_loss": self.best_loss}
        # JSON cannot represent infinities, which new schedules have anyway.
        schedule = {key: value for key, value in self.schedule.state_dict().items() if value != math.inf}
        state = {"stale_evaluations": self._stale_evaluations, "lr": self.lr, "schedule": schedule}
        return tensors, losses | state

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.initial_loss, self.best_loss = state["initial_loss"], state["best_loss"]
        self._stale_evaluations = state["stale_evaluations"]
        self.best = {name: tensors[f"best/{name}"] for name in self.parameters}
        _copy_into(self.parameters, {name: tensors[f"parameter/{name}"] for name in self.parameters})
        states: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if name in states and kind not in ("best", "parameter"):
                states[name][kind] = tensor
        # torch has no state for a parameter that has had no gradient yet.
        load_state(self.optimizer, {place: state for place, state in enumerate(states.values()) if state})
        self.optimizer.param_groups[0]["lr"] = state["lr"]
        self.schedule.load_state_dict(state["schedule"])


class StageRun:
    """A running stage: its units and its progress."""

    def __init__(self, objective: Objective, batches: Batches, validation_rows: Rows, config: TrainConfig) -> None:
        self._objective, self._validation_rows, self.batches = objective, validation_rows, batches
        self.units = [_UnitRun(unit, config, batches.num_steps) for unit in objective.units]
        self._devices = sorted({str(p.device) for unit in self.units for p in unit.parameters.values() if p.is_cuda})
        self.step = 0
        self._losses, self._least_loss = dict[str, float](), math.inf
        self._started = time.perf_counter()
        for unit in self.units:
            unit.optimizer.zero_grad()

    @property
    def tokens(self) -> int:
        return self.step * self.batches.tokens_per_step

    @property
    def seconds(self) -> float:
        """Return the time spent so far, including runs before a resume."""
        return time.perf_counter() - self._started

    @property
    def done(self) -> bool:
        return self.step == self.batches.num_steps or all(unit.stopped for unit in self.units)

    @property
    def _training(self) -> list[_UnitRun]:
        return [unit for unit in self.units if not unit.stopped]

    def update(self) -> dict[str, Any]:
        """Take one optimizer step; return its line of the metrics."""
        started = time.perf_counter()
        losses = self._checked(self._objective.backward(self.batches.at(self.step)), "loss", self.step + 1)
        sum_gradients(parameter for unit in self.units for parameter in unit.parameters.values())
        units = {unit.name: {"loss": losses[unit.name], **unit.update(self.step)} for unit in self._training}
        for unit in self.units:
            unit.optimizer.zero_grad()
        self.step += 1
        speed = self.batches.tokens_per_step / max(time.perf_counter() - started, 1e-9)  # a clock may stand still
        return self._record("step", units) | {"tokens_per_second": speed}

    def evaluate(self) -> dict[str, Any]:
        """Compute held-out losses for schedules and snapshots; return their line of the metrics."""
        losses = self._checked(self._objective.evaluate(self._validation_rows), "held-out loss", self.step)
        for unit in self._training:
            unit.observe(losses[unit.name])
        self._losses = losses
        self._least_loss = min(self._least_loss, self._mean(losses))
        return self._record(
            "evaluation", {unit.name: {"loss": losses[unit.name], "best_loss": unit.best_loss} for unit in self.units}
        )

    def check_divergence(self, title: str) -> None:
        """Raise DivergedError if the stage ends far above its first loss; a lack of improvement is no divergence."""
        first, last = self._mean({unit.name: unit.initial_loss for unit in self.units}), self._mean(self._losses)
        if self._least_loss < first or last <= max(DIVERGED * first, SMALL_LOSS):
            return
        worst = max(self.units, key=lambda unit: self._losses[unit.name] - unit.initial_loss)
        raise DivergedError(
            f"{title}: expected a held-out loss below the first one of {first:.4g}, found none, and {last:.4g} at step "
            f"{self.step}, most of it in {worst.name} ({self._losses[worst.name]:.4g}, at first "
            f"{worst.initial_loss:.4g}): diverged; lower lr (it began at {worst.peak:g}), in another output folder"
        )

    def _checked(self, losses: dict[str, float], what: str, step: int) -> dict[str, float]:
        return {unit.name: unit.finite(losses[unit.name], what, step) for unit in self.units}

    def _record(self, event: str, units: dict[str, dict[str, float]]) -> dict[str, Any]:
        loss = self._mean({name: unit["loss"] for name, unit in units.items()})
        progress = {"event": event, "step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        return progress | {"loss": loss, "units": units}

    @staticmethod
    def _mean(losses: dict[str, float]) -> float:
        return sum(losses.values()) / len(losses)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, states = rng_state(self._devices), {}
        for unit in self.units:
            unit_tensors, states[unit.name] = unit.state()
            tensors |= unit_tensors
        progress = {"step": self.step, "seconds": self.seconds, "losses": self._losses, "least_loss": self._least_loss}
        return tensors, progress | {"units": states}

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.step, self._losses, self._least_loss = state["step"], state["losses"], state["least_loss"]
        self._started -= state["seconds"]
        for unit in self.units:
            unit.load(tensors, state["units"][unit.name])
        restore_rng_state(tensors, self._devices)

    def result(self) -> TrainResult:
        return TrainResult(
            steps=self.step,
            tokens=self.tokens,
            best_loss={unit.name: unit.best_loss for unit in self.units},
            initial_loss={unit.name: unit.initial_loss for unit in self.units},
            seconds=self.seconds,
            stopped_early=self.step < self.batches.num_steps,
        )


def _parameters(units: Sequence[Unit]) -> dict[str, nn.Parameter]:
    return {name: parameter for unit in units for name, parameter in unit.parameters.items()}


def _copy_into(parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
