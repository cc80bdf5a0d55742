"""The examples do what they say, and stay a screen long."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import linearize
from linearize.configs.feature_maps import ReluMap
from linearize.mixers.feature_maps.pointwise import Relu
from tests import tiny
from tests.byte_tokenizer import CHATML, byte_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
Example = Callable[..., str]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Runs an example in this process; what it printed."""

    def run(name: str, *arguments: Any) -> str:
        path = ROOT / "examples" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_a_screen_and_says_what_stands_behind_it(path: Path, example: Example) -> None:
    if path.stem == "finetune_trl":
        pytest.importorskip("trl", reason="trl is not installed; `make test-trl` installs it")
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 55
    assert f"python examples/{path.name}" in text  # how to run it
    assert re.search(r"arXiv \d{4}\.\d{5}|github\.com/", text)  # the public source
    with pytest.raises(SystemExit) as done:
        example(path.stem, "--help")
    assert done.value.code == 0


def test_lolcats(example: Example, tmp_path: Path) -> None:
    text = tiny.write_text(tmp_path / "text.jsonl", documents=400)
    given = ["--model", tiny.teacher_folder(), "--text", text, "--output-dir", tmp_path]
    assert "def" in example("lolcats", *given, "--steps", 2)
    for stage in ("attention_transfer", "finetune"):
        assert json.loads((tmp_path / stage / "result.json").read_text())["steps"] == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "LinearizedLlamaForCausalLM"


def test_convert_without_training(example: Example, tmp_path: Path) -> None:
    text = tiny.write_text(tmp_path / "text.jsonl", documents=400)
    given = ["--model", tiny.teacher_folder(), "--text", text, "--output-dir", tmp_path]
    assert "def read_config" in example("convert_without_training", *given, "--fraction", 0.5, "--length", 256)
    layers = json.loads((tmp_path / "config.json").read_text())["linearize"]["layers"]
    assert all(layer["cache"]["size"] for layer in layers)


def test_export_stock(example: Example, tmp_path: Path) -> None:
    text = tiny.write_text(tmp_path / "text.jsonl", documents=400)
    given = ["--model", tiny.teacher_folder(), "--text", text, "--output-dir", tmp_path, "--length", 128]
    printed = example("export_stock", *given)
    assert "<class 'transformers.models.granite_swa" in printed and "def read_config" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convert_without_training", "lolcats", "export_stock"])
def test_an_example_with_its_defaults(example: Example, tmp_path: Path, name: str) -> None:
    """On the bundled teacher and the text that the examples name."""
    command = [sys.executable, ROOT / "scripts" / "write_stdlib_corpus.py", tmp_path / "corpus"]
    subprocess.run(command, check=True, capture_output=True)
    given = ["--text", tmp_path / "corpus" / "train.jsonl", "--output-dir", tmp_path / "out"]
    assert "def" in example(name, *given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:'pin_memory':UserWarning")
@pytest.mark.parametrize("name, options", [("trainer", []), ("trl", []), ("trl", ["--packing"])])
def test_finetune(example: Example, tmp_path: Path, name: str, options: list[str]) -> None:
    """The model that is saved is the fine-tuned one, and differs from the one that was converted."""
    if name == "trl":
        pytest.importorskip("trl", reason="trl is not installed; `make test-trl` installs it")
    text = tiny.write_text(tmp_path / "text.jsonl", documents=400)
    data = ["--data" if name == "trl" else "--text", text]
    given = ["--model", tiny.teacher_folder(), *data, "--output-dir", tmp_path, "--steps", 2, "--length", 64]
    example(f"finetune_{name}", *given, *options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "LinearizedLlamaForCausalLM"
    before = AutoModelForCausalLM.from_pretrained(tiny.teacher_folder()).state_dict()
    changed = {key for key, x in model.state_dict().items() if key in before and not x.equal(before[key])}
    assert len(changed) == 2 * 7  # of both layers, all projections


def test_compare_chat(example: Example, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.finished_run().folder, tmp_path / "run")
    for wrong in (tmp_path, folder):  # no run, and a model without a chat template
        with pytest.raises(SystemExit) as refused:
            example("compare_chat", wrong)
        assert refused.value.code == 2
    byte_tokenizer(template=CHATML).save_pretrained(folder / "model")
    said = example("compare_chat", folder, "--question", "abc")
    assert all(words in said for words in ("teacher", "streaming", "full", "KiB"))


def test_the_page_of_the_examples_lists_them() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\w+\.py)\)", page)) == [path.name for path in EXAMPLES]


def test_the_python_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for the names of the model and of the text, and sizes for a tiny model."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    text = tiny.write_text(tmp_path / "text.jsonl", documents=400)
    settings = {"data.dataset": str(text), "data.sequence_length": 256, "memory.fraction": 0.5}
    for name, ours in {
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(tiny.teacher_folder()),
        '{"data.dataset": "text.jsonl", "memory.fraction": 0.2}': repr(settings),
    }.items():
        assert name in code
        code = code.replace(name, ours)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == "LinearizedLlamaForCausalLM"


def test_the_python_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for the names of the model and of the text, and a budget."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), re.DOTALL)
    text = tiny.write_text(tmp_path / "text.jsonl", documents=400)
    budget = {"batch_size": 4, "max_tokens": 256, "eval_every": 2}
    settings = {f"{stage}.{field}": value for stage in ("transfer", "finetune") for field, value in budget.items()}
    settings |= {"data.dataset": str(text), "data.sequence_length": 32, "mixer.span.window_size": 8}
    for name, ours in {
        '"path/to/llama"': repr(tiny.teacher_folder()),
        '{"data.dataset": "text.jsonl"}': repr(settings),
    }.items():
        assert name in code
        code = code.replace(name, ours)
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec(compile(code, "tutorial.md", "exec"), made)
    assert type(made["softmax"]).__name__ == "LlamaForCausalLM"
    assert {path.parent.name for path in tmp_path.glob("run/*/result.json")} == {"transfer", "finetune"}


def test_a_map_of_ones_own(tmp_path: Path) -> None:
    """In a process of its own, which is the only one that knows the map."""
    script = str(ROOT / "examples" / "own_feature_map.py")
    command = [sys.executable, script, "--model", tiny.teacher_folder(), "--output-dir", str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert float(said.split()[-1]) < 1e-4
    layers = json.loads((tmp_path / "config.json").read_text())["linearize"]["layers"]
    assert {layer["feature_map"]["type"] for layer in layers} == {"squared_relu"}
    with pytest.raises(ValueError, match="squared_relu"):  # nobody registered it here
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_map_that_is_there_already() -> None:
    with pytest.raises(ValueError, match="'relu'"):
        linearize.register_feature_map(ReluMap, Relu)


@pytest.mark.parametrize("folder", ["recommended/pycode-5m", "lolcats/stories260K"])
def test_read_run_of_a_committed_run(example: Example, folder: str) -> None:
    printed = example("read_run", ROOT / "experiments" / folder)
    found = json.loads((ROOT / "experiments" / folder / "evaluation.json").read_text())
    for line in found["measured"]:
        assert re.search(rf"^{re.escape(line['label'])} +{line['quality']['loss']['mean']:.3f} ", printed, re.MULTILINE)
    assert all(f"{line['cache_bytes']:,} bytes" in printed for line in found["speed"])


def test_read_run_says_what_was_kept(example: Example, tmp_path: Path) -> None:
    """By hand: a window at 3.0, a student at 2.9 and a teacher at 2.5, all fine-tuned on the same tokens."""
    losses = {"window_finetuned": 3.0, "student": 2.9, "teacher_finetuned": 2.5, "teacher": 1.0, "window": 9.0}
    measured = [
        {"name": name, "label": name, "quality": {"loss": {"mean": loss}, "beyond": {"mean": loss}}}
        for name, loss in losses.items()
    ]
    evaluation = {"window_size": 8, "measured": measured, "comparisons": [], "speed": []}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    assert "kept of the teacher's gain beyond the window: 20%" in example("read_run", tmp_path)
