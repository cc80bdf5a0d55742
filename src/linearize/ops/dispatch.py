"""Choose the implementation for a device. No other module does.

``LINEARIZE_IMPL=reference`` (or any other name in `IMPLEMENTATIONS`) forces one, for debugging and for tests. `backend`
has the operations of each.
"""

from __future__ import annotations

import functools
import logging
import os
from importlib.util import find_spec

import torch

from linearize.base import UserError

ENVIRONMENT = "LINEARIZE_IMPL"
# In order of preference. The last three have one form for rows of all lengths.
IMPLEMENTATIONS = ("triton", "torch", "chunked", "dense", "reference")
logger = logging.getLogger(__name__)


def implementation_for(device: torch.device) -> str:
    """Return the name of the implementation for `device`; "torch" while compiling, which compilers can trace."""
    return "torch" if torch.compiler.is_compiling() else choose(device, os.environ.get(ENVIRONMENT))


@functools.cache
def choose(device: torch.device, forced: str | None) -> str:
    """Return the name of the implementation for `device`; log the choice once.

    Raises:
        UserError: `forced` is not a known name, or that implementation does not support this device.
    """
    candidates = [name for name in IMPLEMENTATIONS if forced in (None, name)]
    if not candidates:
        names = ", ".join(IMPLEMENTATIONS)
        raise UserError(f"{ENVIRONMENT}: expected one of {names}; found {forced!r}; name one of these, or unset it")
    chosen = next((name for name in candidates if missing(name, device) is None), None)
    if chosen is None:  # only a forced one can be unsupported
        why = missing(candidates[0], device)
        raise UserError(f"{ENVIRONMENT}: expected one that serves {device}; found {forced}: {why}; unset it")
    logger.info("linear attention on %s: %s", device, chosen)
    return chosen


def missing(name: str, device: torch.device) -> str | None:
    """Return why an implementation does not support a device; None: it does."""
    if name != "triton":
        return None
    if device.type != "cuda":
        return "its kernels are for CUDA devices"
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)):
        return "its kernels are for NVIDIA's GPUs since Ampere"
    return None if find_spec("triton") else "triton is not installed (pip install 'linearize[gpu]')"
