"""What is known without weights is refused without weights, by `plan` as by `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import linearize
from linearize.base import UserError
from linearize.hf.checkpoint import read_config
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.plan import check_run
from linearize.recipe import Recipe
from linearize.run import folder, pipeline
from tests import tiny
from tests.commands import Command, assert_refused

ALONE = {"finetune.lora": None, "finetune.mixers": True}
# By name: a recipe, fields, and what is refused.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixers of a budget": (
        "recommended",
        {"finetune.all_weights": False, "finetune.mixers": True},
        "finetune: expected weights to train, found mixers without parameters; set finetune.lora",
    ),
    "mixers without parameters": (
        "elu",
        {"transfer": None} | ALONE,
        "finetune: expected weights to train, found mixers without parameters; set finetune.lora",
    ),
    "mixers without parameters, adapted": (
        "elu",
        {"transfer": None, "adapt": {"lora": None, "mixers": True}},
        "adapt: expected weights to train, found mixers without parameters; set adapt.lora",
    ),
    "transfer to mixers without parameters": (
        "elu",
        {"transfer": {}},
        "transfer: expected mixers with parameters to train, found none; set transfer=null",
    ),
    "a loss without meaning": (
        "lolcats",
        {"mixer.normalizer.type": "group_norm", "mixer.combine.type": "add", "transfer.weight_cross_entropy": 1.0},
        "transfer.weight_cross_entropy: expected mixers whose attention weights are a distribution over the keys",
    ),
    "blocks with a task": (
        "lolcats",
        {"data.task.type": "associative_recall", "transfer.layers_per_block": 1},
        "transfer.layers_per_block: expected a language model, found the task associative_recall",
    ),
    "too many positions": (
        "lolcats",
        {"data.sequence_length": 257},
        "data.sequence_length: expected at most the model's 256 positions, found 257",
    ),
    "far too many positions": (
        "recommended",
        {"data.sequence_length": 100_000},
        "data.sequence_length: expected at most the model's 256 positions, found 100000",
    ),
    "too long expressions": (
        "lolcats",
        {"data.task.type": "list_ops", "data.task.max_length": 256},
        "data.task.max_length: expected at most the model's 256 positions, found 257",
    ),
    "no vision model": (
        "hedgehog-vit",
        {},
        "data.task: expected a vision model for image_classification, found llama",
    ),
    "classes for a number": (
        "lolcats",
        {"data.task.type": "text_classification", "data.task.metrics": ["spearman"]},
        "data.task.metrics: expected a model with one output for `spearman`, found 2 classes",
    ),
    "too few tokens": (
        "lolcats",
        {"data.task.type": "associative_recall", "data.task.vocabulary_size": 1000},
        "data.task: expected a decoder with at least 1000 tokens",
    ),
    "too few classes": ("lolcats", {"data.task.type": "list_ops"}, "data.task: expected a model with at least"),
    "a budget without text": (
        "recommended",
        {"data.task.type": "text_classification", "data.repeated_span_fraction": 0},
        "recipe field (all): memory is fitted to the attention of a language model: set it to null",
    ),
    "data beside a task that generates its own": (
        "lolcats",
        {"data.task.type": "associative_recall", "data.dataset": "own.tsv"},
        "data.dataset: expected none, because the task associative_recall generates its own data, found 'own.tsv'; ",
    ),
    "a cache without text": (
        "lolcats",
        {"data.task.type": "associative_recall", "mixer.span.type": "terraced", "mixer.cache.size": 4},
        "recipe field (all): mixer.cache is fitted to the attention of a language model: set it to null",
    ),
}


def cases() -> list[Any]:
    """Every command with everything that it refuses; `convert` has no stages."""
    stages = ("transfer", "adapt", "finetune")
    return [
        pytest.param(command, *refused, id=f"{command}: {name}")
        for name, refused in REFUSED.items()
        for command in ("plan", "run", "convert")
        if command != "convert" or not refused[2].startswith(stages)
    ]


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights or rows are read")

    monkeypatch.setattr(folder, "load_model", fail)
    monkeypatch.setattr(pipeline, "load_processor", fail)


@pytest.mark.usefixtures("weightless")
@pytest.mark.parametrize("name, recipe, fields, message", cases())
def test_every_command_refuses_it(
    command: Command, name: str, recipe: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fields = {"data.sequence_length": 64} | fields
    options = [word for field, value in fields.items() for word in ("--set", f"{field}={_yaml(value)}")]
    where = [] if name == "plan" else ["--output-dir", str(tmp_path / "out")]
    if name != "plan" and fields.get("data.task.type") not in ("associative_recall", "list_ops"):
        where += ["--dataset", tiny.text_file()]
    assert_refused(command(name, recipe, "--model", tiny.teacher_folder(), *where, *options), message)
    assert not (tmp_path / "out").exists()


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(x)}" for key, x in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_what_is_converted_on_text_is_refused_before_the_text_is_read() -> None:
    teacher = tiny.llama()
    recipe = Recipe.load("recommended", {"data.dataset": "nowhere.txt", "data.sequence_length": 257})
    with pytest.raises(UserError, match=r"data\.sequence_length: expected at most the model's 256 positions"):
        linearize.convert(teacher, recipe, tiny.load_tokenizer(tiny.teacher_folder()))


@pytest.mark.parametrize("stage", ["adapt", "finetune"])
def test_quantized_weights_that_are_to_train_are_refused_before_anything_is_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch, stage: str, tmp_path: Path
) -> None:
    teacher = tiny.llama()
    teacher.is_quantized = True  # type: ignore[assignment]
    monkeypatch.setattr(folder.Run, "load_teacher", lambda _: teacher)
    monkeypatch.delattr(pipeline, "measure")
    fields = {"data.sequence_length": 64, "data.validation_fraction": 0.3, stage: "{lora: null, all_weights: true}"}
    options = [word for field, value in fields.items() for word in ("--set", f"{field}={value}")]
    where = ["--model", tiny.teacher_folder(), "--dataset", tiny.text_file(), "--output-dir", str(tmp_path / "out")]
    done = command("run", *where, *options)
    assert done.status == 2
    assert f"error: {stage}.all_weights: expected a model that is not quantized, found quantized weights" in done.err
    assert not (tmp_path / "out").exists()


def test_what_trains_is_accepted() -> None:
    shape = TeacherShape.from_config(read_config(tiny.teacher_folder()))
    length = {"data.sequence_length": 64}
    for name, fields in (
        ("lolcats", ALONE),
        ("recommended", {}),
        ("elu", {}),
        ("lolcats", {"heads": [{"kv_heads": ["0.0"], "mixer": None}]}),
    ):
        recipe = Recipe.load(name, length | fields)
        check_run(recipe, shape, resolve(recipe, shape, dtype=torch.float32))
