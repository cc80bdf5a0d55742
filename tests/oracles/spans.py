"""Which keys a query reads by softmax and which by linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SpanSpec:
    """A span in the papers' words: `kind`, window w, number of blocks b (terraced only) and sinks s."""

    kind: Literal["none", "sliding", "terraced"]
    window_size: int = 0
    blocks: int = 0
    sinks: int = 0


def span_keys(spec: SpanSpec, n: int) -> tuple[set[int], set[int]]:
    """The softmax keys and the linear keys of the query at position `n` of its document; together 0..n, disjoint."""
    softmax, linear = set(), set()
    for j in range(n + 1):
        if spec.kind == "none":
            near = False
        elif spec.kind == "sliding":  # the query itself and the w - 1 tokens before it
            near = n - j < spec.window_size
        elif spec.kind == "terraced":  # the query's own block of w tokens and the b - 1 blocks before it
            near = n // spec.window_size - j // spec.window_size < spec.blocks
        else:
            raise ValueError(spec.kind)
        if near or j < spec.sinks:
            softmax.add(j)
        else:
            linear.add(j)
    return softmax, linear
