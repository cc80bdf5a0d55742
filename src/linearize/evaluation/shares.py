"""Compute the share of the teacher's gain from far context that a student retains, on text and in copying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from linearize.evaluation.candidates import REFERENCES
from linearize.evaluation.intervals import Interval, Totals, resample
from linearize.evaluation.perplexity import TokenLosses, require_same_tokens

# The loss of random tokens decreases by up to 0.15 nats along a row without any copying (measured on a small Llama), so
# only a gain well above that counts as copying.
NEGLIGIBLE_COPY_GAIN = 0.25


@dataclass(frozen=True)
class KeptGain:
    """The gains of teacher and student in nats per token, and the student's gain divided by the teacher's.

    Attributes:
        share: None: the interval of the teacher's gain includes a negligible gain.
        against: the pair of `REFERENCES` from which gains are measured; None for copying, which needs no reference.
    """

    teacher_gain: Interval
    student_gain: Interval
    share: Interval | None
    against: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.against is not None and self.against not in REFERENCES:
            raise ValueError(f"against: expected one of {REFERENCES}, found {self.against}")


def kept_copying(
    teacher: Sequence[Totals], student: Sequence[Totals], *, samples: int = 1000, seed: int = 0
) -> KeptGain:
    """Return the gains in copying: the loss on the first copy minus that on the second (`copy_losses`)."""
    mean, draws = resample([*teacher, *student], samples=samples, seed=seed)
    return _kept(mean[0::2] - mean[1::2], draws[:, 0::2] - draws[:, 1::2], NEGLIGIBLE_COPY_GAIN)


def kept_far_context(
    losses: Mapping[str, TokenLosses], window_size: int, *, samples: int = 1000, seed: int = 0
) -> KeptGain | None:
    """Return the share (window - student) / (window - teacher) of losses beyond the window, by the first `REFERENCES`.

    None: none of them was measured, or the text has too few tokens beyond the window.

    Raises:
        ValueError: the models were not measured on the same tokens.
    """
    against = next((pair for pair in REFERENCES if losses.keys() >= set(pair)), None)
    if against is None or losses["student"].beyond_missing(window_size):
        return None
    window, teacher = against
    chosen = [losses[name] for name in (teacher, "student", window)]
    require_same_tokens(*chosen)
    mean, draws = resample([x.beyond(window_size).totals() for x in chosen], samples=samples, seed=seed)
    return replace(_kept(mean[2] - mean[:2], draws[:, 2:] - draws[:, :2], 0.0), against=against)


def _kept(gains: Float[Tensor, " 2"], draws: Float[Tensor, "S 2"], negligible: float) -> KeptGain:
    """Return the result from the gains of (teacher, student), and their gains in resamples."""
    teacher, student = Interval.of(gains[0], draws[:, 0]), Interval.of(gains[1], draws[:, 1])
    measurable = teacher.low > negligible
    share = Interval.of(gains[1] / gains[0], draws[:, 1] / draws[:, 0]) if measurable else None
    return KeptGain(teacher, student, share)
