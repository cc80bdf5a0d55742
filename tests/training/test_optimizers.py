"""Optimizers by name; those of bitsandbytes where it is installed (`make test-quantized`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from linearize.base import UserError
from linearize.configs.training import FinetuneConfig, TrainConfig
from linearize.data.rows import PackedRows
from linearize.training.loop import Unit, train
from linearize.training.optimizers import make_optimizer

IDS = torch.randint(64, (16, 4), generator=torch.Generator().manual_seed(0))
ROWS = PackedRows(IDS, torch.arange(4).expand(16, -1).clone(), IDS)


class Table:
    """A number for each of 64 tokens in each of 128 columns is to be 1: large enough for moments in 8 bits."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.weight, self.bias, self.dies_at = nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(3)), dies_at
        self.units = [Unit("all", {"weight": self.weight, "bias": self.bias})]

    def backward(self, micro_batches: list[PackedRows]) -> dict[str, float]:
        if step.number == self.dies_at:
            raise KeyboardInterrupt
        loss = sum(self._loss(rows) for rows in micro_batches) / len(micro_batches)
        loss.backward()
        return {"all": loss.item()}

    def evaluate(self, rows: PackedRows) -> dict[str, float]:
        with torch.no_grad():
            return {"all": float(self._loss(rows))}

    def _loss(self, rows: PackedRows) -> torch.Tensor:
        return (self.weight[rows.input_ids] - 1).square().mean() + (self.bias - 1).square().mean()


def config(optimizer: str) -> TrainConfig:
    return TrainConfig.model_validate(
        {"lr": 0.05, "batch_size": 4, "epochs": 4, "eval_every": 3, "optimizer": optimizer}
    )


def trained(optimizer: str, folder: Path, dies_at: int | None = None) -> Table:
    table = Table(dies_at)
    train(table, ROWS, ROWS, config(optimizer), output_dir=folder, seed=0, title="table")
    return table


def test_eight_bits_train_almost_alike_and_resume_as_if_unbroken(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; `make test-quantized` installs it")
    optimizer = "adamw_8bit"
    whole, exact = trained(optimizer, tmp_path / "whole"), trained("adamw", tmp_path / "exact")
    assert (whole.weight - exact.weight).abs().max() < 0.05 and whole.weight.mean() > 0.2
    assert not torch.equal(whole.weight, exact.weight), "moments in 8 bits are not exact"
    with pytest.raises(KeyboardInterrupt):
        trained(optimizer, tmp_path / "broken", dies_at=8)
    resumed = trained(optimizer, tmp_path / "broken")
    assert torch.equal(resumed.weight, whole.weight) and torch.equal(resumed.bias, whole.bias)


def test_moments_take_a_byte_each() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; `make test-quantized` installs it")
    weight = nn.Parameter(torch.ones(64, 128))
    optimizer = make_optimizer(config("adamw_8bit"), [weight])
    weight.square().sum().backward()
    optimizer.step()
    kept = [x for x in optimizer.state[weight].values() if isinstance(x, torch.Tensor) and x.shape == weight.shape]
    assert [x.dtype for x in kept] == [torch.uint8] * 2


def test_a_library_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"optimizer: expected bitsandbytes .* pip install 'linearize\[quantized\]'"):
        make_optimizer(config("adamw_8bit"), [nn.Parameter(torch.zeros(3))])


def test_a_cpu_has_nothing_to_page_out() -> None:
    with pytest.raises(UserError, match=r"optimizer: expected a GPU .* found a CPU; set optimizer=adamw_8bit"):
        make_optimizer(config("paged_adamw_8bit"), [nn.Parameter(torch.zeros(3))])


def test_stages_of_before_are_gone_on_with() -> None:
    """Fields that they lack count only where they are set."""
    before = FinetuneConfig().identity()
    assert "optimizer" not in before and "activation_checkpointing" not in before and "lr" in before
    now = FinetuneConfig(optimizer="adamw_8bit", activation_checkpointing=True).identity()
    assert now["optimizer"] == "adamw_8bit" and now["activation_checkpointing"] is True
