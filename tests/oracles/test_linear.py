"""The linear part: its two forms against each other, against examples by hand, and against the papers' equations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.oracles.heads import turn
from tests.oracles.linear import Head, linear_bidirectional, linear_quadratic, linear_recurrent, lowest
from tests.oracles.spans import SpanSpec, span_keys
from tests.oracles.test_oracles import SPANS

LENGTH, F, D = 13, 3, 2


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(a: object, b: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=atol)


PLAIN = Head(random(LENGTH, F).exp(), random(LENGTH, F, seed=1).exp(), random(LENGTH, D, seed=2))
SCALAR = (-random(LENGTH, 1, seed=3).exp()).expand(LENGTH, F)
FEATURES, VALUES = -random(LENGTH, F, seed=4).exp(), -random(LENGTH, D, seed=5).exp()
UNIT_KEYS = torch.nn.functional.normalize(PLAIN.keys, dim=-1)
BETA = torch.sigmoid(random(LENGTH, seed=6))
ANGLES = 0.5 * torch.arange(LENGTH, dtype=torch.float64)[:, None].expand(-1, 2)
TURNS = torch.stack([turn(angle.cos(), angle.sin(), F) for angle in ANGLES])
LOGS = 3 * random(LENGTH, F, seed=7)
HEADS = {
    "plain": PLAIN,
    "scalar": replace(PLAIN, log_decay_k=SCALAR, input_scale=BETA),
    "features": replace(PLAIN, log_decay_k=FEATURES),
    "values": replace(PLAIN, log_decay_v=VALUES),
    "gates": replace(PLAIN, log_decay_k=FEATURES, log_decay_v=VALUES),
    "delta": replace(PLAIN, keys=UNIT_KEYS, beta=BETA),
    "gated delta": replace(PLAIN, keys=UNIT_KEYS, beta=BETA, log_decay_k=FEATURES),
    "exponential": replace(PLAIN, keys=LOGS, exponential=True),
    "gated exponential": replace(PLAIN, keys=LOGS, exponential=True, log_decay_k=FEATURES, log_decay_v=VALUES),
    "turned exponential": replace(PLAIN, keys=LOGS, exponential=True, turns=TURNS, log_decay_k=SCALAR),
    "turned": replace(PLAIN, turns=TURNS),
}


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_the_recurrence_agrees_with_the_definition(name: str, span: SpanSpec) -> None:
    head = HEADS[name]
    num, den = linear_quadratic(head, span)
    recurrent_num, recurrent_den, state, following = linear_recurrent(head, span)
    close(recurrent_num, num)
    close(recurrent_den, den)
    assert num.isfinite().all()

    # The state read by further decays is the last query's read.
    last = LENGTH - 1
    a, b = (logs.exp() for logs in head.log_decays(slice(lowest(span, last), LENGTH)))
    if head.exponential and span_keys(span, last)[1]:
        a = a * math.exp(state.maximum - float(head.keys.max()))
    close((a[:, None] * state.S * b).T @ head.phi_q[last], num[last])
    close((a * state.z) @ head.phi_q[last], den[last])

    # The state readable next is the state of the query with which the next block begins.
    assert (following is None) == (span.kind != "terraced")
    if following is not None and LENGTH % span.window_size == 0:
        longer = {key: torch.cat([x, x[:1]]) for key, x in vars(head).items() if isinstance(x, torch.Tensor)}
        _, _, then, _ = linear_recurrent(replace(head, **longer), span)
        close(following.S, then.S)
        close(following.z, then.z)


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_lowest_window_key(span: SpanSpec) -> None:
    for n in range(30):
        assert span_keys(span, n)[1] == {j for j in range(lowest(span, n)) if j >= span.sinks and j <= n}


def ones(**more: torch.Tensor) -> Head:
    """Four tokens with one feature 1 and the values 1, 2, 4, 8."""
    return Head(torch.ones(4, 1), torch.ones(4, 1), vector(1, 2, 4, 8)[:, None], **more)


def test_decay_ticks_across_the_window_by_hand() -> None:
    head = ones(log_decay_k=vector(1, 0.5, 0.5, 0.25).log()[:, None])
    num, den = linear_quadratic(head, SpanSpec("none"))
    close(num.flatten(), vector(1, 0.5 + 2, 0.25 + 1 + 4, 0.0625 + 0.25 + 1 + 8))
    close(den, vector(1, 1.5, 1.75, 1.4375))
    num, den = linear_quadratic(head, SpanSpec("sliding", 2))
    close(num.flatten(), vector(0, 0, 0.25, 0.0625 + 0.25))
    close(den, vector(0, 0, 0.25, 0.0625 + 0.125))
    num, den = linear_quadratic(head, SpanSpec("sliding", 2, sinks=1))
    close(num.flatten(), vector(0, 0, 0, 0.25))
    _, _, state, _ = linear_recurrent(head, SpanSpec("sliding", 2))
    assert (float(state.S), float(state.z)) == (2.5, 1.5)  # as of position 1: 0.5 * 1 + 2
    _, _, state, following = linear_recurrent(head, SpanSpec("terraced", 2, 1))
    assert following is not None
    assert (float(state.S), float(following.S)) == (2.5, 0.25 * (0.5 * 2.5 + 4) + 8)


def test_values_decay_apart_from_the_denominator_by_hand() -> None:
    num, den = linear_quadratic(ones(log_decay_v=vector(1, 0.5, 0.5, 0.25).log()[:, None]), SpanSpec("none"))
    close(num.flatten(), vector(1, 2.5, 5.25, 9.3125))
    close(den, vector(1, 2, 3, 4))


def test_input_scale_is_rfas_recurrence() -> None:
    """ReGLA eqs. 6, 7: S = g S + (1 - g) phi v^T, and the same for z."""
    g = torch.sigmoid(random(LENGTH, seed=8))
    head = replace(PLAIN, log_decay_k=g.log()[:, None].expand(LENGTH, F), input_scale=1 - g)
    num, den = linear_quadratic(head, SpanSpec("none"))
    S, z = torch.zeros(F, D, dtype=torch.float64), torch.zeros(F, dtype=torch.float64)
    for t in range(LENGTH):
        S = g[t] * S + (1 - g[t]) * torch.outer(head.keys[t], head.v[t])
        z = g[t] * z + (1 - g[t]) * head.keys[t]
        close(num[t], head.phi_q[t] @ S)
        close(den[t], head.phi_q[t] @ z)


def test_the_outer_gate_is_maos_recurrence() -> None:
    """ReGLA eq. 9, laid out F x D: S = G * S + phi v^T with the outer product G of both decays."""
    num, _ = linear_quadratic(HEADS["gates"], SpanSpec("none"))
    S = torch.zeros(F, D, dtype=torch.float64)
    for t in range(LENGTH):
        S = torch.outer(FEATURES[t].exp(), VALUES[t].exp()) * S + torch.outer(PLAIN.keys[t], PLAIN.v[t])
        close(num[t], PLAIN.phi_q[t] @ S)


def test_delta_rule_is_the_papers_recurrence() -> None:
    """ReGLA eq. 8, transposed to F x D: S = S - g phi phi^T S + g phi v^T."""
    num, _ = linear_quadratic(HEADS["delta"], SpanSpec("none"))
    S = torch.zeros(F, D, dtype=torch.float64)
    for t in range(LENGTH):
        phi = UNIT_KEYS[t]
        S = S - BETA[t] * torch.outer(phi, phi) @ S + BETA[t] * torch.outer(phi, PLAIN.v[t])
        close(num[t], PLAIN.phi_q[t] @ S)


def test_delta_rule_stores_exactly_under_orthonormal_keys() -> None:
    """b = 1: each key returns its own value, and a key written twice its last value."""
    keys, values = torch.linalg.qr(random(4, 4))[0].T, random(4, 3, seed=1)
    order = [0, 1, 2, 1, 3, 0]
    v = random(6, 3, seed=2)
    head = Head(keys[order], keys[order], v, beta=torch.ones(6))
    num, _ = linear_quadratic(head, SpanSpec("none"))
    close(num, v)
    recall = Head(keys, keys, values, beta=torch.ones(4))
    _, _, state, _ = linear_recurrent(recall, SpanSpec("none"))
    close(keys @ state.S, values)
    *_, state, _ = linear_recurrent(head, SpanSpec("none"))
    close(keys @ state.S, v[[5, 3, 2, 4]])


def test_a_lagging_read_of_the_delta_rule_decays_and_does_not_erase() -> None:
    """One key, b = 1, decay 1/2, w = 2: the last query reads v_1 (which replaced v_0), decayed by steps 2 and 3."""
    head = ones(log_decay_k=vector(0.5, 0.5, 0.5, 0.5).log()[:, None], beta=torch.ones(4))
    num, _ = linear_quadratic(head, SpanSpec("sliding", 2))
    close(num.flatten(), vector(0, 0, 0.25 * 1, 0.25 * 2))
    close(linear_recurrent(head, SpanSpec("sliding", 2))[0], num)


def test_the_running_maximum_scales_and_nothing_else() -> None:
    """In y_n every key is over e^(m_n), m_n over all positions 0..n, also those of the window and the sinks."""
    for span in (SpanSpec("none"), SpanSpec("sliding", 3, sinks=2), SpanSpec("terraced", 3, 2)):
        num, den = linear_quadratic(HEADS["gated exponential"], span)
        plain = replace(HEADS["gated exponential"], keys=LOGS.exp(), exponential=False)
        plain_num, plain_den = linear_quadratic(plain, span)
        for n in range(LENGTH):
            scale = math.exp(max(float(LOGS[t].max()) for t in range(n + 1)))
            close(num[n] * scale, plain_num[n], atol=1e-9)
            close(den[n] * scale, plain_den[n], atol=1e-9)


def test_keys_are_turned_after_the_exponential() -> None:
    by_hand = torch.stack([TURNS[j] @ LOGS[j].exp() for j in range(LENGTH)])
    maxima = LOGS.max(1).values.cummax(0).values.exp()
    num, den = linear_quadratic(replace(HEADS["turned exponential"], log_decay_k=None), SpanSpec("none"))
    weights = (PLAIN.phi_q @ by_hand.T).tril()
    close(num, weights @ PLAIN.v / maxima[:, None])
    close(den, weights.sum(1) / maxima)
    close(linear_quadratic(HEADS["turned"], SpanSpec("none"))[1][0], PLAIN.phi_q[0] @ (TURNS[0] @ PLAIN.keys[0]))


def test_the_running_maximum_bears_any_size() -> None:
    for shift in (-5000.0, 5000.0):
        shifted = replace(HEADS["exponential"], keys=LOGS + shift)
        for span in SPANS:
            expected = linear_quadratic(HEADS["exponential"], span)
            for found in (linear_quadratic(shifted, span), linear_recurrent(shifted, span)):
                close(found[0], expected[0], atol=1e-9)
                close(found[1], expected[1], atol=1e-9)
    rising = replace(HEADS["exponential"], keys=1000.0 * torch.arange(LENGTH)[:, None] + LOGS)
    num, _ = linear_quadratic(rising, SpanSpec("none"))
    alone = (LOGS - LOGS.max(1, keepdim=True).values).exp()
    close(num, (PLAIN.phi_q * alone).sum(1, keepdim=True) * PLAIN.v)


def test_bidirectional_by_hand() -> None:
    num, den = linear_bidirectional(PLAIN)
    close(num, PLAIN.phi_q @ (PLAIN.keys.T @ PLAIN.v))
    close(den, PLAIN.phi_q @ PLAIN.keys.sum(0))
    num, den = linear_bidirectional(HEADS["exponential"])
    close(num, PLAIN.phi_q @ ((LOGS - LOGS.max()).exp().T @ PLAIN.v))
