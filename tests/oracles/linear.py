"""The linear part of one head over one document, with any decay, input scale or delta rule, in two forms.

    additive    num_n = sum_j (phi_q(n) . a(n,j) * phi_k(j)) b(n,j) * v_j        den_n: 1 for b(n,j) * v_j
    delta rule  S_t = a_t S_(t-1),  then  S_t += beta_t phi_k(t) (v_t - S_t^T phi_k(t))^T

where j runs over the query's linear keys, and a(n,j), b(n,j) are the products of the decays of steps j+1 .. n on the
feature and on the value axis. Keys whose features are exponentials come as logarithms e_j, and in y_n each of them is
exp(e_j - m_n), m_n the largest e of positions 0..n (ReGLA eq. 12, made causal). Where weights are divided by their
sum, no maximum matters: `log_weights` are relative to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles.spans import SpanSpec, span_keys


@dataclass(frozen=True)
class Head:
    """phi_q [T,F] (finished), keys [T,F], v [T,D] by position, and what else its linear part has.

    Decays are logarithms: log_decay_k [T,F], log_decay_v [T,D]. input_scale, beta [T]. With `exponential`, keys are
    logarithms, and `log_queries` [T,F] are those of phi_q before it was divided by anything. `turns` [T,F,F] are
    matrices (RoPE) which key features are multiplied by, after the exponential. `largest` [T] is that of the positions'
    own keys, where others are written for them.
    """

    phi_q: Tensor
    keys: Tensor
    v: Tensor
    log_decay_k: Tensor | None = None
    log_decay_v: Tensor | None = None
    input_scale: Tensor | None = None
    beta: Tensor | None = None
    exponential: bool = False
    log_queries: Tensor | None = None
    turns: Tensor | None = None
    largest: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.beta is None or not self.exponential, "the delta rule's keys are normalised one by one"

    @property
    def length(self) -> int:
        return len(self.keys)

    def maximum(self, n: int) -> float:
        """m_n."""
        return float((self.keys.amax(-1) if self.largest is None else self.largest)[: n + 1].max())

    def key(self, j: int, maximum: float) -> Tensor:
        """i_j phi_k(j) [F], exponentials over e^maximum."""
        phi = (self.keys[j].double() - maximum).exp() if self.exponential else self.keys[j].double()
        phi = phi if self.turns is None else self.turns[j].double() @ phi
        return phi if self.input_scale is None else float(self.input_scale[j]) * phi

    def log_decays(self, steps: slice) -> tuple[Tensor, Tensor]:
        """Sums of the log decays of some steps, on the feature axis [F] and on the value axis [D]."""
        none_k = torch.zeros(self.phi_q.shape[-1], dtype=torch.float64)
        none_v = torch.zeros(self.v.shape[-1], dtype=torch.float64)
        return (
            none_k if self.log_decay_k is None else self.log_decay_k[steps].double().sum(0),
            none_v if self.log_decay_v is None else self.log_decay_v[steps].double().sum(0),
        )


@dataclass(frozen=True)
class State:
    """S [F,D] and z [F] as of one position, with exponential features over e^maximum."""

    S: Tensor
    z: Tensor
    maximum: float


def lowest(span: SpanSpec, n: int) -> int:
    """lo(n): the lowest key of the window of query n."""
    if span.kind == "none":
        return n + 1
    if span.kind == "sliding":
        return max(0, n - span.window_size + 1)
    return span.window_size * max(0, n // span.window_size - span.blocks + 1)


# --- the definition ---------------------------------------------------------------------------------------------------


def _decays_between(head: Head, j: int, n: int) -> tuple[Tensor, Tensor]:
    """a(n,j) [F] and b(n,j) [D]."""
    a, b = head.log_decays(slice(j + 1, n + 1))
    return a.exp(), b.exp()


def _written(head: Head, span: SpanSpec) -> list[Tensor]:
    """What each key writes: v_j, and under the delta rule u_j = beta_j (v_j - sum_(i<j) (phi_j . a(j,i) phi_i) u_i)."""
    if head.beta is None:
        return [v.double() for v in head.v]
    assert head.log_decay_v is None
    written: list[Tensor] = []
    for j in range(head.length):
        recalled = torch.zeros_like(head.v[j], dtype=torch.float64)
        for i in range(span.sinks, j):
            a, _ = _decays_between(head, i, j)
            recalled += float(head.key(j, 0) @ (a * head.key(i, 0))) * written[i]
        written.append(float(head.beta[j]) * (head.v[j].double() - recalled))
    return written


def linear_quadratic(head: Head, span: SpanSpec) -> tuple[Tensor, Tensor]:
    """The definition, key by key: num [T,D] and den [T]."""
    num = torch.zeros(head.v.shape, dtype=torch.float64)
    den = torch.zeros(head.length, dtype=torch.float64)
    written = _written(head, span)
    for n in range(head.length):
        maximum = head.maximum(n)
        for j in span_keys(span, n)[1]:
            a, b = _decays_between(head, j, n)
            weight = head.phi_q[n].double() @ (a * head.key(j, maximum))
            num[n] += weight * b * written[j]
            den[n] += weight
    return num, den


def log_weights(head: Head, n: int, keys: Iterable[int]) -> Tensor:
    """log(phi_q(n) . a(n,j) * phi_k(j)) of some keys j, where features are exponentials and never formed."""
    assert head.exponential and head.log_queries is not None and head.turns is None
    found = []
    for j in keys:
        logs = head.log_queries[n].double() + head.keys[j].double() + head.log_decays(slice(j + 1, n + 1))[0]
        scale = 1.0 if head.input_scale is None else float(head.input_scale[j])
        found.append(torch.logsumexp(logs, 0) + (math.log(scale) if scale else -math.inf))
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def linear_bidirectional(head: Head) -> tuple[Tensor, Tensor]:
    """An encoder's form: every query reads every key, no decay. num [T,D], den [T]."""
    assert head.log_decay_k is None and head.log_decay_v is None and head.beta is None
    maximum = float(head.keys.max())
    num = torch.zeros(head.v.shape, dtype=torch.float64)
    den = torch.zeros(head.length, dtype=torch.float64)
    for n in range(head.length):
        for j in range(head.length):
            weight = head.phi_q[n].double() @ head.key(j, maximum)
            num[n] += weight * head.v[j].double()
            den[n] += weight
    return num, den


# --- the recurrence ---------------------------------------------------------------------------------------------------


class _Recurrence:
    """S and z as of position `at`; sinks leave no trace but their share in the running maximum."""

    def __init__(self, head: Head, span: SpanSpec) -> None:
        self.head, self.span, self.at = head, span, -1
        self.S = torch.zeros(head.phi_q.shape[-1], head.v.shape[-1], dtype=torch.float64)
        self.z = torch.zeros(head.phi_q.shape[-1], dtype=torch.float64)
        self.maximum = float("-inf")

    def copy(self) -> _Recurrence:
        other = _Recurrence(self.head, self.span)
        other.at, other.S, other.z, other.maximum = self.at, self.S.clone(), self.z.clone(), self.maximum
        return other

    def decay(self) -> None:
        """Move to the next position by its decays alone. A greater maximum is one more decay, e^(m_(t-1) - m_t)."""
        self.at += 1
        before, self.maximum = self.maximum, self.head.maximum(self.at)
        if self.at < self.span.sinks:
            return
        a, b = (logs.exp() for logs in self.head.log_decays(slice(self.at, self.at + 1)))
        if self.head.exponential and before > float("-inf"):
            a = a * torch.tensor(before - self.maximum, dtype=torch.float64).exp()
        self.S = a[:, None] * self.S * b[None, :]
        self.z = a * self.z

    def step(self) -> None:
        """Move to the next position and take in its key, if it is no sink."""
        self.decay()
        if self.at < self.span.sinks:
            return
        phi, value = self.head.key(self.at, self.maximum), self.head.v[self.at].double()
        if self.head.beta is not None:
            value = float(self.head.beta[self.at]) * (value - self.S.T @ phi)
        self.S = self.S + phi[:, None] * value[None, :]
        self.z = self.z + phi

    def state(self) -> State:
        return State(self.S, self.z, self.maximum)


def linear_recurrent(head: Head, span: SpanSpec) -> tuple[Tensor, Tensor, State, State | None]:
    """Token by token: num [T,D], den [T], the state as of position lo(T-1) - 1, and that which is readable next.

    A key enters the state when it leaves the span, at lo(n); query n reads that state after the decays, and the decays
    alone, of steps lo(n) .. n. The state readable next, of terraced spans only, is that of T-1 - (blocks - 1) w.
    """
    num = torch.zeros(head.v.shape, dtype=torch.float64)
    den = torch.zeros(head.length, dtype=torch.float64)
    entered = _Recurrence(head, span)
    for n in range(head.length):
        while entered.at < lowest(span, n) - 1:
            entered.step()
        reader = entered.copy()
        while reader.at < n:
            reader.decay()
        num[n] = reader.S.T @ head.phi_q[n].double()
        den[n] = reader.z @ head.phi_q[n].double()
    if span.kind != "terraced":
        return num, den, entered.state(), None
    following = entered.copy()
    while following.at < head.length - 1 - (span.blocks - 1) * span.window_size:
        following.step()
    return num, den, entered.state(), following.state()
