"""The whole layer of the oracles: against softmax attention, the papers' equations, and part by part by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from tests.oracles.attention import softmax_attention, window_partial
from tests.oracles.heads import Inputs, Weights, make_head, scale_of
from tests.oracles.mixer import bidirectional_layer, mixer_layer, normalized, span_of, with_sink

H, G, D, E, LENGTH = 4, 2, 4, 5, 9
SHAPE = LayerShape(num_heads=H, num_kv_heads=G, head_dim=D, hidden_size=E, max_positions=16)
ROWS = [[[1, 2, 4], [5, 6, 7, 8]], [list(range(LENGTH))]]
NO_SPAN, SLIDING = {"type": "none"}, {"type": "sliding", "window_size": 3}
SINKS, TERRACED = {**SLIDING, "sinks": 1}, {"type": "terraced", "window_size": 2, "blocks": 2}
NORM, ADD, MIX = {"type": "group_norm"}, {"type": "add"}, {"type": "mix"}

MAPS: dict[str, dict[str, Any]] = {
    "identity": {"type": "identity"},
    "elu1": {"type": "elu1"},
    "relu": {"type": "relu"},
    "exp": {"type": "exp", "temperature": 2.0},
    "exp after": {"type": "exp", "rotation": "after"},
    "t2r": {"type": "t2r"},
    "supra": {"type": "t2r", "per": "model", "rotation": "after"},
    "no activation": {"type": "t2r", "activation": "none", "per": "kv_head"},
    "hedgehog": {"type": "hedgehog", "feature_dim": 6},
    "hedgehog kv": {"type": "hedgehog", "per": "kv_head", "activation": "softmax", "bias": True},
    "hedgehog exp": {"type": "hedgehog", "activation": "exp", "rotation": "none"},
    "lolcat": {"type": "lolcat"},
    "lolcat elu1": {"type": "lolcat", "activation": "elu1", "per": "model"},
    "regla": {"type": "regla", "feature_dim": 3},
    "performer": {"type": "performer"},
    "cosformer": {"type": "cosformer"},
    "taylor2": {"type": "taylor2"},
    "rfa": {"type": "rfa", "feature_dim": 6},
    "dpfp": {"type": "dpfp", "nu": 2},
}
DECAYS: dict[str, dict[str, Any]] = {
    "lightning": {"type": "fixed"},
    "retnet": {"type": "fixed", "schedule": "retnet"},
    "scalar": {"type": "scalar"},
    "feature": {"type": "feature", "rank": 2},
    "outer": {"type": "outer"},
    "refined": {"type": "refined"},
    "refined features": {"type": "refined", "axis": "feature"},
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def config_of(**parts: Any) -> MixerConfig:
    """The config of these parts: map, span `SLIDING`, group norm and `add` unless told otherwise."""
    parts = {"span": SLIDING, "feature_map": MAPS["elu1"], "normalizer": NORM, "combine": ADD, **parts}
    return MixerConfig.model_validate(parts)


def make_weights(config: MixerConfig, seed: int = 0) -> Weights:
    """Random weights of the shapes that the config asks for."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    feature_map, decay = config.feature_map, config.decay
    found: dict[str, Any] = {
        "window_factor": torch.sigmoid(normal(H)),
        "window_weight": torch.sigmoid(normal(H)),
        "offset": normal(H),
        "norm_weight": normal(H, D),
        "output_gate": normal(H, D, E),
        "longest": SHAPE.max_positions,
    }
    if feature_map is None:
        return Weights(**found)
    width, heads = feature_map.features(SHAPE), feature_map.key_heads(SHAPE)
    if hasattr(feature_map, "projections"):
        for name, (matrices, inputs, outputs) in zip(("query", "key"), feature_map.projections(SHAPE), strict=True):
            found[f"{name}_weight"] = normal(matrices, inputs, outputs) / math.sqrt(inputs)
            if feature_map.bias:
                found[f"{name}_bias"] = normal(matrices, outputs)
    if feature_map.type in ("performer", "rfa"):
        found["projection"] = normal(1, width if feature_map.type == "performer" else width // 2, D)
        found["sigma"] = normal(G).exp()
    rows = () if decay is None or decay.type == "scalar" else (D if decay.values else width,)
    found |= {
        "gate_weight": normal(heads, *rows, E),
        "gate_bias": normal(heads, *rows),
        "refine_weight": normal(heads, *rows, E),
        "refine_bias": normal(heads, *rows),
        "gate_down": normal(2, E),
        "gate_up": normal(heads, width, 2),
        "feature_gate_weight": normal(heads, width, E),
        "feature_gate_bias": normal(heads, width),
        "value_gate_weight": normal(heads, D, E),
        "value_gate_bias": normal(heads, D),
        "write_weight": normal(heads, E),
    }
    return Weights(**found)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE of x [B,heads,T,D] by angles [T,D/2] as complex numbers: dimension i with i + D/2."""
    numbers = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.complex(angles.cos(), angles.sin())
    return torch.cat([numbers.real, numbers.imag], dim=-1)


ANGLES = torch.arange(LENGTH, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
UNROTATED = random(2, H, LENGTH, D, seed=1), random(2, G, LENGTH, D, seed=2)
INPUTS = Inputs(
    q=rotate(UNROTATED[0], ANGLES),
    k=rotate(UNROTATED[1], ANGLES),
    v=random(2, G, LENGTH, D, seed=3),
    scaling=0.5,
    hidden=random(2, LENGTH, E, seed=4),
    unrotated=UNROTATED,
    rope=(torch.cat([ANGLES.cos()] * 2, -1)[None], torch.cat([ANGLES.sin()] * 2, -1)[None]),
)
CONFIGS = {
    **{f"map {name}": config_of(feature_map=part) for name, part in MAPS.items()},
    **{f"decay {name}": config_of(decay=part, span=TERRACED) for name, part in DECAYS.items()},
    **{f"delta {name}": config_of(feature_map=part, update={"type": "delta"}) for name, part in MAPS.items()},
    "gated delta": config_of(update={"type": "delta", "key_norm": "sum"}, decay={**DECAYS["feature"]}, span=SINKS),
    "turned delta": config_of(feature_map=MAPS["supra"], update={"type": "delta", "key_norm": "sum"}),
    "lolcats": config_of(
        feature_map=MAPS["hedgehog"], normalizer={"type": "sum"}, combine={"type": "shared_denominator"}
    ),
    "rfa": config_of(
        feature_map=MAPS["rfa"],
        normalizer={"type": "sum"},
        decay=DECAYS["scalar"],
    ),
    "mix": config_of(combine=MIX, scale="regla", feature_map=MAPS["regla"]),
    "mix of sums": config_of(
        combine=MIX,
        normalizer={"type": "sum"},
        decay=DECAYS["scalar"],
        span=SINKS,
        feature_map=MAPS["lolcat"],
    ),
    "gla": config_of(
        feature_map=MAPS["identity"],
        scale="head_dim",
        decay=DECAYS["feature"],
        normalizer={"type": "rms_norm", "output_gate": True},
    ),
    "unnormalised": config_of(normalizer={"type": "none"}),
    "window only": config_of(feature_map=None, combine={"type": "window_only"}, normalizer={"type": "sum"}),
}


def close(a: object, b: object, atol: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=atol)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_window_as_long_as_the_document_is_softmax_attention(name: str) -> None:
    config = CONFIGS[name]
    expected = softmax_attention(INPUTS.q, INPUTS.k, INPUTS.v, ROWS, scaling=0.5)
    for span in ({"type": "sliding", "window_size": 9}, {"type": "terraced", "window_size": 5, "blocks": 2}):
        wide = MixerConfig.model_validate({**config.model_dump(), "span": span})
        close(mixer_layer(wide, make_weights(wide), INPUTS, ROWS), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_both_forms_of_the_linear_part_give_one_layer(name: str) -> None:
    """And documents of a packed row are independent, and padding gives zeros."""
    config = CONFIGS[name]
    weights = make_weights(config)
    y = mixer_layer(config, weights, INPUTS, ROWS)
    close(mixer_layer(config, weights, INPUTS, ROWS, recurrent=True), y)
    assert y.isfinite().all() and not y[0, :, [0, 3]].any()
    slots = ROWS[0][1]
    alone = Inputs(
        q=INPUTS.q[:1, :, slots],
        k=INPUTS.k[:1, :, slots],
        v=INPUTS.v[:1, :, slots],
        scaling=0.5,
        hidden=None if INPUTS.hidden is None else INPUTS.hidden[:1, slots],
        unrotated=(UNROTATED[0][:1, :, slots], UNROTATED[1][:1, :, slots]),
        rope=None if INPUTS.rope is None else (INPUTS.rope[0][:, slots], INPUTS.rope[1][:, slots]),
    )
    close(mixer_layer(config, weights, alone, [[list(range(len(slots)))]])[0], y[0][:, slots])


def test_combinations_by_hand() -> None:
    """The last of three queries: window w = 1 holds its own value, elu + 1 reads the two keys before, undecayed."""
    q, k = torch.ones(1, 1, 3, 1), torch.zeros(1, 1, 3, 1)
    v = torch.tensor([1.0, 3.0, 10.0]).view(1, 1, 3, 1)
    inputs = Inputs(q, k, v, scaling=1.0)
    w = Weights(window_factor=torch.tensor([0.25]), window_weight=torch.tensor([0.75]))
    # phi_q = 2, phi_k = 1: numerators 2 (1 + 3), denominators 2 per key
    expected = {
        ("shared_denominator", "sum"): (0.25 * 10 + 8) / (0.25 + 4),
        ("add", "sum"): 10 + 2,
        ("add", "none"): 10 + 8,
        ("mix", "sum"): 0.75 * 10 + 0.25 * 2,
        ("mix", "none"): 0.75 * 10 + 0.25 * 8,
    }
    for (combine, normalizer), value in expected.items():
        part, span = {"type": combine}, {"type": "sliding", "window_size": 1}
        config = config_of(span=span, combine=part, normalizer={"type": normalizer})
        y = mixer_layer(config, w, inputs, [[[0, 1, 2]]])
        assert float(y[0, 0, 2]) == pytest.approx(value), combine
        assert float(y[0, 0, 0]) == 1  # nothing is linear for the first query
    window = window_partial(q, k, v, [[[0, 1, 2]]], span_of(config_of()), scaling=1.0)
    assert window[0].flatten().tolist() == [1, 4, 14]


def test_absolute_scale_by_hand() -> None:
    """With features exp(x) of one dimension and b = 0, a far key weighs e^(q + k), a near one e^(scaling q k)."""
    q, k = torch.tensor([0.0, 0.0, 2.0]).view(1, 1, 3, 1), torch.tensor([1.0, -1.0, 0.5]).view(1, 1, 3, 1)
    v = torch.tensor([1.0, 3.0, 10.0]).view(1, 1, 3, 1)
    inputs, w = Inputs(q, k, v, scaling=1.0), Weights(offset=torch.tensor([0.25]))
    part, span = {"type": "absolute_scale"}, {"type": "sliding", "window_size": 1}
    config = config_of(span=span, combine=part, normalizer={"type": "sum"}, feature_map={"type": "exp"})
    far = [math.exp(2 + 1 + 0.25), math.exp(2 - 1 + 0.25)]
    expected = (math.exp(1) * 10 + far[0] * 1 + far[1] * 3) / (math.exp(1) + sum(far))
    y = mixer_layer(config, w, inputs, [[[0, 1, 2]]])
    assert float(y[0, 0, 2]) == pytest.approx(expected)
    assert float(y[0, 0, 0]) == 1


def test_normalizers_by_hand() -> None:
    num, w = torch.tensor([1.0, 3.0], dtype=torch.float64), Weights(norm_weight=torch.tensor([[1.0, 2.0]]))
    sums = config_of(normalizer={"type": "sum"})
    assert normalized(sums, w, 0, num, 0.5, None).tolist() == [2, 6]
    close(normalized(sums, w, 0, num, -0.5, None), num * 1e6)
    rfa = config_of(normalizer={"type": "sum"}, feature_map=MAPS["rfa"])
    assert normalized(rfa, w, 0, num, 0.5, None).tolist() == [1, 3]
    assert normalized(rfa, w, 0, num, 2.0, None).tolist() == [0.5, 1.5]
    assert normalized(config_of(normalizer={"type": "none"}), w, 0, num, 0.5, None).tolist() == [1, 3]
    groups = normalized(config_of(normalizer={"type": "group_norm", "eps": 3.0}), w, 0, num, 0.5, None)
    assert groups.tolist() == [-0.5, 0.5]  # mean 2, variance 1
    config = config_of(normalizer={"type": "rms_norm", "eps": 4.0, "output_gate": True})
    gate = torch.tensor([[[0.0, 1.0], [math.log(3), 0.0]]], dtype=torch.float64)
    hidden = torch.tensor([1.0, 0.0], dtype=torch.float64)
    y = normalized(config, replace(w, output_gate=gate), 0, num, 0.5, hidden)
    close(y, torch.tensor([0, 3 / 3 * 2 * math.log(3) * 0.75], dtype=torch.float64))  # mean square 5, plus eps 4


def test_a_learned_sink_by_hand() -> None:
    """Beside a window that weighs 1 with the value 6 and 1/2 with 0, at a largest score of 1; and by itself."""
    w = Weights(sink_logit=torch.tensor([1.0, 1 + math.log(2)]), sink_value=torch.tensor([[3.0]]))
    window = torch.tensor([6.0], dtype=torch.float64), 1.5
    beside = config_of(span=SLIDING)
    (num, den), top = with_sink(beside, w, 0, window, 1.0)
    assert (num.item(), den, top) == (9, 2.5, 1)
    (num, den), top = with_sink(beside, w, 1, window, 1.0)
    assert (num.item(), den, top) == pytest.approx((3 + 3, 0.75 + 1, 1 + math.log(2)))
    (num, den), top = with_sink(config_of(span=NO_SPAN), w, 0, (torch.zeros(1, dtype=torch.float64), 0.0), 0.0)
    assert (num.item(), den, top) == pytest.approx((3 * math.e, math.e, 0))


def test_scales_by_hand() -> None:
    assert [scale_of(config_of(scale=name), 64, 16) for name in ("none", "head_dim")] == [1, 0.25]
    assert scale_of(config_of(scale="regla"), 64, 16) == pytest.approx(1 / (math.e * 8 * math.sqrt(math.e**2 - 1)))


def test_rotation_chooses_the_inputs() -> None:
    """T2R without bias by its features: of rotated inputs, of unrotated ones, and turned after the map."""
    for rotation in ("before", "none", "after"):
        config = config_of(feature_map={"type": "t2r", "bias": False, "rotation": rotation})
        w = make_weights(config)
        assert w.query_weight is not None and w.key_weight is not None
        head = make_head(config, w, INPUTS, 1, 3, ROWS[1][0])
        q, k = (INPUTS.q, INPUTS.k) if rotation == "before" else UNROTATED
        phi_q, phi_k = (q[1:, 3:] @ w.query_weight[3]).relu(), (k[1:, 1:] @ w.key_weight[3]).relu()
        if rotation == "after":
            phi_q, phi_k = rotate(phi_q, ANGLES), rotate(phi_k, ANGLES)
        close(head.phi_q, phi_q[0, 0])
        close(head.keys, phi_k[0, 0])


@pytest.mark.parametrize("name", ["elu1", "hedgehog", "regla", "supra", "exp after"])
def test_bidirectional_layer(name: str) -> None:
    """An encoder: the last causal query reads all keys, so reversed order of keys changes nothing but positions."""
    config = config_of(span=NO_SPAN, feature_map=MAPS[name], normalizer={"type": "none"})
    w = make_weights(config)
    y = bidirectional_layer(config, w, INPUTS, ROWS)
    causal = mixer_layer(config, w, INPUTS, ROWS)
    for row, documents in enumerate(ROWS):
        for slots in documents:
            close(y[row, :, slots[-1]], causal[row, :, slots[-1]])
    order = list(range(LENGTH))[::-1]
    flipped = replace(
        INPUTS,
        q=INPUTS.q[:, :, order],
        k=INPUTS.k[:, :, order],
        v=INPUTS.v[:, :, order],
        unrotated=tuple(x[:, :, order] for x in UNROTATED),
        rope=None if INPUTS.rope is None else tuple(x[:, order] for x in INPUTS.rope),
    )
    close(bidirectional_layer(config, w, flipped, ROWS)[1], y[1][:, order])
    assert not y[0, :, [0, 3]].any()
