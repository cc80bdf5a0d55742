"""Whose sizes blocks of work have: a CPU's, which stay in its cache, or those that fill a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_pretended: ContextVar[torch.device | None] = ContextVar("pretended", default=None)


def kind(device: torch.device) -> str:
    """By which key a table of sizes is read for tensors on `device`: "cpu", or "cuda" for all others."""
    return "cpu" if (_pretended.get() or device).type == "cpu" else "cuda"


@contextmanager
def blocks_for(device: torch.device) -> Iterator[None]:
    """Within, blocks have the sizes for this device, wherever the tensors are."""
    token = _pretended.set(device)
    try:
        yield
    finally:
        _pretended.reset(token)
