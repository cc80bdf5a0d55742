"""The primitives, as everything else calls them: the first implementation that can serve the call evaluates them.

``LINEARIZE_IMPL=reference`` (or any other name in `IMPLS`) forces one, for debugging and for tests. The definitions are
in `reference`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.base import UserError
from linearize.ops import chunked, dense, eviction_cache, fused, reference
from linearize.ops.eviction_cache import Blocks
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Layout, Span
from linearize.ops.linear_state import LinearState, linear_state
from linearize.ops.partial import Partial

ENVIRONMENT = "LINEARIZE_IMPL"
Operation = TypeVar("Operation", bound=Callable[..., object])
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Impl:
    """One implementation: `ops` has the primitives, apart from those of eviction caches, which few have.

    `supports(device)` says why it cannot serve a device, or None.
    """

    name: str
    ops: ModuleType
    supports: Callable[[torch.device], str | None] = lambda device: None


# In order of preference. Where the first one does not serve, `SHORT` serves short rows.
SHORT = Impl("dense", dense)
KERNELS = Impl("triton", fused, fused.missing)
IMPLS = (KERNELS, Impl("chunked", chunked), SHORT, Impl("reference", reference))


@functools.cache
def choose(device: torch.device, forced: str | None) -> Impl:
    """The implementation for `device`; the choice is logged once.

    Raises:
        UserError: `forced` names no implementation, or one that cannot serve this device.
    """
    candidates = [impl for impl in IMPLS if forced in (None, impl.name)]
    if not candidates:
        names = ", ".join(impl.name for impl in IMPLS)
        raise UserError(f"{ENVIRONMENT}: expected one of {names}; found {forced!r}; name one of these, or unset it")
    impl = next((impl for impl in candidates if impl.supports(device) is None), None)
    if impl is None:  # which was forced
        why = candidates[0].supports(device)
        raise UserError(f"{ENVIRONMENT}: expected one that serves {device}; found {forced}: {why}; unset it")
    logger.info("linear attention on %s: %s", device, impl.name)
    return impl


def _ops(keys: Tensor, layout: Layout, queries: Tensor | None = None) -> ModuleType:
    found = layout.key_position.shape[1], layout.length
    expected = keys.shape[2], layout.length if queries is None else queries.shape[2]
    assert found == expected, f"layout: expected (keys, queries) {expected}, found {found}"
    forced = os.environ.get(ENVIRONMENT)
    ops = choose(keys.device, forced).ops
    if forced is None and ops is not fused and queries is not None and dense.pays(queries.shape, keys.shape[2]):
        return SHORT.ops
    return ops


def _uncompiled(function: Operation) -> Operation:
    """Compilers leave it alone, rather than break it into many graphs at what they cannot trace.

    The choice is cached, and layouts keep what they have worked out. A compiled step of generation does not come
    through here.
    """
    return torch.compiler.disable(function)  # type: ignore[return-value]


@_uncompiled
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
    """The linear part of every query, as `reference.linear_scan` defines it."""
    options = {"log_decay_k": log_decay_k, "log_decay_v": log_decay_v, "kernel": kernel, "state": state}
    return _ops(v, layout, phi_q).linear_scan(phi_q, phi_k, v, span=span, layout=layout, **options)


@_uncompiled
def scan_with_state(
    phi_q: Float[Tensor, "B H T F"], phi_k: Float[Tensor, "B Hk K F"], v: Float[Tensor, "B G K D"], **given: Any
) -> tuple[Partial, LinearState]:
    """`linear_scan`, which says what else is given, and the state after the last token (`linear_state`)."""
    ops = _ops(v, given["layout"], phi_q)
    if ops is fused:
        return fused.scan_with_state(phi_q, phi_k, v, **given)
    return ops.linear_scan(phi_q, phi_k, v, **given), linear_state(phi_k, v, **given)


@_uncompiled
def delta_values(
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    beta: Float[Tensor, "B Hk K 1"],
    *,
    log_decay_k: Float[Tensor, "#B Hk K X"] | None = None,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> Float[Tensor, "B Hk K D"]:
    """Values that the delta rule writes instead of v, as `reference.delta_values` defines them."""
    options = {"log_decay_k": log_decay_k, "span": span, "layout": layout, "state": state}
    return _ops(v, layout).delta_values(phi_k, v, beta, **options)


@_uncompiled
def window_softmax(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    *,
    span: Span,
    scaling: float,
    softcap: float | None = None,
    layout: Layout,
) -> Partial:
    """The softmax part of every query, as `reference.window_softmax` defines it."""
    options = {"span": span, "scaling": scaling, "softcap": softcap, "layout": layout}
    return _ops(v, layout, q).window_softmax(q, k, v, **options)


def has_kernels(device: torch.device) -> bool:
    """Return whether kernels of our own serve `device`, eviction caches included; never while compiling."""
    return not torch.compiler.is_compiling() and choose(device, os.environ.get(ENVIRONMENT)).ops is fused


@_uncompiled
def with_cached(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G P D"],
    v: Float[Tensor, "B G P D"],
    blocks: Blocks,
    held: Int[Tensor, "B G J C"],
    window: Partial,
    *,
    scaling: float,
    softcap: float | None,
    layout: Layout,
) -> Partial:
    """Add what the block's cache holds to `window`, which may be overwritten (`eviction_cache.with_cached`)."""
    ops = fused if has_kernels(v.device) else eviction_cache
    return ops.with_cached(q, k, v, blocks, held, window, scaling=scaling, softcap=softcap, layout=layout)
