"""The scripts of experiments/real_models/, on tiny models."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import linearize
from linearize.hf.checkpoint import load_model
from linearize.recipe import Recipe
from tests import tiny

REAL_MODELS = Path(__file__).parents[2] / "experiments" / "real_models"


def load(script: str) -> ModuleType:
    """A script of experiments/real_models/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"real_models_{script}", REAL_MODELS / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sort, story = load("sort"), load("story")


def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
    script.main()


def read(path: Path) -> tuple[dict[str, Any], str]:
    """What a script wrote: the data, and the page beside them."""
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


# --- sort -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 that has learned to sort four letters of three, all 81 inputs."""
    folder = tmp_path_factory.mktemp("sorter")
    sizes = dict(n_embd=32, n_layer=2, n_head=2, n_positions=7, vocab_size=3, tie_word_embeddings=False)
    quiet = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = GPT2Config(**sizes, **quiet, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(folder)
    inputs = sort.every_input(str(folder))
    rows = sort.sorting_rows(inputs, inputs.sort(dim=1).values)
    training = {"finetune.lr": 3e-3, "finetune.epochs": 40, "finetune.batch_size": 27}
    recipe = Recipe.load("hedgehog-gpt2", training)
    assert recipe.finetune is not None
    linearize.finetune(model, rows, rows, recipe.finetune, output_dir=folder / "training")
    model.save_pretrained(folder)
    return folder


def test_rows_of_sorting() -> None:
    inputs = torch.tensor([[2, 0, 1], [1, 1, 0]])
    rows = sort.sorting_rows(inputs, inputs.sort(dim=1).values)
    assert rows.inputs()["input_ids"].tolist() == [[2, 0, 1, 0, 1], [1, 1, 0, 0, 1]], "the last letter is not read"
    assert rows.targets().tolist() == [0, 1, 2, 0, 1, 1] and rows.target_counts().tolist() == [3, 3]


def test_a_model_that_sorts(sorter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"transfer.epochs": 6, "finetune.epochs": 4, "finetune.lr": 1e-3}
    methods = {label: (name, overrides | short) for label, (name, overrides) in sort.METHODS.items()}
    monkeypatch.setattr(sort, "METHODS", methods)
    arguments = ["--model", sorter, "--output-dir", tmp_path / "stages", "--json", tmp_path / "found.json"]
    call(sort, monkeypatch, *arguments)
    found, page = read(tmp_path / "found.json")
    assert (found["teacher"], found["inputs"], found["other_half"]) == (81, 81, 40)
    linear, windowed = found["methods"].values()
    for method in (linear, windowed):
        everything, half = method["all"], method["half"]
        assert everything["swapped"] < everything["finetuned"] > 60
        assert half["swapped"] < half["finetuned"] <= 40
    assert windowed["all"]["window_finetuned"] < 40 > windowed["all"]["window"], "it does not see the first letter"
    assert "window" not in linear["all"]
    cells = [str(windowed["all"][stage]) for stage in sort.STAGES]
    assert f"| LoLCATs, window of 2 | {' | '.join(cells)} |" in page


def test_the_cache_changes_no_answer(sorter: Path) -> None:
    """Letters counted as they are generated are those that the model gives without a cache."""
    teacher = load_model(str(sorter), dtype=torch.float32, device=torch.device("cpu"))
    student = linearize.convert(teacher, Recipe.load("lolcats", {"mixer.span.window_size": 2})).eval()
    inputs = sort.every_input(str(sorter))
    tokens = inputs
    for _ in range(4):
        tokens = torch.cat([tokens, student(tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert sort.answers(student, inputs).tolist() == tokens[:, 4:].tolist()
    right = (tokens[:, 4:] == inputs.sort(dim=1).values).all(dim=1).sum()
    assert sort.rightly_sorted(student, inputs) == right < len(inputs)


def test_what_cannot_be_asked_to_sort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = {tiny.gpt2_folder(): "with at most 100,000 inputs", str(tmp_path): "config.json"}
    capsys.readouterr()
    for model, expected in reasons.items():
        with pytest.raises(SystemExit, match="2"):
            call(sort, monkeypatch, "--model", model, "--output-dir", tmp_path / "out", "--json", tmp_path / "a.json")
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1 and expected in message
    assert not list(tmp_path.iterdir())


# --- story ------------------------------------------------------------------------------------------------------------


def test_a_model_of_stories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = tiny.write_text(tmp_path / "valid.jsonl", documents=30, seed=1)
    monkeypatch.setattr(story, "RECIPE", story.RECIPE | tiny.RECIPE)
    monkeypatch.setattr(story, "NEW_TOKENS", 20)
    arguments = ["--model", tiny.teacher_folder(), "--dataset", tiny.text_file(), "--validation-dataset", held_out]
    arguments += ["--output-dir", tmp_path / "run", "--json", tmp_path / "found.json", "--set", "seed=3"]
    with tiny.quick_measures():
        call(story, monkeypatch, *arguments)
    found, page = read(tmp_path / "found.json")
    assert found["set"]["seed"] == 3

    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    losses = {line["label"]: line["quality"]["loss"]["mean"] for line in evaluation["measured"]}
    perplexity = {label: x["mean"] for label, x in found["perplexity"].items()}
    assert perplexity == pytest.approx({label: torch.tensor(x).exp().item() for label, x in losses.items()}, rel=1e-4)
    assert perplexity["student"] < perplexity["student, untrained"] and "window only, fine-tuned" in perplexity
    assert f"| student | {perplexity['student']:.2f} [" in page

    assert list(found["stories"]) == ["teacher", "student, untrained", "student"]
    student = load_model(str(tmp_path / "run" / "model"), dtype=torch.float32, device=torch.device("cpu"))
    prompt = tiny.tokens(story.PROMPT)
    told = student.generate(prompt, max_new_tokens=20, do_sample=False)[0]
    text = story.load_tokenizer(tiny.teacher_folder()).decode(told, skip_special_tokens=True)
    assert found["stories"]["student"]["text"] == text and text.startswith(story.PROMPT)
    assert found["stories"]["teacher"]["as_the_teacher"] == found["stories"]["teacher"]["tokens"] > 0


def test_where_stories_part() -> None:
    assert story.alike([1, 2, 3], [1, 2, 4]) == 2
    assert story.alike([1, 2], [1, 2, 4]) == 2
    assert story.alike([3], [4]) == 0


def test_no_stories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--dataset", tmp_path / "none.txt", "--validation-dataset", tmp_path / "none.txt"]
    model = tiny.teacher_folder()
    capsys.readouterr()  # where this is the first to ask for it, saving has said something
    with pytest.raises(SystemExit, match="2"):
        call(story, monkeypatch, "--model", model, *data, "--output-dir", tmp_path / "run")
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "none.txt" in message
