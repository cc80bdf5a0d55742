"""Converted models of layers with full attention and windows with a learned sink, which can be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.configs.mixer import LayerPlan, MixerConfig
from linearize.hf.convert import convert_layers
from linearize.training.memory import layer_mixer
from tests import tiny
from tests.byte_tokenizer import CHATML, byte_tokenizer
from tests.hf.models import make_teacher, randomize_mixers

WINDOW = 7


def local_global(layers: int = 3, *, learned_sink: bool = True) -> LayerPlan:
    """The middle layer has full attention, the others a window."""
    window: MixerConfig = layer_mixer(WINDOW, 0, learned_sink=learned_sink)
    return tuple(None if index == layers // 2 else window for index in range(layers))


def make_student(
    architecture: str = "llama", plan: LayerPlan | None = None, *, learned_sink: bool = True, **fields: Any
) -> PreTrainedModel:
    """A student in float64 whose sinks and biases are far from 0."""
    teacher = make_teacher(architecture, **fields)
    count = teacher.config.num_hidden_layers
    student = convert_layers(teacher, local_global(count, learned_sink=learned_sink) if plan is None else plan).eval()
    randomize_mixers(student)
    return student


def student_folder(folder: Path) -> Path:
    """A saved student with a tokenizer of bytes, in float32."""
    student = convert_layers(tiny.llama(layers=3), local_global()).eval()
    randomize_mixers(student)
    student.save_pretrained(folder)
    byte_tokenizer(template=CHATML).save_pretrained(folder)
    return folder


def random_ids(rows: int, length: int) -> torch.Tensor:
    """Token ids."""
    return torch.randint(1, 60, (rows, length), generator=torch.Generator().manual_seed(0))
