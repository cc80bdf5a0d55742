"""Loss per token, and its mean with an interval that says how much of the number is luck of the draw.

Axes: N rows (packed sequences), L tokens per row, B rows per forward pass, V vocabulary, C quantities measured on the
same rows, S bootstrap resamples. Losses are in nats per token; perplexity is e^loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from linearize.base import UserError
from linearize.data.packing import PackedRows
from linearize.data.rows import IGNORED, inference

_CHUNK_ELEMENTS = 2**24  # largest fp32 copy of logits at a time: 64 MiB


@dataclass(frozen=True)
class TokenLosses:
    """Entry [n, t] is about predicting token t of row n from the tokens before it. All on the CPU."""

    loss: Float[Tensor, "N L"]  # finite everywhere; counts only where the mask is True
    mask: Bool[Tensor, "N L"]
    position: Int[Tensor, "N L"]  # of token t in its document, 0-based

    def beyond(self, window_size: int) -> TokenLosses:
        """Only tokens whose query has keys beyond the window: the query that predicts position p stands at p - 1."""
        return TokenLosses(self.loss, self.mask & (self.position > window_size), self.position)

    def beyond_missing(self, window_size: int) -> str | None:
        """Why there is no interval beyond the window, or None where there is one."""
        rows = int(self.beyond(window_size).mask.any(dim=1).sum())
        reasons = {
            0: f"no token stands more than {window_size} tokens into its document",
            1: f"only one sequence has tokens more than {window_size} into a document, and an interval needs two",
        }
        return reasons.get(rows)

    def totals(self) -> Totals:
        return Totals(torch.where(self.mask, self.loss, 0).double().sum(dim=1), self.mask.sum(dim=1).double())


@dataclass(frozen=True)
class Totals:
    """One quantity over rows: its sum and how many tokens it sums over."""

    sum: Float[Tensor, " N"]
    count: Float[Tensor, " N"]


@dataclass(frozen=True)
class Interval:
    """A mean over tokens and its 95 % percentile bootstrap interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, mean: Float[Tensor, ""], draws: Float[Tensor, " S"]) -> Interval:
        low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
        return cls(mean.item(), low, high)


@dataclass(frozen=True)
class Quality:
    """Held-out loss over all tokens, and over those that stand beyond the window (None where `beyond_missing`)."""

    loss: Interval
    beyond: Interval | None
    tokens: int
    tokens_beyond: int
    beyond_missing: str | None

    @classmethod
    def of(cls, losses: TokenLosses, window_size: int, *, samples: int = 1000, seed: int = 0) -> Quality:
        beyond, missing = losses.beyond(window_size), losses.beyond_missing(window_size)
        return cls(
            loss=bootstrap(losses, samples=samples, seed=seed),
            beyond=None if missing else bootstrap(beyond, samples=samples, seed=seed),
            tokens=int(losses.mask.sum()),
            tokens_beyond=int(beyond.mask.sum()),
            beyond_missing=missing,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def token_losses(model: nn.Module, rows: PackedRows, *, batch_size: int, title: str = "loss") -> TokenLosses:
    """Cross-entropy of every predicted token, in fp32, `batch_size` rows per forward pass.

    Raises:
        FloatingPointError: a predicted token's loss is not a finite number.
    """
    batches = []
    console = Console(stderr=True)
    with inference(model) as device:
        splits = torch.arange(len(rows.input_ids)).split(batch_size)
        for index in track(splits, title, console=console, transient=True, disable=not console.is_terminal):
            input_ids, position_ids = rows.input_ids[index].to(device), rows.position_ids[index].to(device)
            # No attention mask: Hugging Face models then read the document boundaries off the positions.
            logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            batches.append(_cross_entropy(logits, rows.labels[index].to(device)).cpu())
    loss = torch.cat(batches)
    mask = (rows.labels != IGNORED).cpu()
    mask[:, 0] = False  # nothing stands before the first token
    if bad := int((~loss.isfinite()).sum()):
        raise FloatingPointError(f"{title}: the loss of {bad} of {int(mask.sum())} tokens is not a finite number")
    return TokenLosses(loss, mask, rows.position_ids.cpu())


def _cross_entropy(logits: Float[Tensor, "B L V"], labels: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """The loss at t is that of the logits at t - 1; 0 where there is no label. Chunked: logits may be in bf16."""
    loss = torch.zeros(labels.shape, device=labels.device)
    chunk = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    for row in range(len(logits)):
        for start in range(1, labels.shape[1], chunk):
            target = labels[row, start : start + chunk]
            predicted = logits[row, start - 1 : start - 1 + len(target)].float()
            loss[row, start : start + chunk] = F.cross_entropy(
                predicted, target, ignore_index=IGNORED, reduction="none"
            )
    return loss


def resample(
    columns: Sequence[Totals], *, samples: int = 1000, seed: int = 0
) -> tuple[Float[Tensor, " C"], Float[Tensor, "S C"]]:
    """Token-weighted means of each column, and the same under `samples` resamples of the rows, shared by all columns.

    Rows, not tokens, are drawn: tokens of one text are not independent of each other.

    Raises:
        UserError: fewer than two rows hold tokens of every column.
    """
    total, count = torch.stack([c.sum for c in columns]), torch.stack([c.count for c in columns])
    used = (count > 0).all(dim=0)
    total, count = total[:, used], count[:, used]
    num_rows = total.shape[1]
    if num_rows < 2:
        raise UserError(
            f"evaluation data: expected at least 2 sequences with predicted tokens, found {num_rows}; "
            "give more text, or use shorter sequences"
        )
    generator = torch.Generator().manual_seed(seed)
    draws = []
    for _ in range(samples):
        index = torch.randint(num_rows, (num_rows,), generator=generator)
        draws.append(total[:, index].sum(dim=1) / count[:, index].sum(dim=1))
    return total.sum(dim=1) / count.sum(dim=1), torch.stack(draws)


def bootstrap(losses: TokenLosses, *, samples: int = 1000, seed: int = 0) -> Interval:
    """Mean loss per token, with its interval over resampled rows."""
    mean, draws = resample([losses.totals()], samples=samples, seed=seed)
    return Interval.of(mean[0], draws[:, 0])


def paired_difference(a: TokenLosses, b: TokenLosses, *, samples: int = 1000, seed: int = 0) -> Interval:
    """Mean of a - b on the same tokens: far narrower than two intervals apart, for hard texts are hard for both."""
    require_same_tokens(a, b)
    mean, draws = resample([a.totals(), b.totals()], samples=samples, seed=seed)
    return Interval.of(mean[0] - mean[1], draws[:, 0] - draws[:, 1])


def require_same_tokens(*losses: TokenLosses) -> None:
    """Raises ValueError unless all were measured on the same tokens of the same rows."""
    first = losses[0]
    if not all(torch.equal(first.mask, x.mask) and torch.equal(first.position, x.position) for x in losses):
        raise ValueError("losses can only be compared where they were measured on the same rows")
