"""Quality against bytes: what `linearize frontier` measures, trains and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from linearize.base import UserError
from linearize.evaluation.perplexity import token_losses
from linearize.hf.checkpoint import load_model
from linearize.hf.convert import convert_layers
from linearize.recipe import Recipe
from linearize.report import frontier as words
from linearize.run.folder import Run
from linearize.run.frontier import ALLOCATED, LAYERS, WINDOW, frontier
from linearize.training.loop import StageRun
from linearize.training.memory import head_mixer
from tests import tiny

REFERENCE, LENGTH, PAIR = 8, 64, 2 * 8 * 4  # bytes of a key and a value of 8 numbers, fp32
HEADS = 4
SMALL = {
    "memory": {"fraction": 0.5, "reference_length": LENGTH, "sinks": 1, "recall_fraction": 0.3},
    "data.validation_fraction": 0.5,
    "data.validation_rows": 40,
    "finetune.batch_size": 4,
    "finetune.eval_every": 2,
    "finetune.max_tokens": 2 * 4 * LENGTH,
}


def job(folder: Path, **changes: Any) -> Run:
    fields = {name: value for name, value in tiny.RECIPE.items() if name.startswith("data.")}
    fields |= SMALL | {"data.dataset": str(tiny.text_file())} | changes
    return Run(Recipe.load("recommended", fields), tiny.teacher_folder(), folder, torch.float32, torch.device("cpu"))


def points(found: dict[str, Any]) -> dict[tuple[float, str, bool], dict[str, Any]]:
    return {(point["fraction"], point["name"], point["trained"]): point for point in found["points"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Any]]:
    run = job(tmp_path_factory.mktemp("frontier") / "out")
    return run, frontier(run, [0.75, 0.25], reference=REFERENCE, command="linearize frontier")


def test_every_way_at_every_fraction(made: tuple[Run, dict[str, Any]]) -> None:
    found = points(made[1])
    for fraction in (0.75, 0.25):
        untrained = {name for at, name, trained in found if at == fraction and not trained}
        assert untrained == {"window", WINDOW, ALLOCATED, LAYERS}
        assert {name for at, name, trained in found if at == fraction and trained} == {WINDOW, ALLOCATED, LAYERS}
        budget = fraction * LENGTH * HEADS * PAIR
        assert found[fraction, "window", False]["bytes"] == found[fraction, WINDOW, False]["bytes"] == budget
        for trained in (False, True):  # one more pair in every head, with its scores and position, would be too much
            assert budget - HEADS * (PAIR + 16) < found[fraction, ALLOCATED, trained]["bytes"] <= budget
            assert budget - HEADS * PAIR <= found[fraction, LAYERS, trained]["bytes"] <= budget
    assert [made[1]["chosen"][fraction]["full_layers"] != [] for fraction in (0.75, 0.25)] == [True, False]
    assert all((point["far_finetuned"] is None) != point["trained"] for point in made[1]["points"])
    assert made[1]["tokens"] == 2 * 4 * LENGTH


def test_losses_are_those_of_the_models(made: tuple[Run, dict[str, Any]]) -> None:
    run, found = made
    teacher, rows = load_model(run.model, dtype=torch.float32, device=torch.device("cpu")), tiny.load_data(run).test
    student = convert_layers(teacher, (head_mixer(16, 0, 0),) * 2)
    ours, its = (token_losses(model, rows, batch_size=4).loss.double().mean().item() for model in (student, teacher))
    mean = points(found)[0.25, "window", False]["minus_teacher"]["mean"]
    assert mean == pytest.approx(ours - its, abs=2e-3) and ours != its
    # What has all but a quarter of the keys is nearer than what has a quarter of them.
    near, far = (abs(points(found)[at, "window", False]["minus_teacher"]["mean"]) for at in (0.75, 0.25))
    assert near < far


def test_the_same_again_trains_nothing(made: tuple[Run, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = made
    monkeypatch.setattr(StageRun, "update", lambda self: pytest.fail("an optimizer step was taken"))
    for name in ("measure_attention", "measure_layers"):
        monkeypatch.setattr(f"linearize.run.allocation.{name}", lambda *_, **__: pytest.fail("measured again"))
    again = frontier(run, [0.75, 0.25], reference=REFERENCE, command="linearize frontier")
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(found))


def test_without_training(tmp_path: Path) -> None:
    found = frontier(job(tmp_path / "out", finetune=None), [0.25], reference=REFERENCE, command="")
    assert {name for _, name, _ in points(found)} == {"window", WINDOW, ALLOCATED, LAYERS}
    assert not any(point["trained"] for point in found["points"]) and found["tokens"] is None
    page = words.page(found)
    assert words.FINE_TUNED not in page and "fine-tuned" not in page


@pytest.mark.parametrize("read", [words.page, words.figure])
def test_what_is_written(made: tuple[Run, dict[str, Any]], read: Callable[[dict[str, Any]], str]) -> None:
    stored = json.loads(json.dumps(made[1]))
    for place, point in enumerate(stored["points"]):  # a random teacher gains nothing that could be kept
        point["copying"]["share"] = {"mean": 0.1 * place, "low": 0.0, "high": 1.0}
    text = read(stored)
    assert text == read(stored), "the same bytes again"
    if read is words.figure:
        ElementTree.fromstring(text)
        assert f"{ALLOCATED}, fine-tuned" in text
    else:
        assert f"| 25% | {ALLOCATED}, fine-tuned | " in text and f"over a window of {REFERENCE}" in text
        assert text.count("\n| 75% |") == sum(point["fraction"] == 0.75 for point in stored["points"])
        assert "- 25%: " in text
        assert words.FINE_TUNED in text


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="take `recommended`"):
        frontier(job(tmp_path / "a", memory=None), [0.25], reference=REFERENCE, command="")
    with pytest.raises(UserError, match=r"--window: .* found 60"):
        frontier(job(tmp_path / "b"), [0.25], reference=60, command="")
    with pytest.raises(UserError, match="memory: expected at least"):
        frontier(job(tmp_path / "c", finetune=None), [0.01], reference=REFERENCE, command="")
    assert not (tmp_path / "b").exists()
