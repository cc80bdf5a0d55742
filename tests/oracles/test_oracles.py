"""The oracles against numbers worked out by hand, against torch, and against each other."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracles.attention import (
    hedgehog_features,
    linear_attention_quadratic,
    lolcats_layer,
    softmax_attention,
    window_partial,
)
from tests.oracles.recurrent import linear_attention_recurrent
from tests.oracles.spans import SpanSpec, span_keys

SPANS = [
    SpanSpec("none"),
    SpanSpec("none", sinks=2),
    SpanSpec("sliding", 1),
    SpanSpec("sliding", 3),
    SpanSpec("sliding", 4, sinks=2),
    SpanSpec("sliding", 2, sinks=5),
    SpanSpec("terraced", 3, 1),
    SpanSpec("terraced", 3, 2),
    SpanSpec("terraced", 1, 2),
    SpanSpec("terraced", 4, 3, sinks=1),
    SpanSpec("terraced", 2, 1, sinks=3),
]
ROWS = [  # two documents, one of length 1 between them and padding everywhere; one long document
    [[1, 2, 4, 5], [6], [8, 9, 10, 11, 13]],
    [list(range(15))],
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_span_keys_by_hand() -> None:
    assert span_keys(SpanSpec("none"), 2) == (set(), {0, 1, 2})
    assert span_keys(SpanSpec("none", sinks=1), 2) == ({0}, {1, 2})
    assert span_keys(SpanSpec("sliding", 1), 2) == ({2}, {0, 1})
    assert span_keys(SpanSpec("sliding", 2), 0) == ({0}, set())
    assert span_keys(SpanSpec("sliding", 2), 5) == ({4, 5}, {0, 1, 2, 3})
    assert span_keys(SpanSpec("sliding", 2, sinks=1), 5) == ({0, 4, 5}, {1, 2, 3})
    assert span_keys(SpanSpec("terraced", 3, 1), 5) == ({3, 4, 5}, {0, 1, 2})
    assert span_keys(SpanSpec("terraced", 3, 1), 6) == ({6}, {0, 1, 2, 3, 4, 5})
    assert span_keys(SpanSpec("terraced", 3, 2), 5) == ({0, 1, 2, 3, 4, 5}, set())
    assert span_keys(SpanSpec("terraced", 3, 2), 6) == ({3, 4, 5, 6}, {0, 1, 2})
    assert span_keys(SpanSpec("terraced", 3, 2, sinks=2), 7) == ({0, 1, 3, 4, 5, 6, 7}, {2})


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_span_keys_follow_the_lowest_softmax_key(span: SpanSpec) -> None:
    """The closed form of lo(n): softmax keys lo(n)..n and the sinks, linear keys below."""
    w, b = span.window_size, span.blocks
    for n in range(30):
        if span.kind == "none":
            lo = n + 1
        elif span.kind == "sliding":
            lo = max(0, n - w + 1)
        else:
            lo = w * max(0, math.floor(n / w) - b + 1)
        expected = set(range(lo, n + 1)) | set(range(min(span.sinks, n + 1)))
        assert span_keys(span, n) == (expected, set(range(n + 1)) - expected)


def test_eq_7_by_hand() -> None:
    """T = 3, w = 2, D = 1. The features of a one-column map are [1, 1] whatever x is, so phi_q.phi_k = 2."""
    q = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log().view(1, 1, 3, 1)
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(1, 1, 3, 1)
    documents, span = [[[0, 1, 2]]], SpanSpec("sliding", 2)
    num, den, c = window_partial(q, k, v, documents, span, scaling=1.0)
    torch.testing.assert_close(num.flatten().tolist(), [1.0, 1 / 2 * 1 + 2, 2 / 3 * 2 + 4])
    torch.testing.assert_close(den.flatten().tolist(), [1.0, 1 / 2 + 1, 2 / 3 + 1])
    torch.testing.assert_close(c.flatten().tolist(), [0.0, math.log(2), math.log(3)])

    features = torch.tensor([[3.0, 0.0, 3.0]], dtype=torch.float64).view(1, 1, 3, 1)
    half = torch.full((1, 1, 3, 1), 0.5, dtype=torch.float64)
    num, den = linear_attention_quadratic(features, half, v, documents, span)
    assert num.flatten().tolist() == den.flatten().tolist() == [0.0, 0.0, 1.5]

    weight = torch.full((1, 1, 1), 0.7, dtype=torch.float64)
    g = torch.tensor([0.1], dtype=torch.float64)
    y = lolcats_layer(q, k, v, weight, weight, g, documents, span, scaling=1.0)
    by_hand = [1.0, (1 * 1 + 2 * 2) / 3, (0.1 * (2 / 3 * 2 + 4) + 2 * 1) / (0.1 * (2 / 3 + 1) + 2)]
    torch.testing.assert_close(y.flatten().tolist(), by_hand)
    y = lolcats_layer(q, k, v, weight, weight, g, documents, SpanSpec("none"), scaling=1.0)
    torch.testing.assert_close(y.flatten().tolist(), [1.0, 3 / 2, 7 / 3])


def test_sinks_scaling_and_softcap_by_hand() -> None:
    """The third query reads key 0 (the sink) and itself by softmax, and key 1 by linear attention."""
    q = torch.full((1, 1, 3, 1), 2.0, dtype=torch.float64)
    k = torch.tensor([1.0, 7.0, 3.0], dtype=torch.float64).view(1, 1, 3, 1)
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(1, 1, 3, 1)
    span = SpanSpec("sliding", 1, sinks=1)
    num, den, c = window_partial(q, k, v, [[[0, 1, 2]]], span, scaling=0.5, softcap=5.0)
    sink, own = 5 * math.tanh(1 / 5), 5 * math.tanh(3 / 5)
    torch.testing.assert_close(float(c[0, 0, 2]), own)
    torch.testing.assert_close(float(den[0, 0, 2]), math.exp(sink - own) + 1)
    torch.testing.assert_close(float(num[0, 0, 2]), math.exp(sink - own) * 1 + 4)
    num, den = linear_attention_quadratic(q, k, v, [[[0, 1, 2]]], span)
    assert (float(num[0, 0, 2]), float(den[0, 0, 2])) == (2 * 7 * 2, 2 * 7)


def test_hedgehog_features_by_hand() -> None:
    x = torch.tensor([[[[math.log(2.0), math.log(4.0)]]]], dtype=torch.float64)
    phi = hedgehog_features(x, torch.eye(2, dtype=torch.float64)[None])
    torch.testing.assert_close(phi.flatten().tolist(), [1 / 3, 2 / 3, 2 / 3, 1 / 3])
    phi = hedgehog_features(1000 * x, torch.eye(2, dtype=torch.float64)[None])
    assert phi.flatten().tolist() == [1e-12, 1.0, 1.0, 1e-12]


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_recurrence_agrees_with_the_quadratic_form(span: SpanSpec) -> None:
    phi_q, phi_k, v = random(2, 4, 15, 3), random(2, 2, 15, 3, seed=1), random(2, 2, 15, 5, seed=2)
    num, den = linear_attention_quadratic(phi_q, phi_k, v, ROWS, span)
    recurrent_num, recurrent_den, states = linear_attention_recurrent(phi_q, phi_k, v, ROWS, span)
    torch.testing.assert_close(recurrent_num, num, rtol=0, atol=1e-12)
    torch.testing.assert_close(recurrent_den, den, rtol=0, atol=1e-12)
    for b, row in enumerate(ROWS):  # the final state is the sum over the last query's linear keys
        _, linear_keys = span_keys(span, len(row[-1]) - 1)
        for h in range(4):
            keys = [row[-1][j] for j in linear_keys]
            torch.testing.assert_close(states[b][h].S, phi_k[b, h // 2, keys].T @ v[b, h // 2, keys])
            torch.testing.assert_close(states[b][h].z, phi_k[b, h // 2, keys].sum(0))


def test_window_as_long_as_the_document_is_softmax_attention() -> None:
    q, k, v = random(2, 4, 15, 4), random(2, 2, 15, 4, seed=1), random(2, 2, 15, 4, seed=2)
    weight, g = random(4, 4, 2, seed=3), torch.rand(4, dtype=torch.float64)
    expected = softmax_attention(q, k, v, ROWS, scaling=0.5)
    for span in (SpanSpec("sliding", 15), SpanSpec("terraced", 15, 1), SpanSpec("terraced", 8, 2)):
        y = lolcats_layer(q, k, v, weight, weight, g, ROWS, span, scaling=0.5)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(expected[1], sdpa[1], rtol=0, atol=1e-12)


def test_documents_are_independent_and_padding_is_zero() -> None:
    """Each document of a packed row gives what it gives alone; key maps per KV head equal equal maps per query head."""
    q, k, v = random(2, 4, 15, 4), random(2, 2, 15, 4, seed=1), random(2, 2, 15, 4, seed=2)
    query_weight, key_weight, g = random(4, 4, 2, seed=3), random(2, 4, 2, seed=4), torch.rand(4, dtype=torch.float64)
    repeated = key_weight.repeat_interleave(2, 0)
    for span in SPANS:
        y = lolcats_layer(q, k, v, query_weight, key_weight, g, ROWS, span, scaling=0.5)
        for b, row in enumerate(ROWS):
            padding = sorted(set(range(15)) - {slot for slots in row for slot in slots})
            assert not y[b, :, padding].any()
            for slots in row:
                one = [x[b : b + 1][:, :, slots] for x in (q, k, v)]
                alone = lolcats_layer(*one, query_weight, repeated, g, [[list(range(len(slots)))]], span, scaling=0.5)
                torch.testing.assert_close(y[b, :, slots], alone[0], rtol=0, atol=1e-12)
