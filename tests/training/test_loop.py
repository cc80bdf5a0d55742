"""The training loop on two small linear regressions from token ids; also run as a script by the tests that kill it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import linearize
from linearize.base import DivergedError, UserError
from linearize.configs.training import Constant, Cosine, Plateau, TrainConfig
from linearize.data.rows import PackedRows
from linearize.training import resumption as checkpoint_module
from linearize.training.loop import TrainResult, Unit, train
from linearize.training.optimizers import build_schedule

VOCABULARY, LENGTH = 5, 4
CONFIG = TrainConfig(lr=0.05, epochs=3, batch_size=4, micro_batch_size=2, eval_every=4, schedule=Plateau(patience=1))


def packed_rows(num_rows: int, seed: int) -> PackedRows:
    ids = torch.randint(VOCABULARY, (num_rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return PackedRows(input_ids=ids, position_ids=torch.arange(LENGTH).expand(num_rows, -1).clone(), labels=ids)


TRAIN, VALIDATION = packed_rows(22, seed=1), packed_rows(6, seed=2)


class Regressions:
    """Unit i learns target_i[token] under dropout; `scale` multiplies its loss, `on_step` runs inside each step."""

    def __init__(
        self,
        scale: tuple[float, float] = (1.0, 1.0),
        on_step: Callable[[int], None] | None = None,
        dropout: float = 0.2,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.targets = [torch.randn(VOCABULARY, generator=generator) for _ in range(2)]
        self.weights = [nn.Parameter(torch.randn(VOCABULARY, generator=generator)) for _ in range(2)]
        self.bias = nn.Parameter(torch.zeros(()))
        self.never_used = nn.Parameter(torch.ones(2))
        self.scale, self.on_step, self.dropout = scale, on_step, dropout
        self.seen: list[list[PackedRows]] = []
        self.trajectory: list[list[torch.Tensor]] = []

    @property
    def units(self) -> list[Unit]:
        first = {"first.weight": self.weights[0], "first.bias": self.bias, "first.never_used": self.never_used}
        return [Unit("first", first), Unit("second", {"second.weight": self.weights[1]})]

    def losses(self, rows: PackedRows, dropout: float) -> list[torch.Tensor]:
        losses = []
        for weight, target, bias in zip(self.weights, self.targets, (self.bias, 0.0), strict=True):
            prediction = nn.functional.dropout(weight, dropout)[rows.input_ids] + bias
            losses.append((prediction - target[rows.input_ids]).square().mean())
        return losses

    def backward(self, micro_batches: list[PackedRows]) -> dict[str, float]:
        self.trajectory.append([weight.detach().clone() for weight in self.weights])
        self.seen.append(micro_batches)
        if self.on_step is not None:
            self.on_step(len(self.seen))
        total = [0.0, 0.0]
        for rows in micro_batches:
            for index, loss in enumerate(self.losses(rows, self.dropout)):
                mean = loss * self.scale[index] / len(micro_batches)
                mean.backward()
                total[index] += mean.item()
        return dict(zip(("first", "second"), total, strict=True))

    @torch.no_grad()
    def evaluate(self, rows: PackedRows) -> dict[str, float]:
        return dict(zip(("first", "second"), [loss.item() for loss in self.losses(rows, 0.0)], strict=True))


class Scripted(Regressions):
    """Held-out losses as given, evaluation by evaluation, whatever the parameters are."""

    def __init__(self, first: list[float], second: list[float]) -> None:
        super().__init__()
        self.script = list(zip(first, second, strict=True))
        self.at_evaluation: list[torch.Tensor] = []

    def evaluate(self, rows: PackedRows) -> dict[str, float]:
        self.at_evaluation.append(torch.stack([weight.detach() for weight in self.weights]))
        return dict(zip(("first", "second"), self.script[len(self.at_evaluation) - 1], strict=True))


class OneOf(Regressions):
    """One of the units, the other one left out."""

    def __init__(self, index: int) -> None:
        super().__init__(dropout=0.0)
        self.index = index

    @property
    def units(self) -> list[Unit]:
        return [super().units[self.index]]

    def backward(self, micro_batches: list[PackedRows]) -> dict[str, float]:
        name = self.units[0].name
        return {name: super().backward(micro_batches)[name]}

    def evaluate(self, rows: PackedRows) -> dict[str, float]:
        name = self.units[0].name
        return {name: super().evaluate(rows)[name]}


def run(objective: Regressions, folder: Path, config: TrainConfig = CONFIG, seed: int = 0, **rows: Any) -> TrainResult:
    arguments = {"train_rows": TRAIN, "validation_rows": VALIDATION, **rows}
    return train(objective, **arguments, config=config, output_dir=folder, seed=seed, title="regressions")


def with_(config: TrainConfig = CONFIG, **changes: Any) -> TrainConfig:
    return config.model_copy(update=changes)


def metrics(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def untimed_metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in {"seconds", "tokens_per_second"}} for line in lines]


# --- learning ---------------------------------------------------------------------------------------------------------


def test_held_out_loss_goes_down_and_metrics_tell(tmp_path: Path) -> None:
    objective = Regressions(dropout=0.0)
    before = objective.evaluate(VALIDATION)
    result = run(objective, tmp_path, with_(epochs=20, eval_every=25, lr=0.2, schedule=Constant()))
    assert result.initial_loss == before
    assert result.best_loss == objective.evaluate(VALIDATION)
    assert all(result.best_loss[name] < 0.01 * before[name] for name in before)
    assert (result.steps, result.tokens, result.stopped_early) == (100, 100 * 4 * LENGTH, False)

    steps, evaluations = metrics(tmp_path, "step"), metrics(tmp_path, "evaluation")
    assert [line["step"] for line in steps] == list(range(1, 101))
    assert [line["step"] for line in evaluations] == [0, 25, 50, 75, 100]
    assert evaluations[0]["units"]["second"]["loss"] == before["second"]
    last = steps[-1]
    assert last["tokens"] == result.tokens
    assert last["loss"] == sum(unit["loss"] for unit in last["units"].values()) / 2
    assert last["units"]["first"]["lr"] == 0.2
    assert last["units"]["first"]["grad_norm"] > 0
    assert last["tokens_per_second"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "result.json", "trained.safetensors"]


def test_one_line_per_evaluation_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Regressions(), tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 5  # steps 0, 4, 8, 12 and 15
    assert err.splitlines()[1].startswith("regressions: step 4 of 15, held-out loss ")


# --- rows -------------------------------------------------------------------------------------------------------------


def test_an_epoch_is_a_permutation_in_micro_batches_without_the_rest(tmp_path: Path) -> None:
    rows = dataclasses.replace(TRAIN, input_ids=torch.arange(22)[:, None].expand(-1, LENGTH) % VOCABULARY)
    rows = dataclasses.replace(rows, labels=torch.arange(22)[:, None].expand(-1, LENGTH).clone())  # the row's number
    objective = Regressions()
    result = run(objective, tmp_path, train_rows=rows)
    assert result.steps == 3 * (22 // 4)
    assert all([len(rows) for rows in micro_batches] == [2, 2] for micro_batches in objective.seen)
    flat = torch.cat([rows.labels[:, 0] for micro_batches in objective.seen for rows in micro_batches])
    order = flat.view(3, 20).tolist()
    assert all(len(set(epoch)) == 20 for epoch in order)
    assert order[0] != order[1] != order[2]
    assert order[0] != sorted(order[0])

    other_seed = Regressions()
    run(other_seed, tmp_path / "other", train_rows=rows, seed=1)
    assert other_seed.seen[0][0].labels[:, 0].tolist() != order[0][:2]


def test_fewer_rows_than_a_batch_are_one_batch(tmp_path: Path) -> None:
    objective = Regressions()
    result = run(objective, tmp_path, train_rows=packed_rows(3, seed=3))
    assert (result.steps, result.tokens) == (3, 3 * 3 * LENGTH)
    assert [len(rows) for rows in objective.seen[0]] == [2, 1]


@pytest.mark.parametrize(("max_tokens", "steps"), [(1, 1), (31, 1), (32, 2), (47, 2), (10_000, 15)])
def test_max_tokens_bounds_the_steps(tmp_path: Path, max_tokens: int, steps: int) -> None:
    result = run(Regressions(), tmp_path, with_(max_tokens=max_tokens))
    assert (result.steps, result.tokens, result.stopped_early) == (steps, steps * 16, False)
    assert metrics(tmp_path, "evaluation")[-1]["step"] == steps


# --- units ------------------------------------------------------------------------------------------------------------


def test_trajectories_are_those_of_clipped_adamw_per_unit(tmp_path: Path) -> None:
    config = with_(clip_norm=0.5, weight_decay=0.1, betas=(0.8, 0.99), schedule=Constant())
    objective, expected = Regressions(scale=(3.0, 0.2), dropout=0.0), Regressions(scale=(3.0, 0.2), dropout=0.0)
    run(objective, tmp_path, config)
    groups = [[expected.weights[0], expected.bias], [expected.weights[1]]]
    optimizers = [torch.optim.AdamW(group, lr=0.05, betas=(0.8, 0.99), weight_decay=0.1) for group in groups]
    norms = []
    for micro_batches in objective.seen:
        expected.backward(micro_batches)
        norms.append([float(nn.utils.clip_grad_norm_(group, 0.5)) for group in groups])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert any(norm > 0.5 for norm, _ in norms)  # or the test would not test clipping
    reported = [[unit["grad_norm"] for unit in line["units"].values()] for line in metrics(tmp_path, "step")]
    torch.testing.assert_close(reported, norms)
    for got, want in zip(objective.trajectory, expected.trajectory, strict=True):
        torch.testing.assert_close(got, want)


def test_a_units_gradients_do_not_touch_the_others_clipping(tmp_path: Path) -> None:
    plain, scaled = Regressions(), Regressions(scale=(1000.0, 1.0))
    run(plain, tmp_path / "plain", with_(clip_norm=0.1))
    run(scaled, tmp_path / "scaled", with_(clip_norm=0.1))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(plain.trajectory, scaled.trajectory, strict=True))
    assert not torch.equal(plain.trajectory[-1][0], scaled.trajectory[-1][0])


def test_each_unit_ends_with_its_own_best_parameters(tmp_path: Path) -> None:
    objective = Scripted(first=[3.0, 1.0, 2.0, 2.0, 2.0], second=[3.0, 3.0, 2.0, 1.0, 2.0])
    result = run(objective, tmp_path)
    best = torch.stack([objective.at_evaluation[1][0], objective.at_evaluation[3][1]])
    assert not torch.equal(best, objective.at_evaluation[-1])
    assert torch.equal(torch.stack(objective.weights), best)
    trained = load_file(tmp_path / "trained.safetensors")
    assert trained.keys() == {"first.weight", "first.bias", "first.never_used", "second.weight"}
    assert torch.equal(torch.stack([trained["first.weight"], trained["second.weight"]]), best)
    assert (result.initial_loss, result.best_loss) == ({"first": 3.0, "second": 3.0}, {"first": 1.0, "second": 1.0})


def test_training_that_only_hurts_leaves_the_initial_parameters(tmp_path: Path) -> None:
    objective = Scripted(first=[1.0, 1.2, 1.3, 1.4, 1.9], second=[1.0, 2.0, 3.0, 4.0, 2.1])
    run(objective, tmp_path)
    assert torch.equal(torch.stack(objective.weights), objective.at_evaluation[0])


def test_each_unit_stops_early_by_itself_and_the_stage_with_the_last(tmp_path: Path) -> None:
    objective = Scripted(
        first=[3.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0], second=[3.0, 4.0, 4.0, 2.0, 2.0, 2.0, 2.0]
    )  # at steps 0, 4, 8, 12, 16, 20, 24
    result = run(objective, tmp_path, with_(epochs=100, early_stopping=3))
    assert (result.steps, result.stopped_early) == (24, True)
    assert metrics(tmp_path, "evaluation")[-1]["step"] == 24
    # The first unit stands still from step 12 on, and what is measured of it then no longer counts.
    first, second = torch.stack(objective.at_evaluation).unbind(1)
    assert [bool((a != b).any()) for a, b in itertools.pairwise(first)] == [True] * 3 + [False] * 3
    assert [bool((a != b).any()) for a, b in itertools.pairwise(second)] == [True] * 6
    assert result.best_loss == {"first": 3.0, "second": 2.0}
    assert torch.equal(objective.weights[0], first[0]) and torch.equal(objective.weights[1], second[3])
    steps = metrics(tmp_path, "step")
    assert [list(line["units"]) for line in steps] == [["first", "second"]] * 12 + [["second"]] * 12
    assert all(line["loss"] == line["units"]["second"]["loss"] for line in steps[12:])


def test_a_unit_stops_early_where_it_would_alone(tmp_path: Path) -> None:
    """However long the other one trains."""
    config = with_(epochs=100, early_stopping=1, eval_every=1, lr=0.2)
    together = Regressions(dropout=0.0)
    run(together, tmp_path / "together", config)
    for index, name in enumerate(("first", "second")):
        alone = OneOf(index)
        result = run(alone, tmp_path / name, config)
        lines = [line["step"] for line in metrics(tmp_path / "together", "step") if name in line["units"]]
        assert lines == list(range(1, result.steps + 1))
        assert torch.equal(alone.weights[index], together.weights[index])


# --- schedules --------------------------------------------------------------------------------------------------------


def optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Constant(), [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        (Constant(warmup_steps=3), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        (Cosine(), [2.0, 1 + math.cos(math.pi / 6), 1.5, 1.0, 0.5, 1 - math.cos(math.pi / 6)]),
        (
            Cosine(warmup_steps=2, min_lr=1.0),
            [2 / 3, 4 / 3, 2.0, 1.5 + math.sqrt(0.125), 1.5, 1.5 - math.sqrt(0.125)],
        ),
    ],
)
def test_schedules_by_step(config: Constant | Cosine, expected: list[float]) -> None:
    schedule, values = build_schedule(config, moved := optimizer(lr=2.0), total_steps=6), []
    for _ in range(6):
        values.append(moved.param_groups[0]["lr"])
        moved.step()
        schedule.step()
    assert values == pytest.approx(expected)


def test_plateau_reduces_after_patience_and_stops_at_min_lr() -> None:
    moved = optimizer(lr=1.0)
    schedule: Any = build_schedule(Plateau(factor=0.5, patience=1, min_lr=0.2), moved, total_steps=100)
    rates = []
    # Base, bad, bad, better, not enough better, bad; then bad for good.
    for loss in [1.0, 1.0, 1.1, 0.9, 0.89995, 0.95, 1.0, 1.0, 1.0, 1.0]:
        schedule.step(loss)
        rates.append(moved.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2])


def test_units_reach_their_plateaus_apart(tmp_path: Path) -> None:
    run(Scripted(first=[5.0, 4.0, 3.0, 2.0, 1.0], second=[1.0, 1.0, 1.0, 1.0, 1.0]), tmp_path)
    rates = [tuple(unit["lr"] for unit in line["units"].values()) for line in metrics(tmp_path, "step")]
    assert rates == [(0.05, 0.05)] * 8 + [(0.05, pytest.approx(0.005))] * 7


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_stage(tmp_path: Path) -> None:
    class Diverges(Regressions):
        def backward(self, micro_batches: list[PackedRows]) -> dict[str, float]:
            losses = super().backward(micro_batches)
            return {**losses, "second": math.nan} if len(self.seen) == 3 else losses

    with pytest.raises(UserError, match=r"^loss of second is not finite at step 3: found nan; lower lr \(now 0.05\)"):
        run(Diverges(), tmp_path)
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2]


def test_a_gradient_that_is_not_finite_ends_the_stage(tmp_path: Path) -> None:
    class Overflows(Regressions):
        def backward(self, micro_batches: list[PackedRows]) -> dict[str, float]:
            losses = super().backward(micro_batches)
            if len(self.seen) == 2:
                self.weights[1].grad = torch.full((VOCABULARY,), math.inf)
            return losses

    with pytest.raises(UserError, match="gradient norm of second is not finite at step 2: found inf"):
        run(Overflows(), tmp_path)


def test_a_stage_that_ends_far_above_where_it_began_has_diverged(tmp_path: Path) -> None:
    high = with_(lr=30.0, schedule=Constant())
    message = (
        r"^regressions: expected a held-out loss below the first one of [\d.]+, found none, and [\d.]+ at step 15, "
        r"most of it in (first|second) \(.*\): diverged; lower lr \(it began at 30\), in another output folder$"
    )
    with pytest.raises(DivergedError, match=message):
        run(Regressions(dropout=0.0), tmp_path, high)
    assert not (tmp_path / "result.json").exists()
    again = Regressions(dropout=0.0)
    with pytest.raises(DivergedError, match=message):  # once more, from the last checkpoint
        run(again, tmp_path, high)
    assert not again.seen


@pytest.mark.parametrize(
    ("first", "second", "diverged"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0], "first"),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 0.5, 5.0], "first"),
        ([1.0, 2.0, 3.0, 4.0, 2.9], [1.0, 1.0, 1.0, 1.0, 1.0], None),  # not improved, but near
        ([1.0, 0.9, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0], None),  # there is something better to go back to
        ([1e-9, 2e-9, 3e-9, 4e-9, 5e-9], [1.0, 0.9, 0.8, 0.7, 0.6], None),  # nothing that one exact unit does matters
        ([0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], None),
        ([-2e-8, 1e-5, 4e-4, 4e-4, 4e-4], [-1e-8, -1e-8, -1e-8, -1e-8, -1e-8], None),  # began as the teacher itself
        ([1e-4, 2e-4, 4e-4, 4e-4, 5e-4], [1e-4, 1e-4, 1e-4, 1e-4, 1e-4], None),  # what is left is negligible
        ([1e-4, 2e-4, 4e-4, 4e-4, 4e-2], [1e-4, 1e-4, 1e-4, 1e-4, 1e-4], "first"),
    ],
)
def test_what_counts_as_diverged(tmp_path: Path, first: list[float], second: list[float], diverged: str | None) -> None:
    if diverged is None:
        run(Scripted(first, second), tmp_path)
        return
    with pytest.raises(DivergedError, match=f"most of it in {diverged}"):
        run(Scripted(first, second), tmp_path)


def test_what_cannot_improve_is_not_trained(tmp_path: Path) -> None:
    """A teacher finetuned on its own outputs starts at a loss of 0, where a step can only lead away."""
    trainee = Scripted(first=[0.0], second=[0.0])
    result = run(trainee, tmp_path)
    assert not trainee.seen and result.stopped_early
    assert all(before.equal(after) for before, after in zip(trainee.at_evaluation[0], trainee.weights, strict=True))


def test_what_cannot_improve_lets_the_others_train(tmp_path: Path) -> None:
    trainee = Scripted(first=[0.0] * 5, second=[1.0, 0.9, 0.8, 0.7, 0.6])
    run(trainee, tmp_path)
    first, second = (torch.stack(list(of)) for of in zip(*trainee.at_evaluation, strict=True))
    assert first.eq(first[0]).all()
    assert not second[-1].equal(second[0])


def test_a_held_out_loss_that_is_not_finite_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="held-out loss of first is not finite at step 0: found inf; nothing is trained"
    ):
        run(Scripted(first=[math.inf], second=[1.0]), tmp_path)


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows to train on"):
        run(Regressions(), tmp_path / "empty", train_rows=TRAIN.rows([]))


# --- resume -----------------------------------------------------------------------------------------------------------


def assert_equal_runs(folder: Path, unbroken: Path) -> None:
    assert untimed_metrics(folder) == untimed_metrics(unbroken)
    got, want = load_file(folder / "trained.safetensors"), load_file(unbroken / "trained.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    got, want = json.loads((folder / "result.json").read_text()), json.loads((unbroken / "result.json").read_text())
    timed = {"seconds": 0, "sha256": ""}
    assert {**got, **timed} == {**want, **timed}
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "result.json", "trained.safetensors"]


def resume(folder: Path, config: TrainConfig = CONFIG) -> Regressions:
    """Go on with parameters and a random state that only the checkpoint can put right."""
    objective = Regressions()
    for unit in objective.units:
        for parameter in unit.parameters.values():
            parameter.data += 1
    torch.manual_seed(12345)
    run(objective, folder, config)
    return objective


class Interrupted(Exception):
    pass


def interrupt_at(step: int) -> Callable[[int], None]:
    def on_step(calls: int) -> None:
        if calls == step:
            raise Interrupted

    return on_step


@pytest.mark.parametrize("schedule", [Plateau(patience=1), Cosine(warmup_steps=3), Constant(warmup_steps=14)])
def test_an_interrupted_run_goes_on_as_if_unbroken(tmp_path: Path, schedule: Plateau | Cosine | Constant) -> None:
    config = with_(schedule=schedule, lr=1.5, eval_every=2)  # large, so that a plateau is reached before the break
    run(Regressions(), tmp_path / "unbroken", config)
    with pytest.raises(Interrupted):
        run(Regressions(on_step=interrupt_at(12)), tmp_path / "broken", config)
    assert [line["step"] for line in metrics(tmp_path / "broken", "step")] == list(range(1, 12))
    objective = resume(tmp_path / "broken", config)
    assert len(objective.seen) == 15 - 10  # from the checkpoint of step 10, not from the start
    assert {unit["lr"] for unit in metrics(tmp_path / "broken", "step")[10]["units"].values()} != {1.5}
    assert_equal_runs(tmp_path / "broken", tmp_path / "unbroken")


@pytest.mark.parametrize("step", [2, 9, 11, 12])
def test_an_interrupted_run_keeps_the_count_of_evaluations_without_improvement(tmp_path: Path, step: int) -> None:
    """Also where one of the units has stopped already; at the end both have."""
    config = with_(early_stopping=2, eval_every=1, epochs=100, lr=0.2)
    run(Regressions(dropout=0.0), tmp_path / "unbroken", config)
    last = {name: line["step"] for line in metrics(tmp_path / "unbroken", "step") for name in line["units"]}
    assert len(set(last.values())) == 2 and max(last.values()) == 12
    with pytest.raises(Interrupted):
        run(Regressions(dropout=0.0, on_step=interrupt_at(step)), tmp_path / "broken", config)
    run(Regressions(dropout=0.0), tmp_path / "broken", config)
    assert_equal_runs(tmp_path / "broken", tmp_path / "unbroken")


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(Regressions(on_step=interrupt_at(6)), tmp_path)
    file = tmp_path / "checkpoint-000000004" / "state.json"
    state = json.loads(file.read_text())
    for key in ("sha256", "tensors_sha256"):  # which that version did not write
        del state[key]
    del state["units"]["first"]["lr"]
    file.write_text(json.dumps(state))
    with pytest.raises(UserError, match="expected a checkpoint of this version of linearize, found one without 'lr'"):
        run(Regressions(), tmp_path)


def test_a_run_that_died_after_stopping_early_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise Interrupted

    config = with_(early_stopping=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.StageFolder, "finish", killed)
        with pytest.raises(Interrupted):
            run(Scripted(first=[1.0, 2.0], second=[1.0, 2.0]), tmp_path, config)
    objective = Regressions()
    result = run(objective, tmp_path, config)
    assert (result.steps, result.stopped_early, objective.seen) == (4, True, [])


KILLS = {  # moment: what the process is about to do for the n-th time when it is killed
    "between checkpoints": ("step", 7),
    "half a checkpoint": ("save_file", 3),
    "checkpoint not yet in place": ("replace", 2),
    "checkpoint before it not yet gone": ("replace", 3),
    "parameters without the result": ("replace", 11),
    "checkpoint still there after the result": ("replace", 12),
}


def run_until_killed(folder: Path, moment: str) -> None:
    """The body of the child process: SIGKILL itself at `moment`, so that nothing is cleaned up."""
    kind, count = KILLS[moment]
    calls = {"step": 0, "save_file": 0, "replace": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            calls[name] += 1
            if (name, calls[name]) == (kind, count):
                if name == "save_file":
                    function(*arguments)
                    os.truncate(arguments[1], Path(arguments[1]).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return wrapper

    checkpoint_module.save_file = counted("save_file", checkpoint_module.save_file)
    Path.replace = counted("replace", Path.replace)
    run(Regressions(on_step=counted("step", lambda _: None)), folder)


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=[pytest.mark.slow] if n > 1 else []) for n, moment in enumerate(KILLS)]
)
def test_a_killed_run_goes_on_as_if_unbroken(tmp_path: Path, moment: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(linearize.__file__).parents[1])}
    child = subprocess.run([sys.executable, __file__, tmp_path / "broken", moment], env=environment, check=False)
    assert child.returncode == -signal.SIGKILL
    leftovers = {path.name for path in (tmp_path / "broken").iterdir()}
    assert (
        leftovers
        >= {
            "between checkpoints": {"checkpoint-000000004"},
            "half a checkpoint": {"checkpoint-000000004", "unfinished"},
            "checkpoint not yet in place": {"checkpoint-000000000", "unfinished"},
            "checkpoint before it not yet gone": {"checkpoint-000000000", "checkpoint-000000004", "unfinished"},
            "parameters without the result": {"checkpoint-000000015", "trained.safetensors", "unfinished"},
            "checkpoint still there after the result": {"checkpoint-000000015", "trained.safetensors", "result.json"},
        }[moment]
    )
    resume(tmp_path / "broken")
    run(Regressions(), tmp_path / "unbroken")
    assert_equal_runs(tmp_path / "broken", tmp_path / "unbroken")


def test_a_finished_stage_is_loaded_at_once(tmp_path: Path) -> None:
    first = Regressions()
    result = run(first, tmp_path)
    metrics_before = (tmp_path / "metrics.jsonl").read_bytes()
    second = Regressions(on_step=interrupt_at(1))
    assert run(second, tmp_path) == result
    assert torch.equal(torch.stack(first.weights), torch.stack(second.weights))
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics_before


class Renamed(Regressions):
    @property
    def units(self) -> list[Unit]:
        return [*super().units[:1], Unit("second", {"another.weight": self.weights[1]})]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": with_(lr=0.1)}, "expected lr = 0.1, found lr = 0.05; use another output folder"),
        ({"config": with_(schedule=Cosine())}, "expected schedule = .*cosine.*, found schedule = .*plateau"),
        ({"seed": 1}, "expected seed = 1, found seed = 0"),
        ({"train_rows": TRAIN.rows(slice(0, 21))}, "expected data = "),
        ({"validation_rows": packed_rows(6, seed=9)}, "expected data = "),
        ({"objective": Renamed()}, "expected parameters = "),
    ],
)
def test_another_runs_folder_is_refused(tmp_path: Path, finished: bool, changes: dict[str, Any], message: str) -> None:
    if finished:
        run(Regressions(), tmp_path)
    else:
        with pytest.raises(Interrupted):
            run(Regressions(on_step=interrupt_at(6)), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=message):
        run(**{"objective": Regressions(), "folder": tmp_path, **changes})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_terminal_shows_a_bar_with_loss_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    run(Regressions(on_step=lambda step: time.sleep(0.3 if step == 2 else 0)), tmp_path)  # longer than a redraw takes
    out, err = capsys.readouterr()
    assert out == ""
    assert "regressions" in err
    assert "15/15" in err
    assert "tokens/s" in err


if __name__ == "__main__":
    run_until_killed(Path(sys.argv[1]), sys.argv[2])
