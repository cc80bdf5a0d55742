"""A bounded number of exact keys per KV head, of those that left the window: which are worth keeping."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from linearize.base import Config
from linearize.ops.exact_cache import Worth

Score = Literal["redundancy_and_age", "redundancy", "value_norm", "key_norm", "recent", "random"]

PER_DOUBLING = 0.4  # of a key's age, in cosine


class ExactCache(Config):
    """C exact key-value pairs per KV head beside the window; when a block leaves it, the best C of all stay.

    Scores: `redundancy`, of keys most alike (cosine, with RoPE) the older goes; `redundancy_and_age`, a key twice as
    old goes before one that is 0.4 more alike; `value_norm` and `key_norm`, the smallest goes; `recent`, the oldest
    goes, which is a longer window; `random`. After LoLA (arXiv 2505.23666), whose cache is filled by another score.

    What is dropped is written to the linear state, where there is a linear part; else it is lost.
    """

    size: PositiveInt = Field(description="pairs per KV head")
    score: Score = Field(default="redundancy_and_age", description="which pairs are worth keeping")

    @property
    def reads_values(self) -> bool:
        """Whether the choice depends on the values."""
        return self.score == "value_norm"

    @property
    def worth(self) -> Worth:
        """What `score` gives keys, values and positions of candidates, oldest first: the least goes."""
        return SCORES[self.score]


def redundancy(
    k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M D"], position: Int[Tensor, "B G M"]
) -> Float[Tensor, "B G M"]:
    """Minus the cosine of each key with the newer one most like it."""
    unit = torch.nn.functional.normalize(k.float(), dim=-1)
    alike = unit @ unit.mT
    newer = torch.ones(alike.shape[-2:], dtype=torch.bool, device=k.device).triu(1) & (position >= 0)[:, :, None]
    return -alike.masked_fill(~newer, -1).amax(-1)


def redundancy_and_age(
    k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M D"], position: Int[Tensor, "B G M"]
) -> Float[Tensor, "B G M"]:
    """`redundancy`, less 0.4 for each time that the key's age doubles, from 1 for the newest candidate."""
    age = position.amax(-1, keepdim=True) - position + 1
    return redundancy(k, v, position) - PER_DOUBLING * age.float().log2()


def value_norm(k: Tensor, v: Tensor, position: Tensor) -> Float[Tensor, "B G M"]:
    """The length of the value."""
    return v.float().norm(dim=-1)


def key_norm(k: Tensor, v: Tensor, position: Tensor) -> Float[Tensor, "B G M"]:
    """The length of the key."""
    return k.float().norm(dim=-1)


def recent(k: Tensor, v: Tensor, position: Tensor) -> Float[Tensor, "B G M"]:
    """The position."""
    return position.float()


def random(k: Tensor, v: Tensor, position: Tensor) -> Float[Tensor, "B G M"]:
    """A number that looks random and depends on the position alone, so that every form draws the same."""
    mixed = (position.long() * 2654435761 + 12345) % 4294967291
    return ((mixed * 48271) % 2147483647).float()


SCORES: dict[Score, Worth] = {
    "redundancy_and_age": redundancy_and_age,
    "redundancy": redundancy,
    "value_norm": value_norm,
    "key_norm": key_norm,
    "recent": recent,
    "random": random,
}
