"""Layouts say which slot holds which token of which document: padding, packing and carried context.

A span splits the keys 0..n of a query at position n into softmax keys from ``lo(n)`` to n and linear keys below. The
window and the scan read the same span object, the recipe's own, so that both parts always agree on the split.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from linearize.configs.spans import Span

Found = TypeVar("Found")
Tokens = dict[str, Tensor]  # the tensors of tokens that later calls need, by name: [B, heads, slots, width]


@dataclass(frozen=True)
class SequenceLayout:
    """Positions and documents of the K key slots; the last `length` slots are the queries' own tokens.

    Attributes:
        key_position: [B, K] int64, position within the slot's own document, counted over valid tokens from 0; -1 for a
            slot without a key (padding, or context before the document began). B may be 1 and broadcast.
        key_document: [B, K] int64, nondecreasing along a row; 0 is the document carried over from an earlier call.
        length: T, the number of queries.
        uniform: every row is one document without padding (known from the construction, so no device sync).
        sink_slots: the first slots hold the carried document's sinks, and no other slot does.
        seen: number of tokens of the carried document before this call; None: there is no carried document.
    """

    key_position: Int[Tensor, "B K"]
    key_document: Int[Tensor, "B K"]
    length: int
    uniform: bool = False
    sink_slots: int = 0
    seen: Int[Tensor, " B"] | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def full(cls, length: int, device: torch.device | str | None = None) -> SequenceLayout:
        """Return a layout with one full document per row, from its start; the batch axis is 1 and broadcasts.

        The last few layouts are cached, so that the layers of a model share their computed properties.
        """
        device = torch.device("cpu" if device is None else device)
        return _full(length, device) if torch.compiler.is_compiling() else _kept_full(length, device)

    def once(self, name: Hashable, work: Callable[[], Found]) -> Found:
        """Return `work()`, which depends only on the layout and `name` (any hashable); it is computed once."""
        if name not in self._known:
            with torch.inference_mode(False), torch.no_grad():  # later callers may compute gradients with the result
                self._known[name] = work()
        return self._known[name]

    @classmethod
    def from_positions(cls, position: Int[Tensor, "B T"]) -> SequenceLayout:
        """Return a layout in which a document starts wherever `position` is 0; -1 is padding, anywhere in the row."""
        return cls(position, (position == 0).cumsum(-1), position.shape[1])

    @classmethod
    def from_valid(cls, valid: Bool[Tensor, "B T"]) -> SequenceLayout:
        """Return a layout with one document per row, number 0; `valid` False is padding, anywhere in the row."""
        position = torch.where(valid, valid.cumsum(-1) - 1, -1)
        return cls(position, torch.zeros_like(position), valid.shape[1])

    def with_context(self, seen: Int[Tensor, " B"], span: Span) -> SequenceLayout:
        """Return this layout after `span.sinks + span.context` slots with keys of a carried document of `seen` tokens.

        Tokens of document 0 continue the carried document: their positions count from `seen`.
        """
        context = context_positions(seen, span)
        # No later query's window reaches below lo(seen - 1), and the carried linear state has the keys there.
        sinks, recent = context[:, : span.sinks], context[:, span.sinks :]
        context = torch.cat([sinks, recent.where(recent >= span.lo(seen[:, None] - 1), -1)], dim=1)
        goes_on = (self.key_document == 0) & (self.key_position >= 0)
        own = self.key_position + seen[:, None] * goes_on
        position = torch.cat([context, own], dim=1)
        document = torch.cat([torch.zeros_like(context), self.key_document.expand(len(seen), -1)], dim=1)
        return SequenceLayout(position, document, self.length, sink_slots=span.sinks, seen=seen)

    def to(self, device: torch.device | str | int | None) -> SequenceLayout:
        """Return the layout on another device (None: itself). accelerate calls it if layers are on several devices."""
        if device is None:
            return self
        seen = None if self.seen is None else self.seen.to(device)
        position, document = self.key_position.to(device), self.key_document.to(device)
        return replace(self, key_position=position, key_document=document, seen=seen, _known={})

    @property
    def query_position(self) -> Int[Tensor, "B T"]:
        return self._of_queries(self.key_position)

    @property
    def query_document(self) -> Int[Tensor, "B T"]:
        return self._of_queries(self.key_document)

    def _of_queries(self, x: Int[Tensor, "B K"]) -> Int[Tensor, "B T"]:
        return x if x.shape[1] == self.length else x[:, x.shape[1] - self.length :]

    @property
    def compaction(self) -> Int[Tensor, "B K"] | None:
        """Return the slot order that moves keys before padding; None: each document's keys are adjacent already.

        Chunked evaluation needs slot distance = position distance within a document; padding between two tokens of one
        document (a left-padded second turn, say) breaks that.
        """
        return None if self.uniform else self.once("compaction", self._compaction)

    def _compaction(self) -> Tensor | None:
        position, valid = self.key_position[:, self.sink_slots :], self.key_position >= 0
        gap = (position[:, 1:] > 0) & (position[:, :-1] != position[:, 1:] - 1)
        # The first key of a row may stand at any position: what precedes it is in the carried state.
        gap &= (position >= 0).cumsum(1)[:, :-1] > 0
        if not bool(gap.any()):
            return None
        return torch.argsort((~valid).to(torch.int8), dim=1, stable=True)

    @property
    def count(self) -> Int[Tensor, " B"]:
        """Return the number of tokens of each row's last document so far, the position of the next token."""
        return self.once("count", self._count)

    def _count(self) -> Tensor:
        last = self.key_document == self.last_document
        count = torch.where(last, self.key_position, -1).amax(1) + 1
        # A row without tokens in this call keeps its count, even if no context slot has a key.
        return count if self.seen is None else count.where(self.last_document[:, 0] > 0, count.maximum(self.seen))

    @property
    def last_document(self) -> Int[Tensor, "B 1"]:
        """Return the document of each row's last token (0, the carried one, for a row without tokens)."""
        return self.once("last_document", self._last_document)

    def _last_document(self) -> Tensor:
        return torch.where(self.key_position >= 0, self.key_document, 0).amax(1, keepdim=True)


def _full(length: int, device: torch.device) -> SequenceLayout:
    position = torch.arange(length, device=device)[None]
    return SequenceLayout(position, torch.zeros_like(position), length, uniform=True)


@lru_cache(maxsize=4)
def _kept_full(length: int, device: torch.device) -> SequenceLayout:
    with torch.inference_mode(False):  # later callers may compute gradients with it
        return _full(length, device)


def forget_layouts() -> None:
    """Clear the cache of full layouts, with their computed properties."""
    _kept_full.cache_clear()


def context_positions(seen: Int[Tensor, " B"], span: Span) -> Int[Tensor, "B S"]:
    """Return the positions of the keys that are kept after `seen` tokens, in order, -1 for an empty slot.

    They are the sinks, then those of the last `span.context` tokens that are not sinks.
    """
    recent = seen[:, None] - span.context + torch.arange(span.context, device=seen.device)
    return _behind_sinks(recent, seen, span)


def slot_positions(seen: Int[Tensor, " B"], span: Span) -> Int[Tensor, "B S"]:
    """Return the positions of `context_positions` in the order of the state's slots (`slots_of`)."""
    last, ring = seen[:, None] - 1, torch.arange(span.context, device=seen.device)
    return _behind_sinks(last - (last - ring) % max(span.context, 1), seen, span)


def slots_of(position: Int[Tensor, "*shape"], span: Span) -> Int[Tensor, "*shape"]:
    """Return the slots in which a state keeps the tokens at these positions: one for each sink, then a ring.

    A token overwrites the one `span.context` tokens before it, and never moves.
    """
    ring = span.sinks + position % max(span.context, 1)
    return torch.where(position < span.sinks, position, ring) if span.sinks else ring


def _behind_sinks(recent: Int[Tensor, "B N"], seen: Int[Tensor, " B"], span: Span) -> Int[Tensor, "B S"]:
    recent = recent.where(recent >= span.sinks, -1)
    if not span.sinks:
        return recent
    sinks = torch.arange(span.sinks, device=seen.device).expand(len(seen), -1)
    return torch.cat([sinks.where(sinks < seen[:, None], -1), recent], dim=1)
