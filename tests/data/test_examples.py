"""Texts with labels: tokenised, split, padded, and compared with outputs where they should be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.data.examples import ClassifiedTexts, ClassifiedTokens, Texts, build_examples
from linearize.data.labels import Classes
from linearize.data.packing import Dataset
from linearize.data.rows import Rows
from tests.byte_tokenizer import byte_tokenizer

TWO = Classes({"bad": 0, "good": 1}, 2)


def tokenizer(**special: str) -> Any:
    made = byte_tokenizer()
    made.add_special_tokens({"pad_token": "<|pad|>", "mask_token": "<|im_start|>"} | special)
    return made


def table(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def built(config: DataConfig, classes: Classes = TWO, *, use_cache: bool | None = None, seed: int = 0) -> Dataset:
    config = config.model_copy(update={"validation_fraction": 0.5})
    return build_examples(config, tokenizer(), classes, seed=seed, use_cache=use_cache)


def parts(data: Dataset) -> tuple[Any, Any, Any]:
    return data.train, data.validation, data.test


def sentences(count: int = 60) -> list[dict[str, Any]]:
    return [{"sentence": f"text {'x' * (i % 7)}{i}", "label": i % 2} for i in range(count)]


def test_tsv_without_names_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "cola.tsv"
    path.write_text("".join(f'g\t{i % 2}\t\tHe said "{i}.\n' for i in range(60)), encoding="utf-8")
    task = {"type": "text_classification"}
    config = DataConfig(dataset=str(path), columns=("source", "label", "mark", "sentence"), task=task)  # type: ignore[arg-type]
    data = built(config)
    assert isinstance(data.train, ClassifiedTexts) and sum(map(len, parts(data))) == sum(data.documents) == 60
    row = data.train.rows([3])
    assert isinstance(row, ClassifiedTexts)
    text = tokenizer().decode(row.input_ids[0])
    assert text.startswith('He said "') and int(text[9:-1]) % 2 == int(row.labels[0]), "quotation marks stay"
    with pytest.raises(UserError, match="data row 1: expected a column 'sentence'"):
        built(config.model_copy(update={"columns": None}))


def test_a_batch_is_padded_to_its_longest_row(tmp_path: Path) -> None:
    config = DataConfig(dataset=table(tmp_path, sentences()), task={"type": "text_classification"})  # type: ignore[arg-type]
    rows = built(config).train
    assert isinstance(rows, ClassifiedTexts) and isinstance(rows, Rows)
    assert rows.num_tokens == int(rows.lengths.sum()) and rows.target_counts().sum() == len(rows)
    short = rows.rows(rows.lengths.argsort()[:3])
    assert isinstance(short, ClassifiedTexts)
    inputs = short.inputs()
    assert inputs["input_ids"].shape[1] == int(short.lengths.max()) < int(rows.lengths.max())
    assert torch.equal(inputs["attention_mask"].sum(1), short.lengths)
    assert bool((inputs["input_ids"][inputs["attention_mask"] == 0] == tokenizer().pad_token_id).all())
    assert "use_cache" not in inputs and built(config, use_cache=False).train.inputs()["use_cache"] is False


def test_names_and_numbers_of_classes(tmp_path: Path) -> None:
    rows = [{"sentence": f"t{i}", "label": ("bad", "good", "1", 0, 1.0)[i % 5]} for i in range(60)]
    config = DataConfig(dataset=table(tmp_path, rows), task={"type": "text_classification"})  # type: ignore[arg-type]
    data = built(config)
    labels = {}
    for side in parts(data):
        for ids, length, label in zip(side.input_ids, side.lengths, side.labels, strict=True):
            labels[tokenizer().decode(ids[:length])] = int(label)
    assert [labels[f"t{i}"] for i in range(5)] == [0, 1, 1, 0, 1]
    for wrong, words in (
        (2, "a class from 0 to 1"),
        ("dull", "found 'dull'"),
        (0.5, "found 0.5"),
        (None, "None"),
        (math.inf, "inf"),
    ):
        config = DataConfig(dataset=table(tmp_path, [{"sentence": "a", "label": wrong}] * 9), task=config.task)
        with pytest.raises(UserError, match=words):
            built(config)


def test_numbers_as_labels_of_pairs(tmp_path: Path) -> None:
    rows = [{"a": f"one {i}", "b": "two", "score": i / 2} for i in range(60)]
    task = {
        "type": "text_classification",
        "text_columns": ("a", "b"),
        "label_column": "score",
        "metrics": ("spearman",),
    }
    data = built(DataConfig(dataset=table(tmp_path, rows), task=task))  # type: ignore[arg-type]
    assert isinstance(data.train, ClassifiedTexts) and data.train.labels.dtype == torch.float32
    first = tokenizer().decode(data.train.input_ids[0][: data.train.lengths[0]])
    assert first.startswith("one ") and first.endswith("two")
    for wrong in (float("nan"), "inf", "high", None):
        broken = table(tmp_path, [rows[0], rows[1] | {"score": wrong}])
        with pytest.raises(UserError, match="data row 2: expected a number, found"):
            built(DataConfig(dataset=broken, task=task))  # type: ignore[arg-type]


def test_words_carry_labels_once(tmp_path: Path) -> None:
    rows = [{"tokens": ["ab", "c", f"{i}"], "tags": [1, 0, 1]} for i in range(60)]
    config = DataConfig(dataset=table(tmp_path, rows), task={"type": "token_classification"})  # type: ignore[arg-type]
    train = built(config).train
    assert isinstance(train, ClassifiedTokens)
    assert train.labels[0].tolist()[:4] == [1, -100, 0, 1], "the first byte of each word"
    logits = torch.arange(train.labels.numel() * 2.0).view(*train.labels.shape, 2)
    compared = train.compared(SimpleNamespace(logits=logits))
    assert torch.equal(compared, logits[train.labels != -100]) and len(compared) == int(train.target_counts().sum())
    targets = train.targets()
    assert targets is not None and targets.tolist() == [1, 0, 1] * len(train)
    broken = table(tmp_path, [{"tokens": ["a"], "tags": [1, 0]}] * 4)
    with pytest.raises(UserError, match="a list of words and a list of as many labels"):
        built(config.model_copy(update={"dataset": broken}))


def test_texts_to_embed_are_compared_without_padding(tmp_path: Path) -> None:
    rows = [{"text": "x" * (i + 1)} for i in range(60)] + [{"text": "  "}]
    config = DataConfig(dataset=table(tmp_path, rows), task={"type": "text_embedding"})  # type: ignore[arg-type]
    train = built(config).train
    assert type(train) is Texts and train.targets() is None
    hidden = torch.randn(*train.input_ids.shape, 5)
    compared = train.compared(SimpleNamespace(last_hidden_state=hidden))
    assert torch.equal(compared, hidden[train.mask]) and len(compared) == int(train.lengths.sum())


def test_some_tokens_of_a_text_are_hidden(tmp_path: Path) -> None:
    """Of each text a share, the same whenever it is read; of these 80 % by the mask, and 10 % by any other token."""
    text = "".join(chr(97 + i % 26) for i in range(400))
    rows = [{"text": f"{i} {text}"} for i in range(60)] + [{"text": " "}]
    task = {"type": "masked_language_modelling", "share": 0.25}
    config = DataConfig(dataset=table(tmp_path, rows), task=task, sequence_length=200)  # type: ignore[arg-type]
    train = built(config).train
    assert isinstance(train, ClassifiedTokens) and set(train.target_counts().tolist()) == {50}
    hidden = train.labels != -100
    mask = train.input_ids == tokenizer().mask_token_id
    assert not (mask & ~hidden).any()
    assert torch.equal(train.targets(), train.labels[hidden])  # type: ignore[arg-type]
    masked, kept = (float(x[hidden].double().mean()) for x in (mask, train.input_ids == train.labels))
    assert masked == pytest.approx(0.8, abs=0.03) and kept == pytest.approx(0.1, abs=0.03)
    whole = torch.where(hidden, train.labels, train.input_ids)
    assert {tokenizer().decode(row) for row in whole} <= {row["text"][:200] for row in rows}
    assert torch.equal(built(config).train.input_ids, train.input_ids)


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    config = DataConfig(dataset=table(tmp_path, [{"text": "a"}] * 60), task={"type": "masked_language_modelling"})  # type: ignore[arg-type]
    blind = byte_tokenizer()
    blind.add_special_tokens({"pad_token": "<|pad|>"})
    with pytest.raises(UserError, match="tokenizer: expected a mask token"):
        build_examples(config, blind, TWO, seed=0, use_cache=None)


def test_copies_stay_together_and_a_held_out_file_apart(tmp_path: Path) -> None:
    rows = sentences(60) * 2
    config = DataConfig(dataset=table(tmp_path, rows), task={"type": "text_classification"})  # type: ignore[arg-type]
    data = built(config)
    train, validation, test = (
        {tokenizer().decode(ids[:length]) for ids, length in zip(part.input_ids, part.lengths, strict=True)}
        for part in parts(data)
    )
    assert train | validation | test == {row["sentence"] for row in rows} and len(data.train) == 60
    assert not train & validation and not train & test and not validation & test
    held = table(tmp_path, rows[:30], "held.jsonl")
    data = built(config.model_copy(update={"validation_dataset": held}))
    assert data.documents == (60, 7, 23)
    assert built(config.model_copy(update={"validation_dataset": held, "validation_rows": 18})).documents[2] == 18


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    config = DataConfig(dataset=table(tmp_path, sentences()), task={"type": "text_classification"})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected a padding token"):
        build_examples(config, byte_tokenizer(), TWO, seed=0, use_cache=None)
    task = {"type": "text_classification", "text_columns": ("premise",)}
    with pytest.raises(UserError, match="expected a column 'premise'"):
        built(DataConfig(dataset=config.dataset, task=task))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"expected at least 16 held-out examples to test on, .* found 14; use more"):
        built(DataConfig(dataset=table(tmp_path, sentences(30)), task=config.task))
    held_out = config.model_copy(update={"validation_dataset": config.dataset})
    with pytest.raises(UserError, match="expected examples to train on, found none that are not held out"):
        built(held_out)


def test_the_fingerprint_knows_labels(tmp_path: Path) -> None:
    config = DataConfig(dataset=table(tmp_path, sentences()), task={"type": "text_classification"})  # type: ignore[arg-type]
    changed = [row | {"label": 1 - row["label"]} for row in sentences()]
    other = config.model_copy(update={"dataset": table(tmp_path, changed, "other.jsonl")})
    assert built(config).fingerprint == built(config).fingerprint != built(other).fingerprint


def test_classes_of_a_config() -> None:
    assert Classes.of({}).count == 2, "as transformers has it"
    named = Classes.of({"label2id": {"a": 0, "b": 1, "c": 2}, "id2label": {"0": "a", "1": "b", "2": "c"}})
    assert named.count == 3 and named.number("c", "") == 2
