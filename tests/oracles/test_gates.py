"""The gates of the oracles against numbers worked out by hand and numbers printed in the papers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracles import gates


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sigmoid_and_its_logarithm() -> None:
    a = vector(-800, -1, 0, math.log(3), 800)
    torch.testing.assert_close(gates.sigmoid(a), vector(0, 1 / (1 + math.e), 0.5, 0.75, 1))
    torch.testing.assert_close(
        gates.log_sigmoid(a), vector(-800, -math.log(1 + math.e), -math.log(2), math.log(0.75), 0)
    )


def test_lightning_slopes() -> None:
    """SUPRA: 32 heads have gamma 0.431 ... 0.9961, and max(gamma)^2048 = 3.35e-4 (sec. 4)."""
    gammas = [math.exp(gates.log_fixed("lightning", h, 32)) for h in range(32)]
    assert gammas[0] == pytest.approx(0.431, abs=5e-4) and gammas[31] == pytest.approx(0.9961, abs=5e-5)
    assert gammas == sorted(gammas) and gammas[-1] ** 2048 == pytest.approx(3.35e-4, rel=2e-3)
    assert gates.alibi_slopes(1) == [2**-8]
    assert gates.alibi_slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8]


def test_lightning_slopes_of_other_head_counts() -> None:
    """ALiBi: those of the power of two below, then every second one of twice it."""
    assert gates.alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert gates.alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    twelve = [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert gates.alibi_slopes(12) == pytest.approx(twelve)


def test_retnet_decays() -> None:
    assert math.exp(gates.log_fixed("retnet", 0, 8)) == pytest.approx(1 - 1 / 32)
    assert math.exp(gates.log_fixed("retnet", 7, 8)) == pytest.approx(1 - 1 / 4096)
    with pytest.raises(ValueError, match="flat"):
        gates.log_fixed("flat", 0, 8)


def test_scalar_gate_by_hand() -> None:
    """w.x + b = 1 + 2 log 3 - 1 = log 9: g = 0.9."""
    x, weight = vector(1, math.log(3)), vector(1, 2)
    log_g, rest = gates.scalar_gate(x, weight, vector(-1)[0])
    assert (math.exp(log_g), rest) == (pytest.approx(0.9), pytest.approx(0.1))


def test_low_rank_gate_by_hand() -> None:
    """W1 x = [3], W2 W1 x + b = [3, 0 + log 3]."""
    down, up = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0], [0.0]])
    log_alpha = gates.low_rank_gate(vector(1, 2), down, up, vector(0, math.log(3)), 16.0)
    torch.testing.assert_close(log_alpha.exp(), vector((1 / (1 + math.exp(-3))) ** (1 / 16), 0.75 ** (1 / 16)))


def test_outer_gate_by_hand() -> None:
    x, zeros = vector(math.log(3)), vector(0, 0)
    log_f, log_z = gates.outer_gate(x, torch.tensor([[1.0], [0.0]]), zeros, torch.tensor([[-1.0]]), vector(0))
    torch.testing.assert_close(log_f.exp(), vector(0.75, 0.5))
    torch.testing.assert_close(log_z.exp(), vector(0.25))


@pytest.mark.parametrize("g, r, f", [(0.2, 0, 0.04), (0.2, 1, 0.36), (0.5, 0.5, 0.5), (0.8, 0.25, 0.75 * 0.64 + 0.24)])
def test_refined_gate_by_hand(g: float, r: float, f: float) -> None:
    """Biases alone: logit(g) and logit(r). ReGLA eq. 16: r = 0 gives g^2, r = 1 gives 1 - (1 - g)^2."""
    logit_r = {0: -800.0, 1: 800.0}.get(r, math.log(r / (1 - r)) if 0 < r < 1 else 0)
    none = torch.zeros(1, 1)
    log_f = gates.refined_gate(vector(7), none, vector(math.log(g / (1 - g))), none, vector(logit_r))
    assert math.exp(log_f) == pytest.approx(f)
    own = gates.refined_gate(vector(2), torch.ones(1, 1), vector(-2), -torch.ones(1, 1), vector(2))
    assert math.exp(own) == pytest.approx(0.5)


def test_refined_gate_is_accurate_near_zero() -> None:
    """g = e^-30, r = 1/2: f = g up to g^2."""
    none = torch.zeros(1, 1)
    log_f = gates.refined_gate(vector(0), none, vector(-30), none, vector(0))
    assert float(log_f) == pytest.approx(-30, abs=1e-12)


def test_delta_rule_parts_by_hand() -> None:
    assert gates.write_strength(vector(1, math.log(3)), vector(0, 1)) == pytest.approx(0.75)
    assert gates.unit_sum(vector(1, 3)).tolist() == [0.25, 0.75]
    assert gates.unit_norm(vector(3, 4)).tolist() == [0.6, 0.8]
    assert gates.unit_norm(vector(0, 0)).tolist() == gates.unit_sum(vector(0, 0)).tolist() == [0, 0]
