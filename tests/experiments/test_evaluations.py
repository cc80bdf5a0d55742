"""Runs whose measurements are committed: they load, and their pages say what they found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from linearize.report.card import evaluation_page
from linearize.report.load import load_run
from linearize.report.page import render

SCRIPT = Path(__file__).parents[2] / "experiments" / "evaluations.py"
spec = importlib.util.spec_from_file_location("evaluations", SCRIPT)
assert spec is not None and spec.loader is not None
evaluations = importlib.util.module_from_spec(spec)
spec.loader.exec_module(evaluations)
FOLDERS = {f"{folder.parent.name}/{folder.name}": folder for folder in evaluations.folders()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_evaluation_pages_are_what_the_command_writes(folder: str) -> None:
    assert (FOLDERS[folder] / "evaluation.md").read_text(encoding="utf-8") == evaluation_page(load_run(FOLDERS[folder]))


@pytest.mark.parametrize("folder", ["lolcats/pycode-5m", "lolcats/stories260K"])
def test_the_page_of_a_run_is_made(folder: str) -> None:
    page = render([load_run(FOLDERS[folder])])
    assert "Copying random tokens from beyond the window" in page
    assert ("Heads with the largest output errors" in page) == ("pycode" in folder)
