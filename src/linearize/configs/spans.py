"""Configs of spans, which determine the softmax keys of a query.

Every span has, in tokens:
    lo(position)        the first softmax key of the query at `position` (0-based within its document)
    last(position)      the last query whose window has the key at `position`
    sinks               number of first keys of a document that are always softmax keys and never linear keys
    max_softmax_keys    most softmax keys of a query, including its own, without sinks
    linear_delay        number of steps after which a key is added to the linear state
    context             slots for keys and values in a state, without sinks
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import Field, PositiveInt

from linearize.base import Config

SINKS = "keys at the start of a document that always stay softmax keys"


Numbers = TypeVar("Numbers", bound="WholeNumbers")


@runtime_checkable
class WholeNumbers(Protocol):
    """The operations of integer tensors that spans use; configs do not import torch."""

    def __add__(self: Numbers, other: int, /) -> Numbers: ...
    def __sub__(self: Numbers, other: int, /) -> Numbers: ...
    def __mul__(self: Numbers, other: int, /) -> Numbers: ...
    def div(self: Numbers, other: int, /, *, rounding_mode: Literal["floor"]) -> Numbers: ...
    def clamp_min(self: Numbers, min: int, /) -> Numbers: ...


class NoSpan(Config):
    """Pure linear attention: lo(n) = n + 1, every key is linear."""

    type: Literal["none"] = "none"
    sinks: ClassVar[int] = 0
    max_softmax_keys: ClassVar[int] = 0
    linear_delay: ClassVar[int] = 0
    context: ClassVar[int] = 0

    def lo(self, position: Numbers) -> Numbers:
        return position + 1

    def last(self, position: Numbers) -> Numbers:
        return position - 1


class SlidingSpan(Config):
    """Softmax over the last `window_size` keys, lo(n) = max(0, n - w + 1), and the first `sinks`; linear below."""

    type: Literal["sliding"] = "sliding"
    window_size: PositiveInt = Field(default=64, description="softmax keys of a query, its own included")
    sinks: int = Field(default=0, ge=0, description=SINKS)

    @property
    def max_softmax_keys(self) -> int:
        return self.window_size

    linear_delay = context = max_softmax_keys

    def lo(self, position: Numbers) -> Numbers:
        return (position - (self.window_size - 1)).clamp_min(0)

    def last(self, position: Numbers) -> Numbers:
        return position + (self.window_size - 1)


class TerracedSpan(Config):
    """Softmax over the query's own block of `window_size` keys and the `blocks` - 1 before it, linear below.

    lo(n) = w max(0, floor(n / w) - b + 1).
    """

    type: Literal["terraced"] = "terraced"
    window_size: PositiveInt = Field(default=64, description="keys of one block; blocks begin at its multiples")
    blocks: PositiveInt = Field(default=2, description="2: own block and the one before; 1: own block only")
    sinks: int = Field(default=0, ge=0, description=SINKS)

    @property
    def max_softmax_keys(self) -> int:
        return self.blocks * self.window_size

    context = max_softmax_keys

    @property
    def linear_delay(self) -> int:
        return (self.blocks - 1) * self.window_size

    def lo(self, position: Numbers) -> Numbers:
        first = position.div(self.window_size, rounding_mode="floor") - (self.blocks - 1)
        return first.clamp_min(0) * self.window_size

    def last(self, position: Numbers) -> Numbers:
        block = position.div(self.window_size, rounding_mode="floor")
        return (block + self.blocks) * self.window_size - 1


Span = NoSpan | SlidingSpan | TerracedSpan
