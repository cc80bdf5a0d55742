"""Tasks on the command line, and what is refused: one line that says what to do."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from linearize.base import UserError
from linearize.recipe import Recipe
from linearize.run.folder import Run
from linearize.run.pipeline import run
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.commands import Command, assert_refused
from tests.task_runs import CPU, KINDS, QUICK, TRANSFER, job, numbers, written


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of an encoder: not to be changed."""
    made = job("classes of texts", tmp_path_factory.mktemp("classified") / "run", finetune__epochs=1)
    run(made)
    return made


# --- the command line -------------------------------------------------------------------------------------------------


def options(recipe: dict[str, Any]) -> list[str]:
    return [word for name, value in recipe.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def test_run_plan_and_eval_as_commands(command: Command, tmp_path: Path) -> None:
    model = tiny.encoder_folder()
    planned = command("plan", "hedgehog-bert", "--model", model)
    assert planned.status == 0 and "hedgehog-bert" in planned.out
    assert json.loads(command("plan", "hedgehog-bert", "--model", model, "--json").out)["bidirectional"] is True

    short = options(QUICK | TRANSFER | {"transfer.epochs": 1, "finetune.epochs": 1})
    on = ["--model", model, "--dataset", tiny.sentences_file(), "--output-dir", tmp_path / "run"]
    done = command("run", "hedgehog-bert", *on, *short)
    assert done.status == 0 and "accuracy" in done.out and "the model: " in done.err
    done = command("eval", tmp_path / "run" / "model", "--dataset", tiny.sentences_file(), "--json")
    assert done.status == 0
    assert numbers(json.loads(done.out)) == numbers(written(tmp_path / "run"))


def test_built_in_tasks_need_no_dataset(command: Command, tmp_path: Path) -> None:
    fields = QUICK | KINDS["recall"].fields() | {"finetune.epochs": 1}
    given = ["--model", tiny.teacher_folder(), "--output-dir", tmp_path / "run"]
    done = command("run", "hedgehog-scratch", *given, *options(fields), "--json")
    assert done.status == 0
    assert json.loads(done.out)["task"]["type"] == "associative_recall"


def test_what_an_encoder_cannot_do(command: Command, classified: Run, tmp_path: Path) -> None:
    model = classified.folder / "model"
    generates = (
        f"model {model}: expected one for AutoModelForCausalLM, found one for AutoModelForSequenceClassification"
    )
    assert_refused(command("generate", model, "--prompt", "a"), generates)
    assert_refused(command("bench", model), generates)
    moved = shutil.copytree(model, tmp_path / "moved")
    for name in ("recipe.yaml", "run.json"):  # a model of before they were written beside it
        (moved / name).unlink()
    done = command("eval", moved, "--dataset", tiny.sentences_file())
    assert_refused(done, f"model {moved}: expected one for AutoModelForCausalLM, found one for AutoModelForSequence")
    assert "set data.task.type" in done.err
    task = options(
        {"data.task": {"type": "text_classification"}, "evaluation.examine": False, "data.sequence_length": 48}
    )
    task += options({"data.validation_fraction": 0.5})
    alone = command("eval", moved, "--dataset", tiny.sentences_file(), *task, "--json")
    assert alone.status == 0
    assert [line["name"] for line in json.loads(alone.out)["task"]["scored"]] == ["student"]


def test_bad_input_is_one_line(command: Command, tmp_path: Path) -> None:
    given = ["run", "hedgehog-bert", "--model", tiny.encoder_folder(), "--output-dir", tmp_path / "run"]
    assert_refused(
        command(*given), "data.dataset: expected a hub id, or a local file or folder, found none; pass --dataset"
    )
    wrong = options({"data.task.label_column": "mood"})
    done = command(*given, "--dataset", tiny.sentences_file(), *wrong)
    assert_refused(done, "data row 1: expected a column 'mood' (data.task.label_column), found sentence, label, score")
    assert not (tmp_path / "run").exists()


# --- what is refused --------------------------------------------------------------------------------------------------


def without_padding(folder: Path) -> str:
    """The encoder with a tokenizer that has no token to pad with."""
    shutil.copytree(tiny.encoder_folder(), folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


ENCODER = (tiny.encoder_folder, tiny.sentences_file)
TASK = {"data.task": {"type": "text_classification"}}
EMBEDDING = {"data.task": {"type": "text_embedding"}, "data.text_column": "sentence"}
# A recipe, a model, its data, further fields, and what is said.
REFUSED: dict[str, tuple[str, Callable[[], str], Callable[[], str], dict[str, Any], str]] = {
    "a window": ("absolute-scale", *ENCODER, {}, r"mixer\.span: expected `none`.*; use the recipe hedgehog-bert or"),
    "a window, with a task": (
        "lolcats",
        *ENCODER,
        TASK,
        r"mixer\.span: expected `none`.*; use the recipe hedgehog-bert",
    ),
    "next tokens": (
        "hedgehog",
        *ENCODER,
        {},
        r"data\.task: expected a task for an encoder \(bert\), found language_modelling; use the recipe hedgehog-bert",
    ),
    "recall by an encoder": (
        "hedgehog-scratch",
        *ENCODER,
        {"data.task": {"type": "associative_recall"}},
        r"data\.task: expected a task for an encoder \(bert\), found associative_recall",
    ),
    "images for a text model": (
        "hedgehog-vit",
        *ENCODER,
        {},
        r"data\.task: expected a vision model for image_classification, found bert; ",
    ),
    "text for a vision model": (
        "hedgehog-bert",
        tiny.image_classifier_folder,
        tiny.sentences_file,
        {},
        r"data\.task: expected image_classification for a vision model \(vit\), found text_classification; ",
    ),
    "embeddings with labels": (
        "hedgehog-bert",
        *ENCODER,
        EMBEDDING,
        r"recipe .*set finetune\.loss={labels: 0, output_mse",
    ),
    "embeddings from scratch": (
        "hedgehog-scratch",
        *ENCODER,
        EMBEDDING | {"finetune.loss": {"labels": 0, "output_mse": 1}},
        r"recipe .*weights `random` have no embeddings to learn from: set another data\.task",
    ),
    "select_rows_by_esl": (
        "hedgehog-bert",
        *ENCODER,
        {"data.select_rows_by_esl": 4},
        r"recipe .*data\.select_rows_by_esl is for language models",
    ),
    "repeats": (
        "hedgehog-bert",
        *ENCODER,
        {"data.repeated_span_fraction": 0.1},
        r"recipe .*data\.repeated_span_fraction is for language models",
    ),
    "blocks of an encoder": (
        "hedgehog-bert",
        *ENCODER,
        {"transfer.layers_per_block": 1},
        r"transfer\.layers_per_block: expected null, because an encoder",
    ),
    "blocks with a task": (
        "hedgehog-bert",
        tiny.decoder_classifier_folder,
        tiny.sentences_file,
        {"transfer.layers_per_block": 1, "data.validation_fraction": 0.5},
        r"transfer\.layers_per_block: expected a language model, found the task text_classification",
    ),
    "numbers for classes": (
        "hedgehog-bert",
        *ENCODER,
        {"data.task.metrics": ["spearman"], "data.task.label_column": "score"},
        r"data\.task\.metrics: expected a model with one output for `spearman`, found 2 classes; ",
    ),
    "a decoder that does not know the padding": (
        "hedgehog-bert",
        functools.partial(tiny.decoder_classifier_folder, 2, None),
        tiny.sentences_file,
        {},
        r"config\.json: pad_token_id: expected 259, the padding of the rows, found None; set it there",
    ),
    "ListOps with other padding": (
        "hedgehog-scratch",
        functools.partial(tiny.decoder_classifier_folder, 10),
        tiny.sentences_file,
        {"data.task": {"type": "list_ops"}, "data.dataset": None},
        r"config\.json: pad_token_id: expected 0, the padding of the rows, found 259; set it there",
    ),
    "long texts": (
        "hedgehog-bert",
        *ENCODER,
        {"data.sequence_length": 200},
        r"data\.sequence_length: expected at most the model's 128 positions, found 200; ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line(case: str, tmp_path: Path) -> None:
    name, model, dataset, fields, message = REFUSED[case]
    fitting = {"data.sequence_length": 48} if name in ("absolute-scale", "hedgehog", "lolcats") else {}
    with pytest.raises(UserError, match=f"^{message}") as refused:
        run(Run(Recipe.load(name, fitting | {"data.dataset": dataset()} | fields), model(), tmp_path / "run", **CPU))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_no_padding_token(tmp_path: Path) -> None:
    model = without_padding(tmp_path / "model")
    recipe = Recipe.load("hedgehog-bert", {"data.dataset": tiny.sentences_file()})
    with pytest.raises(UserError, match=r"^tokenizer: expected a padding token, .*; set the tokenizer's pad_token"):
        run(Run(recipe, model, tmp_path / "run", **CPU))  # type: ignore[arg-type]
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|pad|>", "additional_special_tokens": ["<|a|>"]})
    tokenizer.pad_token = "<|a|>"
    tokenizer.save_pretrained(model)
    with pytest.raises(UserError, match=r"^tokenizer: expected a padding token below the model's vocab_size of 260"):
        run(Run(recipe, model, tmp_path / "run", **CPU))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
