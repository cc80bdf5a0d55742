"""Rows of contexts and their continuations, with which converted models and presses are compared.

A model reads a context in one call and the continuation in one more call, on the cache that the first call left
(`linearize.evaluation.continuation`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, progress
from linearize.data.rows import inference
from linearize.distributed import all_reduce_sum, shard_batches
from linearize.evaluation.continuation import CONTINUATION, Readings, draw_needle, hide_needle, score
from linearize.evaluation.retrieval import opening_tokens
from linearize.evaluation.speed import require_positions

CONTEXT = 1024  # tokens
TEXTS, NEEDLES = 16, 48  # rows: the fewest that an interval needs, and as many needles as make a narrow one


@dataclass(frozen=True)
class ContextRow:
    """Token ids of a context and its continuation; the continuation's last `scored` tokens are measured."""

    context: list[int]
    continuation: list[int]
    scored: int


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


def _require_tokens(available: int, needed: int, rows: str) -> None:
    if available < needed:
        raise UserError(
            f"held-out text: expected at least {needed:,} tokens for {rows}, found {available:,}; give a longer text"
        )


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
    loss, found = all_reduce_sum(loss), all_reduce_sum(found)
    if bad := int((~loss.isfinite()).sum()):
        raise FloatingPointError(f"{title}: the loss of {bad} of {len(rows)} rows is not a finite number")
    return Readings(loss, found > 0)


def _read(model: nn.Module, row: ContextRow, device: torch.device) -> tuple[float, bool]:
    context, continuation = (torch.tensor([part], device=device) for part in (row.context, row.continuation))
    read = model(input_ids=context, use_cache=True, logits_to_keep=1)
    more = model(input_ids=continuation, past_key_values=read.past_key_values, use_cache=True)
    return score(read.logits[0, -1:], more.logits[0], continuation[0], row.scored)
