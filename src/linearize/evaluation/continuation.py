"""Measure what a model still knows of a context after reading it: the loss of its continuation, and needles.

A model reads a context in one call and the continuation in another call, with the cache of the first. So the
continuation depends on the context through the cache alone.

A needle is a fact that is written into a context ("The secret number for copper is 48213."). Its continuation is the
question ("The secret number for copper is") and the answer. It counts as found if greedy decoding gives the answer:
each token of the answer is the most likely one, given the right ones before it.

Axes: N rows, C tokens of a continuation, V vocabulary. Losses are in nats per token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.evaluation.intervals import Interval, Totals, intervals, paired_interval
from linearize.evaluation.retrieval import encode, split_tokens

CONTINUATION = 256  # tokens
DEPTHS = (0.05, 0.95)  # of the first and the last needle, in shares of the context

FACT = "\nThe secret number for {} is"
THINGS = (
    *("copper", "silver", "gold", "iron", "zinc", "tin", "lead", "nickel", "cotton", "paper", "glass", "leather"),
    *("sugar", "coffee", "honey", "rice"),
)


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
        return intervals([Totals.of_each(self.loss)], samples=samples, seed=seed)[0]


def loss_difference(a: Readings, b: Readings, *, samples: int = 1000, seed: int = 0) -> Interval:
    """Return the mean of a - b on the same rows, with its bootstrap interval over rows.

    Raises:
        ValueError: their numbers of rows differ.
        UserError: too few rows (`intervals.resamples`).
    """
    if len(a.loss) != len(b.loss):
        raise ValueError(f"expected two readings of the same rows, found {len(a.loss)} and {len(b.loss)} rows")
    return paired_interval(Totals.of_each(a.loss), Totals.of_each(b.loss), samples=samples, seed=seed)


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
    """Return the text with the needle's fact in it, at the depth of needle `number` (from 0) of `needles` needles."""
    depth = DEPTHS[0] + (DEPTHS[1] - DEPTHS[0]) * number / max(needles - 1, 1)
    before = round(depth * len(text))
    return [*text[:before], *needle.fact, *text[before:]]


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
