"""Random inputs for the ops: tensors, a span, and rows of documents with padding."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linearize.configs.spans import NoSpan, SlidingSpan, Span, TerracedSpan
from linearize.ops.inputs import LinearInputs, LinearState, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
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
    SpanSpec("sliding", 1, sinks=4),
    SpanSpec("sliding", 16, sinks=2),
    SpanSpec("sliding", 7, sinks=9),
    SpanSpec("terraced", 16, 1, sinks=3),
    SpanSpec("terraced", 7, 2, sinks=1),
    SpanSpec("terraced", 1, 3, sinks=5),
]
INPUTS = ("q", "k", "v", "phi_q", "phi_k")
DECAYS = ("log_decay_k", "log_decay_v", "beta")
# What a case's linear part does besides adding: "gates" is a decay of both axes, "delta" alone or with a decay.
RULES = ("none", "scalar", "features", "values", "gates", "delta", "delta scalar", "delta features")
HEADS = [(2, 2, 2), (4, 2, 2), (4, 2, 4), (4, 1, 1), (4, 1, 4)]  # query heads, KV heads, heads of phi_k


@dataclass(frozen=True)
class Case:
    """q [B,H,T,D], k, v [B,G,T,D], phi_q [B,H,T,F], phi_k [B,Hk,T,F], and which slots hold which document.

    Where the case has them: log_decay_k [B,Hk,T,1 or F], log_decay_v [B,Hk,T,D], beta (delta rule) [B,Hk,T,1].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    phi_q: Tensor
    phi_k: Tensor
    documents: Documents
    span: SpanSpec
    softcap: float | None = None
    scaling: float = 0.4
    log_decay_k: Tensor | None = None
    log_decay_v: Tensor | None = None
    beta: Tensor | None = None

    def __repr__(self) -> str:
        heads = (self.q.shape[1], self.k.shape[1], self.phi_k.shape[1])
        linear = {name: x.shape[-1] for name, x in self.tensors.items() if name in DECAYS}
        return f"Case({self.span}, heads={heads}, {linear}, softcap={self.softcap}, documents={self.documents})"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that there are, by name."""
        found = {name: getattr(self, name) for name in (*INPUTS, *DECAYS)}
        return {name: x for name, x in found.items() if x is not None}

    @property
    def decays(self) -> dict[str, Tensor | None]:
        """What the ops call the log decays."""
        return {"log_decay_k": self.log_decay_k, "log_decay_v": self.log_decay_v}

    def softmax(self, layout: SequenceLayout | None = None) -> SoftmaxInputs:
        """Return the inputs of the window."""
        layout = self.layout if layout is None else layout
        return SoftmaxInputs(self.q, self.k, self.v, self.package_span, layout, self.scaling, self.softcap)

    def linear(self, layout: SequenceLayout | None = None, state: LinearState | None = None) -> LinearInputs:
        """Return the inputs of the linear part."""
        layout = self.layout if layout is None else layout
        keys = self.phi_q, self.phi_k, self.v, self.package_span, layout
        return LinearInputs(*keys, beta=self.beta, **self.decays, state=state)

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
    def layout(self) -> SequenceLayout:
        return SequenceLayout.from_positions(self.position)

    @property
    def package_span(self) -> Span:
        """The package's object for `span`."""
        span = self.span
        if span.kind == "none":
            return NoSpan()
        if span.kind == "sliding":
            return SlidingSpan(window_size=span.window_size, sinks=span.sinks)
        return TerracedSpan(window_size=span.window_size, blocks=span.blocks, sinks=span.sinks)

    def to(self, dtype: torch.dtype) -> Case:
        """All numbers rounded to `dtype`."""
        return replace(self, **{name: x.to(dtype) for name, x in self.tensors.items()})

    def grown(self, factor: float) -> Case:
        """With everything that lies in padding slots multiplied by `factor`."""
        padding = (self.position < 0)[:, None, :, None]
        return replace(self, **{name: x.where(~padding, x * factor) for name, x in self.tensors.items()})

    def tied(self, keys: int) -> Case:
        """Groups of `keys` keys score exactly alike: they differ in components only that no query looks at.

        Queries look at one component alone, where keys have powers of 2: a score is one product, exact by whichever
        factor the scaling is multiplied first, and the same on every processor.
        """
        first = torch.arange(self.length) // keys * keys
        q, k = torch.zeros_like(self.q), self.k.clone()
        q[..., 0] = self.q[..., 0]
        k[..., 0] = (k[..., 0].sign() * 2.0 ** k[..., 0].abs().round())[:, :, first]
        return replace(self, q=q, k=k)


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


def own_layout(documents: Documents, start: int, stop: int) -> SequenceLayout:
    """The slots start..stop: document 0 goes on where an earlier call left it, its positions counted from there."""
    position = torch.full((len(documents), stop - start), -1)
    document = torch.zeros_like(position)
    for b, row in enumerate(documents):
        new = 0
        for slots in row:
            own = [slot - start for slot in slots if start <= slot < stop]
            if not own:
                continue
            if slots[0] >= start:
                new += 1
                document[b, own[0] :] = new
            position[b, own] = torch.arange(len(own))
    return SequenceLayout(position, document, stop - start)


def make_case(
    span: SpanSpec,
    styles: tuple[str, ...],
    length: int,
    *,
    heads: tuple[int, int, int] = (2, 1, 2),
    seed: int = 0,
    softcap: float | None = None,
    rule: str = "none",
) -> Case:
    """Float64 inputs, one row per style; features are positive, as feature maps give them. D = 6, F = 4.

    Log decays lie between -20 and 0; half of the steps decay little, some not at all.
    """
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)

    def normal(h: int, width: int) -> Tensor:
        return torch.randn(len(styles), h, length, width, generator=generator, dtype=torch.float64)

    def log_decay(width: int) -> Tensor:
        shape = len(styles), feature_heads, length, width
        kind = torch.rand(shape, generator=generator, dtype=torch.float64)
        much, little = (torch.rand(shape, generator=generator, dtype=torch.float64) * x for x in (20, 0.2))
        return -torch.where(kind < 0.1, 0, torch.where(kind < 0.6, little, much))

    query_heads, kv_heads, feature_heads = heads
    case = Case(
        q=2 * normal(query_heads, 6),
        k=normal(kv_heads, 6),
        v=normal(kv_heads, 6),
        phi_q=normal(query_heads, 4).exp(),
        phi_k=normal(feature_heads, 4).exp(),
        documents=[documents_of(style, length, rng) for style in styles],
        span=span,
        softcap=softcap,
    )
    decay, linear = rule.removeprefix("delta").strip(), {}
    if decay in ("scalar", "features", "gates"):
        linear["log_decay_k"] = log_decay(1 if decay == "scalar" else 4)
    if decay in ("values", "gates"):
        linear["log_decay_v"] = log_decay(6)
    if rule.startswith("delta"):
        linear["beta"] = torch.rand(len(styles), feature_heads, length, 1, generator=generator, dtype=torch.float64)
        linear["phi_k"] = torch.nn.functional.normalize(case.phi_k, dim=-1)
    return replace(case, **linear)
