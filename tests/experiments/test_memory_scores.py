"""The script of experiments/memory/, on a tiny model, and what is committed of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from linearize.mixers.exact_cache import Score
from linearize.recipe import Recipe
from tests import tiny

MEMORY = Path(__file__).parents[2] / "experiments" / "memory"


def load() -> ModuleType:
    """The script, which is no package."""
    spec = importlib.util.spec_from_file_location("memory_scores", MEMORY / "scores.py")
    assert spec is not None and spec.loader is not None
    sys.modules["memory_scores"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scores = load()


@pytest.mark.slow
def test_every_score_in_as_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same again is the same."""
    lines = Path(tiny.text_file()).read_text().splitlines(keepends=True)
    for place, name in enumerate(("train", "held_out")):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[place::2]))
    monkeypatch.setattr(scores, "PAIRS", (24,))
    arguments = ["--model", str(tiny.teacher_folder()), "--dataset", str(tmp_path), "--seeds", "2", "--rows", "3"]
    arguments += ["--copies", "16", "--needles", "2", "--tokens", "1024", "--held-out", "40"]
    scores.main([*arguments, "--output", str(tmp_path / "a.json")])
    found = json.loads((tmp_path / "a.json").read_text())
    assert (tmp_path / "a.md").read_text() == scores.page(found)
    points = {point["name"]: point for point in found["points"]}
    assert set(points) == {*get_args(Score), scores.LONGER} and len(found["heads"]) == 2
    largest = max(point["bytes"] for point in points.values())
    assert largest == points["redundancy"]["bytes"] and points["redundancy"]["kept"] == 24
    for name, point in points.items():
        per_pair = 2 * 8 * 4 + (0 if name == scores.LONGER else 8) + (4 if "attention_re" in name else 0)
        assert largest - per_pair < point["bytes"] <= largest
    assert points["attention_received"]["kept"] < 24 < points[scores.LONGER]["kept"]
    needs = {f"{layer}.{head}": x for layer, heads in found["needs"].items() for head, x in enumerate(heads)}
    assert found["heads"] == sorted(needs, key=lambda head: -needs[head])[:2]
    far = [point["shares"]["far gain"] for point in points.values()]
    assert all(len(set(x)) == 2 for x in far) and len({tuple(x) for x in far}) == len(far)  # by seed, and by score


def test_the_committed_page_is_that_of_the_committed_numbers() -> None:
    found = json.loads((MEMORY / "scores.json").read_text(encoding="utf-8"))
    assert scores.page(found) == (MEMORY / "scores.md").read_text(encoding="utf-8")
    assert {point["name"] for point in found["points"]} == {*get_args(Score), scores.LONGER}


def test_a_folder_without_texts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scores.main(["--model", str(tiny.teacher_folder()), "--dataset", str(tmp_path)])
    assert "--dataset: expected a folder with train.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((MEMORY / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_recipes_load(path: Path) -> None:
    recipe = Recipe.load(str(path))
    assert recipe.name == path.stem and recipe.memory is not None
    assert all(mixer.feature_map is not None for mixer in recipe.memory.mixers)
