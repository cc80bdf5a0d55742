"""Encoders saved and loaded again: every head, in a fresh process, from the teacher's own checkpoint."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.hf.classes import MODEL_CLASSES
from tests.hf.checks import assert_close
from tests.hf.encoders import ENCODERS, Case, inputs_of, make_encoder, make_student, student_of, teacher_of

HEADS = [
    pytest.param(name, auto, cls.__bases__[-1].__name__, id=f"{name}-{auto}" + f"-{number}" * (number > 0))
    for name in ENCODERS
    for auto, classes in MODEL_CLASSES[f"linearized_{name}"].items()
    for number, cls in enumerate(classes)
]
# One head of each architecture; of BERT's, the base model is the one that remote code loads.
SAVED = {name: Case(name, head="ForMaskedLM") for name in ("roberta", "albert", "modernbert")}
SAVED |= {name: Case(name, head="ForSequenceClassification") for name in ("distilbert",)}
SAVED |= {name: Case(name, head="ForImageClassification") for name in ("deit", "dinov2")}
SAVED |= {name: Case(name) for name in ("bert", "vit")}


def head_inputs(architecture: str, auto: str) -> dict[str, Tensor]:
    inputs = inputs_of(architecture)
    if auto == "AutoModelForMultipleChoice":  # of DistilBERT's, it takes no positions
        return {name: torch.stack([x, x.flip(0)], dim=1) for name, x in inputs.items() if name != "position_ids"}
    return inputs


def outputs(model: PreTrainedModel, architecture: str, auto: str) -> Tensor:
    with torch.no_grad():
        return model(**head_inputs(architecture, auto))[0]


@pytest.mark.parametrize("architecture, auto, base", HEADS)
def test_every_head_comes_back(architecture: str, auto: str, base: str, tmp_path: Path) -> None:
    case = Case(architecture, head=base.removeprefix(ENCODERS[architecture][0]))
    teacher, student = teacher_of(case), make_student(case)
    found = outputs(student, architecture, auto)
    student.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto).from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is type(student) and type(student).__name__ == f"Linearized{type(teacher).__name__}"
    assert_close(outputs(loaded, architecture, auto), found)
    expected = outputs(teacher, architecture, auto)
    assert not torch.allclose(found, expected)
    with linearize.softmax_attention(loaded):
        assert_close(outputs(loaded, architecture, auto), expected)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_teacher_s_folder_with_a_linearized_config_is_a_conversion(architecture: str, tmp_path: Path) -> None:
    """What transformers renames in older checkpoints of a base, it renames for ours too."""
    teacher = make_encoder(architecture).float()
    teacher.save_pretrained(tmp_path)
    student = linearize.convert(teacher, Case(architecture).recipe())
    loaded, report = type(student).from_pretrained(
        tmp_path, config=student.config, dtype=torch.float32, output_loading_info=True
    )
    assert report["missing_keys"] == {name for name in student.state_dict() if ".mixer." in name}
    assert not report["unexpected_keys"]
    for name, parameter in student.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What `fresh_encoders.py` says, and the folder with the outputs that it wrote."""
    checkpoints, folder = tmp_path_factory.mktemp("encoders"), tmp_path_factory.mktemp("loaded")
    for name, case in SAVED.items():
        copy.deepcopy(student_of(case)).save_pretrained(checkpoints / name)
        save_file(
            {key: x.contiguous() for key, x in inputs_of(name).items()}, checkpoints / name / "inputs.safetensors"
        )
    environment = os.environ | dict(HF_HOME=str(folder), HF_MODULES_CACHE=str(folder / "modules"), HF_HUB_OFFLINE="1")
    command = [sys.executable, Path(__file__).with_name("fresh_encoders.py"), checkpoints, folder]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


@pytest.mark.parametrize("name", [*SAVED, "remote"])
def test_loads_in_a_fresh_process(name: str, fresh_process: tuple[dict[str, Any], Path]) -> None:
    report, folder = fresh_process
    architecture = "bert" if name == "remote" else name
    student = student_of(SAVED[architecture])
    assert report[name] == f"linearize.hf.classes.{type(student).__name__}"
    with torch.no_grad():
        expected = student(**inputs_of(architecture))[0]
    assert_close(load_file(folder / f"{name}.safetensors")["first"], expected)
