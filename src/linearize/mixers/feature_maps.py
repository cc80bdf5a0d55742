"""Feature maps phi: what stands for exp(q.k) in linear attention."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linearize.config import HedgehogMap
from linearize.ops.partial import accumulation_dtype

MIN_FEATURE = 1e-12  # LoLCATs' clamp


class Hedgehog(nn.Module):
    """phi(x) = [softmax(xW), softmax(-xW)], untied for q and k (LoLCATs App. A; Hedgehog eqs. 5-6 without bias).

    Query maps are per query head. Key maps are per query head too (LoLCATs), or per KV head, which makes the state
    smaller by the number of query heads that share a KV head. The key map starts as a copy of the query map.
    """

    def __init__(self, config: HedgehogMap, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.feature_dim = config.feature_dim or head_dim
        self.group = num_heads // num_kv_heads
        key_heads = num_heads if config.per == "query_head" else num_kv_heads
        self.query_weight = nn.Parameter(torch.empty(num_heads, head_dim, self.feature_dim // 2))
        self.key_weight = nn.Parameter(torch.empty(key_heads, head_dim, self.feature_dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Identity (the authors' runs), or Kaiming-uniform on the whole [heads, D, F/2] tensor."""
        if self.config.init == "identity":
            self.key_weight.copy_(torch.eye(*self.key_weight.shape[1:]))
        else:
            nn.init.kaiming_uniform_(self.key_weight)
        # Query heads that share a key map start from the same one.
        self.query_weight.copy_(
            self.key_weight.repeat_interleave(len(self.query_weight) // len(self.key_weight), dim=0)
        )

    def q(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T F"]:
        """Features of queries."""
        return _softmax_halves(x, self.query_weight)

    def k(self, x: Float[Tensor, "B G K D"]) -> Float[Tensor, "B Hk K F"]:
        """Features of keys, per KV head or, after repeating them, per query head."""
        repeats = len(self.key_weight) // x.shape[1]
        return _softmax_halves(x if repeats == 1 else x.repeat_interleave(repeats, dim=1), self.key_weight)


def _softmax_halves(x: Float[Tensor, "B h T D"], weight: Float[Tensor, "h D E"]) -> Float[Tensor, "B h T F"]:
    dtype = accumulation_dtype(x.dtype)
    x = x.to(dtype) @ weight.to(dtype)
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1).clamp_min(MIN_FEATURE)


FEATURE_MAPS: dict[type, type[Hedgehog]] = {HedgehogMap: Hedgehog}
