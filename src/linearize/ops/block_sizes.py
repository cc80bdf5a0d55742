"""Choose between block sizes for CPUs, which stay in the cache, and for GPUs, which fill the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_pretended: ContextVar[torch.device | None] = ContextVar("pretended", default=None)


def kind(device: torch.device) -> str:
    """Return the key of `device` in a table of block sizes: "cpu", or "cuda" for all other devices."""
    return "cpu" if (_pretended.get() or device).type == "cpu" else "cuda"


@contextmanager
def blocks_for(device: torch.device) -> Iterator[None]:
    """Use the block sizes of this device in the `with` block, wherever the tensors are."""
    token = _pretended.set(device)
    try:
        yield
    finally:
        _pretended.reset(token)
