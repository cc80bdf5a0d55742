"""The closer look as a whole, by known answers: a student that is its teacher, one without a linear part, one alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import linearize
from linearize.evaluation.candidates import Candidate
from linearize.evaluation.config import EvaluationConfig
from linearize.evaluation.controls import window_only_plan
from linearize.evaluation.examination import Examination, examine
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer

POSITIONS = 128
ROWS = tiny.packed([[64], [30, 34], [64], [64]])
CONFIG = EvaluationConfig(bootstrap_samples=20, fidelity_tokens=128, prompts=2, new_tokens=6, recall_trials=2)


def examined(models: dict[str, PreTrainedModel], window_size: int = 8, **changes: Any) -> Examination:
    @contextmanager
    def opened(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        yield model

    candidates = [Candidate(name, lambda model=model: opened(model)) for name, model in models.items()]
    options = {"window_size": window_size, "max_positions": POSITIONS, "seed": 0}
    return examine(candidates, ROWS, byte_tokenizer(), config=CONFIG.model_copy(update=changes), **options)


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    return tiny.llama().double()


def test_a_student_that_is_its_teacher(teacher: PreTrainedModel) -> None:
    """A window that holds every key."""
    student = linearize.convert(teacher, tiny.recipe(mixer__span__window_size=POSITIONS))
    found = examined({"teacher": teacher, "student": student})
    assert found.agreement is not None and found.generations is not None
    assert found.agreement.top1.low == 1
    assert found.agreement.kl.high < 1e-6
    assert found.generations.agreement.low == 1
    assert found.generations.common_prefix.low == CONFIG.new_tokens
    for layer in found.fidelity.layers:
        assert max(layer.output_relative) < 1e-12
    assert all(share == 0 for layer in found.path_usage.layers for share in layer.linear_share)
    for test in found.retrieval:
        assert test.models["student"] == test.models["teacher"]
        assert test.recovery is None or test.recovery.mean == pytest.approx(1)
    assert found.not_measured == {"tasks": "none asked for; name some by --tasks or evaluation.tasks"}
    assert "in 100.0% [100.0%, 100.0%] of all places" in found.lines()[0]


def test_a_window_has_no_linear_mass(teacher: PreTrainedModel) -> None:
    converted = linearize.convert(teacher, tiny.recipe(mixer__span__window_size=8))
    student = convert_layers(teacher, window_only_plan(read_plan(converted.config)))
    found = examined({"teacher": teacher, "student": student})
    assert all(share == 0 for layer in found.path_usage.layers for share in layer.linear_share)
    assert found.path_usage.without_linear.mean == 0
    assert "has no linear part" in found.path_usage.words
    assert found.agreement is not None and found.agreement.kl.low > 0


def test_a_student_alone(teacher: PreTrainedModel) -> None:
    """Without a teacher, and with text that is too short to go on with: said, not raised."""
    student = linearize.convert(teacher, tiny.recipe(mixer__span__window_size=8))
    found = examined({"student": student})
    assert (found.agreement, found.generations) == (None, None)
    assert found.not_measured["agreement"] == "no teacher at hand"
    short = examined({"teacher": teacher, "student": student}, window_size=32, new_tokens=64)
    assert short.generations is None
    assert short.not_measured["generations"].startswith("generations: expected at least 2 held-out documents")
    assert short.agreement is not None


def test_only_some_rows_are_read(teacher: PreTrainedModel) -> None:
    student = linearize.convert(teacher, tiny.recipe(mixer__span__window_size=8))
    found = examined({"teacher": teacher, "student": student}, examined_tokens=128)
    assert found.agreement is not None
    assert found.agreement.tokens == int((ROWS.labels[[0, 3], 1:] != -100).sum())


def test_plain_data(teacher: PreTrainedModel) -> None:
    student = linearize.convert(teacher, tiny.recipe(mixer__span__window_size=8))
    plain = examined({"teacher": teacher, "student": student}).to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == json.loads(json.dumps(plain))
    sections = {"agreement", "generations", "fidelity", "path_usage", "retrieval", "tasks", "not_measured"}
    assert set(plain) == sections
    assert torch.tensor(plain["fidelity"]["maps"][0]["student"]).ndim == 2
