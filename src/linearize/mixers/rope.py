"""Rotary positions (RoPE), in Llama's convention: the first R of D dimensions, in two halves."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from linearize.mixers.inputs import AttnInputs

Rope = tuple[Tensor, Tensor]


def apply_rope(x: Float[Tensor, "B h T D"], rope: Rope) -> Float[Tensor, "B h T D"]:
    """`x` rotated by cosines and sines [B or 1, T, R]; dimensions from R on stay as they are."""
    return rotated(x, rope[0][:, None], rope[1][:, None])


def rotated(
    x: Float[Tensor, "B h T D"], cos: Float[Tensor, "#B #h T R"], sin: Float[Tensor, "#B #h T R"]
) -> Float[Tensor, "B h T D"]:
    """`x` rotated, each head by its own cosines and sines or all by the same."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = cos.shape[-1] // 2
    first, second = turned[..., :half], turned[..., half:]
    y = turned * cos
    # In place: the features of all heads are too many for a tensor more than needed.
    y[..., :half].addcmul_(second, sin[..., :half], value=-1)
    y[..., half:].addcmul_(first, sin[..., half:])
    return torch.cat([y, rest], dim=-1) if rest.shape[-1] else y


def map_inputs(rotation: Literal["before", "after", "none"], inputs: AttnInputs) -> tuple[Tensor, Tensor]:
    """The queries and keys that a feature map sees; a model without RoPE has only one kind."""
    if rotation == "before" or inputs.unrotated is None:
        return inputs.q, inputs.k
    return inputs.unrotated
