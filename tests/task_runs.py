"""Runs of every kind of task, in a few steps on tiny models."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linearize.recipe import Recipe
from linearize.run.folder import Run
from tests import tiny

CPU = {"dtype": torch.float32, "device": torch.device("cpu")}

# Few steps, large ones, on what is learned soon.
QUICK: dict[str, Any] = {
    "finetune.epochs": 3,
    "finetune.batch_size": 8,
    "finetune.lr": 5e-3,
    "finetune.eval_every": 6,
    "data.sequence_length": 48,
    "data.validation_fraction": 0.3,
    "data.validation_rows": 24,
    "evaluation.bootstrap_samples": 40,
    "evaluation.copy_rows": 2,
    "evaluation.long": True,
    "evaluation.examine": False,
    "evaluation.fidelity_tokens": 128,
}
TRANSFER = {"transfer.epochs": 2, "transfer.batch_size": 8, "transfer.eval_every": 6}
FROM_SCRATCH = {"finetune.schedule.warmup_steps": 0}


@dataclass(frozen=True)
class Kind:
    """A recipe, a model's folder, what to run on, and what comes of it."""

    recipe: str
    model: Callable[[], str]
    fields: Callable[[], dict[str, Any]]
    metrics: tuple[str, ...]
    tag: str


def _on(dataset: Callable[[], str], **fields: Any) -> Callable[[], dict[str, Any]]:
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return lambda: TRANSFER | {"data.dataset": dataset()} | named


def _made(kind: str, **fields: Any) -> Callable[[], dict[str, Any]]:
    task = {"type": kind, "train_examples": 48, "held_out_examples": 24} | fields
    return lambda: FROM_SCRATCH | {"data.task": task}


LISTOPS = _made("list_ops", min_length=3, max_length=20, max_depth=2, max_arguments=3)
GLUE = ("accuracy", "f1", "matthews")
ROUGE = ("rouge1", "rouge2", "rougeL")
TO_OUTPUTS = {"labels": 0, "output_mse": 1}
KINDS = {
    "classes of texts": Kind(
        "hedgehog-bert",
        tiny.encoder_folder,
        _on(tiny.sentences_file, data__task__metrics=GLUE, evaluation__examine=True),
        GLUE,
        "text-classification",
    ),
    "numbers of texts": Kind(
        "hedgehog-bert",
        functools.partial(tiny.encoder_folder, labels=1),
        _on(tiny.sentences_file, data__task__metrics=["spearman"], data__task__label_column="score"),
        ("spearman",),
        "text-classification",
    ),
    "classes of tokens": Kind(
        "hedgehog-bert",
        functools.partial(tiny.encoder_folder, "ForTokenClassification"),
        _on(tiny.words_file, data__task={"type": "token_classification"}),
        ("accuracy", "f1"),
        "token-classification",
    ),
    "masked tokens": Kind(
        "hedgehog-bert",
        functools.partial(tiny.encoder_folder, "ForMaskedLM"),
        _on(tiny.sentences_file, data__task={"type": "masked_language_modelling"}, data__text_column="sentence"),
        ("accuracy", "likelihood"),
        "fill-mask",
    ),
    "embeddings": Kind(
        "hedgehog-bert",
        functools.partial(tiny.encoder_folder, "Model"),
        _on(
            tiny.sentences_file,
            data__task={"type": "text_embedding"},
            data__text_column="sentence",
            finetune__loss=TO_OUTPUTS,
            finetune__lr=1e-3,
        ),
        ("cosine",),
        "sentence-similarity",
    ),
    "images": Kind(
        "hedgehog-vit", tiny.image_classifier_folder, _on(tiny.image_folder), ("accuracy",), "image-classification"
    ),
    "images, by a distilled model": Kind(
        "hedgehog-vit",
        functools.partial(tiny.image_classifier_folder, "DeiT", "ForImageClassificationWithTeacher"),
        _on(tiny.image_folder),
        ("accuracy",),
        "image-classification",
    ),
    "recall": Kind(
        "hedgehog-scratch",
        tiny.teacher_folder,
        _made("associative_recall", vocabulary_size=8, length=16, labels="every"),
        ("accuracy",),
        "text-generation",
    ),
    "ListOps by an encoder": Kind(
        "hedgehog-scratch",
        functools.partial(tiny.encoder_folder, labels=10),
        LISTOPS,
        ("accuracy",),
        "text-classification",
    ),
    "ListOps by a decoder": Kind(
        "hedgehog-scratch",
        functools.partial(tiny.decoder_classifier_folder, 10, 0),
        LISTOPS,
        ("accuracy",),
        "text-classification",
    ),
    "summaries": Kind(
        "hedgehog-llama",
        tiny.teacher_folder,
        _on(
            tiny.dialogues_file,
            data__validation_rows=40,
            data__task__summaries=3,
            data__task__new_tokens=4,
            evaluation__trained_controls=False,
        ),
        ROUGE,
        "text-generation",
    ),
}


def job(kind: str, folder: Path, **fields: Any) -> Run:
    found = KINDS[kind]
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return Run(Recipe.load(found.recipe, QUICK | found.fields() | named), found.model(), folder, **CPU)  # type: ignore[arg-type]


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    """An evaluation.json without what differs between two runs of the same."""
    found = json.loads(json.dumps(found))
    if "speed" in found:
        return tiny.untimed(found)
    provenance = {k: v for k, v in found["provenance"].items() if k not in ("seconds", "command")}
    return found | {"provenance": provenance}


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())
