"""What sections make of their numbers, where it is more than showing them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from linearize.report.figures import Line
from linearize.report.findings import per_head_budget, sentences
from linearize.report.html import Block, Figure, Prompts, Text
from linearize.report.load import RunFiles
from linearize.report.numbers import THIN
from linearize.report.sections import costs, heads, quality, recall, recipe, tasks, training
from linearize.training.allocation import Allocation
from tests.report import sample

Read = Callable[..., RunFiles]


def figure(blocks: Any, title: str) -> Figure:
    return next(block for block in blocks if isinstance(block, Figure) and block.title == title)


def rows(found: Figure) -> list[list[str]]:
    return [list(row) for group in found.numbers.groups for row in group.rows]


def texts(blocks: Any) -> list[str]:
    return [block.words for block in blocks if isinstance(block, Text)]


def test_bins_are_named_by_the_positions_they_hold() -> None:
    assert quality.bin_names([0, 1, 2, 4, 1024, 1025]) == ["0", "1", "2\u20133", "4\u20131,023", "1,024"]


def test_recipes_are_compared_field_by_field() -> None:
    first = {"name": "a", "mixer": {"span": {"window_size": 64}, "decay": None}, "seed": 0}
    second = {"name": "a", "mixer": {"span": {"window_size": 32}, "decay": {"type": "scalar"}}, "seed": 0}
    assert recipe.differences([first, second]) == [
        ["mixer.span.window_size", "64", "32"],
        ["mixer.decay.type", "\u2013", "scalar"],
    ]


def test_loss_by_position_has_the_distance_from_the_teacher(read: Read) -> None:
    losses = {"teacher": [None, sample.interval(2.0, 0.1)], "student": [None, sample.interval(2.5, 0.1)]}
    section = quality.positions([read(positions={"edges": [0, 1, 3], "documents": [40, 40], "losses": losses})])
    found = figure(section.blocks, "Held-out loss by position in the document")
    assert rows(found)[1] == ["1\u20132", "2.000 [1.900, 2.100]", "2.500 [2.400, 2.600]"]
    assert "loss minus the teacher" in found.svg
    lines = [Line("teacher", [1, 3], [2.0, 1.0]), Line("student", [1, 2, 3], [2.5, 9.0, 1.25], style=4)]
    assert quality.above_teacher(lines) == [Line("student", [1, 3], [0.5, 0.25], style=4)]
    assert "student, at positions 1\u20132: 2.500" in found.svg


def test_memory_by_head(read: Read) -> None:
    """Pairs that each head keeps, and what recall needs of it."""
    needs = {0: [[-9.0, -9.0], [-5.0, -4.0]], 3: [[math.log(0.1), math.log(0.3)]] * 2}
    recall = {0: [0, 88], 3: [952, 0]}
    allocation = Allocation(window=6, text=2, recall=recall, sinks=4, needs=needs, budget=40_000, held=40_000)
    run = replace(read(), allocation=allocation)
    section = heads.memory([run])
    assert rows(figure(section.blocks, "KV pairs by head")) == [["layer 0", "12", "100"], ["layer 3", "964", "12"]]
    assert rows(figure(section.blocks, "What recall needs of each head"))[1] == ["layer 3", "0.20", "0.20"]
    said = f"1 of 4 KV heads holds 89{THIN}% of its 1,088 key-value pairs (3.0; layer.head)."
    assert f"Per-head KV budget allocation: {said}" in sentences(run) and per_head_budget(read()) is None


def test_the_worst_and_the_best_head_are_named(read: Read) -> None:
    found = sample.evaluation()["fidelity"]
    found["layers"] = found["layers"][:2]
    for layer in found["layers"]:
        layer["output_relative"] = [0.5] * sample.HEADS
    found["layers"][1]["output_relative"][3], found["layers"][0]["output_relative"][2] = 0.9, 0.1
    section = heads.fidelity([read(fidelity=found)])
    error = figure(section.blocks, "Relative output error")
    assert "worst layer 1 head 3, 0.900; " in error.svg and "best layer 0 head 2, 0.100" in error.svg
    assert rows(error)[0] == ["layer 0", "0.5000", "0.5000", "0.1000", *["0.5000"] * 5]


def test_texts_are_marked_from_where_the_student_leaves_the_teacher(read: Read) -> None:
    given = sample.evaluation()["generations"]
    given["samples"] = [{"prompt": "p", "reference": "r", "teacher": "abc", "student": "abX"}]
    run = read(generations=given)
    block = next(b for b in tasks.generations([run]).blocks if isinstance(b, Prompts))
    assert [(t.title, t.same, t.other) for t in block.prompts["p"]] == [
        ("what the text says", "r", ""),
        ("teacher", "abc", ""),
        ("student", "ab", "X"),
    ]
    both = next(b for b in tasks.generations([run, read(generations=given)]).blocks if isinstance(b, Prompts))
    titles = [text.title for text in both.prompts["p"]]
    assert titles[:2] == ["what the text says", "teacher"] and len(titles) == 4


def test_a_grid_without_cells_leaves_its_verdict(read: Read) -> None:
    found = sample.evaluation()["retrieval"][0] | {"row_values": [], "models": {}}
    found |= {"teacher_share": None, "student_share": None, "floor": None, "recovery": None}
    blocks: list[Block] = list(recall.recall([read(retrieval=[found])]).blocks)
    assert "Recall, passkey: too few tests beyond the window of 64 tokens fit the model's positions." in texts(blocks)
    assert [block.title for block in blocks if isinstance(block, Figure)] == [
        "Copying random tokens from beyond the window"
    ]


def test_cells_that_do_not_fit_are_blank(read: Read) -> None:
    found = sample.evaluation()["retrieval"][0]
    found["models"]["student"][4][0] = None
    drawn = figure(recall.recall([read(retrieval=[found])]).blocks, "Passkey by distance")
    assert "not measured" in drawn.svg
    assert rows(drawn)[9][:2] == ["distance 960", "\u2013"]


def test_transfer_is_told_layer_by_layer(read: Read) -> None:
    found = figure(training.training([read()]).blocks, "What attention transfer did for each layer")
    assert rows(found)[0] == ["layer 0", "9,000.0", "180.0"]
    assert "Highest after transfer: layer 5, 1,080.0" in found.svg


def test_a_run_without_training_says_so(read: Read) -> None:
    run = read()
    assert run.recipe is not None
    untrained = run.recipe.model_copy(update=dict.fromkeys(("transfer", "adapt", "finetune")))
    said = training.training([replace(run, recipe=untrained, stages={})])
    assert texts(said.blocks) == ["Nothing was trained in this run."]
    assert texts(training.training([replace(run, stages={})]).blocks) == [
        "What the stages did is not in the files: the run's own folder contains it (result.json)."
    ]


@pytest.mark.parametrize("batches", [(1,), (2, 8)])
def test_the_smallest_batch_is_drawn_and_all_are_in_the_table(read: Read, batches: tuple[int, ...]) -> None:
    entries = sample.evaluation()["speed"][:6]
    speed = [entry | {"batch_size": b, "cache_bytes": 1000 * b} for b in batches for entry in entries]
    found = figure(costs.speed([read(speed=speed)]).blocks, "Time and memory against length")
    assert found.caption.startswith(f"Batch of {batches[0]};")
    assert ("batches of 8" in found.caption) is (len(batches) > 1)
    assert re.findall(r"([\d,]+) bytes", found.svg) == [f"{batches[0]},000"] * 2
    assert {row[1] for row in rows(found)} == set(map(str, batches))
