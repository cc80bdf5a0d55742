"""Read texts with labels, and pad them to the longest of a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.configs.tasks import MaskedLanguageModelling, TextClassification, TextEmbedding, TokenClassification
from linearize.data.labels import Classes, as_number, cell, text_cell
from linearize.data.packing import Dataset, document_progress
from linearize.data.rows import IGNORED, Indices, Rows
from linearize.data.sources import LocatedRow, read_rows
from linearize.data.splits import require_enough_of, shuffled, split, validation_and_test, without

Item = TypeVar("Item")
_BATCH = 256  # texts per tokenizer call


@dataclass(frozen=True)
class Example:
    """One text, or pair of texts, as tokens; `segments` are token types, if the tokenizer has them."""

    input_ids: list[int]
    segments: list[int] | None
    label: Any  # a class, a number, a class per token, or None

    @property
    def key(self) -> bytes:
        """Return a digest of the input."""
        return hashlib.blake2b(torch.tensor(self.input_ids).numpy().data, digest_size=16).digest()


@dataclass(frozen=True)
class Texts:
    """N sequences, padded at the end to the longest of them.

    Without labels, as here, their hidden states are compared with the teacher's.

    Attributes:
        segments: token types, if the tokenizer has them.
        use_cache: False for decoders, which would fill a cache; None for models without such an argument.
    """

    input_ids: Int64[Tensor, "N L"]
    lengths: Int64[Tensor, " N"]
    segments: Int64[Tensor, "N L"] | None
    use_cache: bool | None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def mask(self) -> Bool[Tensor, "N L"]:
        """True for tokens, False for padding."""
        return torch.arange(self.input_ids.shape[1]) < self.lengths[:, None]

    def rows(self, indices: Indices) -> Texts:
        lengths = self.lengths[indices]
        longest = int(lengths.max()) if len(lengths) else 0
        cut = {
            name: x[indices][:, :longest]
            for name in ("input_ids", "segments")
            if (x := getattr(self, name)) is not None
        }
        return replace(self, lengths=lengths, **cut, **self._labels(indices, longest))

    def inputs(self) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "attention_mask": self.mask.long()}
        if self.segments is not None:
            inputs["token_type_ids"] = self.segments
        return inputs if self.use_cache is None else inputs | {"use_cache": self.use_cache}

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.input_ids, self.lengths)
        if self.segments is not None:
            yield self.segments
        if (targets := self.targets()) is not None:
            yield targets

    def _labels(self, indices: Indices, longest: int) -> dict[str, Tensor]:
        """Return the labels of these rows, as fields."""
        return {}

    def target_counts(self) -> Int64[Tensor, " N"]:
        return self.lengths

    def compared(self, outputs: Any) -> Float[Tensor, "M C"]:
        """Return the last hidden states of all tokens."""
        return outputs.last_hidden_state[self.mask.to(outputs.last_hidden_state.device)]

    def targets(self) -> Tensor | None:
        return None


@dataclass(frozen=True)
class ClassifiedTexts(Texts):
    """Texts with a label each: classes (int64), or numbers (float32)."""

    labels: Int64[Tensor, " N"] | Float[Tensor, " N"]

    def _labels(self, indices: Indices, longest: int) -> dict[str, Tensor]:
        return {"labels": self.labels[indices]}

    def target_counts(self) -> Int64[Tensor, " N"]:
        return torch.ones_like(self.lengths)

    def compared(self, outputs: Any) -> Float[Tensor, "N C"]:
        return outputs.logits

    def targets(self) -> Int64[Tensor, " N"] | Float[Tensor, " N"]:
        return self.labels


@dataclass(frozen=True)
class ClassifiedTokens(Texts):
    """Texts with the class of each token; -100 for none."""

    labels: Int64[Tensor, "N L"]

    def _labels(self, indices: Indices, longest: int) -> dict[str, Tensor]:
        return {"labels": self.labels[indices][:, :longest]}

    def target_counts(self) -> Int64[Tensor, " N"]:
        return (self.labels != IGNORED).sum(1)

    def compared(self, outputs: Any) -> Float[Tensor, "M C"]:
        return outputs.logits[(self.labels != IGNORED).to(outputs.logits.device)]

    def targets(self) -> Int64[Tensor, " M"]:
        return self.labels[self.labels != IGNORED]


def build_examples(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, classes: Classes, *, seed: int, use_cache: bool | None
) -> Dataset:
    """Read, tokenise and split the examples of `config.task`, cut to `config.sequence_length` tokens.

    The split is that of `packing.build_dataset`. At most `config.validation_rows` examples choose checkpoints, and at
    most as many are the test.

    Args:
        classes: of the model's head.
        use_cache: as in `Texts`.

    Raises:
        UserError: nothing to read, malformed rows, labels that the model has no class for, or no padding token.
    """
    pad: Any = tokenizer.pad_token_id
    if pad is None:
        raise UserError(
            "tokenizer: expected a padding token, which a batch of texts needs, found none; set the tokenizer's "
            "pad_token and the config's pad_token_id, and save both"
        )
    read = partial(_read, tokenizer=tokenizer, classes=classes)
    parts = split_examples(config, read, lambda example: example.key, seed)
    return examples_dataset(*(padded_texts(examples, pad, use_cache) for examples in parts))


def split_examples(
    config: DataConfig, read: Callable[[DataConfig], list[Item]], key: Callable[[Item], bytes], seed: int
) -> tuple[list[Item], list[Item], list[Item]]:
    """Return training, validation and test examples; training examples are shuffled by the seed.

    Raises:
        UserError: no training examples, or fewer test examples than an interval needs.
    """
    everything = read(config)
    if config.validation_dataset is None:
        train, held_out = split(everything, key, config.validation_fraction)
    else:
        held_out = read(config.model_copy(update={"dataset": config.validation_dataset, "max_documents": None}))
        train = without(everything, held_out, key)
    if not train:
        raise UserError("data: expected examples to train on, found none that are not held out; use more data")
    wanted = config.validation_rows
    validation, test = validation_and_test(held_out, key, size=lambda _: 1, wanted=wanted)
    require_enough_of(test := test[:wanted], [*train, *held_out], key, "examples")
    return shuffled(train, f"train {seed}"), validation, test


def examples_dataset(train: Rows, validation: Rows, test: Rows) -> Dataset:
    """Return a dataset of these parts."""
    return Dataset(train, validation, test, (len(train), len(validation), len(test)))


def unlabelled_texts(examples: Sequence[Example], pad: int, use_cache: bool | None) -> Texts:
    """Return rows of the examples without their labels."""
    input_ids = _filled([example.input_ids for example in examples], pad)
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    segments = [example.segments for example in examples if example.segments is not None]
    return Texts(input_ids, lengths, _filled(segments, 0) if segments else None, use_cache)


def padded_texts(examples: Sequence[Example], pad: int, use_cache: bool | None) -> Texts:
    """Return rows of at least one example, of the class that fits the examples' labels."""
    rows, labels = unlabelled_texts(examples, pad, use_cache), [example.label for example in examples]
    if labels[0] is None:
        return rows
    inputs = rows.input_ids, rows.lengths, rows.segments, use_cache
    if isinstance(labels[0], list):
        return ClassifiedTokens(*inputs, _filled(labels, IGNORED))
    return ClassifiedTexts(*inputs, torch.tensor(labels))  # int64, or float32 for numbers


def _filled(rows: Sequence[list[int]], value: int) -> Int64[Tensor, "N L"]:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def _read(config: DataConfig, tokenizer: PreTrainedTokenizerBase, classes: Classes) -> list[Example]:
    rows = islice(read_rows(config), config.max_documents)
    encode, examples = _ENCODERS[type(config.task)], []
    for batch in document_progress(iter(lambda: list(islice(rows, _BATCH)), []), "tokenising"):
        examples += encode(batch, config, tokenizer, classes)
    return examples


def _tokenized(
    tokenizer: PreTrainedTokenizerBase, config: DataConfig, texts: list[str], pairs: list[str] | None = None
) -> Iterator[tuple[list[int], list[int] | None]]:
    """Yield the tokens of each text, or pair of texts, and their types, if the tokenizer has them."""
    encoded: Any = tokenizer(texts, pairs, truncation=True, max_length=config.sequence_length, verbose=False)
    ids = encoded["input_ids"]
    return zip(ids, encoded.get("token_type_ids") or [None] * len(ids), strict=True)


def _encode_texts(
    rows: Iterable[LocatedRow], config: DataConfig, tokenizer: PreTrainedTokenizerBase, classes: Classes
) -> list[Example]:
    task = config.task
    assert isinstance(task, TextClassification)
    pairs, labels = [], []
    for where, row in rows:
        pairs.append([text_cell(row, column, where, "data.task.text_columns") for column in task.text_columns])
        label = cell(row, task.label_column, where, "data.task.label_column")
        labels.append(as_number(label, where) if task.regression else classes.number(label, where))
    texts = (list(column) for column in zip(*pairs, strict=True))
    inputs = _tokenized(tokenizer, config, *texts)
    return [Example(*tokens, label) for tokens, label in zip(inputs, labels, strict=True)]


def _encode_words(
    rows: Iterable[LocatedRow], config: DataConfig, tokenizer: PreTrainedTokenizerBase, classes: Classes
) -> list[Example]:
    task, examples = config.task, []
    assert isinstance(task, TokenClassification)
    for where, row in rows:
        words = cell(row, task.words_column, where, "data.task.words_column")
        tags = cell(row, task.labels_column, where, "data.task.labels_column")
        if not isinstance(words, list) or not isinstance(tags, list) or len(words) != len(tags) or not words:
            raise UserError(f"{where}: expected a list of words and a list of as many labels, found {words!r:.60}")
        numbers = [classes.number(tag, where) for tag in tags]
        encoded: Any = tokenizer(
            words, is_split_into_words=True, truncation=True, max_length=config.sequence_length, verbose=False
        )
        label, before = [], None
        for word in encoded.word_ids():
            label.append(IGNORED if word is None or word == before else numbers[word])
            before = word
        examples.append(Example(encoded["input_ids"], encoded.get("token_type_ids"), label))
    return examples


def _encode_unlabelled(
    rows: Iterable[LocatedRow], config: DataConfig, tokenizer: PreTrainedTokenizerBase, classes: Classes
) -> list[Example]:
    found = [text_cell(row, config.text_column, where, "data.text_column") for where, row in rows]
    found = [text for text in found if text.strip()]
    return [Example(*tokens, None) for tokens in _tokenized(tokenizer, config, found)] if found else []


def _encode_masked(
    rows: Iterable[LocatedRow], config: DataConfig, tokenizer: PreTrainedTokenizerBase, classes: Classes
) -> list[Example]:
    task, found = config.task, []
    assert isinstance(task, MaskedLanguageModelling)
    mask: Any = tokenizer.mask_token_id
    if mask is None:
        raise UserError(
            "tokenizer: expected a mask token, which hides the tokens to predict, found none; set mask_token there, "
            "or another data.task.type"
        )
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    for example in _encode_unlabelled(rows, config, tokenizer, classes):
        random = Random(example.key)
        places = [place for place, token in enumerate(example.input_ids) if token not in special]
        if not places:
            continue
        input_ids, labels = list(example.input_ids), [IGNORED] * len(example.input_ids)
        for place in random.sample(places, max(1, round(task.share * len(places)))):
            labels[place], drawn = input_ids[place], random.random()
            if drawn < 0.9:
                input_ids[place] = mask if drawn < 0.8 else random.choice(ordinary)
        found.append(replace(example, input_ids=input_ids, label=labels))
    return found


_ENCODERS: dict[type, Callable[[Iterable[LocatedRow], DataConfig, PreTrainedTokenizerBase, Classes], list[Example]]] = {
    TextClassification: _encode_texts,
    TokenClassification: _encode_words,
    MaskedLanguageModelling: _encode_masked,
    TextEmbedding: _encode_unlabelled,
}
