"""Whole runs whose task is not language modelling: what they write, that they resume and can be measured again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linearize.evaluation.results import Results
from linearize.run.evaluate import evaluate
from linearize.run.folder import Run
from linearize.run.pipeline import run
from linearize.run.rows import SOURCES
from linearize.training import loop
from tests import tiny
from tests.task_runs import CPU, KINDS, Kind, job, numbers, written


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


def evaluated(model: Path, **options: Any) -> Results:
    return evaluate(str(model), **(dict(teacher=None, dataset=None, overrides={}) | CPU | options))


# Always: one of texts, of images, of examples that are made and of embeddings.
ALWAYS = {"classes of texts", "images", "recall", "embeddings"}


@pytest.mark.parametrize("kind", [pytest.param(x, marks=() if x in ALWAYS else pytest.mark.slow) for x in KINDS])
def test_a_run_of_each_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(kind, tmp_path / "run")
    results = run(made)
    assert results is not None and results.task is not None
    check_what_is_written(made, results)
    check_something_was_learned(made, results)

    def update(self: Any) -> None:
        raise AssertionError("an optimizer step was taken")

    monkeypatch.setattr(loop.StageRun, "update", update)
    before = numbers(written(made.folder))
    if made.recipe.data.task.language:
        run(made, until="finetune")  # measuring a language model takes long, and is done again below
    else:
        again = run(made)
        assert again is not None and numbers(again.to_json()) == before == numbers(written(made.folder))
    data = {f"data.{field}": value for field in SOURCES if (value := getattr(made.recipe.data, field)) is not None}
    assert numbers(evaluated(made.folder / "model", overrides=data).to_json()) == before


def check_what_is_written(made: Run, results: Results) -> None:
    """Scores of every candidate in all files, and the tag of the hub in the model's card."""
    kind, found = next(kind for kind in KINDS.values() if _is(kind, made)), written(made.folder)
    random = made.recipe.weights == "random"
    assert found["task"]["metrics"] == list(kind.metrics)
    assert found["task"]["type"] == made.recipe.data.task.type
    assert found["task"]["pipeline_tag"] == kind.tag
    names = [line["name"] for line in found["task"]["scored"]]
    assert names == (["student"] if random else ["teacher", "swapped", "transferred", "student"])
    assert bool(results.measured) == made.recipe.data.task.language
    readme = (made.folder / "model" / "README.md").read_text()
    assert f"pipeline_tag: {kind.tag}\n" in readme and "Not measured yet" not in readme
    assert f"import {made.recipe.data.task.auto_class}," in readme
    markdown, page = (made.folder / "evaluation.md").read_text(), (made.folder / "report.html").read_text()
    for line in found["task"]["scored"]:
        for metric in kind.metrics:
            score = line["scores"][metric]
            assert f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}]" in markdown
    assert made.recipe.name in page and "</html>" in page
    if made.recipe.evaluation.examine:
        assert found["fidelity"] is not None, found["not_measured"]


def _is(kind: Kind, made: Run) -> bool:
    return (
        kind.recipe == made.recipe.name and kind.metrics == made.recipe.data.task.scores and kind.model() == made.model
    )


def check_something_was_learned(made: Run, results: Results) -> None:
    """Held-out losses fell; where nothing was known before, the finished student is better than at its beginning."""
    for stage in ("transfer", "finetune"):
        if getattr(made.recipe, stage) is not None:
            result = json.loads((made.folder / stage / "result.json").read_text())
            assert sum(result["best_loss"].values()) < sum(result["initial_loss"].values()), stage
    assert results.task is not None
    scores = {line.name: line.scores[results.task.metrics[0]].mean for line in results.task.scored}
    if "swapped" in scores and not made.recipe.data.task.language:
        assert scores["student"] > scores["swapped"]
