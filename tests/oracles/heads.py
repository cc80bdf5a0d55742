"""One head of one document as a `Head`: features, decays and write strengths from raw weights, as a config names them.

The config is a `MixerConfig`, read as plain data: its fields and the `type` of its parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracles import feature_maps, gates
from tests.oracles.linear import Head


@dataclass(frozen=True)
class Weights:
    """The raw weights of a layer, each only where its config has it. H query heads, G KV heads, E hidden size.

    "Hs" is the number of heads of the state, a multiple of G which divides H; rows are shared by H/Hs query heads each.
    """

    query_weight: Tensor | None = None  # [H,D,O], or over all heads [1,H*D,H*O]
    query_bias: Tensor | None = None  # [H,O] or [1,H*O]
    key_weight: Tensor | None = None  # [H or G,D,O], or over all heads [1,G*D,G*O]
    key_bias: Tensor | None = None
    projection: Tensor | None = None  # performer, rfa: fixed rows [1 or G,m,D]
    sigma: Tensor | None = None  # rfa: [G]
    longest: int | None = None  # cosformer: M
    gate_weight: Tensor | None = None  # scalar [Hs,E]; refined, of g, [Hs,F or D,E]
    gate_bias: Tensor | None = None  # scalar [Hs]; refined, of g, [Hs,F or D]; low rank [Hs,F]
    refine_weight: Tensor | None = None  # refined, of r: [Hs,F or D,E]
    refine_bias: Tensor | None = None  # [Hs,F or D]
    gate_down: Tensor | None = None  # low rank, W1: [rank,E]
    gate_up: Tensor | None = None  # low rank, W2: [Hs,F,rank]
    feature_gate_weight: Tensor | None = None  # outer, W_f: [Hs,F,E]
    feature_gate_bias: Tensor | None = None  # [Hs,F]
    value_gate_weight: Tensor | None = None  # outer, W_z: [Hs,D,E]
    value_gate_bias: Tensor | None = None  # [Hs,D]
    write_weight: Tensor | None = None  # delta rule: [Hs,E]
    window_factor: Tensor | None = None  # shared_denominator: g in (0, 1), [H]
    sink_logit: Tensor | None = None  # learned sink: s, [H]
    sink_value: Tensor | None = None  # u, [G,D]
    window_weight: Tensor | None = None  # mix: s in (0, 1), [H]
    offset: Tensor | None = None  # absolute_scale: b, [H]
    norm_weight: Tensor | None = None  # rms_norm: [H,D]
    output_gate: Tensor | None = None  # rms_norm: W_g [H,D,E]
    score_weight: Tensor | None = None  # eviction scores: [G,S,2D+2]
    score_recency: Tensor | None = None  # [G,S]


@dataclass(frozen=True)
class Inputs:
    """q [B,H,T,D], k, v [B,G,T,D] rotated; hidden [B,T,E]; q and k before RoPE; cos and sin [B or 1,T,R]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    softcap: float | None = None
    hidden: Tensor | None = None
    unrotated: tuple[Tensor, Tensor] | None = None
    rope: tuple[Tensor, Tensor] | None = None


def present(x: Any) -> Any:
    """x, which the config needs."""
    assert x is not None
    return x


# --- feature maps -----------------------------------------------------------------------------------------------------


def exponential(feature_map: Any) -> bool:
    """Whether `map_one` returns logarithms of features."""
    return feature_map.type in ("exp", "regla", "performer") or getattr(feature_map, "activation", None) == "exp"


def map_one(
    feature_map: Any,
    x: Tensor,
    head: int,
    kv_head: int,
    position: int,
    weight: Tensor | None,
    bias: Tensor | None,
    w: Weights,
) -> Tensor:
    """phi of one query or key (or its logarithm): x [heads,D] holds those of all heads at this token."""
    name = feature_map.type
    if name in ("t2r", "hedgehog", "lolcat", "regla"):
        z = _projected(feature_map, x, head, present(weight), bias)
        if name == "regla":
            return z
        if name == "hedgehog":
            return {
                "softmax_halves": feature_maps.softmax_halves,
                "softmax": feature_maps.softmax_whole,
                "exp": feature_maps.log_exp_halves,
            }[feature_map.activation](z)
        if name == "lolcat":
            z = z + x[head].double()
        if feature_map.activation in ("none", "exp"):
            return z
        return {"relu": feature_maps.relu, "elu1": feature_maps.elu1}[feature_map.activation](z)
    one = x[head].double()
    if name == "identity":
        return one
    if name == "elu1":
        return feature_maps.elu1(one)
    if name == "relu":
        return feature_maps.relu(one)
    if name == "silu":
        return feature_maps.silu(one)
    if name == "exp":
        return feature_maps.log_exp_t(one, feature_map.temperature)
    if name == "cosformer":
        return feature_maps.cosformer(one, position, present(w.longest))
    if name == "taylor2":
        return feature_maps.taylor2(one)
    if name == "dpfp":
        return feature_maps.dpfp(one, feature_map.nu)
    projection = present(w.projection)
    projection = projection[kv_head if len(projection) > 1 else 0]
    if name == "performer":
        return feature_maps.log_performer(one, projection)
    if name == "rfa":
        return feature_maps.rfa(one, projection, float(present(w.sigma)[kv_head]))
    raise ValueError(name)


def _projected(feature_map: Any, x: Tensor, head: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b of one head; `per: model` has one W over the values of all heads, head after head."""
    if feature_map.per != "model":
        return feature_maps.projected(x[head], weight[head], None if bias is None else bias[head])
    everything = feature_maps.projected(x.flatten(), weight[0], None if bias is None else bias[0])
    return everything.reshape(len(x), -1)[head]


def turn(cos: Tensor, sin: Tensor, width: int) -> Tensor:
    """Llama's RoPE as a matrix [width,width]: x_i pairs with x_(i + R/2), dimensions from R on stay. cos, sin [R]."""
    matrix = torch.eye(width, dtype=torch.float64)
    half = len(cos) // 2
    for i in range(half):
        matrix[i, i], matrix[i, i + half] = cos[i].double(), -sin[i].double()
        matrix[i + half, i + half], matrix[i + half, i] = cos[i + half].double(), sin[i + half].double()
    return matrix


def scale_of(config: Any, features: int, head_dim: int) -> float:
    """The factor of phi_q.phi_k: 1, D^-1/2, or 1 / (e sqrt(F (e^2 - 1))) (ReGLA Theorem 3.1)."""
    return {
        "none": 1.0,
        "head_dim": 1 / math.sqrt(head_dim),
        "regla": 1 / (math.e * math.sqrt(features * (math.e**2 - 1))),
    }[config.scale]


# --- one head ---------------------------------------------------------------------------------------------------------


def make_head(config: Any, w: Weights, inputs: Inputs, row: int, h: int, slots: list[int]) -> Head:
    """What query head `h` of `row` reads by linear attention in the document that lies in `slots`."""
    feature_map, heads, kv_heads = config.feature_map, inputs.q.shape[1], inputs.k.shape[1]
    q, k = inputs.q, inputs.k
    if feature_map.rotation != "before" and inputs.unrotated is not None:
        q, k = inputs.unrotated
    kv_head = h // (heads // kv_heads)
    mapped_keys, key_head = k, kv_head
    if getattr(feature_map, "per", None) == "query_head":  # a key map per query head sees keys repeated for GQA
        mapped_keys, key_head = torch.stack([k[:, i // (heads // kv_heads)] for i in range(heads)], dim=1), h

    delta, logs = config.update.type == "delta", exponential(feature_map)
    turns = None
    if feature_map.rotation == "after" and inputs.rope is not None:
        cos, sin = (x[row if len(x) > 1 else 0] for x in inputs.rope)
        turns = [turn(cos[slot], sin[slot], q.shape[-1]) for slot in slots]

    def finished(phi: Tensor, n: int) -> Tensor:
        """Features whose only reference, where they are exponentials, is their own maximum."""
        phi = (phi - phi.max()).exp() if logs else phi
        if delta:
            phi = {"sum": gates.unit_sum, "l2": gates.unit_norm}[config.update.key_norm](phi)
        return phi if turns is None else turns[n] @ phi

    queries, keys, logarithms = [], [], []
    for n, slot in enumerate(slots):
        phi = map_one(feature_map, q[row, :, slot], h, kv_head, n, w.query_weight, w.query_bias, w)
        scale = scale_of(config, len(phi), q.shape[-1])
        logarithms.append(phi + math.log(scale))
        queries.append(finished(phi, n) * scale)
        phi = map_one(feature_map, mapped_keys[row, :, slot], key_head, kv_head, n, w.key_weight, w.key_bias, w)
        keys.append(finished(phi, n) if delta or not logs else phi)
    late = logs and not delta  # the linear part itself takes the exponential, and turns only then
    hidden = None if inputs.hidden is None else inputs.hidden[row, slots]
    v = inputs.v[row, kv_head, slots]
    return Head(
        phi_q=torch.stack(queries),
        keys=torch.stack(keys),
        v=v,
        **_decays(config, w, hidden, h, heads, len(slots), len(queries[0]), v.shape[-1]),
        beta=_write_strengths(config, w, hidden, h, heads),
        exponential=late,
        log_queries=torch.stack(logarithms) if logs else None,
        turns=torch.stack(turns) if late and turns is not None else None,
    )


def _decays(
    config: Any, w: Weights, hidden: Tensor | None, h: int, heads: int, length: int, features: int, head_dim: int
) -> dict[str, Tensor | None]:
    """log_decay_k [T,F], log_decay_v [T,D], input_scale [T] of query head `h`, where there are any."""
    decay = config.decay
    if decay is None:
        return {}
    if decay.type == "fixed":
        gamma = gates.log_fixed(decay.schedule, h, heads)
        return {"log_decay_k": torch.full((length, features), gamma, dtype=torch.float64)}

    def own(weight: Tensor | None) -> Tensor:
        """The row of the state's head which query head h reads."""
        rows = present(weight)
        return rows[h // (heads // len(rows))]

    found: dict[str, list[Tensor]] = {"log_decay_k": [], "log_decay_v": [], "input_scale": []}
    for x in present(hidden):
        if decay.type == "scalar":
            log_g, rest = gates.scalar_gate(x, own(w.gate_weight), own(w.gate_bias))
            found["log_decay_k"].append(torch.full((features,), log_g, dtype=torch.float64))
            if decay.input_scale:
                found["input_scale"].append(torch.tensor(rest, dtype=torch.float64))
        elif decay.type == "feature":
            up, bias = own(w.gate_up), own(w.gate_bias)
            found["log_decay_k"].append(gates.low_rank_gate(x, present(w.gate_down), up, bias, decay.temperature))
        elif decay.type == "outer":
            a = own(w.feature_gate_weight), own(w.feature_gate_bias)
            b = own(w.value_gate_weight), own(w.value_gate_bias)
            log_a, log_b = gates.outer_gate(x, *a, *b)
            found["log_decay_k"].append(log_a)
            found["log_decay_v"].append(log_b)
        elif decay.type == "refined":
            log_f = gates.refined_gate(
                x, own(w.gate_weight), own(w.gate_bias), own(w.refine_weight), own(w.refine_bias)
            )
            found[{"feature": "log_decay_k", "value": "log_decay_v"}[decay.axis]].append(log_f)
        else:
            raise ValueError(decay.type)
    decays = {name: torch.stack(steps) if steps else None for name, steps in found.items()}
    for name, width in (("log_decay_k", features), ("log_decay_v", head_dim)):
        assert decays[name] is None or decays[name].shape == (length, width), name
    return decays


def _write_strengths(config: Any, w: Weights, hidden: Tensor | None, h: int, heads: int) -> Tensor | None:
    """beta [T] of the delta rule."""
    if config.update.type != "delta":
        return None
    weight = present(w.write_weight)
    weight = weight[h // (heads // len(weight))]
    return torch.tensor([gates.write_strength(x, weight) for x in present(hidden)], dtype=torch.float64)
