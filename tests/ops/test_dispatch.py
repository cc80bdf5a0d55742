"""The choice of an implementation."""

from __future__ import annotations

import pytest
import torch

from linearize import ops
from linearize.ops import chunked, dispatch, reference
from tests.ops.cases import make_case
from tests.ops.parity import FP64, assert_partials_near, both_parts
from tests.oracles.spans import SpanSpec


def test_chunked_by_default_and_any_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(SpanSpec("sliding", 7), ("packed",), 20)
    expected = both_parts(reference, case)
    assert dispatch.choose(torch.device("cpu"), None).linear_scan is chunked.linear_scan
    for name in ("chunked", "reference"):
        monkeypatch.setenv(dispatch.ENVIRONMENT, name)
        assert dispatch.choose(torch.device("cpu"), name).name == name
        assert_partials_near(both_parts(ops, case), expected, FP64)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "fused")
    with pytest.raises(ValueError, match=r"chunked, reference.*'fused'"):
        both_parts(ops, make_case(SpanSpec("none"), ("full",), 3))
