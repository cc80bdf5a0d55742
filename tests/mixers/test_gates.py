"""Decays and the delta rule's parts against their formulas, in exact arithmetic where rounding is the point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor, nn

from linearize.configs.mixer_parts import (
    DecayConfig,
    DeltaUpdate,
    FeatureDecay,
    FixedDecay,
    OuterDecay,
    RefinedDecay,
    ScalarDecay,
)
from linearize.configs.shape import LayerShape
from linearize.mixers.gates import DECAYS, DeltaRule, Gate, GateOut, refined_log_decay
from linearize.mixers.inputs import AttnInputs

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=10, max_positions=64)
HEADS, FEATURES, LENGTH = 2, 8, 5
LEARNED = [
    ScalarDecay(),
    ScalarDecay(input_scale=False, bias_init=2.0),
    FeatureDecay(rank=3, bias_init=-1.0),
    OuterDecay(bias_init=1.0),
    RefinedDecay(bias_init=0.5),
    RefinedDecay(axis="feature"),
]
each_gate = pytest.mark.parametrize("config", LEARNED, ids=repr)


def inputs(dtype: torch.dtype = torch.float64, *, hidden: bool = True, size: float = 1.0) -> AttnInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (normal(3, heads, LENGTH, 6) for heads in (4, 2, 2))
    return AttnInputs(q, k, v, 0.4, hidden=size * normal(3, LENGTH, 10) if hidden else None)


def gate_of(config: DecayConfig, dtype: torch.dtype = torch.float64) -> Gate:
    torch.manual_seed(1)
    return DECAYS[type(config)](config, SHAPE, HEADS, FEATURES).to(dtype)


def tensors(out: GateOut) -> dict[str, Tensor]:
    return {name: x for name, x in vars(out).items() if x is not None}


# --- fixed decays -----------------------------------------------------------------------------------------------------


def fixed(heads: int, schedule: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """[H] log decays."""
    shape = LayerShape(heads, heads, 6, 10, 64)
    gate = DECAYS[FixedDecay](FixedDecay(schedule=schedule), shape, heads, FEATURES)
    out = gate(AttnInputs(*(torch.zeros(3, heads, LENGTH, 6, dtype=dtype) for _ in range(3)), 0.4))
    assert list(tensors(out)) == ["log_decay_k"] and not list(gate.parameters()) and not gate.state_dict()
    assert out.log_decay_k is not None and out.log_decay_k.shape == (1, heads, LENGTH, 1)
    assert torch.equal(out.log_decay_k, out.log_decay_k[:, :, :1].expand(-1, -1, LENGTH, -1))
    return out.log_decay_k[0, :, 0, 0]


EIGHT = [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize(
    "slopes",
    [
        [2**-8],
        [2**-4, 2**-8],
        [2**-4, 2**-8, 2**-2],
        EIGHT,
        [*EIGHT, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
        [2 ** (-h / 4) for h in range(1, 33)],
    ],
    ids=len,
)
def test_lightning_slopes(slopes: list[float]) -> None:
    expected = -torch.tensor(slopes, dtype=torch.float64)
    torch.testing.assert_close(fixed(len(slopes), "lightning"), expected, rtol=1e-14, atol=0)
    single = fixed(len(slopes), "lightning", torch.bfloat16)
    torch.testing.assert_close(single, expected.float(), rtol=0, atol=0)


def test_the_decays_of_32_heads_as_supra_gives_them() -> None:
    gamma = fixed(32, "lightning").exp()
    assert (round(gamma[0].item(), 3), round(gamma[-1].item(), 4)) == (0.431, 0.9961)


def test_retnet_decays() -> None:
    gamma = fixed(4, "retnet").exp()
    expected = torch.tensor([31 / 32, 63 / 64, 127 / 128, 255 / 256], dtype=torch.float64)
    torch.testing.assert_close(gamma, expected, rtol=1e-15, atol=0)
    # So close to 1 that there is no other number between, in double precision either.
    torch.testing.assert_close(fixed(60, "retnet", torch.float32)[59].item(), -(2.0**-64), rtol=1e-6, atol=0)


# --- learned decays ---------------------------------------------------------------------------------------------------


def affine(x: Tensor, part: nn.Module, heads: int = HEADS) -> Tensor:
    """W x + b, [B,Hk,T,X], head by head."""
    width = part.weight.shape[1] // heads
    columns = [slice(h * width, (h + 1) * width) for h in range(heads)]
    bias = torch.zeros(heads * width) if part.bias is None else part.bias
    return torch.stack([x @ part.weight[:, c] + bias[c] for c in columns], dim=1)


def formulas(config: DecayConfig, gate: Gate, x: Tensor) -> dict[str, Tensor]:
    """What the papers say, to be taken the logarithm of."""
    if isinstance(config, ScalarDecay):
        g = affine(x, gate.g).sigmoid()
        return {"log_decay_k": g.log()} | ({"input_scale": 1 - g} if config.input_scale else {})
    if isinstance(config, FeatureDecay):
        return {"log_decay_k": (affine(x @ gate.down.weight, gate.up).sigmoid() ** (1 / config.temperature)).log()}
    if isinstance(config, OuterDecay):
        return {"log_decay_k": affine(x, gate.f).sigmoid().log(), "log_decay_v": affine(x, gate.z).sigmoid().log()}
    assert isinstance(config, RefinedDecay)
    g, r = affine(x, gate.g).sigmoid(), affine(x, gate.r).sigmoid()
    f = (1 - r) * g**2 + r * (1 - (1 - g) ** 2)
    return {"log_decay_v" if config.axis == "value" else "log_decay_k": f.log()}


@each_gate
def test_the_formula(config: DecayConfig) -> None:
    gate, given = gate_of(config), inputs()
    expected = formulas(config, gate, given.hidden)
    found = tensors(gate(given))
    widths = {"log_decay_k": 1 if isinstance(config, ScalarDecay) else FEATURES, "log_decay_v": 6}
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.shape == (3, HEADS, LENGTH, widths.get(name, 1))
        torch.testing.assert_close(x, expected[name], rtol=1e-12, atol=1e-15)


@each_gate
def test_initialisation(config: DecayConfig) -> None:
    """Uniform within 1 / sqrt(inputs), as linear layers; biases at `bias_init`, that of r at 0."""
    gate = gate_of(config)
    for parameter in gate.parameters():
        parameter.data.fill_(100)
    gate.reset_parameters()
    for name, x in gate.named_parameters():
        if name.endswith("bias"):
            assert torch.all(x == (0 if name == "r.bias" else config.bias_init))
        else:
            bound = len(x) ** -0.5
            assert x.abs().amax() <= bound and x.std() > bound / 3 and len(x.unique()) == x.numel()


@each_gate
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_extreme_inputs_give_finite_logarithms_and_gradients(config: DecayConfig, dtype: torch.dtype) -> None:
    gate = gate_of(config, dtype)
    for size in 0.0, 1e2, 1e6:
        given = inputs(dtype, size=size)
        found = tensors(gate(given))
        for name, x in found.items():
            assert x.dtype == torch.float32 and x.isfinite().all()
            assert (x >= 0).all() if name == "input_scale" else (x <= 0).all()
        gate.zero_grad()
        sum(x.sum() for x in found.values()).backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in gate.parameters())


@each_gate
def test_gradients(config: DecayConfig) -> None:
    gate, given = gate_of(config), inputs()
    weights = {name: x.detach().requires_grad_() for name, x in gate.named_parameters()}

    def logs(*values: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(weights, values, strict=True))
        return tuple(tensors(torch.func.functional_call(gate, named, (given,))).values())

    assert torch.autograd.gradcheck(logs, tuple(weights.values()), fast_mode=True)


@each_gate
def test_a_gate_needs_the_layers_input(config: DecayConfig) -> None:
    with pytest.raises(ValueError, match=r"AttnInputs\.hidden: expected the layer's input.*wants_hidden"):
        gate_of(config)(inputs(hidden=False))


# --- the refined gate's logarithm -------------------------------------------------------------------------------------

GRID = [-60.0, -45.5, -31.0, -20.0, -9.0, -3.0, -1.0, -0.25, 0.0, 0.5, 1.0, 2.5, 8.0, 17.0, 30.0, 44.0, 60.0]


def exact_refined() -> Iterator[tuple[float, float, float, float, float]]:
    """(a, b, log f, d log f / da, d log f / db) for g = sigmoid(a), r = sigmoid(b), to a hundred digits."""
    with localcontext() as context:
        context.prec = 120
        for a, b in itertools.product(GRID, repeat=2):
            g, r = (1 / (1 + (-Decimal(x)).exp()) for x in (a, b))
            f = (1 - r) * g**2 + r * (1 - (1 - g) ** 2)
            by_g, by_r = (1 - r) * 2 * g + r * 2 * (1 - g), 1 - (1 - g) ** 2 - g**2
            yield a, b, *(float(x) for x in (f.ln(), by_g * g * (1 - g) / f, by_r * r * (1 - r) / f))


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=str)
def test_the_refined_gate_is_exact_and_finite(dtype: torch.dtype, rtol: float) -> None:
    a, b, log_f, *slopes = torch.tensor(list(exact_refined()), dtype=torch.float64).unbind(1)
    a, b = (x.to(dtype).requires_grad_() for x in (a, b))
    found = refined_log_decay(a, b)
    found.sum().backward()
    assert (found <= 0).all()
    # What is smaller than the smallest normal number may vanish.
    tiny = 2 * torch.finfo(dtype).tiny
    torch.testing.assert_close(found, log_f.to(dtype), rtol=rtol, atol=tiny)
    torch.testing.assert_close(a.grad, slopes[0].to(dtype), rtol=rtol, atol=tiny)
    # 1 - r, of which this slope is a multiple, is 0 for autograd where r rounds to 1, and so on.
    torch.testing.assert_close(b.grad, slopes[1].to(dtype), rtol=rtol, atol=torch.finfo(dtype).eps)


def test_the_refined_gate_against_the_naive_logarithm() -> None:
    a, b = (torch.linspace(-4, 4, 41, dtype=torch.float64)[:, None], torch.linspace(-5, 5, 37, dtype=torch.float64))
    g, r = a.sigmoid(), b.sigmoid()
    a, b = torch.broadcast_tensors(a, b)
    naive = ((1 - r) * g**2 + r * (1 - (1 - g) ** 2)).log()
    torch.testing.assert_close(refined_log_decay(a, b), naive, rtol=1e-11, atol=0)


# --- the delta rule's parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_norm", ["sum", "l2"])
def test_the_write_strength(key_norm: str) -> None:
    config = DeltaUpdate(key_norm=key_norm)
    rule, given = DeltaRule(config, SHAPE, HEADS).double(), inputs()
    rule.reset_parameters()
    (weight,) = rule.parameters()
    assert 0 < weight.abs().amax() <= 10**-0.5
    beta = rule(given)
    assert beta.shape == (3, HEADS, LENGTH, 1)
    expected = (given.hidden @ weight).sigmoid().movedim(2, 1)[..., None]
    torch.testing.assert_close(beta, expected, rtol=1e-12, atol=0)
    assert rule.to(torch.bfloat16)(inputs(torch.bfloat16)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"AttnInputs\.hidden"):
        rule(inputs(hidden=False))


def test_normalized_features() -> None:
    phi = torch.tensor([[1.0, 3.0], [0.0, 0.5], [0.0, 0.0], [2e-7, 2e-7], [3e-25, 4e-25]])[None, None].requires_grad_()
    sums = torch.tensor([[0.25, 0.75], [0, 1], [0, 0], [0.2, 0.2], [3e-19, 4e-19]])
    root = math.sqrt(10)
    norms = torch.tensor([[1 / root, 3 / root], [0, 1], [0, 0], [0.2, 0.2], [3e-19, 4e-19]])
    for key_norm, expected in (("sum", sums), ("l2", norms)):
        found = DeltaRule(DeltaUpdate(key_norm=key_norm), SHAPE, HEADS).normalize(phi)
        torch.testing.assert_close(found[0, 0], expected, rtol=1e-6, atol=0)
        phi.grad = None
        (found * torch.tensor([1.0, 2.0])).sum().backward()
        assert phi.grad.isfinite().all()


@pytest.mark.parametrize("key_norm", ["sum", "l2"])
def test_gradients_of_normalized_features(key_norm: str) -> None:
    phi = torch.rand(2, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rule = DeltaRule(DeltaUpdate(key_norm=key_norm), SHAPE, HEADS)
    assert torch.autograd.gradcheck(rule.normalize, phi)
