"""Random inputs for the ops: tensors, a span, and rows of documents with padding."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linearize.ops.layout import Layout
from linearize.ops.span import NoSpan, SlidingSpan, Span, TerracedSpan
from tests.oracles.attention import Documents
from tests.oracles.spans import SpanSpec

STYLES = ("full", "left", "right", "interior", "packed", "mixed")
# Rows without padding inside a document, and rows with it: the chunked form reorders slots only for the latter.
SIDE_BY_SIDE, WITH_GAPS = ("full", "left", "right", "packed"), ("interior", "mixed", "left")
SPANS = [
    SpanSpec("none"),
    SpanSpec("sliding", 1),
    SpanSpec("sliding", 7),
    SpanSpec("sliding", 16),
    SpanSpec("sliding", 64),
    SpanSpec("terraced", 64, 1),
    SpanSpec("terraced", 16, 2),
    SpanSpec("terraced", 7, 3),
]
SINK_SPANS = [
    SpanSpec("none", sinks=3),
    SpanSpec("sliding", 1, sinks=4),
    SpanSpec("sliding", 16, sinks=2),
    SpanSpec("sliding", 7, sinks=9),
    SpanSpec("terraced", 16, 1, sinks=3),
    SpanSpec("terraced", 7, 2, sinks=1),
    SpanSpec("terraced", 1, 3, sinks=5),
]
HEADS = [(2, 2, 2), (4, 2, 2), (4, 2, 4), (4, 1, 1), (4, 1, 4)]  # query heads, KV heads, heads of phi_k


@dataclass(frozen=True)
class Case:
    """q [B,H,T,D], k, v [B,G,T,D], phi_q [B,H,T,F], phi_k [B,Hk,T,F], and which slots hold which document."""

    q: Tensor
    k: Tensor
    v: Tensor
    phi_q: Tensor
    phi_k: Tensor
    documents: Documents
    span: SpanSpec
    softcap: float | None = None
    scaling: float = 0.4

    def __repr__(self) -> str:
        heads = (self.q.shape[1], self.k.shape[1], self.phi_k.shape[1])
        return f"Case({self.span}, heads={heads}, softcap={self.softcap}, documents={self.documents})"

    @property
    def length(self) -> int:
        return self.q.shape[2]

    @property
    def position(self) -> Tensor:
        """[B,T]: position in the document, -1 for padding."""
        position = torch.full((len(self.documents), self.length), -1)
        for row, row_documents in enumerate(self.documents):
            for slots in row_documents:
                position[row, slots] = torch.arange(len(slots))
        return position

    @property
    def layout(self) -> Layout:
        return Layout.from_positions(self.position)

    @property
    def package_span(self) -> Span:
        """The package's object for `span`."""
        span = self.span
        if span.kind == "none":
            return NoSpan(span.sinks)
        if span.kind == "sliding":
            return SlidingSpan(span.window_size, span.sinks)
        return TerracedSpan(span.window_size, span.blocks, span.sinks)

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers, rounded to `dtype`."""
        tensors = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "phi_q", "phi_k")}
        return replace(self, **tensors)

    def grown(self, factor: float) -> Case:
        """The same numbers, with everything that lies in padding slots multiplied by `factor`."""
        padding = (self.position < 0)[:, None, :, None]
        tensors = {name: getattr(self, name) for name in ("q", "k", "v", "phi_q", "phi_k")}
        return replace(self, **{name: x.where(~padding, x * factor) for name, x in tensors.items()})


def documents_of(style: str, length: int, rng: random.Random) -> list[list[int]]:
    """One row: a list of documents, each the slots of its tokens."""
    slots = list(range(length))
    if style == "full":
        return [slots]
    if style == "left":
        return [slots[rng.randrange(length) :]]
    if style == "right":
        return [slots[: 1 + rng.randrange(length)]]
    if style in ("interior", "mixed"):
        # Runs of padding, rather than single slots, so that whole chunks can be empty.
        kept, valid = [], True
        for slot in slots:
            valid = valid if rng.random() < 0.7 else rng.random() < 0.7
            if valid:
                kept.append(slot)
        slots = kept
    if style == "interior":
        return [slots] if slots else []
    documents = []
    while slots:
        size = rng.choice([1, 1, 2, rng.randint(1, 20), rng.randint(1, 200)])
        documents.append(slots[:size])
        slots = slots[size:]
    return documents


def make_case(
    span: SpanSpec,
    styles: tuple[str, ...],
    length: int,
    *,
    heads: tuple[int, int, int] = (2, 1, 2),
    seed: int = 0,
    softcap: float | None = None,
) -> Case:
    """Float64 inputs, one row per style; features are positive, as feature maps give them. D = 6, F = 4."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)

    def normal(h: int, width: int) -> Tensor:
        return torch.randn(len(styles), h, length, width, generator=generator, dtype=torch.float64)

    query_heads, kv_heads, feature_heads = heads
    return Case(
        q=2 * normal(query_heads, 6),
        k=normal(kv_heads, 6),
        v=normal(kv_heads, 6),
        phi_q=normal(query_heads, 4).exp(),
        phi_k=normal(feature_heads, 4).exp(),
        documents=[documents_of(style, length, rng) for style in styles],
        span=span,
        softcap=softcap,
    )
