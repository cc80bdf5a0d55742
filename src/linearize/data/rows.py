"""Rows that a model is trained and measured on: of text, examples of a task, or images."""

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
    """N rows, each an input of a model together with what is to be learned from it. On the CPU."""

    def __len__(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all rows, without padding."""
        ...

    def target_counts(self) -> Int64[Tensor, " N"]:
        """Return the number of outputs of each row that have labels; a mean loss is a mean over all of these."""
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


@dataclass(frozen=True)
class PackedRows:
    """N rows of L tokens: whole documents and parts of documents, one after the other, without padding.

    `position_ids` restart at 0 at every document start and at every row start. `labels` hold the token at the same
    place (the model shifts them); they are -100 where there is no loss, and wherever `position_ids` is 0, so that no
    prediction crosses from one document into the next. `first_document` is the number of the document that each row
    begins in; None where every row begins with a document of its own.
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
        """The number of each token's document."""
        begins = self.position_ids == 0
        if self.first_document is None:
            return begins.flatten().cumsum(0).view_as(begins) - 1
        return self.first_document[:, None] + begins.cumsum(1) - begins[:, :1].long()

    def spread(self, count: int) -> PackedRows:
        """At most `count` rows, from all documents alike: of each as many as of any other, or all that begin in it."""
        return self.rows(spread(self.documents[:, 0].tolist(), count, "spread"))

    def inputs(self) -> dict[str, Any]:
        """Without a mask, the positions tell documents apart; with a cache, they would not."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.input_ids, self.position_ids, self.labels)

    def compared(self, outputs: Any) -> Float[Tensor, "P V"]:
        """The logits at t - 1 of every token t that has a label."""
        return outputs.logits[:, :-1][self._predicted.to(outputs.logits.device)]

    def targets(self) -> Int64[Tensor, " P"]:
        return self.labels[:, 1:][self._predicted]


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
