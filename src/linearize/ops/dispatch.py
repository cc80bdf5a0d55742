"""Choose the backend that serves a device; nothing else does.

``LINEARIZE_IMPL=reference`` (or any other name in `BACKENDS`) forces one, for debugging and for tests.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.base import UserError
from linearize.ops import chunked, dense, reference
from linearize.ops.backend import Backend
from linearize.ops.inputs import LinearInputs, LinearState, Parts, SoftmaxInputs
from linearize.ops.layout import Layout
from linearize.ops.partial import Partial
from linearize.ops.triton_backend import TritonBackend

ENVIRONMENT = "LINEARIZE_IMPL"
TORCH = Backend("torch")
# In order of preference; the last three are of one form for rows of all lengths.
BACKENDS = (
    TritonBackend("triton"),
    TORCH,
    Backend("chunked", chunked),
    Backend("dense", dense),
    Backend("reference", reference),
)
Operation = TypeVar("Operation", bound=Callable[..., object])
logger = logging.getLogger(__name__)


@functools.cache
def choose(device: torch.device, forced: str | None) -> Backend:
    """Return the backend for `device`; log the choice once.

    Raises:
        UserError: `forced` names no backend, or one that cannot serve this device.
    """
    candidates = [backend for backend in BACKENDS if forced in (None, backend.name)]
    if not candidates:
        names = ", ".join(backend.name for backend in BACKENDS)
        raise UserError(f"{ENVIRONMENT}: expected one of {names}; found {forced!r}; name one of these, or unset it")
    chosen = next((backend for backend in candidates if backend.missing(device) is None), None)
    if chosen is None:  # which was forced
        why = candidates[0].missing(device)
        raise UserError(f"{ENVIRONMENT}: expected one that serves {device}; found {forced}: {why}; unset it")
    logger.info("linear attention on %s: %s", device, chosen.name)
    return chosen


def backend_for(device: torch.device) -> Backend:
    """Return the backend for `device`; while compiling, torch's operations, which compilers can trace."""
    if torch.compiler.is_compiling():
        return TORCH
    return choose(device, os.environ.get(ENVIRONMENT))


def masks_whole_rows(q: Float[Tensor, "B H T D"]) -> bool:
    """Return whether softmax over some keys of these rows is faster as attention over all of them, masked."""
    return backend_for(q.device).masks_whole_rows(q)


def _uncompiled(function: Operation) -> Operation:
    """Keep compilers from a function that they would break into many graphs.

    Layouts cache their results, which cannot be traced. A compiled step of generation does not come through here.
    """
    return torch.compiler.disable(function)  # type: ignore[return-value]


@_uncompiled
def prefill(softmax: SoftmaxInputs | None, linear: LinearInputs | None, *, keeps_state: bool = False) -> Parts:
    """Return the parts of every query, None where there is none, and the linear state after the last token if kept."""
    if softmax is not None:
        _check_lengths(softmax.layout, softmax.k, softmax.q)
    if linear is not None:
        _check_lengths(linear.layout, linear.phi_k, linear.queries())
    part = linear if softmax is None else softmax
    assert part is not None
    return backend_for(part.v.device).prefill(softmax, linear, keeps_state=keeps_state)


@_uncompiled
def window_softmax(x: SoftmaxInputs) -> Partial:
    """Compute softmax of every query over its window (`reference.window_softmax`)."""
    _check_lengths(x.layout, x.k, x.q)
    return backend_for(x.v.device).window_softmax(x)


@_uncompiled
def linear_scan(x: LinearInputs) -> Partial:
    """Compute the linear part of every query, of keys that are added (`reference.linear_scan`)."""
    _check_lengths(x.layout, x.phi_k, x.queries())
    return backend_for(x.v.device).linear_scan(x)


@_uncompiled
def state_after(x: LinearInputs) -> LinearState:
    """Return the linear state after the last token, without outputs."""
    return backend_for(x.v.device).state(x)


def _check_lengths(layout: Layout, keys: Tensor, queries: Tensor) -> None:
    lengths, expected = (layout.key_position.shape[1], layout.length), (keys.shape[2], queries.shape[2])
    assert lengths == expected, f"layout: expected (keys, queries) {expected}, found {lengths}"
