"""Mixers whose map has a kernel in closed form: the same outputs, states and gradients as with its features."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops import chunked
from linearize.ops.layout import SequenceLayout
from tests.ops.parity import FP64, assert_near

SHAPE = LayerShape(4, 2, 5, hidden_size=8, max_positions=256)
TAYLOR: dict[str, Any] = {"feature_map": {"type": "taylor2"}}
IN_CLOSED_FORM = {
    "no window": {"span": {"type": "none"}, "combine": {"type": "add"}},
    "sliding": {"span": {"type": "sliding", "window_size": 7, "sinks": 2}},
    "terraced": {"span": {"type": "terraced", "window_size": 4, "blocks": 2}},
}
WITH_FEATURES = {
    "gate": {"decay": {"type": "scalar"}},
    "delta rule": {"update": {"type": "delta"}, "normalizer": {"type": "none"}, "combine": {"type": "add"}},
    "scaled": {"scale": "head_dim"},
}


def make_mixer(settings: dict[str, Any]) -> LinearMixer:
    return LinearMixer(MixerConfig.model_validate(TAYLOR | settings), SHAPE).double()


def inputs(length: int) -> AttnInputs:
    generator = torch.Generator().manual_seed(length)
    sizes = ((2, heads, length, SHAPE.head_dim) for heads in (4, 2, 2))
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes)
    return AttnInputs(q, k, v, scaling=0.4)


@pytest.mark.parametrize("name", IN_CLOSED_FORM)
def test_the_same_as_with_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "MAX_CHUNK", 16)
    mixer = make_mixer(IN_CLOSED_FORM[name])
    kernel, given = mixer.kernel, inputs(60)
    assert kernel is not None

    def run() -> dict[str, torch.Tensor]:
        valid = torch.ones(2, 60, dtype=torch.bool)
        valid[1, :9] = False
        y = mixer(given, SequenceLayout.from_valid(valid))
        found = {"y": y} | dict(zip("qkv", torch.autograd.grad(y.sum(), (given.q, given.k, given.v)), strict=True))
        with torch.no_grad():
            found["prefill"], state = mixer.step(given.tokens(0, 40), None)
            found["piece"], state = mixer.step(given.tokens(40, 50), state)
            for n in range(50, 60):
                found[f"token {n}"], state = mixer.step(given.tokens(n, n + 1), state)
        assert state.linear is not None
        return found | state.linear.named_tensors()

    found = run()
    mixer.kernel = None
    for part, expected in run().items():
        assert_near(found[part], expected, FP64, part)


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_where_features_are_more_than_the_kernel_says_they_are_made(name: str) -> None:
    assert make_mixer(WITH_FEATURES[name]).kernel is None
