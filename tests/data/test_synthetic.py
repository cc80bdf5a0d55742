"""Associative recall and ListOps: what they are, against slow and independent statements of it."""

from __future__ import annotations

import re
import statistics
from itertools import islice
from typing import Any

import pytest
import torch

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.configs.tasks import AnyTask, AssociativeRecall, ListOps
from linearize.data.examples import ClassifiedTexts
from linearize.data.labels import Classes
from linearize.data.rows import PackedRows
from linearize.data.synthetic import CLS, TOKENS, build_generated, check_generated, expressions, recall_rows
from linearize.hf.teacher import TeacherShape

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
DECODER = TeacherShape.from_config({"model_type": "llama", **SMALL})
TEN = Classes({}, 10)


@pytest.mark.parametrize("labels", ["last", "every"])
def test_recall(labels: str) -> None:
    task = AssociativeRecall(vocabulary_size=12, length=40)
    rows = recall_rows(task, 50, labels=labels, seed="a")
    tables = set()
    for ids, learned in zip(rows.input_ids.tolist(), rows.labels.tolist(), strict=True):
        keys, values, known = ids[::2], ids[1::2], {}
        assert max(keys) < 6 <= min(values), "keys are the lower half"
        for slot, (key, value) in enumerate(zip(keys, values, strict=True)):
            assert known.get(key, value) == value, "a key keeps its value"
            last = slot == len(keys) - 1
            assert (learned[2 * slot + 1] == value) == (last or (labels == "every" and key in known))
            assert learned[2 * slot] == -100 and (not last or key in known)
            known[key] = value
        tables.add(tuple(sorted(known.items())))
    assert len(tables) > 40, "every sequence has associations of its own"
    assert torch.equal(recall_rows(task, 50, labels=labels, seed="a").input_ids, rows.input_ids)
    assert not torch.equal(recall_rows(task, 50, labels=labels, seed="b").input_ids, rows.input_ids)


def test_recall_is_scored_by_the_last_value_alone() -> None:
    task = AssociativeRecall(vocabulary_size=12, length=16, train_examples=20, held_out_examples=16, labels="every")
    data = build_generated(task, seed=0, use_cache=False)
    assert isinstance(data.train, PackedRows) and data.train.target_counts().float().mean() > 1
    assert data.validation.target_counts().tolist() == data.test.target_counts().tolist() == [1] * 16
    assert len({tuple(ids) for part in (data.validation, data.test) for ids in next(part.tensors()).tolist()}) == 32
    with pytest.raises(UserError, match=r"expected at least 16 held-out examples \(data\.task\.held_out_examples\)"):
        build_generated(task.model_copy(update={"held_out_examples": 2}), seed=0, use_cache=False)
    with pytest.raises(UserError, match="at least 64 tokens"):
        big = AssociativeRecall(vocabulary_size=64)
        check_generated(DataConfig(task=big), DECODER, TEN)


def value(tokens: list[str]) -> int:
    """Of an expression, by a stack and the statistics module."""
    stack: list[list[Any]] = []
    for token in tokens:
        if token.startswith("["):
            stack.append([token])
        elif token == "]":
            operator, *values = stack.pop()
            result = {
                "[MIN": lambda v: sorted(v)[0],
                "[MAX": lambda v: sorted(v)[-1],
                "[MED": lambda v: int(statistics.median(v)),
                "[SM": lambda v: sum(v) % 10,
            }[operator](values)
            if not stack:
                return result
            stack[-1].append(result)
        else:
            stack[-1].append(int(token))
    raise AssertionError("the brackets do not match")


def test_listops() -> None:
    task = ListOps(min_length=5, max_length=40, max_depth=3, max_arguments=4)
    names = {number: name for name, number in TOKENS.items()}
    found = list(islice(expressions(task, "a"), 300))
    depths = set()
    for example in found:
        assert example.input_ids[0] == CLS
        tokens = [names[number] for number in example.input_ids[1:]]
        assert task.min_length <= len(tokens) <= task.max_length
        assert value(tokens) == example.label
        depth = deepest = 0
        for token in tokens:
            depth += token.startswith("[") - (token == "]")
            deepest = max(deepest, depth)
        depths.add(deepest)
    assert depths == {1, 2, 3}
    assert len({tuple(x.input_ids) for x in found}) == 300 and {x.label for x in found} == set(range(10))


def test_all_examples_of_listops_are_different() -> None:
    """Training, validation and test data have no expression in common. Only 400 expressions exist."""
    task = ListOps(min_length=4, max_length=4, max_depth=1, max_arguments=2, train_examples=100, held_out_examples=16)
    data = build_generated(task, seed=0, use_cache=False)
    parts = (data.train, data.validation, data.test)
    rows = [tuple(row) for part in parts for row in part.inputs()["input_ids"].tolist()]
    assert len(rows) == len(set(rows)) == 132


def test_listops_makes_its_data() -> None:
    task = ListOps(train_examples=30, held_out_examples=16)
    data = build_generated(task, seed=0, use_cache=False)
    assert isinstance(data.train, ClassifiedTexts) and data.documents == (30, 16, 16)
    with pytest.raises(UserError, match="10 classes"):
        check_generated(DataConfig(task=task), DECODER, Classes({}, 2))


@pytest.mark.parametrize("task", [AssociativeRecall(vocabulary_size=12, length=16), ListOps()], ids=lambda x: x.type)
@pytest.mark.parametrize("field", ["dataset", "validation_dataset"])
def test_data_beside_a_task_that_generates_its_own_is_refused(task: AnyTask, field: str) -> None:
    data = DataConfig.model_validate({"task": task, field: "own.tsv"})
    expected = f"data.{field}: expected none, because the task {task.type} generates its own data, found 'own.tsv'; "
    with pytest.raises(UserError, match=f"^{re.escape(expected)}leave it out, or set data.task.type to a task"):
        check_generated(data, DECODER, TEN)


@pytest.mark.parametrize(
    "task",
    [
        AssociativeRecall(vocabulary_size=12, length=16, train_examples=40, held_out_examples=20),
        ListOps(train_examples=40, held_out_examples=20, min_length=4, max_length=40),
    ],
    ids=lambda task: task.type,
)
def test_seeds_are_examined_on_the_same_examples(task: AnyTask) -> None:
    assert isinstance(task, AssociativeRecall | ListOps)
    one, two = (build_generated(task, seed=seed, use_cache=False).__dict__ for seed in (0, 1))
    for part in ("validation", "test"):
        for x, y in zip(one[part].tensors(), two[part].tensors(), strict=True):
            assert torch.equal(x, y)
