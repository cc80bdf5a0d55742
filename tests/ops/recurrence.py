"""The linear part as a recurrence over tokens, and cases whose decays reach further."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.ops.cases import Case
from tests.oracles.linear import lowest


class Read(NamedTuple):
    """num [B,H,T,D] and den [B,H,T] of every query; u [B,Hk,T,D], what each key writes. Zeros for padding."""

    num: Tensor
    den: Tensor
    u: Tensor


def recurrence(case: Case) -> Read:
    """S_t = decay_t S_(t-1) + phi_t u_t^T, where u_t = v_t, or beta_t (v_t - (decay_t S_(t-1))^T phi_t).

    In float64, all rows and documents. Every state is kept, and a query reads the one before its window.
    """
    heads, key_heads = case.phi_q.shape[1], case.phi_k.shape[1]
    phi_q, phi_k = case.phi_q.double(), case.phi_k.double()
    values = case.v.double().repeat_interleave(key_heads // case.v.shape[1], dim=1)
    num = torch.zeros(*case.phi_q.shape[:3], values.shape[3], dtype=torch.float64)
    den, u = num[..., 0].clone(), torch.zeros_like(values)
    nothing = torch.zeros(len(values), key_heads, case.length, 1, dtype=torch.float64)
    log_k = nothing if case.log_decay_k is None else case.log_decay_k.double()
    log_v = nothing if case.log_decay_v is None else case.log_decay_v.double()
    for b, documents in enumerate(case.documents):
        for slots in documents:
            S = torch.zeros(key_heads, phi_k.shape[3], values.shape[3], dtype=torch.float64)
            z, states = S[..., 0], [(S, S[..., 0])]  # states[n]: before the token at position n
            for n, t in enumerate(slots):
                if n >= case.span.sinks:
                    S = S * log_k[b, :, t, :, None].exp() * log_v[b, :, t, None].exp()
                    z = z * log_k[b, :, t].exp()
                    k, write = phi_k[b, :, t, :, None], values[b, :, t, None]
                    if case.beta is not None:
                        write = case.beta[b, :, t, :, None].double() * (write - k.mT @ S)
                    S, z, u[b, :, t] = S + k * write, z + k[..., 0], write[:, 0]
                states.append((S, z))
                lo = lowest(case.span, n)
                skipped = slots[max(lo, case.span.sinks) : n + 1]
                q = phi_q[b, :, t].unflatten(0, (key_heads, -1)) * log_k[b, :, skipped].sum(1).exp()[:, None]
                read_S, read_z = states[lo]
                far = (q @ read_S) * log_v[b, :, skipped].sum(1).exp()[:, None]
                num[b, :, t], den[b, :, t] = far.reshape(heads, -1), (q @ read_z[..., None]).reshape(heads)
    return Read(num, den, u)


def gently(case: Case) -> Case:
    """With a hundredth of the log decays: half of what a chunk begins with is left at its end, rather than nothing."""
    return replace(case, **{name: x / 100 for name, x in case.decays.items() if x is not None})
