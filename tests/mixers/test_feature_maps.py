"""Feature maps: values by hand, kernels, projections of every kind, gradients, and inputs up to 1e4."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from linearize.configs.feature_maps import FeatureMapConfig, LearnedMap
from linearize.configs.shape import LayerShape
from linearize.mixers import feature_maps as maps
from linearize.mixers.feature_maps import FEATURE_MAPS
from linearize.mixers.feature_maps.base import FeatureMap

GROUPED = LayerShape(num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=24, max_positions=32)
FULL = LayerShape(num_heads=3, num_kv_heads=3, head_dim=6, hidden_size=18, max_positions=32)
ONE = LayerShape(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=2, max_positions=8)

FIXED = [
    maps.IdentityMap(),
    maps.SiluMap(),
    maps.Elu1Map(),
    maps.ReluMap(),
    maps.ExpMap(temperature=0.5),
    maps.PerformerMap(),
    maps.PerformerMap(feature_dim=8),
    maps.CosformerMap(),
    maps.TaylorMap(),
    maps.RfaMap(),
    maps.RfaMap(feature_dim=10),
    maps.DpfpMap(),
    maps.DpfpMap(nu=3),
]
LEARNED = [
    maps.T2RMap(),
    maps.T2RMap(feature_dim=5, activation="none"),
    *(maps.HedgehogMap(activation=x, bias=x == "exp") for x in ("softmax_halves", "softmax", "exp")),
    maps.HedgehogMap(feature_dim=8, bias=True),
    *(maps.LolcatMap(activation=x) for x in ("exp", "relu", "elu1")),
    maps.ReglaMap(feature_dim=5),
]
PLACES = list(itertools.product(("query_head", "kv_head", "model"), (False, True)))
# Every place for one map of each kind, two of the six for the others.
PLACED = [
    (config, *place)
    for i, config in enumerate(LEARNED)
    for place in (PLACES if i in (0, 2, 6) else (PLACES[i % 6], PLACES[(i + 3) % 6]))
]
CASES = [(config, GROUPED) for config in FIXED] + [
    (config.model_copy(update={"per": per, "tied": tied}), FULL if tied and per == "model" else GROUPED)
    for config, per, tied in PLACED
]


def name(case: object) -> str:
    if not isinstance(case, FeatureMapConfig):
        return ""
    options = {k: v for k, v in case if k in ("per", "activation", "nu", "feature_dim") and v is not None}
    return " ".join([case.type, *map(str, options.values()), *(["tied"] if getattr(case, "tied", False) else [])])


each_case = pytest.mark.parametrize("config, shape", CASES, ids=name)


def make(config: FeatureMapConfig, shape: LayerShape, *, scale: float = 0.5) -> FeatureMap:
    """In float64, with random parameters."""
    torch.manual_seed(0)
    feature_map = FEATURE_MAPS[type(config)](config, shape).double()
    for parameter in feature_map.parameters():
        parameter.data.normal_(std=scale)
    return feature_map


def inputs(shape: LayerShape, length: int = 5, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and positions, which begin with padding."""
    generator = torch.Generator().manual_seed(1)
    q, k = (
        torch.randn(batch, heads, length, shape.head_dim, generator=generator, dtype=torch.float64)
        for heads in (shape.num_heads, shape.num_kv_heads)
    )
    return q, k, torch.arange(-1, length - 1).expand(batch, -1)


def close(found: Tensor, expected: Tensor | list, tolerance: float = 1e-12) -> None:
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_every_config_has_a_map() -> None:
    assert set(FEATURE_MAPS) == {type(config) for config in FIXED + LEARNED}


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_shapes_and_dtypes(config: FeatureMapConfig, shape: LayerShape, dtype: torch.dtype) -> None:
    feature_map = FEATURE_MAPS[type(config)](config, shape)
    q, k, position = inputs(shape)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for row in position, position[:1]:
        phi_q, phi_k = feature_map.q(q.to(dtype), row), feature_map.k(k.to(dtype), row)
        assert phi_q.shape == (2, shape.num_heads, 5, config.features(shape)) and phi_q.dtype == expected
        assert phi_k.shape == (2, config.key_heads(shape), 5, config.features(shape))
        assert phi_k.dtype == (torch.float64 if config.type == "performer" else expected)
    assert (feature_map.feature_dim, feature_map.key_heads) == (config.features(shape), config.key_heads(shape))
    assert feature_map.exponential == config.exponential
    # Exponentials are over a maximum, so their sums have no scale in which 1e-6 would be little.
    least = {"rfa": 1.0}.get(config.type, torch.finfo(expected).tiny / torch.finfo(expected).eps)
    assert feature_map.min_denominator(expected) == (least if config.exponential or config.type == "rfa" else 1e-6)
    if isinstance(config, LearnedMap):
        weights = tuple(tuple(x.shape) for x in (feature_map.query_weight, feature_map.key_weight) if x is not None)
        assert weights == config.projections(shape)


E1, E2 = math.exp(-1), math.exp(-2)
SIGMOID = 1 / (1 + math.exp(-2))  # softmax over (2, 0)
SOFT4 = [math.exp(x) / (math.exp(2) + math.exp(-2) + 2) for x in (2, 0, -2, 0)]
SILU = [1 / (1 + E1), -2 / (1 + math.exp(2))]
BY_HAND = [
    (maps.IdentityMap(), [1, -2], [1, -2], [1, -2]),
    (maps.SiluMap(), [1, -2], SILU, SILU),
    (maps.Elu1Map(), [1, -2], [2, E2], [2, E2]),
    (maps.ReluMap(), [1, -2], [1, 0], [1, 0]),
    (maps.ExpMap(temperature=0.5), [1, -1], [1, E1], [0.5, -0.5]),
    (maps.T2RMap(init="identity"), [1, -2], [1, 0], [1, 0]),
    (maps.T2RMap(init="identity", activation="none"), [1, -2], [1, -2], [1, -2]),
    (maps.T2RMap(init="identity", activation="elu1"), [1, -2], [2, math.exp(-2)], [2, math.exp(-2)]),
    (maps.HedgehogMap(feature_dim=4), [2, 0], [SIGMOID, 1 - SIGMOID, 1 - SIGMOID, SIGMOID], None),
    (maps.HedgehogMap(feature_dim=4, activation="softmax"), [2, 0], SOFT4, None),
    (maps.HedgehogMap(feature_dim=4, activation="exp"), [1, 0], [1, E1, E2, E1], [1, 0, -1, 0]),
    (maps.LolcatMap(), [1, -1], [1, E2], [1, -1]),
    (maps.LolcatMap(init="identity"), [0.5, -0.5], [1, E2], [1, -1]),
    (maps.LolcatMap(activation="relu"), [1, -1], [1, 0], [1, 0]),
    (maps.LolcatMap(activation="elu1"), [1, -1], [2, E1], [2, E1]),
    (maps.ReglaMap(feature_dim=3), [1, -1], [1, E2, E1], [1, -1, 0]),
    (maps.CosformerMap(), [3, -1], [3 * math.cos(math.pi / 16), 0, 3 * math.sin(math.pi / 16), 0], None),
    (maps.CosformerMap(max_length=2), [3, -1], [3 * 0.5**0.5, 0, 3 * 0.5**0.5, 0], None),
    # r = [2, 0, 0, 3]; rolled by one [3, 2, 0, 0], by two [0, 3, 2, 0], by three [0, 0, 3, 2], by four again r.
    (maps.DpfpMap(), [2, -3], [6, 0, 0, 0], None),
    (maps.DpfpMap(nu=4), [2, -3], [6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 4, 0, 0, 9], None),
]


@pytest.mark.parametrize("config, x, phi_q, phi_k", BY_HAND)
def test_by_hand(config: FeatureMapConfig, x: list, phi_q: list, phi_k: list | None) -> None:
    feature_map = FEATURE_MAPS[type(config)](config, ONE).double()
    x, position = torch.tensor(x, dtype=torch.float64).view(1, 1, 1, 2), torch.tensor([[1]])
    close(feature_map.q(x, position).flatten(), phi_q)
    close(feature_map.k(x, position).flatten(), phi_q if phi_k is None else phi_k)


@pytest.mark.parametrize("per, tied", PLACES)
@pytest.mark.parametrize("bias", [True, False])
def test_projections(per: str, tied: bool, bias: bool) -> None:
    """x W + b, head by head."""
    shape = FULL if tied and per == "model" else GROUPED
    feature_map = make(maps.T2RMap(per=per, tied=tied, bias=bias, activation="none", feature_dim=5), shape)
    q, k, position = inputs(shape)
    group, key_heads = shape.num_heads // shape.num_kv_heads, feature_map.key_heads
    weights = [(feature_map.query_weight, feature_map.query_bias)]
    weights += weights if tied else [(feature_map.key_weight, feature_map.key_bias)]
    for x, found, (weight, b) in zip(
        (q, k), (feature_map.q(q, position), feature_map.k(k, position)), weights, strict=True
    ):
        b = torch.zeros(len(weight), weight.shape[2], dtype=torch.float64) if b is None else b
        for n in range(2):
            for h, t in itertools.product(range(found.shape[1]), range(5)):
                source = x[n, h if x.shape[1] == found.shape[1] else h // group, t]
                if per == "model":
                    expected = (x[n, :, t].reshape(-1) @ weight[0] + b[0])[5 * h : 5 * h + 5]
                else:
                    mine = h // (found.shape[1] // len(weight))
                    expected = source @ weight[mine] + b[mine]
                close(found[n, h, t], expected)
    assert key_heads == (shape.num_heads if per == "query_head" else shape.num_kv_heads)


@pytest.mark.parametrize("per", ["query_head", "kv_head", "model"])
def test_hedgehog_and_lolcat_are_made_of_their_projection(per: str) -> None:
    plain = make(maps.T2RMap(per=per, activation="none", feature_dim=3), GROUPED)
    hedgehog = make(maps.HedgehogMap(per=per, bias=True), GROUPED)
    as_wide = make(maps.T2RMap(per=per, activation="none"), GROUPED)
    lolcat = make(maps.LolcatMap(per=per, bias=True, activation="relu"), GROUPED)
    q, k, position = inputs(GROUPED)
    hedgehog.load_state_dict(plain.state_dict())
    lolcat.load_state_dict(as_wide.state_dict())
    for which, x in ("q", q), ("k", k):
        y = getattr(plain, which)(x, position)
        halves = torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1)
        close(getattr(hedgehog, which)(x, position), halves)
        y = getattr(as_wide, which)(x, position)
        close(getattr(lolcat, which)(x, position), (y + x.repeat_interleave(y.shape[1] // x.shape[1], dim=1)).relu())


def test_taylor_kernel() -> None:
    for head_dim in range(1, 8):
        shape = LayerShape(1, 1, head_dim, head_dim, 8)
        q, k, position = inputs(shape)
        feature_map = make(maps.TaylorMap(), shape)
        u = q @ k.mT / head_dim**0.5
        close(feature_map.q(q, position) @ feature_map.k(k, position).mT, 1 + u + u**2 / 2)


def test_cosformer_kernel() -> None:
    q, k, position = inputs(ONE, length=7)
    i = position[:, None, :, None].clamp_min(0).double()
    feature_map = make(maps.CosformerMap(max_length=9), ONE)
    kernel = feature_map.q(q, position) @ feature_map.k(k, position).mT
    close(kernel, (q.relu() @ k.relu().mT) * torch.cos(math.pi / 18 * (i - i.mT)))


def test_performer_rows_are_orthogonal_blocks_with_the_norms_of_normal_vectors() -> None:
    feature_map = make(maps.PerformerMap(feature_dim=2000), LayerShape(1, 1, 16, 16, 8))
    W = feature_map.weight
    for block in W.split(16):
        close(block @ block.mT, (block @ block.mT).diagonal().diag(), 1e-5)
    # Of normal vectors in 16 dimensions: squared norms of mean 16 and variance 32, no preferred direction.
    square = W.square().sum(-1)
    assert abs(square.mean() - 16) < 4 * (32 / 2000) ** 0.5 and abs(square.var() - 32) < 6
    assert W.unflatten(0, (-1, 16)).diagonal(dim1=1, dim2=2).mean().abs() < 4 * 2000**-0.5
    assert W.mean(0).abs().max() < 4 * 2000**-0.5 and (W.square().mean(0) - 1).abs().max() < 4 * (2 / 2000) ** 0.5


def test_performer_kernel() -> None:
    """The mean over 400 draws is exp(q.k / sqrt D) within 4 of its standard errors, which are 1 to 3 %."""
    shape = LayerShape(1, 1, 8, 8, 8)
    q, k, position = (x * 0.3 if x.is_floating_point() else x for x in inputs(shape, batch=1))
    feature_map = make(maps.PerformerMap(), shape)
    kernels = []
    for _ in range(400):
        feature_map.reset_parameters()
        # Keys' logarithms are complete; queries' features are theirs without a factor per query.
        logs = feature_map.k(q, position)
        close(feature_map.q(q, position), (logs - logs.amax(-1, keepdim=True)).exp())
        kernels.append(logs.exp() @ feature_map.k(k, position).exp().mT)
    ratio = torch.stack(kernels) / (q @ k.mT / 8**0.5).exp()
    error = ratio.std(0) / 20
    assert error.max() < 0.03
    assert ((ratio.mean(0) - 1).abs() < 4 * error).all()


def test_performer_keeps_small_differences_of_large_keys() -> None:
    """Keys of 1e4, whose logarithms are -2e8, alike but for one small coordinate: in fp32 16 apart or not at all."""
    feature_map = make(maps.PerformerMap(), LayerShape(1, 1, 6, 6, 8)).float()
    k = torch.full((1, 1, 8, 6), 1e4, dtype=torch.bfloat16)
    k[..., 5] = torch.linspace(-2, 2, 8)
    x = k.double() / 6**0.25
    logs = x @ feature_map.weight.double().mT - x.square().sum(-1, keepdim=True) / 2
    expected = (logs - logs.amax()).exp().amax(-1)
    assert ((expected > 0.1) & (expected < 0.9)).sum() >= 3
    found = feature_map.k(k, torch.arange(8)[None])
    close((found - found.amax()).float().exp().amax(-1).double(), expected, 1e-6)


def test_rfa() -> None:
    """Each sine and cosine, queries with the weights of their KV head; and the kernel, a mean of cosines."""
    feature_map = make(maps.RfaMap(feature_dim=10), GROUPED)
    q, k, position = inputs(GROUPED)
    W = feature_map.sigma[:, None, None] * feature_map.weight
    unit_q, unit_k = (x / (x.norm(dim=-1, keepdim=True) + 1e-3) for x in (q, k))
    phi_q, phi_k = feature_map.q(q, position), feature_map.k(k, position)
    for h in range(4):
        angle = unit_q[:, h] @ W[h // 2].mT
        close(phi_q[:, h], torch.cat([angle.sin(), angle.cos()], -1) / 5**0.5)
        difference = unit_q[:, h, :, None] - unit_k[:, h // 2, None]
        close(phi_q[:, h] @ phi_k[:, h // 2].mT, (difference @ W[h // 2].mT).cos().mean(-1))


def test_small_features_keep_their_digits() -> None:
    x = torch.tensor([-20.0, -80.0, 3.0]).view(1, 1, 3, 1)
    shape, position = LayerShape(1, 1, 1, 1, 8), torch.arange(3)[None]
    for config in maps.Elu1Map(), maps.LolcatMap(activation="elu1"):
        phi = FEATURE_MAPS[type(config)](config, shape).q(x, position).flatten()
        torch.testing.assert_close(phi.tolist(), [math.exp(-20), math.exp(-80), 4.0], rtol=1e-5, atol=0)
    hedgehog = FEATURE_MAPS[maps.HedgehogMap](maps.HedgehogMap(feature_dim=4), ONE)
    phi = hedgehog.q(torch.tensor([100.0, 0.0]).view(1, 1, 1, 2), position[:, :1]).flatten()
    torch.testing.assert_close(phi.tolist(), [1.0, 1e-12, 1e-12, 1.0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("per", ["query_head", "kv_head", "model"])
@pytest.mark.parametrize("bias", [True, False])
def test_inits(per: str, bias: bool) -> None:
    def weights(init: str, shape: LayerShape, tied: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        config = maps.HedgehogMap(feature_dim=12, per=per, tied=tied, bias=bias, init=init)
        feature_map = FEATURE_MAPS[type(config)](config, shape)
        assert all(x.abs().max() == 0 for n, x in feature_map.named_parameters() if "bias" in n and init != "linear")
        return list(feature_map.parameters())

    for shape in GROUPED, FULL:
        alike = per != "model" or shape is FULL
        for x in weights("identity", shape):
            heads = x.shape[1] // 6
            if x.ndim == 3:
                close(x, torch.stack([torch.block_diag(*[torch.eye(6)] * heads)] * len(x)))
        inputs_, outputs = (shape.num_heads * 6,) * 2 if per == "model" else (6, 6)
        for init, bound in ("kaiming", (6 / (inputs_ * outputs)) ** 0.5), ("linear", inputs_**-0.5):
            found = weights(init, shape)
            assert 0.8 * bound < found[0].abs().max() <= bound
            if init == "linear" and bias:
                assert 0.5 * bound < found[1].abs().max() <= bound
            for query, key in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
                if alike:
                    close(query, key.repeat_interleave(len(query) // len(key), dim=0))
                else:
                    assert query.shape[1:] != key.shape[1:]
        assert all(x.abs().max() == 0 for x in weights("zero", shape))
    assert len(weights("linear", FULL, tied=True)) == 1 + bias


@each_case
def test_gradients(config: FeatureMapConfig, shape: LayerShape) -> None:
    """Against finite differences, of inputs and parameters."""
    feature_map = make(config, shape)
    q, k, position = inputs(shape, length=3, batch=1)
    names = [n for n, _ in feature_map.named_parameters()]

    def features(q: Tensor, k: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        for n, value in zip(names, values, strict=True):
            delattr(feature_map, n)
            setattr(feature_map, n, value)
        return feature_map.q(q, position), feature_map.k(k, position)

    values = [x.detach().requires_grad_() for x in feature_map.parameters()]
    assert torch.autograd.gradcheck(features, (q.requires_grad_(), k.requires_grad_(), *values), fast_mode=True)


@each_case
@pytest.mark.parametrize("scale", [0, 1e2, 1e4])
def test_bfloat16_inputs_of_any_size(config: FeatureMapConfig, shape: LayerShape, scale: float) -> None:
    """Features and gradients are finite, and those of float64 within the rounding of bfloat16."""
    feature_map = make(config, shape, scale=0.3)
    generator = torch.Generator().manual_seed(2)
    q, k = (
        ((torch.rand(1, heads, 40, 6, generator=generator) * 2 - 1) * scale).bfloat16()
        for heads in (shape.num_heads, shape.num_kv_heads)
    )
    q[:, :, 0], k[:, :, 0] = 0, 0
    k[:, :, 20:] = k[:, :, 1:2] + k[:, :, 20:] / 100  # keys of about one size
    results = []
    position = torch.arange(40)[None]
    for dtype, input_dtype in (torch.float32, torch.bfloat16), (torch.float64, torch.float64):
        feature_map = feature_map.to(dtype)
        leaves = [x.to(input_dtype).requires_grad_() for x in (q, k)]
        phi_q, phi_k = feature_map.q(leaves[0], position), feature_map.k(leaves[1], position)
        if config.exponential:
            phi_k = (phi_k - phi_k.amax((2, 3), keepdim=True)).to(dtype).exp()
        random = torch.rand(phi_q.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        y = (phi_q * random).sum() + (phi_k * random[:, : phi_k.shape[1]]).sum()
        grads = torch.autograd.grad(y, [*leaves, *feature_map.parameters()])
        results.append([x.detach().double() for x in (phi_q, phi_k, *grads)])
    for found, expected in zip(*results, strict=True):
        assert found.isfinite().all() and expected.isfinite().all()
        close(found, expected, tolerance=2**-8 * max(1, expected.abs().max().item()))


@each_case
def test_no_way_of_calling_changes_anything(config: FeatureMapConfig, shape: LayerShape) -> None:
    """With gradients or without, with any strides, saved and loaded: the same features, and inputs left as they are."""
    feature_map = make(config, shape)
    q, k, position = inputs(shape)
    before = q.clone(), k.clone()
    expected = feature_map.q(q, position), feature_map.k(k, position)
    torch.manual_seed(1)
    loaded = FEATURE_MAPS[type(config)](config, shape).double()  # with other random numbers
    loaded.load_state_dict(feature_map.state_dict())
    assert torch.equal(loaded.q(q, position), expected[0]) and torch.equal(loaded.k(k, position), expected[1])
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    close(feature_map.q(strided[0], position), expected[0])
    close(feature_map.k(strided[1], position), expected[1])
    with torch.no_grad():
        close(feature_map.q(q, position), expected[0])
        close(feature_map.k(k, position), expected[1])
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
