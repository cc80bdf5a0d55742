"""The models that are measured side by side, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from transformers import PreTrainedModel

BATCH_SIZE = 4  # rows per forward pass
DEFAULT_WINDOW = 64  # the window of the controls where a mixer has none
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
# Who sees no further than the window, and who sees all: the first two that were measured. A student that was finetuned
# is compared with models that were fine-tuned on the same tokens, or the gain of fine-tuning would count as context. No
# teacher is fine-tuned if its own outputs are the only target, because it would not change.
REFERENCES = (("window_finetuned", "teacher_finetuned"), ("window_finetuned", "teacher"), ("window", "teacher"))


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
