"""The whole layer of the oracles as each paper writes its method down: other loops, from the equations."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracles.attention import lolcats_layer
from tests.oracles.mixer import mixer_layer
from tests.oracles.spans import SpanSpec
from tests.oracles.test_mixer import (
    ANGLES,
    CONFIGS,
    DECAYS,
    INPUTS,
    LENGTH,
    MAPS,
    MIX,
    NO_SPAN,
    ROWS,
    SHAPE,
    UNROTATED,
    D,
    G,
    H,
    close,
    config_of,
    make_weights,
    rotate,
)


def test_lolcats_is_eq_7() -> None:
    config, span = CONFIGS["lolcats"], SpanSpec("sliding", 3)
    w = make_weights(config)
    assert w.query_weight is not None and w.key_weight is not None and w.window_factor is not None
    expected = lolcats_layer(
        INPUTS.q, INPUTS.k, INPUTS.v, w.query_weight, w.key_weight, w.window_factor, ROWS, span, scaling=0.5
    )
    close(mixer_layer(config, w, INPUTS, ROWS), expected)


def test_supra_is_eq_10() -> None:
    """GroupNorm(sum_j gamma^(i-j) RoPE(phi(q_i)).RoPE(phi(k_j)) v_j / sqrt D), unrotated inputs."""
    config = config_of(span=NO_SPAN, feature_map=MAPS["supra"], decay=DECAYS["lightning"], scale="head_dim")
    w = make_weights(config)
    assert w.query_weight is not None and w.query_bias is not None
    assert w.key_weight is not None and w.key_bias is not None
    assert w.query_weight.shape == (1, H * D, H * D) and w.key_weight.shape == (1, G * D, G * D)
    flat_q, flat_k = (x.transpose(1, 2).flatten(2) for x in UNROTATED)
    phi_q = (flat_q @ w.query_weight[0] + w.query_bias[0]).relu().unflatten(2, (H, D)).transpose(1, 2)
    phi_k = (flat_k @ w.key_weight[0] + w.key_bias[0]).relu().unflatten(2, (G, D)).transpose(1, 2)
    phi_q, phi_k = rotate(phi_q, ANGLES), rotate(phi_k, ANGLES)
    y = mixer_layer(config, w, INPUTS, ROWS)
    for h in range(H):
        gamma = math.exp(-((2 ** (-8 / H)) ** (h + 1)))
        for i in range(LENGTH):
            weights = [gamma ** (i - j) * float(phi_q[1, h, i] @ phi_k[1, h // 2, j]) / 2 for j in range(i + 1)]
            summed = sum(weight * INPUTS.v[1, h // 2, j] for j, weight in enumerate(weights))
            close(y[1, h, i], torch.nn.functional.group_norm(summed[None], 1, eps=1e-5)[0])


def test_regla_is_eqs_11_12_15_18() -> None:
    """One state per head with values gated by f, keys over the maximum so far, the factor of Theorem 3.1, RMS norm."""
    config = config_of(
        span=NO_SPAN,
        feature_map={"type": "regla", "feature_dim": 3},
        decay=DECAYS["refined"],
        scale="regla",
        normalizer={"type": "rms_norm"},
    )
    w = make_weights(config)
    assert all(x is not None for x in (w.query_weight, w.gate_weight, INPUTS.hidden))
    y = mixer_layer(config, w, INPUTS, ROWS)
    for h in range(H):
        S, m = torch.zeros(3, D, dtype=torch.float64), -math.inf
        for t in range(LENGTH):
            e_q, e_k = INPUTS.q[1, h, t] @ w.query_weight[h], INPUTS.k[1, h // 2, t] @ w.key_weight[h]
            x = INPUTS.hidden[1, t]
            g = torch.sigmoid(w.gate_weight[h] @ x + w.gate_bias[h])
            r = torch.sigmoid(w.refine_weight[h] @ x + w.refine_bias[h])
            f = (1 - r) * g**2 + r * (1 - (1 - g) ** 2)
            before, m = m, max(m, float(e_k.max()))
            S = math.exp(before - m) * S * f[None, :] + torch.outer((e_k - m).exp(), INPUTS.v[1, h // 2, t])
            out = (e_q - e_q.max()).exp() @ S / (math.e * math.sqrt(3 * (math.e**2 - 1)))
            close(y[1, h, t], torch.nn.functional.rms_norm(out, (D,), w.norm_weight[h], 1e-5))


@pytest.mark.parametrize("activation", ["exp", "relu", "elu1"])
def test_lolcat_is_eq_8(activation: str) -> None:
    """y = s window + (1 - s) linear, phi(x) = f(x W + x), the linear weights summing to 1 over the linear keys."""
    feature_map = {"type": "lolcat", "activation": activation}
    config = config_of(combine=MIX, normalizer={"type": "sum"}, feature_map=feature_map)
    w = make_weights(config)
    assert w.query_weight is not None and w.key_weight is not None and w.window_weight is not None
    f = {"exp": torch.exp, "relu": torch.relu, "elu1": lambda x: torch.nn.functional.elu(x) + 1}[activation]
    y = mixer_layer(config, w, INPUTS, ROWS)
    for h in range(H):
        q, k, v, s = INPUTS.q[1, h], INPUTS.k[1, h // 2], INPUTS.v[1, h // 2], w.window_weight[h]
        phi_q, phi_k = f(q @ w.query_weight[h] + q), f(k @ w.key_weight[h] + k)
        for n in range(LENGTH):
            near, far = list(range(max(0, n - 2), n + 1)), list(range(max(0, n - 2)))
            window = torch.softmax(0.5 * k[near] @ q[n], 0) @ v[near]
            weights = phi_k[far] @ phi_q[n]
            linear = weights @ v[far] / weights.sum().clamp(min=1e-6)
            close(y[1, h, n], s * window + (1 - s) * linear if far else window)


def test_delta_net() -> None:
    """DeltaNet as its paper has it: sum-normalised DPFP features, b = sigmoid(w.x), y = S^T phi_q."""
    config = config_of(
        span=NO_SPAN,
        feature_map=MAPS["dpfp"],
        update={"type": "delta", "key_norm": "sum"},
        normalizer={"type": "none"},
    )
    w = make_weights(config)
    assert w.write_weight is not None and INPUTS.hidden is not None
    y = mixer_layer(config, w, INPUTS, ROWS)
    for h in range(H):
        S = torch.zeros(4 * D, D, dtype=torch.float64)
        for t in range(LENGTH):
            phi = []
            for x in (INPUTS.q[1, h, t], INPUTS.k[1, h // 2, t]):
                r = torch.cat([x, -x]).relu()
                phi.append(torch.cat([r * r.roll(1), r * r.roll(2)]))
                phi[-1] = phi[-1] / phi[-1].sum()
            b = torch.sigmoid(w.write_weight[h // 2] @ INPUTS.hidden[1, t])
            S = S + b * torch.outer(phi[1], INPUTS.v[1, h // 2, t] - S.T @ phi[1])
            close(y[1, h, t], S.T @ phi[0])


@pytest.mark.parametrize("input_scale", [True, False])
def test_rfa_is_eqs_6_and_7(input_scale: bool) -> None:
    """S = g S + (1 - g) phi v^T and z = g z + (1 - g) phi per KV head, over a denominator of at least 1."""
    decay = {"type": "scalar", "input_scale": input_scale}
    config = config_of(span=NO_SPAN, feature_map=MAPS["rfa"], decay=decay, normalizer={"type": "sum"})
    w = make_weights(config)
    assert w.projection is not None and w.sigma is not None and INPUTS.hidden is not None
    assert w.gate_weight is not None and w.gate_bias is not None
    y = mixer_layer(config, w, INPUTS, ROWS)
    denominators = []
    for h in range(H):
        S, z = torch.zeros(6, D, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        for t in range(LENGTH):
            phi = []
            for x in (INPUTS.q[1, h, t], INPUTS.k[1, h // 2, t]):
                angle = w.sigma[h // 2] * w.projection[0] @ (x / (x.norm() + 1e-3))
                phi.append(torch.cat([angle.sin(), angle.cos()]) / 3**0.5)
            g = torch.sigmoid(w.gate_weight[h // 2] @ INPUTS.hidden[1, t] + w.gate_bias[h // 2])
            written = 1 - g if input_scale else 1
            S = g * S + written * torch.outer(phi[1], INPUTS.v[1, h // 2, t])
            z = g * z + written * phi[1]
            denominators.append(float(phi[0] @ z))
            close(y[1, h, t], phi[0] @ S / max(denominators[-1], 1))
    assert min(denominators) < 1 and (input_scale or max(denominators) > 1)


def test_cosformer_reweights_by_distance() -> None:
    """relu(q_i).relu(k_j) cos(pi (i - j) / 2M) on unrotated inputs, positions counted in the document."""
    config = config_of(span=NO_SPAN, feature_map=MAPS["cosformer"], normalizer={"type": "sum"})
    y = mixer_layer(config, make_weights(config), INPUTS, ROWS)
    for row, slots in ((0, ROWS[0][1]), (1, ROWS[1][0])):
        q, k, v = UNROTATED[0][row, :, slots], UNROTATED[1][row, :, slots], INPUTS.v[row, :, slots]
        for h in range(H):
            for n, slot in enumerate(slots):
                angle = math.pi * (n - torch.arange(n + 1).double()) / (2 * SHAPE.max_positions)
                weights = k[h // 2, : n + 1].relu() @ q[h, n].relu() * angle.cos()
                close(y[row, h, slot], weights @ v[h // 2, : n + 1] / weights.sum().clamp(min=1e-6))


def test_exponential_features_are_turned_after_the_map() -> None:
    """exp(x) of unrotated inputs, over the maximum so far for keys and its own maximum for the query; then RoPE."""
    config = config_of(span=NO_SPAN, feature_map=MAPS["exp after"], normalizer={"type": "none"})
    y = mixer_layer(config, make_weights(config), INPUTS, ROWS)
    q, k = UNROTATED
    phi_q = rotate((q - q.max(-1, keepdim=True).values).exp(), ANGLES)
    phi_k = rotate(k.exp(), ANGLES)
    for h in range(H):
        for n in range(LENGTH):
            scale = k[1, h // 2, : n + 1].max().exp()
            weights = phi_k[1, h // 2, : n + 1] @ phi_q[1, h, n] / scale
            close(y[1, h, n], weights @ INPUTS.v[1, h // 2, : n + 1])


def test_gla_by_hand() -> None:
    """S = (alpha 1^T) * S + k v^T per KV head, y = RMSNorm(S^T q D^-1/2) * swish(W_g x)."""
    config = config_of(
        span=NO_SPAN,
        feature_map=MAPS["identity"],
        scale="head_dim",
        decay=DECAYS["feature"],
        normalizer={"type": "rms_norm", "output_gate": True},
    )
    w = make_weights(config)
    assert w.gate_down is not None and w.gate_up is not None and w.gate_bias is not None
    assert w.norm_weight is not None and w.output_gate is not None and INPUTS.hidden is not None
    y = mixer_layer(config, w, INPUTS, ROWS)
    for h in range(H):
        S = torch.zeros(D, D, dtype=torch.float64)
        for t in range(LENGTH):
            x = INPUTS.hidden[1, t]
            alpha = torch.sigmoid(w.gate_up[h // 2] @ (w.gate_down @ x) + w.gate_bias[h // 2]) ** (1 / 16)
            S = alpha[:, None] * S + torch.outer(INPUTS.k[1, h // 2, t], INPUTS.v[1, h // 2, t])
            out = torch.nn.functional.rms_norm(INPUTS.q[1, h, t] @ S / 2, (D,), w.norm_weight[h], 1e-5)
            close(y[1, h, t], out * torch.nn.functional.silu(w.output_gate[h] @ x))
