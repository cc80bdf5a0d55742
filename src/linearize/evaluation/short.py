"""Measure a conversion in a few minutes: the loss of a continuation, needles, speed and memory.

The teacher and the student read the same contexts, each in one call. A student reads them in both ways: by streaming,
and in full (`config.prefill`). Each context has one needle (`evaluation.continuation`). From the state after the
context, one call reads the following text, and one the question for the needle. The models alternate, so that a slower
machine affects all of them. Losses are in nats per token.
"""

# The types of torch and transformers are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, progress
from linearize.data.rows import PackedRows, inference
from linearize.data.splits import ENOUGH
from linearize.distributed import all_reduce_sum, is_sharded, shard_batches
from linearize.evaluation.continuation import (
    CONTINUATION,
    Needle,
    Readings,
    draw_needle,
    hide_needle,
    loss_difference,
    score,
)
from linearize.evaluation.intervals import wilson
from linearize.evaluation.results import Reading, ShortEvaluation
from linearize.evaluation.retrieval import opening_tokens
from linearize.evaluation.speed import cache_bytes, now
from linearize.evaluation.timings import Spread
from linearize.hf.conversation import fork_state
from linearize.hf.prefill import FULL, STREAMING

ROWS = ENOUGH  # contexts
TIMED_ROWS, NEW_TOKENS = 4, 8  # contexts after which generation is timed, and tokens generated after each
LEAST = 16  # the least tokens of a context


@dataclass(frozen=True)
class Passage:
    """Token ids of a context and of the text that follows, and the needle that the context holds, if any."""

    context: list[int]
    text: list[int]
    needle: Needle | None


def passages(ids: Sequence[int], tokenizer: Tokenizer, *, context: int, max_positions: int, seed: int) -> list[Passage]:
    """Return `ROWS` passages that do not overlap, with a needle each, at depths evenly spread over `DEPTHS`.

    They are shorter than requested if the text or the model's positions require it. There is no needle if it would be
    more than half of a context.

    Args:
        ids: token ids of held-out text.
        context: tokens of a context, the token that opens a text (BOS) and the needle included.

    Raises:
        UserError: too little text, or too few positions.
    """
    length = min(context + CONTINUATION, len(ids) // ROWS, max_positions - NEW_TOKENS)
    size = min(context, length - min(CONTINUATION, length // 4))
    continuation = min(CONTINUATION, length - size)
    if size < LEAST:
        raise UserError(
            f"short evaluation: expected {ROWS} contexts of at least {LEAST} tokens, found {len(ids):,} tokens of "
            f"held-out text and {max_positions:,} positions; give more text"
        )
    draw, start = random.Random(f"short {seed}"), opening_tokens(tokenizer)
    made: list[Passage] = []
    for row, place in enumerate(sorted(draw.sample(range(len(ids) // length), ROWS))):
        text = list(ids[place * length : (place + 1) * length])
        needle = draw_needle(tokenizer, draw)
        asked = len(needle.question) + len(needle.answer)
        if 2 * len(needle.fact) > size or size + asked > max_positions:
            end = size - len(start)
            context_ids, needle = text[:end], None
        else:
            end = size - len(start) - len(needle.fact)
            context_ids = hide_needle(text[:end], needle, row, ROWS)
        made.append(Passage([*start, *context_ids], text[end : end + continuation], needle))
    return made


def measure_short(
    teacher: PreTrainedModel | None,
    student: PreTrainedModel,
    rows: PackedRows,
    tokenizer: Tokenizer,
    *,
    context: int,
    max_positions: int,
    samples: int,
    seed: int,
) -> ShortEvaluation:
    """Measure a student with both kinds of prefill, and its teacher.

    Several processes divide the passages, and all get the same losses; seconds and bytes are each process's own.

    Args:
        rows: packed held-out rows, read as one text.
        context: tokens of a context.
        samples: bootstrap resamples of the rows.

    Raises:
        FloatingPointError: a loss is not a finite number.
        UserError: too little text, or too few positions.
    """
    ids = rows.input_ids.flatten().tolist()
    made = passages(ids, tokenizer, context=context, max_positions=max_positions, seed=seed)
    readers: list[tuple[str, PreTrainedModel, str | None]] = []
    if teacher is not None:
        readers.append(("teacher", teacher, None))
    readers += [("student", student, STREAMING), ("student", student, FULL)]
    needles = sum(passage.needle is not None for passage in made)
    loss = torch.zeros(len(readers), len(made), dtype=torch.float64)
    answered = torch.zeros(len(readers), len(made), dtype=torch.float64)
    cache_sizes = [0] * len(readers)  # bytes
    prefills: list[list[float]] = [[] for _ in readers]
    decodes: list[list[float]] = [[] for _ in readers]
    turns = [(row, counts, turn) for row, counts in shard_batches(made) for turn in range(len(readers))]
    for place, (row, counts, turn) in enumerate(progress(turns, "short evaluation: teacher and student")):
        timed = place // len(readers) < TIMED_ROWS
        _, model, way = readers[turn]
        with reading(model, way):
            read = _read(model, made[row], new_tokens=NEW_TOKENS if timed else 0)
        prefills[turn].append(read.prefill_seconds)
        decodes[turn] += read.decode_seconds
        cache_sizes[turn] = read.cache_bytes
        if counts:
            loss[turn, row], answered[turn, row] = read.loss, read.answered
    loss, answered = all_reduce_sum(loss), all_reduce_sum(answered)
    if bad := int((~loss.isfinite()).sum()):
        raise FloatingPointError(f"short evaluation: {bad} of {loss.numel()} losses are not finite numbers")
    scores = [Readings(*pair) for pair in zip(loss, answered > 0, strict=True)]
    resampling: dict[str, int] = {"samples": samples, "seed": seed}
    divided = is_sharded(student)

    def result(turn: int) -> Reading:
        name, _, way = readers[turn]
        paired = None
        if teacher is not None and turn > 0:
            paired = loss_difference(scores[turn], scores[0], **resampling)
        share = wilson(int(scores[turn].found.sum()), needles) if needles else None
        # The first one warms up. Processes that divide weights wait for each other, so their times are not reported.
        prefill, decode = (None if divided else Spread.of(x[1:] or x) for x in (prefills[turn], decodes[turn]))
        mean = scores[turn].mean_loss(**resampling)
        return Reading(name, way, mean, paired, share, prefill, decode, cache_sizes[turn])

    return ShortEvaluation(
        context=len(made[0].context),
        continuation=len(made[0].text),
        rows=len(made),
        needles=needles,
        saved_prefill=student.config.prefill or STREAMING,
        readings=[result(turn) for turn in range(len(readers))],
    )


@contextmanager
def reading(model: PreTrainedModel, way: str | None) -> Generator[None, None, None]:
    """Set a student's `config.prefill` in the `with` block; None: change nothing."""
    config: Any = model.config
    if way is None:
        yield
        return
    before = config.prefill
    config.prefill = way
    try:
        yield
    finally:
        config.prefill = before


@dataclass(frozen=True)
class _Read:
    loss: float
    answered: bool
    prefill_seconds: float
    decode_seconds: list[float]
    cache_bytes: int


def _read(model: nn.Module, passage: Passage, *, new_tokens: int) -> _Read:
    """Read a passage, then generate `new_tokens` tokens greedily after its text."""
    forward: Any = model
    with inference(model) as device:
        context, text = (torch.tensor([part], device=device) for part in (passage.context, passage.text))
        start = now()
        read = forward(input_ids=context, use_cache=True, logits_to_keep=1)
        took = now() - start
        cache, context_logits = read.past_key_values, read.logits[0, -1:]
        cache_size = cache_bytes(cache)
        answered = False
        if (needle := passage.needle) is not None:
            asked = torch.tensor([[*needle.question, *needle.answer]], device=device)
            logits = forward(input_ids=asked, past_key_values=fork_state(cache), use_cache=True).logits[0]
            _, answered = score(context_logits, logits, asked[0], len(needle.answer))
        follows = forward(input_ids=text, past_key_values=cache, use_cache=True)
        loss, _ = score(context_logits, follows.logits[0], text[0], text.shape[1])
        token: Tensor = follows.logits[:, -1:].argmax(dim=-1)
        seconds: list[float] = []
        for _ in range(new_tokens):
            start = now()
            step = forward(input_ids=token, past_key_values=cache, use_cache=True)
            token = step.logits[:, -1:].argmax(dim=-1)
            seconds.append(now() - start)
    return _Read(loss, answered, took, seconds, cache_size)
