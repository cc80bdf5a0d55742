"""The whole mixer of a layer, without its projections: window, linear part, normalizer and combination."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attention import Documents, window_partial
from tests.oracles.gates import sigmoid
from tests.oracles.heads import Inputs, Weights, make_head, present
from tests.oracles.linear import linear_bidirectional, linear_quadratic, linear_recurrent
from tests.oracles.spans import SpanSpec, span_keys


def span_of(config: Any) -> SpanSpec:
    """The config's span in the papers' words."""
    span = config.span
    if span.type == "none":
        return SpanSpec("none")
    return SpanSpec(span.type, span.window_size, span.blocks if span.type == "terraced" else 0, span.sinks)


def mixer_layer(
    config: Any, weights: Weights, inputs: Inputs, documents: Documents, *, recurrent: bool = False
) -> Tensor:
    """y [B,H,T,D] of the causal mixer `config`, zero at padding; its linear part by definition or token by token."""
    span = span_of(config)
    y = torch.zeros(inputs.q.shape, dtype=torch.float64)
    window_num, window_den, largest_score = window_partial(
        inputs.q, inputs.k, inputs.v, documents, span, scaling=inputs.scaling, softcap=inputs.softcap
    )
    for row, row_documents in enumerate(documents):
        for slots in row_documents:
            for h in range(y.shape[1]):
                num = torch.zeros(len(slots), y.shape[-1], dtype=torch.float64)
                den = log_scale = torch.zeros(len(slots), dtype=torch.float64)
                if config.feature_map is not None:
                    head = make_head(config, weights, inputs, row, h, slots)
                    num, den = linear_recurrent(head, span)[:2] if recurrent else linear_quadratic(head, span)
                    if config.combine.type == "absolute_scale":
                        # What num and den are relative to: the query's largest logarithm, the largest key so far.
                        log_scale = present(head.log_query) + head.keys.amax(1).cummax(0).values
                for n, slot in enumerate(slots):
                    y[row, h, slot] = _combined(
                        config,
                        weights,
                        h,
                        window=(window_num[row, h, slot], float(window_den[row, h, slot])),
                        linear=(num[n], float(den[n])),
                        log_scales=(float(largest_score[row, h, slot]), float(log_scale[n])),
                        anything_linear=bool(span_keys(span, n)[1]),
                        hidden=None if inputs.hidden is None else inputs.hidden[row, slot],
                    )
    return y


def bidirectional_layer(config: Any, weights: Weights, inputs: Inputs, documents: Documents) -> Tensor:
    """y [B,H,T,D] of an encoder's layer: S and z sum over all valid tokens; no span, decay or delta rule."""
    assert config.span.type == "none" and config.decay is None and config.update.type == "additive"
    y = torch.zeros(inputs.q.shape, dtype=torch.float64)
    for row, row_documents in enumerate(documents):
        for slots in row_documents:
            for h in range(y.shape[1]):
                num, den = linear_bidirectional(make_head(config, weights, inputs, row, h, slots))
                for n, slot in enumerate(slots):
                    hidden = None if inputs.hidden is None else inputs.hidden[row, slot]
                    y[row, h, slot] = normalized(config, weights, h, num[n], float(den[n]), hidden)
    return y


def least_denominator(config: Any) -> float:
    """What denominators of the linear part are clamped at."""
    return 1.0 if config.feature_map.type == "rfa" else 1e-6


def normalized(config: Any, weights: Weights, h: int, num: Tensor, den: float, hidden: Tensor | None) -> Tensor:
    """The linear part's output [D] from its numerator [D] and denominator, by the config's normalizer."""
    normalizer = config.normalizer
    if normalizer.type == "sum":
        return num / max(den, least_denominator(config))
    if normalizer.type == "none":
        return num
    if normalizer.type == "group_norm":
        centred = num - num.mean()
        return centred / math.sqrt(float((centred * centred).mean()) + normalizer.eps)
    if normalizer.type == "rms_norm":
        y = num / math.sqrt(float((num * num).mean()) + normalizer.eps) * present(weights.norm_weight)[h].double()
        if not normalizer.output_gate:
            return y
        gate = present(weights.output_gate)[h].double() @ present(hidden).double()
        return y * gate * sigmoid(gate)
    raise ValueError(normalizer.type)


def _combined(
    config: Any,
    weights: Weights,
    h: int,
    *,
    window: tuple[Tensor, float],
    linear: tuple[Tensor, float],
    log_scales: tuple[float, float],
    anything_linear: bool,
    hidden: Tensor | None,
) -> Tensor:
    """y [D] of one query from (num [D], den) of its window and of its linear part.

    `log_scales`: the logarithms that window and linear part are relative to.
    """
    combine, (window_num, window_den), (num, den) = config.combine, window, linear
    softmax = window_num / window_den if window_den else window_num
    if combine.type == "window_only":
        return softmax
    if combine.type == "shared_denominator":
        g = float(present(weights.window_factor)[h])
        return (g * window_num + num) / max(g * window_den + den, 1e-6)
    if combine.type == "absolute_scale":
        c, scale = log_scales
        far = math.exp(min(max(scale + float(present(weights.offset)[h]) - c, -30), 30))
        return (window_num + far * num) / max(window_den + far * den, 1e-6)
    if combine.type == "add":
        return softmax + normalized(config, weights, h, num, den, hidden)
    if combine.type == "mix":
        if not anything_linear:
            return softmax
        s = float(present(weights.window_weight)[h])
        return s * softmax + (1 - s) * normalized(config, weights, h, num, den, hidden)
    raise ValueError(combine.type)
