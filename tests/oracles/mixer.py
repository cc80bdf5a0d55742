"""The whole mixer of a layer, without its projections: window, linear part, normalizer and combination."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.oracles import eviction_cache
from tests.oracles.attention import Documents, window_partial
from tests.oracles.gates import sigmoid
from tests.oracles.heads import Inputs, Weights, make_head, present
from tests.oracles.linear import Head, linear_bidirectional, linear_quadratic, linear_recurrent, log_weights
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
    memories = {} if config.cache is None else _memories(config, weights, inputs, documents)
    held = {
        (row, g, documents[row][index][n]): keys
        for (row, g, index), memory in memories.items()
        for n, keys in enumerate(memory.held)
    }
    window_num, window_den, largest_score = window_partial(
        inputs.q, inputs.k, inputs.v, documents, span, scaling=inputs.scaling, softcap=inputs.softcap, held=held
    )
    for row, row_documents in enumerate(documents):
        for index, slots in enumerate(row_documents):
            for h in range(y.shape[1]):
                head = num = den = None
                far = [sorted(span_keys(span, n)[1]) for n in range(len(slots))]
                memory = memories.get((row, h // (y.shape[1] // inputs.k.shape[1]), index))
                if memory is not None:
                    far = [[j for j in places if j in memory.place.values()] for places in far]
                if config.feature_map is not None:
                    head = make_head(config, weights, inputs, row, h, slots)
                    head = head if memory is None else as_written(head, memory)
                    num, den = linear_recurrent(head, span)[:2] if recurrent else linear_quadratic(head, span)
                for n, slot in enumerate(slots):
                    window = window_num[row, h, slot], float(window_den[row, h, slot])
                    top = float(largest_score[row, h, slot])
                    if getattr(config.combine, "learned_sink", False):
                        window, top = with_sink(config, weights, h, window, top)
                    if head is not None and head.exponential and config.normalizer.type == "sum":
                        linear = recurred(head, num[n], float(den[n]), n) if recurrent else None
                        y[row, h, slot] = _weighted(config, weights, h, head, far[n], n, window, top, linear)
                        continue
                    y[row, h, slot] = _combined(
                        config,
                        weights,
                        h,
                        window=window,
                        linear=None if num is None else (num[n], float(den[n])),
                        anything_linear=bool(far[n]),
                        hidden=None if inputs.hidden is None else inputs.hidden[row, slot],
                    )
    return y


def with_sink(
    config: Any, weights: Weights, h: int, window: tuple[Tensor, float], top: float
) -> tuple[tuple[Tensor, float], float]:
    """(num, den) of the window and the learned sink, over the larger of `top` and the sink's logit, and that number.

    Without a window: e^s u and e^s as they are.
    """
    logit, values = float(present(weights.sink_logit)[h]), present(weights.sink_value)
    value = values[h // (len(present(weights.sink_logit)) // len(values))].double()
    if config.span.type == "none":
        return (math.exp(logit) * value, math.exp(logit)), 0.0
    (num, den), larger = window, max(top, logit)
    sink = math.exp(logit - larger)
    return (num * math.exp(top - larger) + sink * value, den * math.exp(top - larger) + sink), larger


def window_factor(config: Any, weights: Weights, h: int) -> float:
    """g; without a window, a learned sink has a weight of its own."""
    return 1.0 if config.span.type == "none" else float(present(weights.window_factor)[h])


def _memories(
    config: Any, weights: Weights, inputs: Inputs, documents: Documents
) -> dict[tuple[int, int, int], eviction_cache.Memory]:
    """What becomes of the keys of each row, KV head and document of the row."""
    span, cache, found = config.span, config.cache, {}
    keys = inputs.k if inputs.unrotated is None else inputs.unrotated[1]
    for row, of_row in enumerate(documents):
        for g in range(inputs.k.shape[1]):
            for index, slots in enumerate(of_row):
                k, v = keys[row, g, slots], inputs.v[row, g, slots]
                linear = weights.score_weight, weights.score_recency
                scores = eviction_cache.scores(*(present(x)[g] for x in linear), k, v)
                sizes = {"width": span.window_size, "blocks": span.blocks, "sinks": span.sinks} | cache.model_dump()
                found[row, g, index] = eviction_cache.remember(len(slots), **sizes, scores=scores)
    return found


def as_written(head: Head, memory: eviction_cache.Memory) -> Head:
    """The head with what is written for each position in its place, which keeps its decays, and largest logarithms."""
    source = {place: key for key, place in memory.place.items()}
    index = [source.get(n, n) for n in range(head.length)]
    scale = torch.ones(head.length) if head.input_scale is None else head.input_scale[index]
    return replace(
        head,
        keys=head.keys[index],
        v=head.v[index],
        input_scale=scale * torch.tensor([float(n in source) for n in range(head.length)]),
        beta=None if head.beta is None else head.beta[index],
        turns=None if head.turns is None else head.turns[index],
        largest=head.keys.amax(-1),
    )


def bidirectional_layer(config: Any, weights: Weights, inputs: Inputs, documents: Documents) -> Tensor:
    """y [B,H,T,D] of an encoder's layer: S and z sum over all valid tokens; no span, decay or delta rule."""
    assert config.span.type == "none" and config.decay is None and config.update.type == "additive"
    y = torch.zeros(inputs.q.shape, dtype=torch.float64)
    for row, row_documents in enumerate(documents):
        for slots in row_documents:
            for h in range(y.shape[1]):
                head = make_head(config, weights, inputs, row, h, slots)
                num, den = linear_bidirectional(head)
                for n, slot in enumerate(slots):
                    if head.exponential and config.normalizer.type == "sum":
                        y[row, h, slot] = _mean(log_weights(head, n, range(len(slots))), head.v)[1]
                        continue
                    hidden = None if inputs.hidden is None else inputs.hidden[row, slot]
                    y[row, h, slot] = normalized(config, weights, h, num[n], float(den[n]), hidden)
    return y


# --- exponential features over their sum: weights by their logarithms, without a maximum or a least denominator -------

Part = tuple[float, Tensor]  # the logarithm of the sum of some weights, -inf of none; the mean of values by them [D]


def _mean(logs: Tensor, values: Tensor) -> Part:
    """The values of keys with these log weights."""
    if not len(logs) or float(logs.max()) == -math.inf:
        return -math.inf, torch.zeros(values.shape[-1], dtype=torch.float64)
    return float(torch.logsumexp(logs, 0)), torch.softmax(logs, 0) @ values.double()


def recurred(head: Head, num: Tensor, den: float, n: int) -> Part:
    """The linear part as the recurrence gives it, which is relative to the query's and the keys' largest logarithm."""
    if not den:
        return -math.inf, torch.zeros_like(num)
    return math.log(den) + _reference(head, n), num / den


def _reference(head: Head, n: int) -> float:
    """What phi_q and phi_k of query n are divided by, as a logarithm (ReGLA eqs. 11-12); without phi_q's factor."""
    log_factor = float(head.log_queries[n].max()) - math.log(float(head.phi_q[n].max()))
    return log_factor + head.maximum(n)


def _together(near: Part, far: Part) -> Tensor:
    """The mean of both parts' values by all their weights."""
    total = torch.logsumexp(torch.tensor([near[0], far[0]], dtype=torch.float64), 0)
    return sum(torch.exp(part[0] - total) * part[1] for part in (near, far))


def _weighted(
    config: Any,
    weights: Weights,
    h: int,
    head: Head,
    far: list[int],
    n: int,
    window: tuple[Tensor, float],
    largest_score: float,
    linear: Part | None,
) -> Tensor:
    """y [D] of query n; `linear` is computed from the weights of its keys if not given."""
    combine, (window_num, window_den) = config.combine, window
    near = math.log(window_den) if window_den else -math.inf, window_num / (window_den or 1)
    linear = _mean(log_weights(head, n, far), head.v[far]) if linear is None else linear
    if combine.type == "add":
        return near[1] + linear[1]
    if combine.type == "mix":
        if not far:
            return near[1]
        s = float(present(weights.window_weight)[h])
        return s * near[1] + (1 - s) * linear[1]
    if combine.type == "shared_denominator":  # eq. 7: window and features each over their own maximum
        g = window_factor(config, weights, h)
        return _together((near[0] + math.log(g), near[1]), (linear[0] - _reference(head, n), linear[1]))
    if combine.type == "absolute_scale":
        offset = float(present(weights.offset)[h])
        return _together((near[0] + largest_score, near[1]), (linear[0] + offset, linear[1]))
    raise ValueError(combine.type)


# --- everything else: numerators and denominators ---------------------------------------------------------------------


def least_denominator(config: Any) -> float:
    """What denominators of the linear part are clamped at, where features have an absolute scale."""
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
    linear: tuple[Tensor, float] | None,
    anything_linear: bool,
    hidden: Tensor | None,
) -> Tensor:
    """y [D] of one query from (num [D], den) of its window and of its linear part."""
    combine, (window_num, window_den) = config.combine, window
    softmax = window_num / window_den if window_den else window_num
    if combine.type == "window_only":
        return softmax
    num, den = present(linear)
    if combine.type == "shared_denominator":
        g = window_factor(config, weights, h)
        return (g * window_num + num) / max(g * window_den + den, 1e-6)
    if combine.type == "add":
        return softmax + normalized(config, weights, h, num, den, hidden)
    if combine.type == "mix":
        if not anything_linear:
            return softmax
        s = float(present(weights.window_weight)[h])
        return s * softmax + (1 - s) * normalized(config, weights, h, num, den, hidden)
    raise ValueError(combine.type)
