from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from linearize.base import UserError
from linearize.evaluation.perplexity import TokenLosses
from linearize.evaluation.recall import (
    CopyLosses,
    CopyRows,
    Recall,
    copy_losses,
    copy_rows,
    copy_verdict,
    far_context_verdict,
    ordinary_tokens,
)
from tests.evaluation.fakes import Fake


def rows(**changes) -> CopyRows:
    settings = {"length": 10, "distance": 24, "rows": 20, "seed": 0, "window_size": 16, "max_positions": 64}
    return copy_rows(torch.arange(3, 50), **settings | changes)


def test_rows_repeat_at_the_distance_and_label_the_copies_only() -> None:
    made = rows()
    assert made.input_ids.shape == (20, 34)
    assert made.input_ids[:, :10].equal(made.input_ids[:, 24:])
    assert not made.input_ids[:, :10].equal(made.input_ids[:, 10:20])
    labelled = [t for t in range(34) if made.labels[0, t] != -100]
    assert labelled == [*range(1, 10), *range(25, 34)]
    assert made.labels[:, labelled].equal(made.input_ids[:, labelled])
    assert made.position_ids[0].tolist() == list(range(34))
    assert made.input_ids.min() >= 3
    assert rows(seed=0).input_ids.equal(made.input_ids) and not rows(seed=1).input_ids.equal(made.input_ids)


def test_ordinary_tokens_leave_the_special_ones_out() -> None:
    assert ordinary_tokens(6, [0, 4]).tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distance": 16}, "beyond both the length and the window of 16"),
        ({"length": 30}, "beyond both"),
        ({"length": 1}, "at least 2"),
        ({"max_positions": 33}, "33 positions"),
    ],
)
def test_rows_that_would_not_measure_recall_are_refused(changes, message) -> None:
    with pytest.raises(UserError, match=message):
        rows(**changes)


def test_rows_may_fill_the_positions_exactly_and_start_right_behind_the_window() -> None:
    assert rows(max_positions=34).input_ids.shape == (20, 34)
    assert rows(distance=17).input_ids.shape == (20, 27)


def test_copying_model_has_no_loss_on_the_second_copy() -> None:
    made = rows()
    losses = copy_losses(Fake(distance=24, scale=30.0), made, batch_size=7)
    recall = Recall.of(losses)
    assert recall.second.mean < 1e-6
    assert recall.first.mean == pytest.approx(math.log(50), abs=1e-5)  # nothing to copy yet: uniform
    assert recall.gain.mean == pytest.approx(recall.first.mean - recall.second.mean)
    json.dumps(recall.to_json(), allow_nan=False)


def test_model_that_copies_from_elsewhere_gains_nothing() -> None:
    losses = copy_losses(Fake(distance=23, scale=30.0), rows(), batch_size=7)
    assert Recall.of(losses).gain.mean < 0


def test_verdict_gives_the_share_of_the_teachers_gain() -> None:
    made = rows()
    teacher = copy_losses(Fake(distance=24, scale=30.0), made, batch_size=20)
    student = copy_losses(Fake(distance=24, scale=2.0), made, batch_size=20)
    verdict = copy_verdict(teacher, student)
    expected = 1 - math.log(1 + 49 * math.exp(-2.0)) / math.log(50)
    assert verdict.measurable and verdict.share.mean == pytest.approx(expected, abs=1e-4)
    assert f"{expected:.0%}" in verdict.words
    assert copy_verdict(teacher, teacher).share.mean == copy_verdict(teacher, teacher).share.low == 1.0
    json.dumps(verdict.to_json(), allow_nan=False)


def test_teacher_without_memory_measures_nothing(llama) -> None:
    for teacher in (Fake(), llama):
        losses = copy_losses(teacher, rows(), batch_size=20)
        verdict = copy_verdict(losses, losses)
        assert not verdict.measurable and verdict.share is None
        assert "not measurable with this teacher" in verdict.words
        json.dumps(verdict.to_json(), allow_nan=False)


def test_gain_that_random_tokens_give_without_copying_is_negligible() -> None:
    first = 11.4 + 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(0))
    drifting = CopyLosses(first=first, second=first - 0.15)  # significant, but what position alone can do
    assert Recall.of(drifting).gain.low > 0.1
    assert not copy_verdict(drifting, drifting).measurable


def natural(level: float, *, gain: float, spread: float = 0.1, seed: int = 0, num_rows: int = 40) -> TokenLosses:
    """Loss `level` up to position 8, and `gain` less from there on; noise of the same seed is shared."""
    noise = spread * torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(seed))
    position = torch.arange(16).expand(num_rows, -1)
    return TokenLosses(level + noise - gain * (position >= 8), position > 0, position)


def test_share_of_the_gain_beyond_the_window() -> None:
    verdict = far_context_verdict(
        natural(3.0, gain=0.2), natural(3.0, gain=0.15), natural(3.0, gain=0.0), window_size=8
    )
    assert verdict.measurable
    assert verdict.teacher_gain.mean == pytest.approx(0.2, abs=1e-5)
    assert verdict.share.mean == pytest.approx(0.75, abs=1e-5)
    assert "75%" in verdict.words
    json.dumps(verdict.to_json(), allow_nan=False)


def test_only_tokens_beyond_the_window_count() -> None:
    teacher, window_only = natural(3.0, gain=0.2), natural(3.0, gain=0.0)
    bad_within = replace(window_only, loss=window_only.loss + 5.0 * (window_only.position < 8))
    verdict = far_context_verdict(teacher, teacher, bad_within, window_size=8)
    assert verdict.teacher_gain.mean == pytest.approx(0.2, abs=1e-5) and verdict.share.mean == 1.0


def test_share_interval_covers_the_truth() -> None:
    covered = 0
    for seed in range(60):
        teacher, student, window_only = (
            natural(3.0, gain=gain, spread=0.5, seed=3 * seed + i) for i, gain in enumerate((0.4, 0.2, 0.0))
        )
        share = far_context_verdict(teacher, student, window_only, 8, samples=300).share
        covered += share.low <= 0.5 <= share.high
    assert 52 <= covered <= 60


@pytest.mark.parametrize("gain", [0.0, -0.2])
def test_teacher_that_far_context_does_not_help_measures_nothing(gain) -> None:
    verdict = far_context_verdict(
        natural(3.0, gain=gain, seed=1), natural(3.0, gain=0.0, seed=2), natural(3.0, gain=0.0, seed=3), 8
    )
    assert not verdict.measurable and verdict.share is None
    assert "not measurable with this teacher" in verdict.words


def test_text_without_far_context_measures_nothing() -> None:
    losses = natural(3.0, gain=0.0)
    verdict = far_context_verdict(losses, losses, losses, window_size=16)
    assert not verdict.measurable and verdict.teacher_gain is None
    assert "not measurable on this text" in verdict.words


def test_other_rows_are_refused() -> None:
    losses = natural(3.0, gain=0.1)
    with pytest.raises(ValueError, match="same rows"):
        far_context_verdict(losses, losses, natural(3.0, gain=0.0, num_rows=41), 8)
