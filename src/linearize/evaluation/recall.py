"""How much a model gets out of context beyond the window, and how much of the teacher's gain a student keeps.

Two measures: copying (random tokens that come a second time, too far back for the window), and natural text (the
teacher against the same model confined to its window).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.base import UserError
from linearize.data.packing import PackedRows
from linearize.data.rows import IGNORED
from linearize.evaluation.perplexity import (
    Interval,
    TokenLosses,
    Totals,
    require_same_tokens,
    resample,
    token_losses,
)

# Random tokens get up to 0.15 nats easier with their place in the row although nothing is copied (measured on a small
# Llama), so a gain counts as copying only well above that.
NEGLIGIBLE_COPY_GAIN = 0.25


@dataclass(frozen=True)
class CopyRows(PackedRows):
    """Rows of `length` random tokens, random filler, and, `distance` after their start, the same tokens again.

    Only the copies have labels, without each copy's first token, which nothing announces.
    """

    length: int
    distance: int


@dataclass(frozen=True)
class CopyLosses:
    """Mean loss of each row over the first copy and over the second, in nats per token."""

    first: Float[Tensor, " N"]
    second: Float[Tensor, " N"]

    def columns(self) -> list[Totals]:
        return [Totals(x, torch.ones_like(x)) for x in (self.first, self.second)]


@dataclass(frozen=True)
class Recall:
    """One model's copying: loss on either copy, and gain = first - second."""

    first: Interval
    second: Interval
    gain: Interval

    @classmethod
    def of(cls, losses: CopyLosses, *, samples: int = 1000, seed: int = 0) -> Recall:
        mean, draws = resample(losses.columns(), samples=samples, seed=seed)
        first, second = Interval.of(mean[0], draws[:, 0]), Interval.of(mean[1], draws[:, 1])
        return cls(first, second, gain=Interval.of(mean[0] - mean[1], draws[:, 0] - draws[:, 1]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """The share of the teacher's gain that the student has too; no share where the teacher has no gain to share."""

    measurable: bool
    teacher_gain: Interval | None
    student_gain: Interval | None
    share: Interval | None
    words: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ordinary_tokens(vocab_size: int, special: Collection[int]) -> Int[Tensor, " V"]:
    """The token ids below `vocab_size` that are not special ones."""
    excluded = set(special)
    return torch.tensor([token for token in range(vocab_size) if token not in excluded])


def copy_rows(
    vocabulary: Int[Tensor, " V"],
    *,
    length: int,
    distance: int,
    rows: int,
    seed: int,
    window_size: int,
    max_positions: int,
) -> CopyRows:
    """`rows` independent rows of `distance` + `length` tokens drawn evenly from `vocabulary`.

    Raises:
        UserError: the copy would lie within the window, overlap itself, or not fit the model's positions.
    """
    if length < 2 or distance < length or distance <= window_size:
        raise UserError(
            f"recall: expected a length of at least 2 and a distance beyond both the length and the window of "
            f"{window_size}; found length {length} and distance {distance}; choose a longer distance"
        )
    if distance + length > max_positions:
        raise UserError(
            f"recall: expected distance + length to fit the model's {max_positions} positions; "
            f"found {distance} + {length}; choose a shorter distance, length or window"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = vocabulary.cpu()[torch.randint(len(vocabulary), (rows, distance), generator=generator)]
    input_ids = torch.cat([drawn, drawn[:, :length]], dim=1)
    labels = input_ids.clone()
    labels[:, length : distance + 1] = IGNORED
    labels[:, 0] = IGNORED
    position_ids = torch.arange(distance + length).expand(rows, -1).contiguous()
    return CopyRows(input_ids, position_ids, labels, length, distance)


def copy_losses(model: nn.Module, rows: CopyRows, *, batch_size: int) -> CopyLosses:
    """Run the model over the rows; `Recall.of` and `copy_verdict` make sense of the result."""
    loss = token_losses(model, rows, batch_size=batch_size, title="recall").loss.double()
    start = rows.distance + 1
    return CopyLosses(first=loss[:, 1 : rows.length].mean(dim=1), second=loss[:, start:].mean(dim=1))


def copy_verdict(teacher: CopyLosses, student: CopyLosses, *, samples: int = 1000, seed: int = 0) -> Verdict:
    """Share of the teacher's copying gain that the student has; both measured on the same rows."""
    mean, draws = resample([*teacher.columns(), *student.columns()], samples=samples, seed=seed)
    gains, gain_draws = mean[0::2] - mean[1::2], draws[:, 0::2] - draws[:, 1::2]
    return _verdict(gains, gain_draws, NEGLIGIBLE_COPY_GAIN, "repeating random tokens seen beyond the window")


def far_context_verdict(
    teacher: TokenLosses,
    student: TokenLosses,
    window_only: TokenLosses,
    window_size: int,
    *,
    samples: int = 1000,
    seed: int = 0,
) -> Verdict:
    """Natural text: (window_only - student) / (window_only - teacher), over the tokens beyond the window.

    `window_only` is the teacher with its attention cut off at the window, all three measured on the same rows.
    """
    require_same_tokens(teacher, student, window_only)
    if missing := teacher.beyond_missing(window_size):
        return Verdict(False, None, None, None, f"not measurable on this text: {missing}")
    columns = [losses.beyond(window_size).totals() for losses in (teacher, student, window_only)]
    mean, draws = resample(columns, samples=samples, seed=seed)
    return _verdict(mean[2] - mean[:2], draws[:, 2:] - draws[:, :2], 0.0, "context beyond the window")


def _verdict(gains: Float[Tensor, " C"], draws: Float[Tensor, "S C"], negligible: float, source: str) -> Verdict:
    """Gains of (teacher, student) from `source`; the teacher's has to be above `negligible` for sure."""
    teacher, student = Interval.of(gains[0], draws[:, 0]), Interval.of(gains[1], draws[:, 1])
    gained = f"{source} gains it {teacher.mean:.3f} [{teacher.low:.3f}, {teacher.high:.3f}] nats per token"
    if teacher.low <= negligible:
        return Verdict(False, teacher, student, None, f"not measurable with this teacher: {gained}")
    share = Interval.of(gains[1] / gains[0], draws[:, 1] / draws[:, 0])
    words = (
        f"the student has {share.mean:.0%} [{share.low:.0%}, {share.high:.0%}] of the teacher's gain; "
        f"for the teacher, {gained}"
    )
    return Verdict(True, teacher, student, share, words)
