"""The unnormalised result of one part of an attention layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

LOG2_E = math.log2(math.e)  # for exp2, which takes a fourth of the time of exp on a CPU


@dataclass(frozen=True)
class Partial:
    """``num`` and ``den`` of a weighted mean of values, both divided by ``exp(log_scale)``.

    For softmax, log_scale is the running max of the scores (FlashAttention's m). fp32, or fp64 for fp64 inputs. A query
    that sees no key has num = den = log_scale = 0.
    """

    num: Float[Tensor, "B H T D"]
    den: Float[Tensor, "B H T"]
    log_scale: Float[Tensor, "B H T"]


def in_dtype(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return x in `dtype`, without a call if it has this type: calls dominate the time of a one-token step."""
    return x if x.dtype == dtype else x.to(dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of features, states and denominators: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
