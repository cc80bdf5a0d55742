"""The models that are measured side by side, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from transformers import PreTrainedModel

BATCH_SIZE = 4  # rows per forward pass
LABELS = {
    "teacher": "teacher",
    "teacher_lora": "teacher, finetuned",
    "swapped": "student, untrained",
    "transferred": "student after transfer",
    "student": "student",
    "ablated": "student, no linear part",
    "window": "window only, untrained",
    "window_sinks": "window + sinks, untrained",
    "window_lora": "window only, finetuned",
}


@dataclass(frozen=True)
class Candidate:
    """A model to measure; `open` yields it, and what it made for that is gone afterwards.

    `training_tokens`: what all stages of training together have shown it since it was a teacher; None if unknown.
    """

    name: str
    open: Callable[[], AbstractContextManager[PreTrainedModel]]
    note: str = ""
    training_tokens: int | None = None

    @property
    def label(self) -> str:
        return LABELS[self.name]
