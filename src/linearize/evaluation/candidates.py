"""The models that are measured together, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from transformers import PreTrainedModel

BATCH_SIZE = 4  # rows per forward pass
DEFAULT_WINDOW = 64  # tokens of the controls' window if a mixer has none
LABELS = {
    "teacher": "teacher",
    "teacher_finetuned": "teacher, fine-tuned",
    "swapped": "student, untrained",
    "transferred": "student after transfer",
    "student": "student",
    "ablated": "student, no linear part",
    "window": "window only, untrained",
    "window_sinks": "window + sinks, untrained",
    "window_finetuned": "window only, fine-tuned",
    "equal_finetuned": "window of equal bytes, fine-tuned",
    "exact_finetuned": "same memory, no linear part, fine-tuned",
}
# Pairs of a window-only model and one with full context; the first pair that was measured is used. A fine-tuned student
# is compared with models fine-tuned on the same tokens, else the gain of fine-tuning would count as context. The
# teacher is not fine-tuned if its own outputs are the only target, because it would not change.
REFERENCES = (("window_finetuned", "teacher_finetuned"), ("window_finetuned", "teacher"), ("window", "teacher"))


@dataclass(frozen=True)
class Candidate:
    """A model to measure.

    Attributes:
        open: returns a context manager that yields the model and releases it afterwards.
        training_tokens: tokens of all training stages since it was a teacher; None: unknown.
    """

    name: str
    open: Callable[[], AbstractContextManager[PreTrainedModel]]
    note: str = ""
    training_tokens: int | None = None

    @property
    def label(self) -> str:
        return LABELS[self.name]
