"""Runs whose measurements are committed, some by former versions: they load, and their pages say what they found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from linearize.report.card import evaluation_page
from linearize.report.findings import far_context
from linearize.report.load import load_run
from linearize.report.numbers import THIN
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


# (window finetuned - student) / (window finetuned - teacher finetuned) of the means beyond the window, by hand. Against
# the untrained window and teacher it was 10, 40 and 24 %, and 5, 38 and 19 % for the window alone, finetuned alike.
@pytest.mark.parametrize(
    "folder, share, against",
    [
        ("lolcats/pycode-5m", (2.496487 - 2.487033) / (2.496487 - 2.294982), "teacher and window finetuned alike"),
        ("lolcats/stories260K", (1.704139 - 1.702638) / (1.704139 - 1.645732), "teacher and window finetuned alike"),
        ("absolute_scale/pycode-5m", (2.468074 - 2.457303) / (2.468074 - 2.297933), "the teacher as it came"),
    ],
)
def test_shares_of_former_files_are_against_models_finetuned_alike(folder: str, share: float, against: str) -> None:
    found = far_context(load_run(FOLDERS[folder]))
    assert found is not None and found.kind == "open" and against in found.words
    assert found.words.startswith(f"The student keeps {share:.0%}".replace("%", f"{THIN}% (interval: run again)"))


@pytest.mark.parametrize("folder", ["lolcats/pycode-5m", "lolcats/stories260K"])
def test_the_page_of_a_former_run_is_made(folder: str) -> None:
    page = render([load_run(FOLDERS[folder])])
    assert "Copying random tokens from beyond the window" in page
    assert ("The student uses its linear part" in page) == ("pycode" in folder)
