from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from linearize.evaluation.copying import Copying, copy_losses
from linearize.evaluation.intervals import Totals
from linearize.evaluation.perplexity import TokenLosses
from linearize.evaluation.shares import KeptGain, kept_copying, kept_far_context
from tests.evaluation.fakes import Fake
from tests.evaluation.test_retrieval import repeats

pytestmark = pytest.mark.usefixtures("few")


def test_the_share_of_the_teachers_copying() -> None:
    made = repeats()
    teacher = copy_losses(Fake(distance=24, scale=30.0), made, batch_size=20)
    student = copy_losses(Fake(distance=24, scale=2.0), made, batch_size=20)
    expected = 1 - math.log(1 + 49 * math.exp(-2.0)) / math.log(50)
    assert kept_copying(teacher, student).share.mean == pytest.approx(expected, abs=1e-4)
    itself = kept_copying(teacher, teacher)
    assert itself.share.mean == itself.share.low == 1.0
    assert itself.teacher_gain == itself.student_gain == Copying.of(teacher).gain


def test_teacher_without_memory_measures_nothing(llama) -> None:
    for teacher in (Fake(), llama):
        losses = copy_losses(teacher, repeats(), batch_size=20)
        assert kept_copying(losses, losses).share is None


def test_gain_that_random_tokens_give_without_copying_is_negligible() -> None:
    first = 11.4 + 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(0))
    one = torch.ones_like(first)
    drifting = [Totals(first, one), Totals(first - 0.15, one)]  # significant, but what position alone can do
    assert Copying.of(drifting).gain.low > 0.1
    assert kept_copying(drifting, drifting).share is None


def natural(level: float, *, gain: float, spread: float = 0.1, seed: int = 0, num_rows: int = 40) -> TokenLosses:
    """Loss `level` up to position 8, and `gain` less from there on; noise of the same seed is shared."""
    noise = spread * torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(seed))
    position = torch.arange(16).expand(num_rows, -1)
    document = torch.arange(num_rows)[:, None].expand(-1, 16)
    return TokenLosses(level + noise - gain * (position >= 8), position > 0, position, document)


def kept(teacher: TokenLosses, student: TokenLosses, window: TokenLosses, reach: int = 8, **options) -> KeptGain | None:
    return kept_far_context({"teacher": teacher, "student": student, "window": window}, reach, **options)


def test_share_of_the_gain_beyond_the_window() -> None:
    found = kept(natural(3.0, gain=0.2), natural(3.0, gain=0.15), natural(3.0, gain=0.0))
    assert found.teacher_gain.mean == pytest.approx(0.2, abs=1e-5)
    assert found.student_gain.mean == pytest.approx(0.15, abs=1e-5)
    assert found.share.mean == pytest.approx(0.75, abs=1e-5)


def test_a_window_that_was_finetuned_alike_keeps_nothing_of_the_teachers_gain() -> None:
    """Finetuning makes everyone 0.3 nats better; what it gives is no context kept."""
    untrained = {"teacher": natural(3.0, gain=0.2), "window": natural(3.0, gain=0.0)}
    tuned = {"teacher_finetuned": natural(2.7, gain=0.3), "window_finetuned": natural(2.7, gain=0.0)}
    found = kept_far_context(untrained | tuned | {"student": tuned["window_finetuned"]}, 8)
    assert found.against == ("window_finetuned", "teacher_finetuned")
    assert (found.share.low, found.share.mean, found.share.high) == (0, 0, 0)
    assert found.teacher_gain.mean == pytest.approx(0.3, abs=1e-5)
    own = kept_far_context(untrained | tuned | {"student": tuned["teacher_finetuned"]}, 8)
    assert own.share.low == own.share.mean == 1
    half = untrained | tuned | {"student": natural(2.7, gain=0.15, seed=1)}
    assert 0 < kept_far_context(half, 8).share.low < 0.5 < kept_far_context(half, 8).share.high < 1


def test_the_best_reference_that_was_measured_is_taken_and_named() -> None:
    losses = {"teacher": natural(2.7, gain=0.2), "window": natural(3.0, gain=0.0), "student": natural(2.7, gain=0.1)}
    assert kept_far_context(losses, 8).against == ("window", "teacher")
    # The teacher's outputs alone were learned: it is what finetuning would make of it.
    found = kept_far_context(losses | {"window_finetuned": natural(2.7, gain=0.0)}, 8)
    assert found.against == ("window_finetuned", "teacher") and found.share.mean == pytest.approx(0.5, abs=1e-5)


def test_only_tokens_beyond_the_window_count() -> None:
    teacher, window_only = natural(3.0, gain=0.2), natural(3.0, gain=0.0)
    bad_within = replace(window_only, loss=window_only.loss + 5.0 * (window_only.position < 8))
    found = kept(teacher, teacher, bad_within)
    assert found.teacher_gain.mean == pytest.approx(0.2, abs=1e-5) and found.share.mean == 1.0


def test_share_interval_covers_the_truth() -> None:
    covered = 0
    for seed in range(60):
        models = (natural(3.0, gain=gain, spread=0.5, seed=3 * seed + i) for i, gain in enumerate((0.4, 0.2, 0.0)))
        share = kept(*models, samples=300).share
        covered += share.low <= 0.5 <= share.high
    assert 52 <= covered <= 60


@pytest.mark.parametrize("gain", [0.0, -0.2])
def test_teacher_that_far_context_does_not_help_measures_nothing(gain) -> None:
    models = (natural(3.0, gain=gain, seed=1), natural(3.0, gain=0.0, seed=2), natural(3.0, gain=0.0, seed=3))
    found = kept(*models)
    assert found.share is None and found.teacher_gain.low <= 0


def test_text_without_far_context_measures_nothing_and_other_rows_are_refused() -> None:
    losses = natural(3.0, gain=0.1)
    assert kept(losses, losses, losses, reach=16) is None
    assert kept_far_context({"teacher": losses, "student": losses}, 8) is None
    with pytest.raises(ValueError, match="same rows"):
        kept(losses, losses, natural(3.0, gain=0.0, num_rows=41))
