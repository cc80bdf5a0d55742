"""The span of the ops that a span of a recipe describes."""

from __future__ import annotations

from linearize.mixers import config as parts
from linearize.ops import NoSpan, SlidingSpan, Span, TerracedSpan


def build_span(config: parts.NoSpan | parts.SlidingSpan | parts.TerracedSpan) -> Span:
    """The ops-level span that a span config describes."""
    return SPANS[type(config)](**config.model_dump(exclude={"type"}))


SPANS: dict[type, type[NoSpan] | type[SlidingSpan] | type[TerracedSpan]] = {
    parts.NoSpan: NoSpan,
    parts.SlidingSpan: SlidingSpan,
    parts.TerracedSpan: TerracedSpan,
}
