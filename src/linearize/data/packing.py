"""Turn text into packed rows: documents are tokenised, split in three, concatenated and cut into rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int64
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from linearize.base import Log, UserError
from linearize.configs.data import DataConfig
from linearize.data.repeats import ordinary_tokens, with_repeats
from linearize.data.rows import IGNORED, PackedRows, Rows
from linearize.data.sources import LocatedRow, on_disk, read_rows
from linearize.data.splits import (
    ENOUGH,
    connected,
    copies,
    require_enough,
    require_enough_of,
    shuffled,
    split,
    validation_and_test,
    without,
)
from linearize.data.templates import PIECE, TokenDocument, encoder_for

Batch = TypeVar("Batch")

_BATCH = 64  # rows per tokenizer call: enough for its threads, without using much memory
_CHARACTERS = 8  # characters per token of `max_tokens` in one tokenizer call


@dataclass(frozen=True)
class Dataset:
    """Rows in three parts, and the number of documents or examples in each.

    Attributes:
        validation: held-out rows for choosing checkpoints, schedules and early stopping.
        test: held-out rows that are measured only at the end.
        test_documents: documents of the test before packing, if there are any.
    """

    train: Rows
    validation: Rows
    test: Rows
    documents: tuple[int, int, int]
    test_documents: tuple[TokenDocument, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.train, self.validation, self.test)


def fingerprint(*parts: Rows) -> str:
    """Return the sha256 of the contents of these rows."""
    digest = hashlib.sha256()
    for tensor in (tensor for part in parts for tensor in part.tensors()):
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


Score = Callable[[PackedRows], Float[Tensor, " N"]]
"""A score of each row by which training rows are selected; `linearize.data.selection` has one."""


def build_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, score: Score | None = None
) -> Dataset:
    """Read, tokenise, split and pack `config.dataset`.

    `config.validation_fraction` of the documents is held out (the papers hold out the first 200 rows of Alpaca; a
    fraction suits all sizes). Exact duplicates stay in one part, and so do the documents of one conversation, and
    conversations with a common document. A source of one document, repeated or not, is cut: the last
    `validation_fraction` of its tokens is held out, and each of its rows counts as a document.

    A `validation_dataset` is held out instead, and training documents that are also in it are left out, with the rest
    of their conversations. It is read whole from disk; from the hub, without the subset of `dataset`, as far as
    `validation_rows` needs it. `splits.validation_and_test` divides held-out documents into those that choose
    checkpoints and the test; test rows are taken evenly from all of its documents.

    Args:
        score: the `config.select_rows_by_esl` training rows with the largest score are kept; held-out rows all are.

    Raises:
        UserError: nothing to read, unreadable or malformed data, a missing column, too few tokens for a row, too few
            test documents, or `config.select_rows_by_esl` with too few rows or without a score.
    """
    documents = _read(config, tokenizer, "data.dataset")
    if config.validation_dataset is None:
        train, held_out = _split(documents, config)
    else:
        name = config.validation_dataset
        used = 4 * config.validation_rows * config.sequence_length  # a quarter of them chooses checkpoints
        limits = {"max_documents": None, "max_tokens": None if on_disk(name) else used}
        source = config.model_copy(update={"dataset": name, "subset": None, **limits})
        held_out = _read(source, tokenizer, "data.validation_dataset", least=2 * ENOUGH)
        train = _without(documents, held_out)
    return _dataset(train, held_out, config, tokenizer, seed, score)


def dataset_from_documents(
    train_texts: Iterable[str],
    held_out_texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    seed: int,
) -> Dataset:
    """Tokenise and pack plain texts that are split already; training documents that are also held out are left out.

    `config.max_documents` and `max_tokens` limit the training texts.

    Raises:
        UserError: too few tokens for a row, too few documents to test on, or `config.select_rows_by_esl`, for which
            there is no score here.
    """

    def tokenised(texts: Iterable[str], max_tokens: int | None) -> list[TokenDocument]:
        as_text = config.model_copy(update={"format": "text", "max_tokens": max_tokens})
        rows = ((f"text {number}", {as_text.text_column: text}) for number, text in enumerate(texts, 1))
        return list(_tokenised(rows, tokenizer, as_text))

    held_out = tokenised(held_out_texts, None)
    train = _without(tokenised(islice(train_texts, config.max_documents), config.max_tokens), held_out)
    return _dataset(train, held_out, config, tokenizer, seed, None)


def first_tokens(config: DataConfig, tokenizer: PreTrainedTokenizerBase, count: int) -> Int64[Tensor, " T"]:
    """Return the first `count` tokens of `config.dataset`, or all if there are fewer; no more documents are read.

    Raises:
        UserError: nothing to read, unreadable or malformed data, or a missing column.
    """
    source = config.model_copy(update={"max_tokens": count})
    return torch.cat([document.input_ids for document in _read(source, tokenizer, "data.dataset")])[:count]


def pack(documents: Iterable[TokenDocument], sequence_length: int) -> PackedRows:
    """Concatenate the documents and cut them into rows; remaining tokens that do not fill a row are dropped."""
    documents = [document for document in documents if len(document)]
    ends = torch.tensor([0, *map(len, documents)]).cumsum(0)[1:]
    num_rows = sum(map(len, documents)) // sequence_length
    shape = (num_rows, sequence_length)

    def cut(pieces: Iterable[Tensor]) -> Int64[Tensor, "N L"]:
        # torch.cat needs a tensor if there are no documents.
        return torch.cat([torch.empty(0, dtype=torch.int64), *pieces])[: num_rows * sequence_length].view(shape)

    positions = cut(torch.arange(len(document)) for document in documents)
    # If a document continues in another row, its positions restart at 0 there.
    positions = torch.minimum(positions, torch.arange(sequence_length))
    labels = cut(document.labels for document in documents)
    return PackedRows(
        input_ids=cut(document.input_ids for document in documents),
        position_ids=positions,
        labels=labels.masked_fill(positions == 0, IGNORED),
        first_document=torch.searchsorted(ends, torch.arange(num_rows) * sequence_length, right=True),
    )


def _dataset(
    train: list[TokenDocument],
    held_out: list[TokenDocument],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    score: Score | None,
) -> Dataset:
    wanted = config.validation_rows * config.sequence_length
    sources = _by_row(held_out)
    rows = [*_by_row(train), *sources]
    key, what = _key(rows), "documents"
    if len(rows) < len(train) + len(held_out):
        # Conversations that have documents in common go to the same part together, as one.
        sources, what = [_flat(group) for group in copies(sources, key).values()], "conversations"
    parts = validation_and_test(sources, key, size=lambda source: sum(map(len, source)), wanted=wanted)
    require_enough_of(parts[1], rows, key, what)
    validation, test = map(_flat, parts)
    train_rows = _rows(shuffled(train, f"train {seed}"), config, "training", "use more data")
    vocabulary = ordinary_tokens(len(tokenizer), tokenizer.all_special_ids)
    train_rows = with_repeats(_chosen(train_rows, config, score), config.repeated_span_fraction, vocabulary, seed=seed)
    validation_rows = _rows(validation, config, "held-out", "use more data, or hold out more of it")
    # The shortest first, so that short documents share rows with each other and not with long ones.
    shortest_first = sorted(test, key=len)
    test_rows = pack(shortest_first, config.sequence_length).spread(config.validation_rows)
    validation_rows = validation_rows.rows(slice(config.validation_rows))
    for name, part in (("training", train_rows), ("held-out", validation_rows), ("test", test_rows)):
        if not (part.labels != IGNORED).any():
            raise UserError(
                f"data: expected {name} tokens that carry a loss, found none in {part.num_tokens}; check that the "
                "rows have outputs or assistant turns, and set a longer data.sequence_length if their prompts fill it"
            )
    numbers = test_rows.documents[test_rows.labels != IGNORED].unique().tolist()
    shown = {id(shortest_first[number]) for number in numbers}
    found = sum(any(id(document) in shown for document in source) for source in parts[1])
    require_enough(found, f"{what} in {len(test_rows)} rows", "set a larger data.validation_rows, or use more data")
    sizes = len(train), len(validation), len(test)
    return Dataset(train_rows, validation_rows, test_rows, sizes, tuple(test))


def _rows(documents: list[TokenDocument], config: DataConfig, side: str, advice: str) -> PackedRows:
    packed = pack(documents, config.sequence_length)
    if not len(packed):
        found = sum(len(document) for document in documents)
        shorter = f"set data.sequence_length to {found} or less, or " if found > 1 else ""
        raise UserError(
            f"data: expected at least {config.sequence_length} {side} tokens (data.sequence_length, one row), "
            f"found {found} in {len(documents)} documents; {shorter}{advice}"
        )
    return packed


def _chosen(rows: PackedRows, config: DataConfig, score: Score | None) -> PackedRows:
    if config.select_rows_by_esl is None:
        return rows
    if score is None:
        raise UserError(
            f"data.select_rows_by_esl: expected a teacher to choose {config.select_rows_by_esl} rows by, found none; "
            "give a score, or set data.select_rows_by_esl=null"
        )
    if len(rows) < config.select_rows_by_esl:
        raise UserError(
            f"data.select_rows_by_esl: expected at least {config.select_rows_by_esl} training rows to choose "
            f"from, found {len(rows)}; "
            "use more data, or set a smaller data.select_rows_by_esl"
        )
    # A stable sort: rows of equal score are chosen in order.
    best = score(rows).argsort(descending=True, stable=True)[: config.select_rows_by_esl]
    return rows.rows(best.sort().values)


def _split(documents: list[TokenDocument], config: DataConfig) -> tuple[list[TokenDocument], list[TokenDocument]]:
    if len(copies(documents, _digest)) > 1:
        rows = _by_row(documents)
        key = _key(rows)
        if len(copies(rows, key)) == 1:
            raise UserError(
                f"data: expected several conversations, some of them to hold out, found {len(documents)} documents of "
                "one, or of several that have replies in common; use more data, or set data.validation_dataset"
            )
        train, held_out = split(rows, key, config.validation_fraction)
        return _flat(train), _flat(held_out)
    length = len(documents[0])
    cuts = [document.cut(length - max(1, round(config.validation_fraction * length))) for document in documents]
    rows, rest = [], cuts[0][1]
    while len(rest) >= config.sequence_length:
        row, rest = rest.cut(config.sequence_length)
        rows.append(row)
    require_enough(max(0, len(rows) - 1), "rows of the only document")  # one at least chooses checkpoints
    return [head for head, _ in cuts], rows


def _without(documents: list[TokenDocument], held_out: list[TokenDocument]) -> list[TokenDocument]:
    """Return the documents of those rows that share no document with held-out rows."""
    rows, excluded = _by_row(documents), _by_row(held_out)
    return _flat(without(rows, excluded, _key([*rows, *excluded])))


def _by_row(documents: Iterable[TokenDocument]) -> list[list[TokenDocument]]:
    """Group documents by their row, in order; a document without a row is a group of its own."""
    return list(copies(documents, lambda document: document.row or id(document)).values())


def _flat(rows: Iterable[list[TokenDocument]]) -> list[TokenDocument]:
    return list(chain.from_iterable(rows))


def _key(rows: Iterable[list[TokenDocument]]) -> Callable[[list[TokenDocument]], bytes]:
    """Return a key that is equal for rows which must be in the same part of a split."""
    return connected(rows, lambda row: map(_digest, row))


def _digest(document: TokenDocument) -> bytes:
    return hashlib.blake2b(document.input_ids.numpy().data, digest_size=16).digest()


def _read(source: DataConfig, tokenizer: PreTrainedTokenizerBase, field: str, least: int = 0) -> list[TokenDocument]:
    documents = list(_tokenised(islice(read_rows(source), source.max_documents), tokenizer, source, least))
    if not documents:
        shortest = source.min_document_tokens
        raise UserError(
            f"{field}: expected documents, found no text in {source.dataset!r}"
            if shortest == 1
            else f"{field}: expected documents of at least {shortest} tokens (data.min_document_tokens), found none in "
            f"{source.dataset!r}"
        )
    return documents


def _tokenised(
    rows: Iterator[LocatedRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig, least: int = 0
) -> Iterator[TokenDocument]:
    """Yield documents that are long enough, until they have `config.max_tokens` tokens and come from `least` rows.

    The last document stays whole, unless it has a long text (`encode_text`).
    """
    encode, tokens, found, last = None, 0, 0, None
    for batch in document_progress(_batches(rows, config.max_tokens), "tokenising"):
        encode = encode or encoder_for(batch[0][1].keys(), config)
        for document in encode(batch, tokenizer, config):
            if len(document) < config.min_document_tokens:
                continue
            yield document
            tokens += len(document)
            found += document.row is None or document.row != last
            last = document.row
            if config.max_tokens is not None and tokens >= config.max_tokens and found >= least:
                return


def _batches(rows: Iterator[LocatedRow], max_tokens: int | None) -> Iterator[list[LocatedRow]]:
    """Yield the rows in batches of at most `_BATCH` rows, and of about as much text as `max_tokens` need."""
    most = PIECE if max_tokens is None else min(PIECE, _CHARACTERS * max_tokens)
    batch: list[LocatedRow] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += _characters(row[1])
        if len(batch) == _BATCH or characters >= most:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _characters(value: Any) -> int:
    """Return the number of characters in a row, or a part of it."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, parts))


def document_progress(batches: Iterable[Batch], title: str, size: Callable[[Any], int] = len) -> Iterator[Batch]:
    """Yield the batches, and count their documents on standard error.

    The count is one line on a terminal, else a line from time to time.
    """
    console, log, count = Console(stderr=True), Log(), 0
    with console.status(title) if console.is_terminal else nullcontext() as status:
        for batch in batches:
            yield batch
            count += size(batch)
            line = f"{title}: {count:,} documents"
            log.say(line)
            if status is not None:
                status.update(line)
