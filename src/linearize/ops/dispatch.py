"""Which backend serves a device: here and nowhere else.

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
    """The backend for `device`; the choice is logged once.

    Raises:
        UserError: `forced` names no backend, or one that cannot serve this device.
    """
    candidates = [backend for backend in BACKENDS if forced in (None, backend.name)]
    if not candidates:
        names = ", ".join(backend.name for backend in BACKENDS)
        raise UserError(f"{ENVIRONMENT}: expected one of {names}; found {forced!r}; name one of these, or unset it")
    found = next((backend for backend in candidates if backend.missing(device) is None), None)
    if found is None:  # which was forced
        why = candidates[0].missing(device)
        raise UserError(f"{ENVIRONMENT}: expected one that serves {device}; found {forced}: {why}; unset it")
    logger.info("linear attention on %s: %s", device, found.name)
    return found


def backend_for(device: torch.device) -> Backend:
    """The backend for `device`; while compiling, torch's operations, which compilers know."""
    if torch.compiler.is_compiling():
        return TORCH
    return choose(device, os.environ.get(ENVIRONMENT))


def _uncompiled(function: Operation) -> Operation:
    """Compilers leave it alone, rather than break it into many graphs at what they cannot trace.

    Layouts keep what they have worked out. A compiled step of generation does not come through here.
    """
    return torch.compiler.disable(function)  # type: ignore[return-value]


@_uncompiled
def prefill(softmax: SoftmaxInputs | None, linear: LinearInputs | None, *, keeps_state: bool = False) -> Parts:
    """The parts of every query, None where there is none, and the linear state after the last token if it is kept."""
    device = softmax.v.device if softmax is not None else linear.v.device if linear is not None else None
    assert device is not None
    return backend_for(device).prefill(softmax, linear, keeps_state=keeps_state)


@_uncompiled
def window_softmax(x: SoftmaxInputs) -> Partial:
    """Softmax of every query over its window (`reference.window_softmax`)."""
    return backend_for(x.v.device).window_softmax(x)


@_uncompiled
def linear_scan(x: LinearInputs) -> Partial:
    """The linear part of every query, of keys that are added (`reference.linear_scan`)."""
    return backend_for(x.v.device).linear_scan(x)


@_uncompiled
def delta_values(x: LinearInputs) -> Float[Tensor, "B Hk K D"]:
    """What the delta rule writes instead of values (`reference.delta_values`)."""
    return backend_for(x.v.device).delta_values(x)


@_uncompiled
def state_after(x: LinearInputs) -> LinearState:
    """The linear state after the last token, without outputs."""
    return backend_for(x.v.device).state(x)
