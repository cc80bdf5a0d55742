"""A bounded number of exact keys per KV head, of those that left the window: which are worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from linearize.base import Config
from linearize.mixers.shape import LayerShape
from linearize.ops import fused
from linearize.ops.exact_cache import Chooser, Worth
from linearize.ops.partial import accumulation_dtype

Score = Literal[
    "redundancy_and_age",
    "redundancy",
    "recall_redundancy_and_age",
    "self_recall",
    "attention_received",
    "attention_recent",
    "expected_attention",
    "learned",
    "value_norm",
    "key_norm",
    "recent",
    "random",
]

PER_DOUBLING = 0.4  # of a key's age, in cosine
BESIDE_RECALL = 0.2  # likewise, where it stands beside an error of recall, which is larger
SHARPNESS = 8.0  # of recall: the weight of a key like another one is e^16 times that of its opposite
NOBODY = -1e4  # in the place of such a cosine where there is no other key; finite, so that a key alone is not NaN
# Of the table of all pairs of candidates: as many rows as hold so many cosines, and no fewer than 128.
COSINES_AT_ONCE, ROWS_AT_ONCE = 2**18, 128


class ExactCache(Config):
    """C exact key-value pairs per KV head beside the window; when a block leaves it, the best C of all stay.

    Scores: `redundancy`, of keys most alike (cosine, with RoPE) the older goes; `redundancy_and_age`, a key twice as
    old goes before one that is 0.4 more alike; `self_recall`, whose value the others recall best by its key goes;
    `recall_redundancy_and_age`, the three together; `attention_received`, of all queries so far, and
    `attention_recent`, of those of the last block: who got the least goes; `expected_attention` and `learned`, who will
    get the least by what was measured on the teacher; `value_norm` and `key_norm`, the smallest goes; `recent`, the
    oldest goes, which is a longer window; `random`. After LoLA (arXiv 2505.23666), whose score is an error of recall by
    the linear state.

    What is dropped is written to the linear state, where there is a linear part; else it is lost.
    """

    size: PositiveInt = Field(description="pairs per KV head")
    score: Score = Field(default="recall_redundancy_and_age", description="which pairs are worth keeping")

    @property
    def keeps(self) -> float | None:
        """What becomes of the attention that pairs received when a block begins, a factor; None: nobody asks for it."""
        return ATTENTION.get(self.score)

    def worth(self, shape: LayerShape) -> Worth | None:
        """What `score` goes by: a new module where it is calibrated on the teacher; None: the attention received."""
        return CALIBRATED[self.score](shape) if self.score in CALIBRATED else SCORES.get(self.score)


def copy_worth(source: Any, target: Any) -> None:
    """Give the caches of a mixer what another one of the same parts, heads of several kinds too, is calibrated to."""
    for (_, fitted), (_, mixer) in zip(source.parts(), target.parts(), strict=True):
        if isinstance(getattr(mixer, "worth", None), nn.Module):
            mixer.worth.load_state_dict(fitted.worth.state_dict())


@dataclass(frozen=True)
class OfPairs:
    """A `Worth` that knows nothing but the pairs.

    Attributes:
        fused: the choice by it in one kernel, where there is one.
    """

    pairs: Callable[[Float[Tensor, "B G P D"], Float[Tensor, "B G P D"]], Float[Tensor, "B G P X"]]
    compare: Callable[[Float[Tensor, "B G M X"], Int[Tensor, "B G M"]], Float[Tensor, "B G M"]]
    fused: Chooser | None = None


def _directions(k: Float[Tensor, "B G P D"], v: Float[Tensor, "B G P D"]) -> Float[Tensor, "B G P D"]:
    """Keys of one length, so long that their products are `SHARPNESS` cosines."""
    return SHARPNESS**0.5 * torch.nn.functional.normalize(k.float(), dim=-1)


def _both(k: Float[Tensor, "B G P D"], v: Float[Tensor, "B G P D"]) -> Float[Tensor, "B G P X"]:
    """Directions, then values: X = 2 D."""
    return torch.cat([_directions(k, v), v.float()], dim=-1)


def redundancy(directions: Float[Tensor, "B G M D"], position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
    """Minus the cosine of each key with the newer one most like it; of the newest, 1."""
    return torch.cat([_redundancy(start, alike) for start, alike in _alike(directions, position)], dim=-1)


def redundancy_and_age(directions: Float[Tensor, "B G M D"], position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
    """`redundancy`, less 0.4 for each time that the key's age doubles, from 1 for the newest candidate."""
    return redundancy(directions, position).sub_(age(position).log2(), alpha=PER_DOUBLING)


def self_recall(both: Float[Tensor, "B G M X"], position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
    """How badly the others recall a pair: log2 ||v_i - sum_j a_ij v_j||, a_i softmax over them of 8 cos(k_i, k_j).

    LoLA's error of recall (arXiv 2505.23666), with the other candidates in place of the linear state: it needs none.
    """
    directions, v = both.chunk(2, dim=-1)
    return torch.cat([_self_recall(start, alike, v) for start, alike in _alike(directions, position)], dim=-1)


def recall_redundancy_and_age(both: Float[Tensor, "B G M X"], position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
    """`self_recall` and `redundancy`, less 0.2 for each time that the key's age doubles."""
    directions, v = both.chunk(2, dim=-1)
    found = [
        _redundancy(start, alike).add_(_self_recall(start, alike, v)) for start, alike in _alike(directions, position)
    ]
    return torch.cat(found, dim=-1).sub_(age(position).log2(), alpha=BESIDE_RECALL)


def _alike(
    directions: Float[Tensor, "B G M D"], position: Int[Tensor, "B G M"]
) -> Iterator[tuple[int, Float[Tensor, "B G m M"]]]:
    """Of some candidates at a time, from which on: `SHARPNESS` cosines with all, of those that are none `NOBODY`."""
    bias = torch.where(position >= 0, 0.0, NOBODY).flatten(0, 1)[:, None]
    unit = directions.flatten(0, 1)
    rows = max(ROWS_AT_ONCE, COSINES_AT_ONCE // bias.numel())
    for start in range(0, unit.shape[1], rows):
        yield start, torch.baddbmm(bias, unit[:, start : start + rows], unit.mT).unflatten(0, position.shape[:2])


def _redundancy(start: int, alike: Float[Tensor, "B G m M"]) -> Float[Tensor, "B G m"]:
    newer = alike[..., start:]
    older = newer.new_full(newer.shape[2:], NOBODY).tril_()
    return (newer + older).amax(-1).clamp_min_(-SHARPNESS).mul_(-1 / SHARPNESS)


def _self_recall(start: int, alike: Float[Tensor, "B G m M"], v: Float[Tensor, "B G M D"]) -> Float[Tensor, "B G m"]:
    alike.diagonal(start, 2, 3).fill_(NOBODY)
    weights, values = alike.flatten(0, 1).softmax(-1), v.flatten(0, 1)
    error = torch.baddbmm(values[:, start : start + weights.shape[1]], weights, values, alpha=-1).norm(dim=-1)
    return error.clamp_min_(torch.finfo(error.dtype).tiny).log2_().unflatten(0, v.shape[:2])


def _key_length(k: Float[Tensor, "B G P D"], v: Float[Tensor, "B G P D"]) -> Float[Tensor, "B G P 1"]:
    return k.float().norm(dim=-1, keepdim=True)


def _value_length(k: Float[Tensor, "B G P D"], v: Float[Tensor, "B G P D"]) -> Float[Tensor, "B G P 1"]:
    return v.float().norm(dim=-1, keepdim=True)


def _itself(pairs: Float[Tensor, "B G M 1"], position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
    return pairs.squeeze(-1)


def _nothing(k: Float[Tensor, "B G P D"], v: Float[Tensor, "B G P D"]) -> Float[Tensor, "B G P 0"]:
    return k[..., :0]


def recent(nothing: Float[Tensor, "B G M 0"], position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
    """The position."""
    return position.float()


def random(nothing: Float[Tensor, "B G M 0"], position: Int[Tensor, "B G M"], seed: int = 0) -> Float[Tensor, "B G M"]:
    """A number that looks random and depends on the position alone, so that every form draws the same."""
    mixed = (position.long() * 2654435761 + 12345) % 4294967291 ^ (seed * 2246822519) % 4294967296
    return ((mixed * 48271) % 2147483647).float()


def age(position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
    """How old each candidate is, 1 for the newest."""
    return (position.amax(-1, keepdim=True) - position + 1).float()


class ExpectedAttention(nn.Module):
    """E exp(q.k) ||v|| over the teacher's queries q, scaled as in its softmax, taken for normal (arXiv 2510.00636).

    E exp(q.k) = exp(mu.k + k^T Sigma k / 2). Of each query head's weights over the candidates, which sum to 1, those of
    all query heads of a KV head are added.

    Queries and keys are rotated ones, the queries those of all positions together: the score asks for no angles, and a
    key is worth the same whoever reads it next. (The paper rotates mu and Sigma to the next 512 positions.) Of the
    frequencies that turn often within the calibration's rows Sigma alone is left, of slow ones mu too.

    Attributes:
        mean, covariance: of the scaled queries of each query head, [H, D] and [H, D, D]; 0 and 1 / D unless calibrated.
    """

    mean: Tensor
    covariance: Tensor

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        heads, width = shape.num_heads, shape.head_dim
        self.groups = shape.num_kv_heads
        self.register_buffer("mean", torch.empty(heads, width))
        self.register_buffer("covariance", torch.empty(heads, width, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Queries of which nothing is known."""
        width = self.mean.shape[1]
        self.mean.zero_()
        self.covariance.copy_(torch.eye(width, device=self.mean.device) / width)

    def pairs(self, k: Float[Tensor, "B G P D"], v: Float[Tensor, "B G P D"]) -> Float[Tensor, "B G P X"]:
        """log E exp(q.k) of each query head of the KV head, and log ||v||."""
        dtype = accumulation_dtype(v.dtype)
        keys = k.to(dtype)[:, :, None]  # [B, G, 1, P, D]
        mean, covariance = (x.to(dtype).unflatten(0, (self.groups, -1)) for x in (self.mean, self.covariance))
        logs = (keys @ mean[..., None]).squeeze(-1) + 0.5 * ((keys @ covariance) * keys).sum(-1)
        length = v.to(dtype).norm(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
        return torch.cat([logs.mT, length.log()], dim=-1)

    def compare(self, pairs: Float[Tensor, "B G M X"], position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
        """The logarithm of it."""
        logs = pairs[..., :-1].masked_fill((position < 0)[..., None], -torch.inf).log_softmax(2)
        return logs.logsumexp(3) + pairs[..., -1]


class Learned(nn.Module):
    """A linear function of key, value, both their lengths and the logarithm of the age.

    Fitted to the logarithm of the largest attention that the teacher's queries beyond the window give the pair; as
    KVzap (arXiv 2601.07891), which reads the hidden state.

    Attributes:
        weight: [G, 2 D + 3]; the newest stay unless it is fitted.
    """

    weight: Tensor

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(shape.num_kv_heads, 2 * shape.head_dim + 3))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Minus the logarithm of the age."""
        self.weight.zero_()
        self.weight[:, -1] = -1

    def pairs(self, k: Float[Tensor, "B G P D"], v: Float[Tensor, "B G P D"]) -> Float[Tensor, "B G P 1"]:
        """All of it but for the age, that of a new pair."""
        found = self.features(k, v, k.new_ones(k.shape[:3]))
        return found @ self.weight.to(found.dtype)[..., None]

    def compare(self, pairs: Float[Tensor, "B G M 1"], position: Int[Tensor, "B G M"]) -> Float[Tensor, "B G M"]:
        """With the age."""
        return pairs.squeeze(-1) + self.weight[:, -1:].to(pairs.dtype) * age(position).log2().to(pairs.dtype)

    @staticmethod
    def features(
        k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M D"], age: Float[Tensor, "B G M"]
    ) -> Float[Tensor, "B G M F"]:
        """What the score is linear in."""
        k, v = (x.to(accumulation_dtype(v.dtype)) for x in (k, v))
        lengths = [x.norm(dim=-1, keepdim=True) for x in (k, v)]
        return torch.cat([k, v, *lengths, age[..., None].log2().to(k.dtype)], dim=-1)


# Of a score that is the attention a pair received: what is kept of it when a block begins. All: H2O (arXiv 2306.14048).
# None: what the last block's queries gave is what counts, SnapKV's window of observation (2404.14469) at every block.
ATTENTION: dict[Score, float] = {"attention_received": 1.0, "attention_recent": 0.0}

CALIBRATED: dict[Score, type[ExpectedAttention | Learned]] = {
    "expected_attention": ExpectedAttention,
    "learned": Learned,
}

SCORES: dict[Score, OfPairs] = {
    "redundancy_and_age": OfPairs(_directions, redundancy_and_age),
    "redundancy": OfPairs(_directions, redundancy),
    "recall_redundancy_and_age": OfPairs(
        _both, recall_redundancy_and_age, partial(fused.choose_by_recall, per_doubling=BESIDE_RECALL)
    ),
    "self_recall": OfPairs(_both, self_recall),
    "value_norm": OfPairs(_value_length, _itself),
    "key_norm": OfPairs(_key_length, _itself),
    "recent": OfPairs(_nothing, recent),
    "random": OfPairs(_nothing, random),
}
