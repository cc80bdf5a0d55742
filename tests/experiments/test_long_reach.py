"""The script of experiments/long_reach/, on tiny models, and what is committed of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoConfig

from linearize.demo.corpus import teacher_path
from tests import tiny

FOLDER = Path(__file__).parents[2] / "experiments" / "long_reach"


def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which is no package."""
    monkeypatch.syspath_prepend(FOLDER.parent)
    spec = importlib.util.spec_from_file_location("reach", FOLDER / "reach.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_models_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    reach = load(monkeypatch)
    monkeypatch.setattr(reach, "NEAREST", 8)
    out = tmp_path / "reach.json"
    models = ["--model", f"one={tiny.teacher_folder()}", "--model", f"other={tiny.teacher_folder()}"]
    sizes = ["--length", "64", "--window", "16", "--rows", "24", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["reach.py", *models, "--dataset", tiny.text_file(), *sizes])
    reach.main()
    found = json.loads(out.read_text())
    losses = found["by_position"]["losses"]
    assert set(losses) == {"one", "one, window of 16", "other", "other, window of 16"}
    assert losses["one"] == losses["other"] != losses["one, window of 16"]
    at = found["by_position"]["edges"].index(8)
    whole, near = (losses[name][at]["mean"] for name in ("one", "one, window of 16"))
    assert near == pytest.approx(whole, abs=1e-5), "nothing lies outside a window that is longer"
    assert set(found["copying"]["one"]) == {"16", "32"} == {str(2 * size) for size in (8, 16)}
    assert found["needles"]["one"].keys() >= {"32"}
    assert out.with_suffix(".md").read_text() == reach.markdown(found)
    monkeypatch.setattr(sys, "argv", ["reach.py", "--model", "/nowhere/nothing", "--dataset", tiny.text_file()])
    with pytest.raises(SystemExit, match="2"):
        reach.main()
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: model: expected a model folder")


def test_the_committed_page_is_that_of_the_committed_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads((FOLDER / "reach.json").read_text(encoding="utf-8"))
    assert load(monkeypatch).markdown(found) == (FOLDER / "reach.md").read_text(encoding="utf-8")


def test_the_committed_model_is_the_bundled_one_with_a_longer_reach() -> None:
    long, bundled = (AutoConfig.from_pretrained(path).to_dict() for path in (FOLDER / "teacher", teacher_path()))
    changed = {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    path = {"_name_or_path": long["_name_or_path"]}
    assert long == bundled | changed | path
    size = sum(file.stat().st_size for file in (FOLDER / "teacher").iterdir())
    assert size <= 12e6
