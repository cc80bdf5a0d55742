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
    key_heads = case.phi_k.shape[1]
    phi_q, phi_k = case.phi_q.double(), case.phi_k.double()
    values = case.v.double().repeat_interleave(key_heads // case.v.shape[1], dim=1)
    num = torch.zeros(*case.phi_q.shape[:3], values.shape[3], dtype=torch.float64)
    den, u = num[..., 0].clone(), torch.zeros_like(values)
    nothing = torch.zeros(len(values), key_heads, case.length, 1, dtype=torch.float64)
    log_k = nothing if case.log_decay_k is None else case.log_decay_k.double()
    log_v = nothing if case.log_decay_v is None else case.log_decay_v.double()
    for b, documents in enumerate(case.documents):
        for slots in documents:
            its_k, its_values, its_log_k, its_log_v = (x[b][:, slots] for x in (phi_k, values, log_k, log_v))
            decay_k, decay_v = its_log_k.exp()[..., None], its_log_v.exp()[:, :, None]
            S = torch.zeros(key_heads, phi_k.shape[3], values.shape[3], dtype=torch.float64)
            z, states = S[..., :1], [(S, S[..., :1])]  # states[n]: before the token at position n
            for n, t in enumerate(slots):
                if n >= case.span.sinks:
                    S, z = S * decay_k[:, n] * decay_v[:, n], z * decay_k[:, n]
                    k, write = its_k[:, n, :, None], its_values[:, n, None]
                    if case.beta is not None:
                        write = case.beta[b, :, t, :, None].double() * (write - k.mT @ S)
                    S, z, u[b, :, t] = S + k * write, z + k, write[:, 0]
                states.append((S, z))
            lows = [lowest(case.span, n) for n in range(len(slots))]
            skips_k, skips_v = (
                torch.stack([x[:, max(lo, case.span.sinks) : n + 1].sum(1) for n, lo in enumerate(lows)], 1).exp()
                for x in (its_log_k, its_log_v)
            )
            read_S, read_z = (torch.stack(x, 1) for x in zip(*(states[lo] for lo in lows), strict=True))
            q = (phi_q[b][:, slots].unflatten(0, (key_heads, -1)) * skips_k[:, None]).transpose(1, 2)  # [h,N,g,F]
            num[b][:, slots] = ((q @ read_S) * skips_v[:, :, None]).transpose(1, 2).flatten(0, 1)
            den[b][:, slots] = (q @ read_z)[..., 0].transpose(1, 2).flatten(0, 1)
    return Read(num, den, u)


def gently(case: Case) -> Case:
    """With a hundredth of the log decays: half of what a chunk begins with is left at its end, rather than nothing."""
    return replace(case, **{name: x / 100 for name, x in case.decays.items() if x is not None})
