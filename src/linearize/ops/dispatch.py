"""Which implementation evaluates a primitive: the first that supports the call, unless one is forced.

``LINEARIZE_IMPL=reference`` (or any other name below) forces one, for debugging and for tests.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from linearize.ops import chunked, delta, reference
from linearize.ops.partial import Partial

ENVIRONMENT = "LINEARIZE_IMPL"
Operation = TypeVar("Operation", bound=Callable[..., object])
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Impl:
    """One implementation; `supports(device)` returns None, or the reason why it cannot serve the call."""

    name: str
    linear_scan: Callable[..., Partial]
    delta_values: Callable[..., Tensor]
    window_softmax: Callable[..., Partial]
    supports: Callable[[torch.device], str | None]


IMPLS = (
    Impl("chunked", chunked.linear_scan, delta.delta_values, chunked.window_softmax, lambda device: None),
    Impl("reference", reference.linear_scan, reference.delta_values, reference.window_softmax, lambda device: None),
)


@functools.cache
def choose(device: torch.device, forced: str | None) -> Impl:
    """The implementation for `device`; the choice is logged once.

    Raises:
        ValueError: `forced` names no implementation, or one that cannot serve this device.
    """
    candidates = [impl for impl in IMPLS if forced in (None, impl.name)]
    if not candidates:
        raise ValueError(f"{ENVIRONMENT}: expected one of {', '.join(i.name for i in IMPLS)}; found {forced!r}")
    reasons = []
    for impl in candidates:
        reason = impl.supports(device)
        if reason is None:
            logger.info("linear attention on %s: %s", device, impl.name)
            return impl
        reasons.append(f"{impl.name}: {reason}")
    raise ValueError(f"no implementation of linear attention for {device}: {'; '.join(reasons)}")


def _uncompiled(function: Operation) -> Operation:
    """Compilers leave it alone, rather than break it into many graphs at what they cannot trace.

    The choice is cached, and layouts keep what they have worked out. A compiled step of generation does not come
    through here.
    """
    return torch.compiler.disable(function)  # type: ignore[return-value]


@_uncompiled
def linear_scan(phi_q, phi_k, v, **options) -> Partial:
    """The linear part of every query; see `reference.linear_scan` for shapes and definition."""
    return choose(v.device, os.environ.get(ENVIRONMENT)).linear_scan(phi_q, phi_k, v, **options)


@_uncompiled
def delta_values(phi_k, v, beta, **options) -> Tensor:
    """What the delta rule writes instead of v; see `reference.delta_values` for shapes and definition."""
    return choose(v.device, os.environ.get(ENVIRONMENT)).delta_values(phi_k, v, beta, **options)


@_uncompiled
def window_softmax(q, k, v, **options) -> Partial:
    """The softmax part of every query; see `reference.window_softmax` for shapes and definition."""
    return choose(v.device, os.environ.get(ENVIRONMENT)).window_softmax(q, k, v, **options)
