"""Rows for training and measuring: packed text, examples of a task, or images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from linearize.data.splits import spread

Indices = Tensor | Sequence[int] | slice

IGNORED = -100
"""The label of a token without loss (the Hugging Face convention)."""


@runtime_checkable
class Rows(Protocol):
    """N rows of model inputs with their targets, on the CPU."""

    def __len__(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all rows, without padding."""
        ...

    def target_counts(self) -> Int64[Tensor, " N"]:
        """Return the number of outputs of each row that have labels; a mean loss is a mean over all of these."""
        ...

    def rows(self, indices: Indices) -> Rows:
        """Return these rows, in this order."""
        ...

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of a model's forward for all rows together, without labels."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield tensors that identify the rows: equal rows have equal tensors."""
        ...

    def compared(self, outputs: Any) -> Float[Tensor, "M C"]:
        """Return those of a model's outputs that the losses compare, row by row."""
        ...

    def targets(self) -> Tensor | None:
        """Return the target [M] of each of `compared`, a class (int64) or a number; None: only a teacher has it."""
        ...


def on_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a model's arguments with all tensors on the device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@dataclass(frozen=True)
class PackedRows:
    """N rows of L tokens: whole documents and parts of documents, without padding.

    Attributes:
        position_ids: restart at 0 at the start of every document and row.
        labels: the token at the same place (the model shifts them); -100 without loss, and wherever `position_ids` is
            0, so that no prediction crosses documents.
        first_document: number of the document with which each row begins; None: every row begins a new document.
    """

    input_ids: Int64[Tensor, "N L"]
    position_ids: Int64[Tensor, "N L"]
    labels: Int64[Tensor, "N L"]
    first_document: Int64[Tensor, " N"] | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def target_counts(self) -> Int64[Tensor, " N"]:
        return self._predicted.sum(1)

    @property
    def _predicted(self) -> Bool[Tensor, "N _"]:
        return self.labels[:, 1:] != IGNORED

    def rows(self, indices: Indices) -> PackedRows:
        first = None if self.first_document is None else self.first_document[indices]
        kept = self.input_ids[indices], self.position_ids[indices], self.labels[indices]
        return PackedRows(*kept, first_document=first)

    @property
    def documents(self) -> Int64[Tensor, "N L"]:
        """Return the number of each token's document."""
        begins = self.position_ids == 0
        if self.first_document is None:
            return begins.flatten().cumsum(0).view_as(begins) - 1
        return self.first_document[:, None] + begins.cumsum(1) - begins[:, :1].long()

    def spread(self, count: int) -> PackedRows:
        """Return at most `count` rows, equally many of each document, or all that begin in it."""
        return self.rows(spread(self.documents[:, 0].tolist(), count, "spread"))

    def inputs(self) -> dict[str, Any]:
        """Return tokens and positions, without a mask or cache, so that models separate documents by positions."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.input_ids, self.position_ids, self.labels)

    def compared(self, outputs: Any) -> Float[Tensor, "P V"]:
        """Return the logits at t - 1 of every token t that has a label."""
        return outputs.logits[:, :-1][self._predicted.to(outputs.logits.device)]

    def targets(self) -> Int64[Tensor, " P"]:
        return self.labels[:, 1:][self._predicted]


@contextmanager
def inference(model: nn.Module) -> Iterator[torch.device]:
    """Disable gradients and dropout in the `with` block; yield the device for inputs. The training flag is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(training)
