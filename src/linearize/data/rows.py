"""What a model is trained and measured on: rows of text, examples of a task, images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

Indices = Tensor | Sequence[int] | slice

IGNORED = -100
"""The label of a token without loss (the Hugging Face convention)."""


@runtime_checkable
class Rows(Protocol):
    """N rows, each an input of a model together with what is to be learned from it. On the CPU."""

    def __len__(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """How many tokens all rows have together, padding apart."""
        ...

    def target_counts(self) -> Int64[Tensor, " N"]:
        """How many outputs of each row are compared with something; a mean loss is a mean over all of these."""
        ...

    def rows(self, indices: Indices) -> Rows:
        """These rows, in this order."""
        ...

    def inputs(self) -> dict[str, Any]:
        """Arguments of a model without a head, for all rows at once."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All that makes them what they are: equal rows have equal tensors."""
        ...

    def compared(self, outputs: Any) -> Float[Tensor, "M C"]:
        """Those of a model's outputs that the losses compare, row by row."""
        ...

    def targets(self) -> Tensor | None:
        """[M]: what each of `compared` should be, a class (int64) or a number; None where only a teacher says it."""
        ...


def on_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A model's arguments with all tensors among them on the device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@contextmanager
def inference(model: nn.Module) -> Iterator[torch.device]:
    """No gradients, no dropout; yields the device to put inputs on. The model's training flag is put back."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(training)
