"""Evaluate the parts of an attention layer: by torch's operations on any device, or by a subclass with kernels.

A backend computes prompts (`prefill` and its parts), one more token (`step`) and the output of both parts (`output`).
`triton_backend` overrides what its kernels support; `dispatch` chooses a backend; `reference` has the definitions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.ops import chunked, dense, eviction_cache, reference
from linearize.ops.dispatch import implementation_for
from linearize.ops.inputs import LinearInputs, LinearState, Parts, Quotient, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.linear_state import linear_state
from linearize.ops.partial import Partial
from linearize.ops.step import StepInputs, StepOutputs, one_token

MOST_MASKED_KEYS = 1024
Operation = TypeVar("Operation", bound=Callable[..., object])


class Backend:
    """Torch's operations.

    Attributes:
        name: the value of `LINEARIZE_IMPL` that selects this backend.
        form: the module that computes rows of all lengths; None: `dense` for short rows, `chunked` for longer ones.
        splits_prompts: whether it is faster to compute the first tokens of a prompt, which see all keys, separately.
    """

    splits_prompts = True

    def __init__(self, name: str, form: ModuleType | None = None) -> None:
        self.name, self.form = name, form

    def masks_whole_rows(self, q: Float[Tensor, "B H T D"]) -> bool:
        """Return whether softmax over some keys of these rows is faster as masked attention over all keys."""
        return self.form is None and q.shape[2] <= MOST_MASKED_KEYS

    def prefill(
        self, softmax: SoftmaxInputs | None, linear: LinearInputs | None, *, keeps_state: bool = False
    ) -> Parts:
        """Return the parts of every query, and the linear state after the last token if it is kept."""
        window = None if softmax is None else self.softmax(softmax)
        if linear is None:
            return Parts(window, None, None)
        if linear.beta is not None:
            linear = linear.with_values(self.delta_values(linear))
        if keeps_state:
            return Parts(window, *self.scan_with_state(linear))
        return Parts(window, self.linear_scan(linear), None)

    def step(self, x: StepInputs) -> StepOutputs:
        """Compute one more token of every row."""
        return one_token(x)

    def output(
        self,
        window: Partial | None,
        linear: Partial | None,
        quotient: Callable[[], Quotient | None],
        dtype: torch.dtype,
    ) -> Float[Tensor, "B H T D"] | None:
        """Return the output of these parts in `dtype`, or None if the mixer has to combine them.

        Args:
            quotient: returns the parameters of the output as one quotient of sums; None: it is no such quotient.
        """
        return None

    def softmax(self, x: SoftmaxInputs) -> Partial:
        """Compute softmax of every query over its window and its block's KV cache with eviction."""
        window = self.window_softmax(x)
        return window if x.cached is None else self.with_cached(x, window)

    def window_softmax(self, x: SoftmaxInputs) -> Partial:
        """Compute softmax over the window (`reference.window_softmax`)."""
        return self._form(x.q, x.k).window_softmax(x)

    def with_cached(self, x: SoftmaxInputs, window: Partial) -> Partial:
        """Add the pairs of the block's cache to `window`."""
        return eviction_cache.merged(window, eviction_cache.cached_softmax(x))

    def linear_scan(self, x: LinearInputs) -> Partial:
        """Compute the linear part (`reference.linear_scan`)."""
        return self._form(x.queries(), x.phi_k).linear_scan(x)

    def scan_with_state(self, x: LinearInputs) -> tuple[Partial, LinearState]:
        """Return the `linear_scan`, and the state after the last token."""
        return self.linear_scan(x), linear_state(x)

    def state(self, x: LinearInputs) -> LinearState:
        """Return the state after the last token alone."""
        return linear_state(x if x.beta is None else x.with_values(self.delta_values(x)))

    def delta_values(self, x: LinearInputs) -> Float[Tensor, "B Hk K D"]:
        """Return the values that the delta rule writes (`reference.delta_values`)."""
        form = chunked if self.form is None else self.form
        return form.delta_values(x)

    def _form(self, queries: Tensor, keys: Tensor) -> ModuleType:
        if self.form is not None:
            return self.form
        return dense if dense.is_short(queries.shape, keys.shape[2]) else chunked


TORCH = Backend("torch")
FORMS = {"chunked": chunked, "dense": dense, "reference": reference}  # each computes rows of all lengths


def backend_for(device: torch.device) -> Backend:
    """Return the backend that `dispatch` chooses for `device`."""
    name = implementation_for(device)
    return TORCH if name == TORCH.name else named(name)


@functools.cache
def named(name: str) -> Backend:
    """Return the backend of this name."""
    if name != "triton":
        return TORCH if name == TORCH.name else Backend(name, FORMS[name])
    from linearize.ops.triton_backend import TritonBackend  # loaded only where it is chosen

    return TritonBackend(name)


def _uncompiled(function: Operation) -> Operation:
    """Exclude a function from torch.compile, which would break it into many graphs.

    Layouts cache their results, which cannot be traced. A compiled step of generation does not call these functions.
    """
    return torch.compiler.disable(function)  # type: ignore[return-value]


@_uncompiled
def prefill(softmax: SoftmaxInputs | None, linear: LinearInputs | None, *, keeps_state: bool = False) -> Parts:
    """Return the parts of every query (None: no such part) and, with `keeps_state`, the state after the last token."""
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
    """Compute the linear part of every query without the delta rule (`reference.linear_scan`)."""
    _check_lengths(x.layout, x.phi_k, x.queries())
    return backend_for(x.v.device).linear_scan(x)


@_uncompiled
def state_after(x: LinearInputs) -> LinearState:
    """Return the linear state after the last token, without outputs."""
    return backend_for(x.v.device).state(x)


def _check_lengths(layout: SequenceLayout, keys: Tensor, queries: Tensor) -> None:
    lengths, expected = (layout.key_position.shape[1], layout.length), (keys.shape[2], queries.shape[2])
    assert lengths == expected, f"layout: expected (keys, queries) {expected}, found {lengths}"
