"""Exponential features of real queries and keys, which spread over far more than a dtype's digits: the weights hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize import convert
from linearize.configs.feature_maps import HedgehogMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import Add
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan
from linearize.demo.corpus import teacher_path
from linearize.hf.attention import observed, softmax_output
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer, learnable, without_lost
from linearize.ops.partial import Partial
from linearize.recipe import Recipe
from tests.mixers.weights import weights_of
from tests.oracles.heads import Inputs, make_head

TEXT = '''
class Stack:
    """Last in, first out."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
'''


@pytest.fixture(scope="module")
def layers() -> tuple[LayerShape, list[AttnInputs]]:
    """q, k and v of every layer of the demo's teacher on some code."""
    tokenizer = AutoTokenizer.from_pretrained(teacher_path())
    student = convert(
        AutoModelForCausalLM.from_pretrained(teacher_path(), dtype=torch.float32), Recipe.load("lolcat-l")
    )
    found: list[AttnInputs] = []

    def observe(layer: Any, inputs: AttnInputs, layout: Any) -> Tensor:
        found.append(inputs)
        return softmax_output(layer, inputs, layout)

    with torch.no_grad(), observed(student, observe):
        student.base_model(input_ids=torch.tensor([tokenizer(TEXT)["input_ids"]]))
    return LayerShape(4, 2, 64, hidden_size=256, max_positions=1024), found


def exact(mixer: LinearMixer, x: AttnInputs) -> Tensor:
    """[H,T,D]: the linear part alone, in float64, by the logarithms of all its weights."""
    inputs, length = Inputs(*(y.double() for y in (x.q, x.k, x.v)), x.scaling), x.q.shape[2]
    y = torch.zeros(x.q.shape[1:], dtype=torch.float64)
    for h in range(len(y)):
        head = make_head(mixer.config, weights_of(mixer.double()), inputs, 0, h, list(range(length)))
        logs = torch.stack([torch.logsumexp(query + head.keys, -1) for query in head.log_queries])
        y[h] = logs.masked_fill(~torch.ones_like(logs).tril().bool(), -torch.inf).softmax(-1) @ head.v
    return y


@pytest.mark.parametrize("name", ["performer", "exp", "lolcat-l", "hedgehog"])
def test_weights_of_a_real_models_queries_and_keys(name: str, layers: tuple[LayerShape, list[AttnInputs]]) -> None:
    """No output is off by a tenth, but for a few whose keys are too small beside others for fp32: `exp`, one in 50."""
    shape, inputs = layers
    config = Recipe.load(name).mixer
    if name == "hedgehog":
        config = config.model_copy(update={"feature_map": HedgehogMap(activation="exp", expansion=2, bias=True)})
    torch.manual_seed(0)
    mixer = LinearMixer(config.resolved(shape), shape).requires_grad_(False)
    for x in inputs:
        y, expected = mixer.float()(x)[0].double(), exact(mixer, x)
        off = (y - expected).norm(dim=-1) > 0.1 * expected.norm(dim=-1)
        assert off.double().mean() < (0.03 if name == "exp" else 0.01)


@pytest.mark.parametrize("name", ["lolcat-l", "exp"])
def test_gradients_of_very_small_sums(name: str, layers: tuple[LayerShape, list[AttnInputs]]) -> None:
    """In fp32 as in fp64, with sums down to e^-70 in the scale of the largest features; finite with smaller ones."""
    shape, inputs = layers
    random = torch.randn(inputs[3].q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for dtype in (torch.float32, torch.float64):
        mixer = LinearMixer(Recipe.load(name).mixer.resolved(shape), shape).to(dtype)
        x = inputs[3].map(lambda y, dtype=dtype: y.to(dtype))
        x = replace(x, q=x.q.clone().requires_grad_(), k=x.k.clone().requires_grad_())
        gradients = torch.autograd.grad((mixer(x) * random.to(dtype)).sum(), [x.q, x.k, *mixer.parameters()])
        found.append(torch.cat([g.double().flatten() for g in gradients]))
    assert found[0].isfinite().all()
    if name == "lolcat-l":
        assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.9999


@pytest.mark.parametrize("distance", [10.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_key_has_all_the_weight(distance: float, dtype: torch.dtype) -> None:
    """However small phi_q.phi_k is: here 2 e^-20 and 2 e^-60, over the largest features."""
    shape = LayerShape(1, 1, 2, hidden_size=2, max_positions=8)
    mixer = LinearMixer(Recipe.load("exp").mixer, shape)
    q, k, v = (torch.tensor(x, dtype=dtype).view(1, 1, 1, 2) for x in ([distance, 0], [0, distance], [1.0, 1.0]))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = mixer(AttnInputs(q, k, v, 1.0))
    torch.testing.assert_close(y, torch.ones_like(y))
    gradients = torch.autograd.grad(y.sum(), leaves)
    assert all(x.isfinite().all() for x in gradients)
    torch.testing.assert_close(gradients[2], torch.ones_like(v))


def test_far_keys_of_any_weight() -> None:
    """In absolute scale: a far key weighs e^b 2 e^size, a near one 1, whatever the largest features are."""
    shape = LayerShape(1, 1, 2, hidden_size=2, max_positions=8)
    fields = {"feature_map": {"type": "exp"}, "combine": {"type": "absolute_scale"}}
    mixer = LinearMixer(MixerConfig.model_validate({"span": {"type": "sliding", "window_size": 1}, **fields}), shape)
    for size, offset, expected in ((50, -50, 2 / 3), (50, 50, 1), (20, -60, 0), (0, -200, 0), (0, 200, 1)):
        q, k = torch.tensor([[[[0.0, 0.0], [size, 0.0]]]]), torch.tensor([[[[0.0, size], [0.0, 0.0]]]])
        v = torch.tensor([[[[1.0, 1.0], [0.0, 0.0]]]])
        with torch.no_grad():
            mixer.combine.get_parameter("offset").fill_(offset)
        y = mixer(AttnInputs(q, k, v, 1.0))[0, 0, 1]
        torch.testing.assert_close(y, torch.full((2,), float(expected)), rtol=1e-5, atol=1e-14)
        (gradient,) = torch.autograd.grad(y.sum(), [mixer.combine.get_parameter("offset")])
        assert gradient.isfinite().all()


def test_sums_that_float32_does_not_hold_are_taken_for_none() -> None:
    """As found in training, in absolute scale: 3e-14 over 1e-28. A sum as small that is a mean of values stays."""
    shape = LayerShape(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=2, max_positions=8)
    config = MixerConfig(feature_map=HedgehogMap(activation="exp"), combine=Add(), span=NoSpan())
    mixer = LinearMixer(config.resolved(shape), shape)
    num = torch.tensor([3.2e-14, 3.2e-27, 3e10]).view(1, 1, 3, 1).expand(-1, -1, -1, 2).clone()
    den = torch.tensor([1.6e-28, 1.6e-28, 1.0]).view(1, 1, 3)
    sums = Partial(num, den, torch.zeros_like(den))
    found = without_lost(sums, mixer.lost(sums))
    assert found.num[0, 0, :, 0].tolist() == [0.0, num[0, 0, 1, 0].item(), num[0, 0, 2, 0].item()]
    assert found.den[0, 0].tolist() == [0.0, *den[0, 0, 1:].tolist()]


def test_sums_that_stay_small_have_no_gradient() -> None:
    """In a scale in which they should be 1: their keys' features would have gradients that float32 does not hold."""
    num = torch.tensor([2.0, 2e-9]).view(1, 1, 2, 1).requires_grad_()
    den = torch.tensor([[[1.0, 1e-9]]]).requires_grad_()
    sums = learnable(Partial(num, den, torch.zeros(1, 1, 2)))
    assert torch.equal(sums.num, num) and torch.equal(sums.den, den)
    gradients = torch.autograd.grad((sums.num[..., 0] / sums.den).sum(), [num, den])
    assert [x.flatten().tolist() for x in gradients] == [[1.0, 0.0], [-2.0, 0.0]]
