"""Run folders, folders of copies, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from linearize.base import UserError
from linearize.report.load import load_run, load_runs
from tests.report import sample

DELETED = object()
COPIES = Path(__file__).parent / "measured" / "pycode-5m"


def test_a_run_folder_is_read_with_the_curves_of_its_stages(tmp_path: Path) -> None:
    run = load_run(sample.write_run(tmp_path / "run"))
    assert run.name == "run" and run.window == sample.WINDOW and run.teacher == "made-up-teacher"
    assert list(run.stages) == ["transfer", "finetune", "controls/window_finetuned", "controls/teacher_finetuned"]
    finetune = run.stages["finetune"]
    assert finetune.result is not None and finetune.result.steps == 96 and finetune.result.identity["lr"] == 0.01
    assert [tokens for tokens, _ in finetune.held_out] == [4096 * step for step in range(0, 97, 12)]


def test_a_folder_of_copies_is_read_without_curves_and_recipe() -> None:
    run = load_run(COPIES)
    assert run.recipe is None and run.teacher is None and run.plan is not None
    result = run.stages["transfer"].result
    assert result is not None and result.steps == 585 and result.identity["lr"] == 0.01
    assert run.stages["finetune"].held_out == []


def test_a_half_written_last_line_is_passed_over_and_no_other(tmp_path: Path) -> None:
    folder = sample.write_run(tmp_path / "run")
    metrics = folder / "finetune" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"event": "step", "st')
    assert len(load_run(folder).stages["finetune"].held_out) == 9
    metrics.write_text('{"event": \n' + whole)
    with pytest.raises(UserError, match=r"metrics\.jsonl: expected an event on line 1"):
        load_run(folder)


def test_a_stage_that_still_runs_has_curves_and_no_result(tmp_path: Path) -> None:
    folder = sample.write_run(tmp_path / "run")
    (folder / "finetune" / "result.json").unlink()
    stage = load_run(folder).stages["finetune"]
    assert stage.result is None and stage.held_out


def test_a_folder_without_an_evaluation_is_a_users_error_in_one_line(tmp_path: Path) -> None:
    folder = sample.write_run(tmp_path / "run")
    (folder / "evaluation.json").unlink()
    with pytest.raises(UserError, match=r"expected a run folder with evaluation\.json, found none") as raised:
        load_run(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("evaluation.json", "{", "evaluation.json: contents: expected JSON"),
        ("evaluation.json", "{}", "evaluation.json: expected measurements, found none"),
        ("evaluation.json", "[1]", r"evaluation.json: contents: expected an object, found \[1\]"),
        ("plan.json", "", "plan.json: contents: expected JSON"),
        ("recipe.yaml", "- a\n", "recipe.yaml: .*expected a mapping of fields"),
        ("recipe.yaml", "{", "recipe.yaml: .*not valid YAML"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = sample.write_run(tmp_path / "run")
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_run(folder)


@pytest.mark.parametrize(
    "name, field, value, words",
    [
        ("evaluation.json", "copying.share.low", "0.2", "expected a valid number, found '0.2'"),
        ("evaluation.json", "measured.3.quality.tokens", None, "expected a valid integer, found None"),
        ("evaluation.json", "far_context.words", "of an older format", "expected no such field, found one"),
        ("evaluation.json", "copying_missing", None, "expected no such field, found one"),
        ("evaluation.json", "speed.0.cache_bytes", DELETED, "expected a value, found none"),
        ("plan.json", "transfer.flops", "many", "expected a valid integer, found 'many'"),
        ("plan.json", "bidirectional", DELETED, "expected a value, found none"),
        ("run.json", "model", 5, "expected a valid string, found 5"),
        ("transfer/result.json", "best_loss", [], "expected an object, found \\[\\]"),
    ],
)
def test_a_field_of_another_format_is_named(tmp_path: Path, name: str, field: str, value: Any, words: str) -> None:
    folder = sample.write_run(tmp_path / "run")
    contents = json.loads((folder / name).read_text())
    around = contents
    *parents, last = field.split(".")
    for key in parents:
        around = around[int(key) if key.isdigit() else key]
    if value is DELETED:
        del around[last]
    else:
        around[last] = value
    sample.write_json(folder / name, contents)
    with pytest.raises(UserError, match=f"{name}: {field}: {words}; restore") as raised:
        load_run(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "section, changes, words",
    [
        ("positions", {"edges": [0, 1]}, "positions: teacher: expected 1 values, found other lengths; restore"),
        (
            "fidelity",
            {"layers": [{"layer": 0, "output_relative": []}]},
            "fidelity.layers.0: output_relative: expected a number per head, found none;",
        ),
        ("far_context", {"against": ["a", "b"]}, r"far_context: against: .* found \('a', 'b'\);"),
    ],
)
def test_sections_that_contradict_themselves_are_refused(
    tmp_path: Path, section: str, changes: dict[str, Any], words: str
) -> None:
    found = sample.evaluation()
    folder = sample.write_run(tmp_path / "run", found | {section: found[section] | changes})
    with pytest.raises(UserError, match=f"evaluation.json: {words}"):
        load_run(folder)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [sample.write_run(tmp_path / name / "run") for name in ("a", "b")]
    assert [run.name for run in load_runs(folders)] == ["a/run", "b/run"]
    with pytest.raises(UserError, match="different run folders"):
        load_runs([folders[0], folders[0]])
    with pytest.raises(UserError, match="found none"):
        load_runs([])


def test_one_teacher_is_told_from_another_by_what_both_files_say(tmp_path: Path) -> None:
    first = load_run(sample.write_run(tmp_path / "first"))
    larger = load_run(sample.write_run(tmp_path / "larger", teacher_parameters=7_000_000))
    copies = sample.write_run(tmp_path / "copies")
    (copies / "run.json").unlink()
    assert not first.same_teacher(larger)
    assert first.same_teacher(load_run(copies))
