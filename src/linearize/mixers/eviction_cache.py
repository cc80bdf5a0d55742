"""A KV cache with eviction beside the window: its size, and the scores that decide which keys it keeps."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linearize.configs.mixer_parts import EvictionCache
from linearize.configs.shape import LayerShape
from linearize.mixers.inputs import AttnInputs
from linearize.ops.partial import in_dtype

LEAST_LENGTH = 1e-6  # of a vector, whose logarithm is read


class EvictionScorer(nn.Module):
    """The eviction scores of a key-value pair: linear functions of key, value, their log lengths, and the position.

    There are S of them, one for each part of the cache.

    Keys are read before RoPE (a rotation does not change their lengths), so position matters through `recency` alone. A
    score that grows with the position lets a pair fade relative to newer ones: what stays is what is important, recent,
    or a little of both. Since all pairs of a head fade alike, their order never changes, and the cache is a running
    top-C.

    Weights are fitted in closed form to attention that the teacher's pairs receive
    (`linearize.training.eviction_scores`), after KVzip (arXiv 2505.23416) and KVzap (arXiv 2601.07891).

    Attributes:
        weight: [G, S, 2 D + 2], of the `features`.
        recency: [G, S], score per token of position; 0 keeps pairs however old they are.
    """

    weight: Tensor
    recency: Tensor

    def __init__(self, cache: EvictionCache, shape: LayerShape) -> None:
        super().__init__()
        scores = shape.num_kv_heads, len(cache.parts)
        self.register_buffer("weight", torch.empty(*scores, 2 * shape.head_dim + 2))
        self.register_buffer("recency", torch.empty(scores))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Score by minus the logarithm of the key's length until fitted (Devoto et al. 2024, arXiv 2406.11430)."""
        self.weight.zero_()
        self.weight[..., (self.weight.shape[-1] - 2) // 2] = -1
        self.recency.zero_()

    @torch.no_grad()
    def forward(self, inputs: AttnInputs, position: Int[Tensor, "#B T"]) -> Float[Tensor, "B G T S"]:
        """Return the scores of tokens at these positions of their documents, in fp32, or fp64 for fp64 inputs."""
        return self.whole(self.of_keys(inputs), inputs.v, position)

    @torch.no_grad()
    def of_keys(self, inputs: AttnInputs) -> Float[Tensor, "B G T S"]:
        """Return the part of the scores that reads keys before RoPE, which slots do not hold."""
        return self._weighted(_with_length(inputs.k if inputs.unrotated is None else inputs.unrotated[1]), 0)

    @torch.no_grad()
    def whole(
        self, of_keys: Float[Tensor, "B G T S"], v: Float[Tensor, "B G T D"], position: Int[Tensor, "#B T"]
    ) -> Float[Tensor, "B G T S"]:
        """Return the scores, from what `of_keys` made of the keys, and from values."""
        of_values = self._weighted(_with_length(v), v.shape[-1] + 1)
        recency = in_dtype(self.recency, of_values.dtype)[:, None] * position.view(len(position), 1, -1, 1)
        return of_keys + of_values + recency

    def _weighted(self, x: Float[Tensor, "B G T D"], first: int) -> Float[Tensor, "B G T S"]:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = x if x.dtype == dtype else x.to(dtype)
        weight = self.weight if self.weight.dtype == dtype else self.weight.to(dtype)
        if torch.compiler.is_compiling():
            rows = weight[:, None, :, first : first + x.shape[-1]]
        else:  # the same in one call
            size, stride = (len(weight), 1, weight.shape[1], x.shape[-1]), (weight.stride(0), 1, weight.stride(1), 1)
            rows = weight.as_strided(size, stride, weight.storage_offset() + first)
        # A sum of each row by itself: equal keys have equal scores, however many tokens come at a time.
        return (x.view(*x.shape[:3], 1, x.shape[3]) * rows).sum(-1)


def features(inputs: AttnInputs) -> Float[Tensor, "B G T F"]:
    """Return what eviction scores are linear in, F = 2 D + 2: key before RoPE and its log length, then the value's."""
    k = inputs.k if inputs.unrotated is None else inputs.unrotated[1]
    return torch.cat([_with_length(k), _with_length(inputs.v)], dim=-1)


def _with_length(x: Float[Tensor, "B G T D"]) -> Float[Tensor, "B G T X"]:
    """Return vectors with the logarithm of their length behind them, in the accumulation dtype."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x if x.dtype == dtype else x.to(dtype)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.cat([x, length.clamp_min(LEAST_LENGTH).log()], dim=-1)


def copy_scorers(source: Any, target: Any) -> None:
    """Copy the fitted eviction scorers of a mixer to another mixer of the same groups of heads."""
    for (_, fitted), (_, mixer) in zip(source.parts(), target.parts(), strict=True):
        if getattr(mixer, "scorer", None) is not None:
            mixer.scorer.load_state_dict(fitted.scorer.state_dict())
