"""Linear attention as a recurrence over tokens: one state, which a key enters when it leaves the window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles.attention import Documents
from tests.oracles.spans import SpanSpec


@dataclass
class RecurrentState:
    """S [F,D] and z [F] of one row and head, the tokens since the document began, and those not yet in the state."""

    S: Tensor
    z: Tensor
    steps: int
    waiting: list[tuple[int, Tensor, Tensor]]  # (position, phi_k [F], v [D])


def empty_state(feature_dim: int, head_dim: int) -> RecurrentState:
    """The state before the first token of a document."""
    S = torch.zeros(feature_dim, head_dim, dtype=torch.float64)
    return RecurrentState(S, torch.zeros(feature_dim, dtype=torch.float64), 0, [])


def recurrent_step(
    state: RecurrentState, phi_q: Tensor, phi_k: Tensor, v: Tensor, span: SpanSpec
) -> tuple[Tensor, Tensor]:
    """Take in one token (phi_q, phi_k [F], v [D]), changing `state`; returns its linear num [D] and den []."""
    n = state.steps
    state.steps += 1
    if n >= span.sinks:
        state.waiting.append((n, phi_k.double(), v.double()))
    if span.kind == "none":
        leaving = n
    elif span.kind == "sliding":
        leaving = n - span.window_size
    elif n % span.window_size == 0:  # a new block begins: the oldest one of the span leaves as a whole
        leaving = n - (span.blocks - 1) * span.window_size - 1
    else:
        leaving = -1
    for position, key, value in state.waiting:
        if position <= leaving:
            state.S = state.S + key[:, None] * value[None, :]
            state.z = state.z + key
    state.waiting = [entry for entry in state.waiting if entry[0] > leaving]
    return state.S.T @ phi_q.double(), state.z @ phi_q.double()


def linear_attention_recurrent(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, documents: Documents, span: SpanSpec
) -> tuple[Tensor, Tensor, list[list[RecurrentState]]]:
    """As `linear_attention_quadratic`, token by token; also the states [row][query head] after the last document."""
    batch, heads, length, feature_dim = phi_q.shape
    num = torch.zeros(batch, heads, length, v.shape[-1], dtype=torch.float64)
    den = torch.zeros(batch, heads, length, dtype=torch.float64)
    states: list[list[RecurrentState]] = []
    for b in range(batch):
        states.append([])
        for h in range(heads):
            k_head, v_head = h // (heads // phi_k.shape[1]), h // (heads // v.shape[1])
            state = empty_state(feature_dim, v.shape[-1])
            for slots in documents[b]:
                state = empty_state(feature_dim, v.shape[-1])
                for t in slots:
                    num[b, h, t], den[b, h, t] = recurrent_step(
                        state, phi_q[b, h, t], phi_k[b, k_head, t], v[b, v_head, t], span
                    )
            states[b].append(state)
    return num, den, states
