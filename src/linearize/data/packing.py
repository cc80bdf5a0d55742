"""Text in, packed rows out: documents are tokenised, split into train and held out, concatenated and cut into rows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from linearize.base import UserError
from linearize.data.config import DataConfig
from linearize.data.rows import IGNORED, Indices, Rows
from linearize.data.sources import Row, on_disk, read_rows
from linearize.data.splits import copies, shuffled, split, without
from linearize.data.templates import TokenDocument, encoder_for

_BATCH = 64  # documents per tokenizer call: enough for its threads, little enough for its memory
_QUIET_SECONDS = 2.0


@dataclass(frozen=True)
class PackedRows:
    """N rows of L tokens: whole documents and parts of documents, one after the other, without padding.

    `position_ids` restart at 0 at every document start and at every row start. `labels` hold the token at the same
    place (the model shifts them); they are -100 where there is no loss, and wherever `position_ids` is 0, so that no
    prediction crosses from one document into the next.
    """

    input_ids: Int64[Tensor, "N L"]
    position_ids: Int64[Tensor, "N L"]
    labels: Int64[Tensor, "N L"]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def target_counts(self) -> Int64[Tensor, " N"]:
        return self._predicted.sum(1)

    @property
    def _predicted(self) -> Bool[Tensor, "N _"]:
        return self.labels[:, 1:] != IGNORED

    def rows(self, indices: Indices) -> PackedRows:
        return PackedRows(self.input_ids[indices], self.position_ids[indices], self.labels[indices])

    def inputs(self) -> dict[str, Any]:
        """Without a mask, the positions tell documents apart; with a cache, they would not."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.input_ids, self.position_ids, self.labels)

    def compared(self, outputs: Any) -> Float[Tensor, "P V"]:
        """The logits at t - 1 of every token t that has a label."""
        return outputs.logits[:, :-1][self._predicted.to(outputs.logits.device)]

    def targets(self) -> Int64[Tensor, " P"]:
        return self.labels[:, 1:][self._predicted]


@dataclass(frozen=True)
class Dataset:
    """Rows to train on and rows held out, the sha256 of what is in them, and the number of documents on each side.

    `held_out` are the held-out documents as they are before packing, where there are any.
    """

    train: Rows
    validation: Rows
    fingerprint: str
    documents: tuple[int, int]
    held_out: tuple[TokenDocument, ...] = ()


Score = Callable[[Sequence[TokenDocument]], Float[Tensor, " N"]]
"""How worthwhile each document is to train on; `linearize.data.selection` has one."""


def build_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, score: Score | None = None
) -> Dataset:
    """Read, tokenise, split and pack `config.dataset`.

    `config.validation_fraction` of the documents is held out, whatever the format (the papers hold out the first 200
    rows of Alpaca; a fraction serves any size). Exact duplicates fall on the same side. A source that is one document,
    repeated or not, is cut: the last `validation_fraction` of its tokens is held out. With a `validation_dataset`, that
    is held out instead, and training documents that are also in it are left out. It is read whole from disk; from the
    hub, without the subset of `dataset`, as far as `validation_rows` need it.

    Args:
        score: of the training documents, the `config.top_esl` with the largest score are kept; held-out ones all are.

    Raises:
        UserError: nothing to read, unreadable or malformed data, a missing column, too few tokens for a row, too few
            documents to choose from, or nothing to choose by.
    """
    documents = _read(config, tokenizer, "data.dataset")
    if config.validation_dataset is None:
        train, validation = _split(documents, config.validation_fraction, seed)
    else:
        validation = _read(_held_out_source(config, config.validation_dataset), tokenizer, "data.validation_dataset")
        train = without(documents, validation, _digest)
    return _dataset(_chosen(train, config, score), validation, config, seed)


def dataset_from_documents(
    train_texts: Iterable[str],
    validation_texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    seed: int,
) -> Dataset:
    """Tokenise and pack plain texts whose split is given; training documents that are also held out are left out.

    `config.max_documents` and `max_tokens` limit the training texts.

    Raises:
        UserError: too few tokens for a row, or `config.top_esl`, for which there is no score here.
    """

    def tokenised(texts: Iterable[str], max_tokens: int | None) -> list[TokenDocument]:
        as_text = config.model_copy(update={"format": "text", "max_tokens": max_tokens})
        return list(_tokenised(({as_text.text_column: text} for text in texts), tokenizer, as_text))

    validation = tokenised(validation_texts, None)
    train = without(tokenised(islice(train_texts, config.max_documents), config.max_tokens), validation, _digest)
    return _dataset(_chosen(train, config, None), validation, config, seed)


def pack(documents: Iterable[TokenDocument], sequence_length: int) -> PackedRows:
    """Concatenate the documents and cut them into rows; the tail that does not fill a row is dropped."""
    documents = list(documents)
    num_rows = sum(len(document) for document in documents) // sequence_length
    shape = (num_rows, sequence_length)

    def cut(pieces: Iterable[Tensor]) -> Int64[Tensor, "N L"]:
        # The empty piece is there for an empty list of documents.
        return torch.cat([torch.empty(0, dtype=torch.int64), *pieces])[: num_rows * sequence_length].view(shape)

    positions = cut(torch.arange(len(document)) for document in documents)
    # Where a document runs on into another row, the column within that row is the smaller of the two.
    positions = torch.minimum(positions, torch.arange(sequence_length))
    labels = cut(document.labels for document in documents)
    return PackedRows(
        input_ids=cut(document.input_ids for document in documents),
        position_ids=positions,
        labels=labels.masked_fill(positions == 0, IGNORED),
    )


def _dataset(train: list[TokenDocument], validation: list[TokenDocument], config: DataConfig, seed: int) -> Dataset:
    train_rows = _rows(shuffled(train, f"train {seed}"), config, "training", "use more data")
    validation = shuffled(validation, f"validation {seed}")
    validation_rows = _rows(validation, config, "held-out", "use more data, or hold out more of it").rows(
        slice(config.validation_rows)
    )
    digest = hashlib.sha256()
    for side, packed in (("training", train_rows), ("held-out", validation_rows)):
        if not (packed.labels != IGNORED).any():
            raise UserError(
                f"data: expected {side} tokens that carry a loss, found none in {packed.num_tokens}; check that the "
                "rows have outputs or assistant turns, and set a longer data.sequence_length if their prompts fill it"
            )
        digest.update(f"{tuple(packed.input_ids.shape)}".encode())
        digest.update(packed.input_ids.contiguous().numpy().data)
    return Dataset(train_rows, validation_rows, digest.hexdigest(), (len(train), len(validation)), tuple(validation))


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


def _chosen(train: list[TokenDocument], config: DataConfig, score: Score | None) -> list[TokenDocument]:
    if config.top_esl is None:
        return train
    if score is None:
        raise UserError(
            f"data.top_esl: expected a teacher to choose {config.top_esl} documents by, found none; "
            "give a score, or set data.top_esl=null"
        )
    if len(train) < config.top_esl:
        raise UserError(
            f"data.top_esl: expected at least {config.top_esl} training documents to choose from, found {len(train)}; "
            "use more data, or set a smaller data.top_esl"
        )
    # Stable: documents of the same score, such as copies, are chosen in their order.
    best = score(train).argsort(descending=True, stable=True)[: config.top_esl]
    return [train[index] for index in sorted(best.tolist())]


def _split(
    documents: list[TokenDocument], fraction: float, seed: int
) -> tuple[list[TokenDocument], list[TokenDocument]]:
    if len(copies(documents, _digest)) == 1:
        cuts = [document.cut(len(document) - max(1, round(fraction * len(document)))) for document in documents]
        return [head for head, _ in cuts], [tail for _, tail in cuts]
    return split(documents, _digest, fraction, seed)


def _digest(document: TokenDocument) -> bytes:
    return hashlib.blake2b(document.input_ids.numpy().data, digest_size=16).digest()


def _held_out_source(config: DataConfig, name: str) -> DataConfig:
    used = config.validation_rows * config.sequence_length
    limits = {"max_documents": None, "max_tokens": None if on_disk(name) else used}
    return config.model_copy(update={"dataset": name, "subset": None, **limits})


def _read(source: DataConfig, tokenizer: PreTrainedTokenizerBase, field: str) -> list[TokenDocument]:
    documents = list(_tokenised(islice(read_rows(source), source.max_documents), tokenizer, source))
    if not documents:
        shortest = source.min_document_tokens
        raise UserError(
            f"{field}: expected documents, found no text in {source.dataset!r}"
            if shortest == 1
            else f"{field}: expected documents of at least {shortest} tokens (data.min_document_tokens), found none in "
            f"{source.dataset!r}"
        )
    return documents


def _tokenised(rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Iterator[TokenDocument]:
    """Documents that are long enough, until there are `config.max_tokens` tokens of them; the last one stays whole."""
    numbered = enumerate(rows, 1)
    encode, tokens = None, 0
    with document_progress("tokenising") as advance:
        while batch := list(islice(numbered, _BATCH)):
            encode = encode or encoder_for(batch[0][1].keys(), config)
            for document in encode(batch, tokenizer, config):
                if len(document) < config.min_document_tokens:
                    continue
                yield document
                tokens += len(document)
                if config.max_tokens is not None and tokens >= config.max_tokens:
                    return
            advance(len(batch))


@contextmanager
def document_progress(title: str) -> Iterator[Callable[[int], None]]:
    """A count of documents on stderr, shown when the work goes on for longer than `_QUIET_SECONDS`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        SpinnerColumn(),
        TextColumn("{task.completed:,.0f} documents"),
        TimeElapsedColumn(),
    )
    progress = Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    )
    task = progress.add_task(title, total=None)
    begin = time.monotonic()

    def advance(documents: int) -> None:
        progress.advance(task, documents)
        if time.monotonic() - begin > _QUIET_SECONDS:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()
