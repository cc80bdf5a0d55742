"""The linear part by the Triton kernels of flash-linear-attention (fla-core), wherever these define the same function.

That is, of spans whose keys leave the window one by one: linear attention, and with one log decay per head (simple GLA,
retention, Mamba-2's) or per feature (GLA); rows of whole documents, packed or not, or a carried document that goes on.
Everything else is served by the chunked form: terraces, decays of values, kernels in closed form, padding, float64, and
the delta rule, of which theirs gives outputs and not the values that are written. They compute in float32.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from linearize.ops import chunked
from linearize.ops.delta import delta_values
from linearize.ops.heads import repeat_kv
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Layout, Span, TerracedSpan
from linearize.ops.linear_state import LinearState, cumulative, ticking
from linearize.ops.partial import Partial
from linearize.ops.window import window_softmax

__all__ = ["delta_values", "linear_scan", "missing", "window_softmax"]


def missing(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None: they can."""
    if device.type != "cuda":
        return "its kernels are for CUDA devices"
    return None if find_spec("fla") else "fla-core is not installed (pip install 'linearize[gpu]')"


def linear_scan(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None,
    log_decay_v: Float[Tensor, "#B Hk K D"] | None = None,
    kernel: Kernel | None = None,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> Partial:
    """The linear part (`reference.linear_scan`), forward and backward."""
    other = log_decay_v is not None or kernel is not None or isinstance(span, TerracedSpan) or v.dtype == torch.float64
    batch, heads, length = phi_q.shape[:3]
    bounds = None if other else layout.once(("bounds of documents", batch), lambda: _bounds(layout, batch))
    if bounds is None:
        options = {"log_decay_k": log_decay_k, "log_decay_v": log_decay_v, "kernel": kernel, "state": state}
        return chunked.linear_scan(phi_q, phi_k, v, span=span, layout=layout, **options)
    from fla.ops.gla import chunk_gla  # type: ignore[import-not-found]
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    # Beside each query lies the key that it is the first to read: the one that left the window with it.
    before = layout.key_position.shape[1] - length
    place = before - span.fold_lag
    enters = layout.query_position - span.fold_lag >= span.sinks
    keys = _beside(phi_k.float(), place, length) * enters[:, None, :, None]
    values = F.pad(_beside(v.float(), place, length), (0, 1), value=1.0)  # of ones: their sum is that of the weights
    S = None if state is None else torch.cat([state.S, state.z[..., None]], dim=-1).float()
    log_decays = None
    if log_decay_k is not None:
        log_decays = ticking(log_decay_k, span, layout)[:, :, before:].float()
        sums = cumulative(log_decay_k, span, layout)
        keys = keys * (sums[:, :, before:] - _beside(sums, place, length)).exp().float()  # what it lost in the window
        if S is not None and before:
            S = S * sums[:, :, before - 1, :, None].exp().float()
    rows = [repeat_kv(x, heads).transpose(1, 2) for x in (phi_q.float(), keys, values)]
    options = {"scale": 1.0, "initial_state": None if S is None else repeat_kv(S, heads)}
    if len(bounds) > batch + 1:  # their kernels take documents of one long row
        rows = [x.flatten(0, 1)[None] for x in rows]
        options["cu_seqlens"] = bounds
    if log_decays is None:
        y, _ = chunk_simple_gla(*rows, **options)
    else:
        log_decays = repeat_kv(log_decays.expand(batch, -1, -1, -1), heads).transpose(1, 2)
        log_decays = log_decays.reshape(*rows[0].shape[:3], -1)
        if log_decays.shape[-1] == 1:
            y, _ = chunk_simple_gla(*rows, g=log_decays.squeeze(-1), **options)
        else:
            y, _ = chunk_gla(*rows, g=log_decays, **options)
    y = y.reshape(batch, length, heads, -1).transpose(1, 2)
    return Partial(y[..., :-1], y[..., -1], torch.zeros_like(y[..., -1]))


def _beside(x: Float[Tensor, "B h K X"], place: int, length: int) -> Float[Tensor, "B h T X"]:
    """Slots from `place` on, as many as queries; zeros before the first slot."""
    return F.pad(x, (0, 0, max(0, -place), 0))[:, :, max(0, place) :][:, :, :length]


def _bounds(layout: Layout, batch: int) -> Int[Tensor, " N"] | None:
    """Where documents begin in all rows put one behind the other, and where the last one ends; None for rows that are
    not whole documents without padding, nor the carried document of each row that goes on.
    """
    position, length = layout.query_position.expand(batch, -1), layout.length
    ends = torch.arange(batch + 1, device=position.device) * length
    if layout.uniform:
        return ends
    carried = layout.seen is not None
    starts = (position == 0) & (not carried)
    goes_on = F.pad(position[:, 1:] == position[:, :-1] + 1, (1, 0), value=carried)
    served = ((position >= 0) & (starts | goes_on)).all()
    if not bool(served if not carried else served & (layout.query_document == 0).all()):
        return None
    starts[:, 0] = True
    return torch.cat([starts.flatten().nonzero()[:, 0], ends[-1:]])
