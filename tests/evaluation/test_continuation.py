from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.base import UserError
from linearize.evaluation.continuation import Readings, loss_difference
from linearize.evaluation.intervals import wilson


def readings(losses: Tensor) -> Readings:
    return Readings(losses.double(), losses < 3)


def test_differences_are_of_pairs() -> None:
    hard = torch.randn(20, generator=torch.Generator().manual_seed(0)) + 3
    teacher, student = readings(hard), readings(hard + 0.1)
    difference = loss_difference(student, teacher)
    for value in (difference.mean, difference.low, difference.high):
        assert value == pytest.approx(0.1, abs=1e-6)
    loss = student.mean_loss()
    assert loss.mean == pytest.approx(hard.mean().item() + 0.1, abs=1e-6) and loss.high - loss.low > 0.3
    with pytest.raises(UserError, match="at least 16 documents or examples"):
        loss_difference(readings(hard[:15]), readings(hard[:15]))
    with pytest.raises(ValueError, match="found 20 and 19 rows"):
        loss_difference(teacher, readings(hard[:19]))


def test_shares_have_wilsons_interval() -> None:
    """By hand: none of n gives [0, z^2 / (n + z^2)]."""
    for successes, low, high in ((48, 0.92590, 1.0), (0, 0.0, 0.07410), (24, 0.36389, 0.63611)):
        interval = wilson(successes, 48)
        assert interval.mean == successes / 48
        assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
