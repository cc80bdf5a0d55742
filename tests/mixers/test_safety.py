"""Every map under bf16 autocast, with inputs up to 1e4: finite, and what float64 gives within bf16 rounding.

Exponentials of logarithms of 1e4 have sums that only float64 can hold, or not even that: those are 0 instead.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from linearize.configs.feature_maps import HedgehogMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.configs.spans import SlidingSpan
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.layout import SequenceLayout
from linearize.recipe import Recipe, recipe_names
from tests.mixers.space import make_drawn, with_tensors

ROUNDING = 2**-7  # the distance of neighbouring bf16 numbers, relative
SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=12, max_positions=256)
LENGTH = 150


def every_config() -> dict[str, MixerConfig]:
    """Every recipe's mixer, and what no recipe uses."""
    found = {name: Recipe.load(name).mixer for name in recipe_names()}
    for activation in ("softmax", "exp"):
        found[f"hedgehog {activation}"] = MixerConfig(feature_map=HedgehogMap(activation=activation))
    for activation in ("relu", "elu1"):
        changed = found["lolcat-l"].feature_map.model_copy(update={"activation": activation})
        found[f"lolcat {activation}"] = found["lolcat-l"].model_copy(update={"feature_map": changed})
    for name in ("exp", "performer", "regla", "cosformer", "taylor"):
        found[f"{name} with a window"] = MixerConfig(
            span=SlidingSpan(window_size=7),
            **{
                part: getattr(found[name], part)
                for part in ("feature_map", "decay", "update", "scale", "normalizer", "combine")
            },
        )
    return {name: config.resolved(SHAPE) for name, config in found.items()}


def gradients(mixer: LinearMixer, inputs, y_grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "hidden": inputs.hidden}
    named |= {"q0": inputs.unrotated[0], "k0": inputs.unrotated[1]}
    leaves = {name: x.detach().requires_grad_() for name, x in named.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inputs.q.dtype == torch.bfloat16):
        y = mixer(with_tensors(inputs, leaves))
    wanted = leaves | dict(mixer.named_parameters())
    found = torch.autograd.grad(y, list(wanted.values()), y_grad.to(y.dtype), allow_unused=True)
    return y.detach(), {name: g for name, g in zip(wanted, found, strict=True) if g is not None}


@torch.no_grad()
def held(single: LinearMixer, double: LinearMixer, inputs: AttnInputs, exact: AttnInputs) -> Tensor:
    """[B,H,T]: queries whose weights' sum fp32 can hold, or float64 cannot either; all, where it has no free scale.

    A key's features are 0 below e^-87 and a query's largest is e^56: what fp32 loses is little beside 1e-8.
    """
    if not single.in_any_scale:
        return torch.ones(inputs.q.shape[:3], dtype=torch.bool)
    layout = SequenceLayout.full(LENGTH)
    (_, found), (_, expected) = single.partials(inputs, layout), double.partials(exact, layout)
    return (found.den > 1e-8) | (expected.den == 0)


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
@pytest.mark.parametrize("name", every_config())
def test_large_inputs_in_bf16_autocast(name: str, magnitude: float) -> None:
    case = make_drawn(every_config()[name], SHAPE, [[list(range(LENGTH))]], LENGTH, seed=4)
    # Without two largest scores that are as good as equal: there c_n, and with it eq. 7, has no gradient.
    generator = torch.Generator().manual_seed(3)

    def large(x: Tensor) -> Tensor:
        """Some tokens up to the magnitude, some small, and one of each extreme."""
        size = torch.rand(1, 1, LENGTH, 1, generator=generator, dtype=torch.float64) ** 4
        x = (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1) * size * magnitude
        x[..., 5, :], x[..., 9, :], x[..., 11, :] = magnitude, -magnitude, 0
        return x.to(torch.bfloat16)

    inputs = case.inputs
    q, k, q0, k0 = (large(x) for x in (inputs.q, inputs.k, *inputs.unrotated))
    single = LinearMixer(case.mixer.config, SHAPE)
    single.load_state_dict({key: x.float() for key, x in case.mixer.state_dict().items()})
    double = LinearMixer(case.mixer.config, SHAPE).double()
    double.load_state_dict({key: x.double() for key, x in single.state_dict().items()})
    half = replace(
        inputs,
        q=q,
        k=k,
        v=inputs.v.to(torch.bfloat16),
        hidden=inputs.hidden.to(torch.bfloat16),
        unrotated=(q0, k0),
        rope=tuple(x.to(torch.bfloat16) for x in inputs.rope),
    )
    tensors = {"q": q, "k": k, "v": half.v, "hidden": half.hidden, "q0": q0, "k0": k0}
    exact = with_tensors(half, {key: x.double() for key, x in tensors.items()}, tuple(x.double() for x in half.rope))
    y_grad = torch.randn(inputs.q.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16)
    y, found = gradients(single, half, y_grad)
    assert y.dtype == torch.bfloat16 and y.isfinite().all() and all(x.isfinite().all() for x in found.values())
    counted = held(single, double, half, exact)[..., None]
    assert counted.double().mean() > (0.99 if magnitude == 1 else 0.7)
    if not counted.all():
        y_grad = y_grad * counted
        found = gradients(single, half, y_grad)[1]
    expected_y, expected = gradients(double, exact, y_grad)
    assert_rounded(y * counted, expected_y * counted, "output")
    for key, gradient in expected.items():
        # A saturated map has no gradient but the rounding of what cancels: of the size of a weight's inputs.
        size = magnitude if key.startswith("feature_map.") else 1.0
        assert_rounded(found[key], gradient, f"gradient of {key}", least=1e-2 * size)


def assert_rounded(found: Tensor, expected: Tensor, what: str, least: float = 0.0) -> None:
    assert found.isfinite().all(), f"{what}: not finite"
    largest = max(float(expected.abs().max()), least)
    error = float((found.double() - expected).abs().max()) / largest
    assert error <= ROUNDING, f"{what}: off by {error:.2g} of {largest:.2g}"
