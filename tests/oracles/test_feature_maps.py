"""The feature maps of the oracles against numbers worked out by hand and identities of the papers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracles import feature_maps
from tests.oracles.heads import turn


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_projections_by_hand() -> None:
    """x W + b: one column of W per output."""
    weight = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], dtype=torch.float64)
    assert feature_maps.projected(vector(1, 2), weight, None).tolist() == [21, 42, 63]
    assert feature_maps.projected(vector(1, 2), weight, vector(1, 0, -1)).tolist() == [22, 42, 62]


def test_maps_without_weights_by_hand() -> None:
    assert feature_maps.relu(vector(-1, 0, 2)).tolist() == [0, 0, 2]
    torch.testing.assert_close(feature_maps.elu1(vector(-1, 0, 2)), vector(math.exp(-1), 1, 3))
    torch.testing.assert_close(
        feature_maps.silu(vector(-1, 0, 2)), vector(-1 / (1 + math.e), 0, 2 / (1 + math.exp(-2)))
    )
    assert feature_maps.log_exp_t(vector(-1, 2), 2.0).tolist() == [-2, 4]


def test_cosformer() -> None:
    """The kernel is relu(q).relu(k) cos(pi (i - j) / 2M) (Qin et al. 2022)."""
    torch.testing.assert_close(feature_maps.cosformer(vector(-1, 2), 0, 8), vector(0, 2, 0, 0))
    torch.testing.assert_close(feature_maps.cosformer(vector(-1, 2), 8, 8), vector(0, 0, 0, 2), rtol=0, atol=1e-15)
    at_third = feature_maps.cosformer(vector(1, 2), 4, 6)  # pi / 3
    torch.testing.assert_close(at_third, vector(0.5, 1, 3**0.5 / 2, 3**0.5))
    q, k = random(4), random(4, seed=1)
    kernel = feature_maps.cosformer(q, 5, 8) @ feature_maps.cosformer(k, 3, 8)
    torch.testing.assert_close(kernel, q.relu() @ k.relu() * math.cos(math.pi * 2 / 16))


def test_taylor_features_give_the_second_order_expansion_of_the_exponential() -> None:
    root = 2**0.5
    by_hand = vector(1, 4 / root / root, 9 / root / root, 2 / 2**0.25, 6 / root, 3 / 2**0.25)
    torch.testing.assert_close(feature_maps.taylor2(vector(2, 3)), by_hand)
    q, k = random(5), random(5, seed=1)
    assert len(feature_maps.taylor2(q)) == 1 + 5 + 15
    u = q @ k / math.sqrt(5)
    torch.testing.assert_close(feature_maps.taylor2(q) @ feature_maps.taylor2(k), 1 + u + u**2 / 2)


def test_dpfp_by_hand() -> None:
    """Schlag et al. 2021: in two dimensions, one feature per quadrant."""
    for x in ((2, 3), (-2, 3), (2, -3), (-2, -3)):
        phi = feature_maps.dpfp(vector(*x), 1)
        assert sorted(phi.tolist()) == [0, 0, 0, 6]
        quadrants = {(2, 3): 1, (-2, 3): 2, (-2, -3): 3, (2, -3): 0}
        assert int(phi.argmax()) == quadrants[x]
    r = vector(2, 0, 0, 3)
    assert feature_maps.dpfp(vector(2, -3), 3).tolist() == torch.cat([r * r.roll(j) for j in (1, 2, 3)]).tolist()


def test_performer_by_hand_and_in_expectation() -> None:
    """phi(q).phi(k) estimates exp(q.k / sqrt D); with 16 dimensions x' = x / 2."""
    assert float(feature_maps.log_performer(vector(2), torch.tensor([[3.0]]))) == 3 * 2 - 2
    x, rows = torch.zeros(16), torch.zeros(4, 16)
    x[1], rows[2, 1] = 4.0, 5.0
    log_m = math.log(4) / 2
    torch.testing.assert_close(feature_maps.log_performer(x, rows), vector(-2, -2, 10 - 2, -2) - log_m)
    q, k, rows = random(4) / 2, random(4, seed=1) / 2, random(20_000, 4, seed=2)
    phi_q, phi_k = feature_maps.log_performer(q, rows).exp(), feature_maps.log_performer(k, rows).exp()
    assert float(phi_q @ phi_k) == pytest.approx(math.exp(float(q @ k) / 2), rel=0.03)


def test_rfa_by_hand_and_in_expectation() -> None:
    """phi(q).phi(k) estimates the Gaussian kernel of unit vectors, exp(-|q^ - k^|^2 sigma^2 / 2)."""
    phi = feature_maps.rfa(vector(3, 4), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), 0.5)
    a, b = 0.5 * 3 / 5.001, 0.5 * 2 * 4 / 5.001
    by_hand = vector(math.sin(a), math.sin(b), math.cos(a), math.cos(b)) / 2**0.5
    torch.testing.assert_close(phi, by_hand)
    assert float(phi @ phi) == pytest.approx(1)
    q, k, rows = random(4), random(4, seed=1), random(20_000, 4, seed=2)
    kernel = float(feature_maps.rfa(q, rows, 0.7) @ feature_maps.rfa(k, rows, 0.7))
    squared_distance = float((q / (q.norm() + 1e-3) - k / (k.norm() + 1e-3)).square().sum())
    assert kernel == pytest.approx(math.exp(-squared_distance * 0.49 / 2), abs=0.02)


def test_halves_by_hand() -> None:
    """z = [log 2, log 4]."""
    z = vector(math.log(2), math.log(4))
    torch.testing.assert_close(feature_maps.softmax_halves(z), vector(1 / 3, 2 / 3, 2 / 3, 1 / 3))
    torch.testing.assert_close(feature_maps.softmax_whole(z), vector(2, 4, 1 / 2, 1 / 4) / 6.75)
    assert feature_maps.softmax_halves(1000 * z).tolist() == [1e-12, 1, 1, 1e-12]
    assert feature_maps.softmax_whole(1000 * z).tolist() == [1e-12, 1, 1e-12, 1e-12]
    torch.testing.assert_close(feature_maps.log_exp_halves(z).exp(), vector(2, 4, 1 / 2, 1 / 4))


def test_rope_is_a_rotation_of_pairs() -> None:
    """Dimension i and i + R/2 are the real and the imaginary part of one number times e^(i angle); the rest stays."""
    angles, x = vector(0.3, 2.0), random(6)
    cos, sin = torch.cat([angles.cos()] * 2), torch.cat([angles.sin()] * 2)
    numbers = torch.complex(x[:2], x[2:4]) * torch.complex(angles.cos(), angles.sin())
    expected = torch.cat([numbers.real, numbers.imag, x[4:]])
    torch.testing.assert_close(turn(cos, sin, 6) @ x, expected)
    assert (turn(cos[[0, 2]], sin[[0, 2]], 2) @ vector(1, 0)).tolist() == [math.cos(0.3), math.sin(0.3)]


def test_theorem_3_1() -> None:
    """ReGLA: for normal x, y the scaled inner product of exp(x) and exp(y) has variance 1; F = 8, by simulation."""
    x, y = random(1_000_000, 8).exp(), random(1_000_000, 8, seed=1).exp()
    scaled = (x * y).sum(1) / (math.e * math.sqrt(8 * (math.e**2 - 1)))
    assert float(scaled.var()) == pytest.approx(1, abs=0.05)
