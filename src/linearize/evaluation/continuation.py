"""Measure what a model still knows of a context after reading it: the loss of its continuation, and needles.

A model reads a context in one call and the continuation in one more call, on the cache that the first call left. So the
continuation depends on the context through the cache alone, however the context was read and whatever the cache keeps.

A needle is a fact that is written into a context ("The secret number for copper is 48213."). Its continuation is the
question ("The secret number for copper is") and the answer. It counts as found if greedy decoding gives the answer:
each token of the answer is the most likely one, given the right ones before it.

Axes: N rows, C tokens of a continuation, V vocabulary. Losses are in nats per token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, progress
from linearize.data.rows import inference
from linearize.distributed import put_together, shard_batches
from linearize.evaluation.intervals import Interval, Totals, resample, wilson
from linearize.evaluation.retrieval import encode, opening_tokens, split_tokens
from linearize.evaluation.speed import require_positions

CONTEXT, CONTINUATION = 1024, 256  # tokens
TEXTS, NEEDLES = 16, 48  # rows: the fewest that an interval needs, and as many needles as make a narrow one
DEPTHS = (0.05, 0.95)  # of the first and the last needle, in shares of the context

FACT = "\nThe secret number for {} is"
THINGS = (
    *("copper", "silver", "gold", "iron", "zinc", "tin", "lead", "nickel", "cotton", "paper", "glass", "leather"),
    *("sugar", "coffee", "honey", "rice"),
)


@dataclass(frozen=True)
class ContextRow:
    """Token ids of a context and its continuation; the continuation's last `scored` tokens are measured."""

    context: list[int]
    continuation: list[int]
    scored: int


@dataclass(frozen=True)
class Readings:
    """Losses and hits of one model on N rows. On the CPU.

    Attributes:
        loss: mean cross-entropy of a row's scored tokens, computed in fp32.
        found: whether each of a row's scored tokens is the most likely one, given the right ones before it. In the
            short evaluation, the loss is of the text after a context, and `found` is of the answer to a question.
    """

    loss: Float[Tensor, " N"]
    found: Bool[Tensor, " N"]

    def mean_loss(self, *, samples: int = 1000, seed: int = 0) -> Interval:
        """Return the mean loss with its bootstrap interval over rows."""
        mean, draws = resample([_totals(self.loss)], samples=samples, seed=seed)
        return Interval.of(mean[0], draws[:, 0])

    def share_found(self) -> Interval:
        """Return the share of rows that are found, with its Wilson interval."""
        return wilson(int(self.found.sum()), len(self.found))


def loss_difference(a: Readings, b: Readings, *, samples: int = 1000, seed: int = 0) -> Interval:
    """Return the mean of a - b on the same rows, with its bootstrap interval over rows.

    It is far narrower than the two models' own intervals: hard texts are hard for both.

    Raises:
        ValueError: as many rows were not read by both.
        UserError: too few rows (`intervals.resamples`).
    """
    if len(a.loss) != len(b.loss):
        raise ValueError(f"expected two readings of the same rows, found {len(a.loss)} and {len(b.loss)} rows")
    mean, draws = resample([_totals(a.loss), _totals(b.loss)], samples=samples, seed=seed)
    return Interval.of(mean[0] - mean[1], draws[:, 0] - draws[:, 1])


def _totals(loss: Float[Tensor, " N"]) -> Totals:
    return Totals(loss.double(), torch.ones(len(loss), dtype=torch.float64))


# --- rows -------------------------------------------------------------------------------------------------------------


def text_rows(
    ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    rows: int = TEXTS,
    context: int = CONTEXT,
    continuation: int = CONTINUATION,
    seed: int = 0,
) -> list[ContextRow]:
    """Return rows of consecutive tokens, no two of which overlap, drawn from all of the text.

    Args:
        ids: token ids of held-out text, without special tokens.
        context: tokens of a context, the token that opens a text (BOS) included, where the tokenizer has one.

    Raises:
        UserError: the text is too short.
    """
    start = opening_tokens(tokenizer)
    length = context - len(start) + continuation
    _require_tokens(len(ids), rows * length, f"{rows} rows of {context} + {continuation} tokens")
    places = random.Random(f"text {seed}").sample(range(len(ids) // length), rows)
    parts = [[*start, *ids[place * length : (place + 1) * length]] for place in sorted(places)]
    return [ContextRow(part[:context], part[context:], continuation) for part in parts]


def needle_rows(
    ids: Sequence[int], tokenizer: Tokenizer, *, needles: int = NEEDLES, context: int = CONTEXT, seed: int = 0
) -> list[ContextRow]:
    """Return contexts with one fact each, at depths evenly spread over `DEPTHS`; the continuation asks for it.

    The depth is the share of the context's text that stands before the fact. The text around it is cut, so that all
    contexts are equally long.

    Args:
        ids: token ids of held-out text, without special tokens. Texts of different contexts may overlap.
        context: tokens of a context, the token that opens a text (BOS) and the fact included.

    Raises:
        UserError: the text is too short, or a fact does not fit the context.
    """
    source, start = random.Random(f"needles {seed}"), opening_tokens(tokenizer)
    made: list[ContextRow] = []
    for number in range(needles):
        needle = draw_needle(tokenizer, source)
        size = len(needle.fact)
        length = context - len(start) - size
        if length < size:
            raise UserError(
                f"needles: expected a context of at least {len(start) + 2 * size} tokens around a fact of "
                f"{size}, found {context}; choose a longer context"
            )
        _require_tokens(len(ids), length, f"contexts of {context} tokens")
        first = source.randrange(len(ids) - length + 1)
        text = hide_needle(ids[first : first + length], needle, number, needles)
        made.append(ContextRow([*start, *text], [*needle.question, *needle.answer], len(needle.answer)))
    return made


@dataclass(frozen=True)
class Needle:
    """Token ids of a fact, and of the question for it and the answer. The fact repeats both in one line of text."""

    fact: list[int]
    question: list[int]
    answer: list[int]


def draw_needle(tokenizer: Tokenizer, source: random.Random) -> Needle:
    """Return a needle about one of `THINGS` with a number of five digits."""
    question, answer = FACT.format(source.choice(THINGS)), f" {source.randrange(10_000, 100_000)}"
    return Needle(encode(tokenizer, f"{question}{answer}.\n"), *split_tokens(tokenizer, question, answer))


def hide_needle(text: Sequence[int], needle: Needle, number: int, needles: int) -> list[int]:
    """Return the text with the needle's fact in it, at the depth of needle `number` (from 0) of so many `needles`."""
    depth = DEPTHS[0] + (DEPTHS[1] - DEPTHS[0]) * number / max(needles - 1, 1)
    before = round(depth * len(text))
    return [*text[:before], *needle.fact, *text[before:]]


def _require_tokens(available: int, needed: int, rows: str) -> None:
    if available < needed:
        raise UserError(
            f"held-out text: expected at least {needed:,} tokens for {rows}, found {available:,}; give a longer text"
        )


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(model: nn.Module, rows: Sequence[ContextRow], *, title: str = "continuation") -> Readings:
    """Read each row's context in one call and its continuation in one more, on the first call's cache.

    Several processes share the rows, and all get the result.

    Args:
        model: any causal language model of transformers, which chooses its own cache.

    Raises:
        FloatingPointError: a scored token's loss is not a finite number.
        UserError: the model has learned positions, and too few for a row.
    """
    config: Any = model.config
    require_positions(title, config, max(len(row.context) + len(row.continuation) for row in rows))
    loss, found = (torch.zeros(len(rows), dtype=torch.float64) for _ in range(2))
    with inference(model) as device:
        for number, counts in progress(shard_batches(rows), title):
            row_loss, row_found = _read(model, rows[number], device)
            if counts:
                loss[number], found[number] = row_loss, row_found
    loss, found = put_together(loss), put_together(found)
    if bad := int((~loss.isfinite()).sum()):
        raise FloatingPointError(f"{title}: the loss of {bad} of {len(rows)} rows is not a finite number")
    return Readings(loss, found > 0)


def _read(model: nn.Module, row: ContextRow, device: torch.device) -> tuple[float, bool]:
    context, continuation = (torch.tensor([part], device=device) for part in (row.context, row.continuation))
    read = model(input_ids=context, use_cache=True, logits_to_keep=1)
    more = model(input_ids=continuation, past_key_values=read.past_key_values, use_cache=True)
    return score(read.logits[0, -1:], more.logits[0], continuation[0], row.scored)


def score(
    context_logits: Float[Tensor, "1 V"], logits: Float[Tensor, "C V"], continuation: Int64[Tensor, " C"], scored: int
) -> tuple[float, bool]:
    """Return the mean fp32 loss of a continuation's last tokens, and whether each of them is the most likely one.

    Args:
        context_logits: of the context's last token. They predict the first token of the continuation.
        logits: of the continuation's own tokens.
        scored: how many tokens count.
    """
    predicted = torch.cat([context_logits, logits[:-1]]).float()[-scored:]
    target = continuation[-scored:]
    return F.cross_entropy(predicted, target).item(), bool((predicted.argmax(dim=-1) == target).all())
