"""How the keys 0..n of a query at position n split: softmax keys from ``lo(n)`` to n, linear keys below.

One span object feeds the window and the scan, so the two halves of the split cannot drift apart. The first `sinks`
keys of a document are softmax keys always and linear keys never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Span(Protocol):
    """The split of the keys, and what follows from it for chunks and for the carried state."""

    @property
    def sinks(self) -> int: ...

    @property
    def max_lag(self) -> int:
        """Most softmax keys of a query (itself included), sinks apart."""
        ...

    @property
    def fold_lag(self) -> int:
        """A key is folded into the linear state this many steps after it was written."""
        ...

    @property
    def context(self) -> int:
        """Key/value slots that a state keeps."""
        ...

    def lo(self, position: Tensor) -> Tensor:
        """First softmax key of the query at `position` (0-based within its document)."""
        ...


@dataclass(frozen=True)
class NoSpan:
    """Pure linear attention: lo(n) = n + 1, no softmax keys apart from sinks."""

    sinks: int = 0
    max_lag: int = 0
    fold_lag: int = 0
    context: int = 0

    def lo(self, position: Tensor) -> Tensor:
        return position + 1


@dataclass(frozen=True)
class SlidingSpan:
    """The last `window_size` keys: lo(n) = max(0, n - w + 1)."""

    window_size: int
    sinks: int = 0

    @property
    def max_lag(self) -> int:
        return self.window_size

    @property
    def fold_lag(self) -> int:
        return self.window_size

    @property
    def context(self) -> int:
        return self.window_size

    def lo(self, position: Tensor) -> Tensor:
        return (position - self.window_size + 1).clamp_min(0)


@dataclass(frozen=True)
class TerracedSpan:
    """The query's own block of `window_size` keys and the `blocks` - 1 before: lo(n) = w max(0, floor(n/w) - b + 1)."""

    window_size: int
    blocks: int = 2
    sinks: int = 0

    @property
    def max_lag(self) -> int:
        return self.blocks * self.window_size

    @property
    def fold_lag(self) -> int:
        return (self.blocks - 1) * self.window_size

    @property
    def context(self) -> int:
        return self.blocks * self.window_size

    def lo(self, position: Tensor) -> Tensor:
        return self.window_size * (position.div(self.window_size, rounding_mode="floor") - self.blocks + 1).clamp_min(0)
