"""Spans against the oracle's key sets, and the bounds that chunks and carried states are sized by."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import SINK_SPANS, SPANS, make_case
from tests.oracles.spans import SpanSpec, span_keys


@pytest.mark.parametrize("spec", SPANS + SINK_SPANS, ids=str)
def test_lo_splits_the_keys(spec: SpanSpec) -> None:
    span = make_case(spec, ("full",), 1).package_span
    n = torch.arange(400)
    for position, lo in zip(n.tolist(), span.lo(n).tolist(), strict=True):
        softmax, linear = span_keys(spec, position)
        assert set(range(lo, position + 1)) | set(range(min(span.sinks, position + 1))) == softmax
        assert set(range(span.sinks, lo)) == linear


@pytest.mark.parametrize("spec", SPANS, ids=str)
def test_lags_and_context_are_tight(spec: SpanSpec) -> None:
    """Away from the start: the greatest number of softmax keys, and a context as long."""
    span = make_case(spec, ("full",), 1).package_span
    counts = [len(span_keys(spec, n)[0]) for n in range(300, 600)]
    assert span.max_softmax_keys == span.context == max(counts)
    # A key is folded no later than the step at which it becomes readable, while it is still in a slot.
    youngest = min(n - max(span_keys(spec, n)[1]) for n in range(300, 600))
    assert span.linear_delay <= youngest
    assert span.linear_delay <= span.context
