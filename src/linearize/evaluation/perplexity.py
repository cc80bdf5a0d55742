"""Compute the loss per token, its mean and its interval.

Axes: N rows (packed sequences), L tokens per row, B rows per forward pass, V vocabulary. Losses are in nats per token;
perplexity is e^loss.
"""

# The types of torch and transformers are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linearize.base import progress
from linearize.data.rows import IGNORED, PackedRows, inference, on_device
from linearize.data.splits import ENOUGH
from linearize.distributed import all_reduce_sum, shard_batches
from linearize.evaluation.intervals import Interval, Totals, intervals, paired_interval

_CHUNK_ELEMENTS = 2**24  # largest fp32 copy of logits at a time: 64 MiB


@dataclass(frozen=True)
class TokenLosses:
    """Losses by token: entry [n, t] is that of predicting token t of row n from the tokens before it. On the CPU."""

    loss: Float[Tensor, "N L"]  # finite everywhere; counts only where the mask is True
    mask: Bool[Tensor, "N L"]
    position: Int[Tensor, "N L"]  # of token t in its document, 0-based
    document: Int[Tensor, "N L"]  # number of token t's document, equal in all rows that the document spans

    def where(self, chosen: Bool[Tensor, "N L"]) -> TokenLosses:
        """Return the losses of the chosen tokens alone."""
        return replace(self, mask=self.mask & chosen)

    def beyond(self, window_size: int) -> TokenLosses:
        """Return losses of tokens whose query, at one position before, has keys beyond the window."""
        return self.where(self.position > window_size)

    def beyond_missing(self, window_size: int) -> str | None:
        """Return why there is no interval beyond the window; None: there is one."""
        found = self.beyond(window_size).documents
        if found >= ENOUGH:
            return None
        if not found:
            return f"no token stands more than {window_size} tokens into its document"
        return f"{found} documents have tokens more than {window_size} into them, and an interval needs {ENOUGH}"

    @property
    def documents(self) -> int:
        """Return the number of documents with a token that counts."""
        return len(self.document[self.mask].unique())

    def totals(self) -> Totals:
        return Totals.of(torch.where(self.mask, self.loss, 0), self.mask, self.document)


@dataclass(frozen=True)
class Quality:
    """Held-out loss over all tokens, and over those beyond the window (None if `beyond_missing`).

    Attributes:
        documents, documents_beyond: number of documents of the intervals; None: not counted.
    """

    loss: Interval
    beyond: Interval | None
    tokens: int
    tokens_beyond: int
    documents: int | None
    documents_beyond: int | None
    beyond_missing: str | None

    @classmethod
    def of(cls, losses: TokenLosses, window_size: int, *, samples: int = 1000, seed: int = 0) -> Quality:
        beyond, missing = losses.beyond(window_size), losses.beyond_missing(window_size)
        return cls(
            loss=bootstrap(losses, samples=samples, seed=seed),
            beyond=None if missing else bootstrap(beyond, samples=samples, seed=seed),
            tokens=int(losses.mask.sum()),
            tokens_beyond=int(beyond.mask.sum()),
            documents=losses.documents,
            documents_beyond=beyond.documents,
            beyond_missing=missing,
        )


def token_losses(model: nn.Module, rows: PackedRows, *, batch_size: int, title: str = "loss") -> TokenLosses:
    """Return the cross-entropy of every predicted token, in fp32, with `batch_size` rows per forward pass.

    Several processes divide the batches, and all get the result.

    Raises:
        FloatingPointError: a predicted token's loss is not a finite number.
    """
    loss = torch.zeros(rows.labels.shape)
    with inference(model) as device:
        splits = torch.arange(len(rows.input_ids)).split(batch_size)
        for number, counts in progress(shard_batches(splits), title):
            index = splits[number]
            logits = model(**on_device(rows.rows(index).inputs(), device)).logits
            if counts:
                loss[index] = _cross_entropy(logits, rows.labels[index].to(device)).cpu()
    loss = all_reduce_sum(loss)
    mask = (rows.labels != IGNORED).cpu()
    mask[:, 0] = False  # no token precedes the first
    if bad := int((~loss.isfinite()).sum()):
        raise FloatingPointError(f"{title}: the loss of {bad} of {int(mask.sum())} tokens is not a finite number")
    return TokenLosses(loss, mask, rows.position_ids.cpu(), rows.documents.cpu())


def _cross_entropy(logits: Float[Tensor, "B L V"], labels: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """Return losses, at t that of the logits at t - 1; 0 without a label. In chunks, which limit fp32 copies."""
    loss = torch.zeros(labels.shape, device=labels.device)
    chunk = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    for row in range(len(logits)):
        for start in range(1, labels.shape[1], chunk):
            target = labels[row, start : start + chunk]
            predicted = logits[row, start - 1 : start - 1 + len(target)].float()
            unreduced = F.cross_entropy(predicted, target, ignore_index=IGNORED, reduction="none")
            loss[row, start : start + chunk] = unreduced
    return loss


def bootstrap(losses: TokenLosses, *, samples: int = 1000, seed: int = 0) -> Interval:
    """Return the mean loss per token, with its interval over resampled documents."""
    return intervals([losses.totals()], samples=samples, seed=seed)[0]


def paired_difference(a: TokenLosses, b: TokenLosses, *, samples: int = 1000, seed: int = 0) -> Interval:
    """Return the mean of a - b on the same tokens, with its interval."""
    require_same_tokens(a, b)
    return paired_interval(a.totals(), b.totals(), samples=samples, seed=seed)


def require_same_tokens(*losses: TokenLosses) -> None:
    """Raise ValueError unless all were measured on the same tokens of the same rows."""
    first = losses[0]
    parts = ("mask", "position", "document")
    if not all(torch.equal(getattr(first, part), getattr(x, part)) for x in losses for part in parts):
        raise ValueError("losses can only be compared where they were measured on the same rows")
