"""Launch Triton kernels: the options that all kernels share, and the strides of tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

WIDEST = 128  # the most features, and values, of a head
MOST_BYTES = 2**15  # bytes of the queries of a program
CHUNK = 64  # queries of a program
# Products of float32 are computed as three of TF32, with almost the same accuracy. Without prefetching, kernels fit the
# 99 KiB of shared memory that GPUs have since Ampere.
OPTIONS = {"PRECISION": "tf32x3", "num_stages": 1}


def launch(kernel: Any, grid: tuple[int, ...], *inputs: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first input, whichever is the current one."""
    with torch.cuda.device_of(inputs[0]):
        kernel[grid](*inputs, **options)


def rows_of_numbers(x: Tensor) -> Tensor:
    """Return the tensor with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: Float[Tensor, "B h K X"]) -> tuple[int, ...]:
    """Return the strides of rows, heads and slots."""
    return x.stride()[:3]


def between_rows(x: Tensor) -> int:
    """Return the stride of the first axis; 0 if it has one row, which all rows share."""
    return x.stride(0) if len(x) > 1 else 0


@functools.cache
def power_of_2(number: int) -> int:
    """Return the least power of 2 that is no less than the number, and no less than 16, which products need."""
    return max(16, 1 << (number - 1).bit_length())
