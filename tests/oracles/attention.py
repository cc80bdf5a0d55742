"""The quadratic definitions, as loops over rows, heads, queries and keys, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from tests.oracles.spans import SpanSpec, span_keys

Documents = list[list[list[int]]]


def _queries(documents: Documents) -> Iterator[tuple[int, int, int, list[int]]]:
    """(row, slot, position, slots of the document) of every valid token."""
    for row, row_documents in enumerate(documents):
        for slots in row_documents:
            for position, slot in enumerate(slots):
                yield row, slot, position, slots


def score(q: Tensor, k: Tensor, scaling: float, softcap: float | None) -> float:
    """One scaled, soft-capped logit of a query [D] and a key [D]."""
    s = scaling * sum(float(a) * float(b) for a, b in zip(q, k, strict=True))
    return s if softcap is None else softcap * math.tanh(s / softcap)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scaling: float, softcap: float | None = None
) -> Tensor:
    """Causal softmax attention within documents. q [B,H,T,D], k, v [B,G,T,D] -> [B,H,T,D]."""
    y = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b, slot, n, slots in _queries(documents):
        for h in range(q.shape[1]):
            g = h // group
            weights = [math.exp(score(q[b, h, slot], k[b, g, slots[j]], scaling, softcap)) for j in range(n + 1)]
            for j in range(n + 1):
                y[b, h, slot] += weights[j] / sum(weights) * v[b, g, slots[j]].double()
    return y


def window_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    span: SpanSpec,
    *,
    scaling: float,
    softcap: float | None = None,
    held: Mapping[tuple[int, int, int], Iterable[int]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax terms of LoLCATs eq. 7: sum e^{s-c} v [B,H,T,D], sum e^{s-c} and c = max s [B,H,T]; 0 where empty.

    `held`: keys beside those of the span, by row, KV head and slot.
    """
    num = torch.zeros_like(q, dtype=torch.float64)
    den, c = torch.zeros(q.shape[:3], dtype=torch.float64), torch.zeros(q.shape[:3], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b, slot, n, slots in _queries(documents):
        for h in range(q.shape[1]):
            g = h // group
            softmax_keys = span_keys(span, n)[0].union((held or {}).get((b, g, slot), ()))
            if not softmax_keys:
                continue
            scores = {j: score(q[b, h, slot], k[b, g, slots[j]], scaling, softcap) for j in softmax_keys}
            c[b, h, slot] = max(scores.values())
            for j in softmax_keys:
                weight = math.exp(scores[j] - max(scores.values()))
                num[b, h, slot] += weight * v[b, g, slots[j]].double()
                den[b, h, slot] += weight
    return num, den, c


def linear_attention_quadratic(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, documents: Documents, span: SpanSpec
) -> tuple[Tensor, Tensor]:
    """The linear terms of LoLCATs eq. 7, key by key: sum phi_q.phi_k v [B,H,T,D] and sum phi_q.phi_k [B,H,T].

    phi_q [B,H,T,F], phi_k [B,H,T,F] or [B,G,T,F], v [B,G,T,D].
    """
    batch, heads, length, _ = phi_q.shape
    num = torch.zeros(batch, heads, length, v.shape[-1], dtype=torch.float64)
    den = torch.zeros(batch, heads, length, dtype=torch.float64)
    for b, slot, n, slots in _queries(documents):
        _, linear_keys = span_keys(span, n)
        for h in range(heads):
            k_head, v_head = h // (heads // phi_k.shape[1]), h // (heads // v.shape[1])
            for j in linear_keys:
                weight = float(phi_q[b, h, slot].double() @ phi_k[b, k_head, slots[j]].double())
                num[b, h, slot] += weight * v[b, v_head, slots[j]].double()
                den[b, h, slot] += weight
    return num, den


def hedgehog_features(x: Tensor, weight: Tensor) -> Tensor:
    """LoLCATs App. A: phi(x) = [softmax(x W), softmax(-x W)], at least 1e-12. x [B,H,T,D], weight [H,D,F/2]."""
    batch, heads, length, _ = x.shape
    half = weight.shape[-1]
    phi = torch.zeros(batch, heads, length, 2 * half, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                z = x[b, h, t].double() @ weight[h].double()
                phi[b, h, t, :half] = torch.softmax(z, 0)
                phi[b, h, t, half:] = torch.softmax(-z, 0)
    return phi.clamp(min=1e-12)


def shared_denominator(window: tuple[Tensor, ...], linear: tuple[Tensor, Tensor], window_factor: Tensor) -> Tensor:
    """LoLCATs eq. 7 from its pieces; `window_factor` is g in (0, 1) per query head [H]."""
    window_num, window_den, _ = window
    linear_num, linear_den = linear
    y = torch.zeros_like(window_num)
    for h in range(y.shape[1]):
        g = float(window_factor[h])
        den = (g * window_den[:, h] + linear_den[:, h]).clamp(min=1e-6)
        y[:, h] = (g * window_num[:, h] + linear_num[:, h]) / den[..., None]
    return y


def lolcats_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    window_factor: Tensor,
    documents: Documents,
    span: SpanSpec,
    *,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """LoLCATs eq. 7: one head-wise layer without its projections, q, k already rotated. Returns [B,H,T,D].

    query_weight [H,D,F/2]; key_weight [H,D,F/2] (per query head, on keys repeated for GQA) or [G,D,F/2];
    window_factor is g in (0, 1) per query head [H].
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if key_weight.shape[0] == heads:
        mapped_keys = torch.stack([k[:, h // (heads // kv_heads)] for h in range(heads)], dim=1)
    else:
        mapped_keys = k
    window = window_partial(q, k, v, documents, span, scaling=scaling, softcap=softcap)
    phi_q, phi_k = hedgehog_features(q, query_weight), hedgehog_features(mapped_keys, key_weight)
    linear = linear_attention_quadratic(phi_q, phi_k, v, documents, span)
    return shared_denominator(window, linear, window_factor)
