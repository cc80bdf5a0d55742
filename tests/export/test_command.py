"""`linearize export`: what it writes, checks and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.base import UserError
from linearize.export import command
from linearize.export.command import export
from linearize_cli import main
from tests import tiny
from tests.export.students import WINDOW, random_ids, student_folder


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return student_folder(tmp_path_factory.mktemp("student") / "model")


def test_a_folder_that_transformers_loads(student: Path, tmp_path: Path) -> None:
    found = export(str(student), tmp_path / "out", to="hf", kind="f32")
    assert found.stock_class == "granite_swa" and found.window == WINDOW and found.agreed == command.NEW_TOKENS
    ours = AutoModelForCausalLM.from_pretrained(student)
    theirs = AutoModelForCausalLM.from_pretrained(found.path)
    assert type(theirs).__module__ == "transformers.models.granite_swa.modeling_granite_swa"
    ids = random_ids(1, 40)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, ours(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert (
        AutoTokenizer.from_pretrained(found.path)("a b").input_ids
        == AutoTokenizer.from_pretrained(student)("a b").input_ids
    )


def test_the_dtype_is_the_models_own(student: Path, tmp_path: Path) -> None:
    export(str(student), tmp_path / "own", to="hf")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["dtype"] == "float32"
    export(str(student), tmp_path / "half", to="hf", kind="bf16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_command_line_says_what_was_checked(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["linearize", "export", str(student), str(tmp_path / "out"), "--to", "hf", "--json"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert found["difference"] < command.TOLERANCE


def test_a_model_that_computes_something_else_is_not_written(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = command.stock_model

    def wrong(*arguments: Any) -> Any:
        stock: Any = whole(*arguments)
        with torch.no_grad():
            stock.model.layers[0].self_attn.sinks.add_(1)
        return stock

    monkeypatch.setattr(command, "stock_model", wrong)
    with pytest.raises(UserError, match=r"expected logits of granite_swa within 0.001 .* nothing was written"):
        export(str(student), tmp_path / "out", to="hf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"to": "onnx"}, "--to: expected hf or gguf, found 'onnx'"),
        ({"to": "hf", "kind": "q8_0"}, "--type: expected one of bf16, f16, f32 for --to hf, found 'q8_0'"),
        ({"to": "gguf", "kind": "q4_0"}, "--type: expected one of bf16, f16, f32, q8_0 for --to gguf, found 'q4_0'"),
        ({"to": "gguf", "stock_class": "cwm"}, "--class: expected granite_swa for --to gguf, found 'cwm'"),
        ({"to": "hf", "stock_class": "ministral"}, "expected a class that has learned sinks, found ministral"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], expected: str, student: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=expected):
        export(str(student), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(student: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="expected a new or an empty folder to export to"):
        export(str(student), tmp_path, to="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_softmax_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="linearized"):
        export(tiny.teacher_folder(), tmp_path / "out", to="hf")
