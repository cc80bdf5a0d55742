"""A budget of memory as data: bytes that KV heads share, and what one of them can have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field, PositiveInt, model_validator

from linearize.base import Config
from linearize.hf.teacher import TeacherShape
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import MixerConfig
from linearize.mixers.exact_cache import ExactCache, Score
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.layout import SlidingSpan, TerracedSpan

Choice = MixerConfig | None  # of a KV head; None: softmax over all keys
BLOCK = 16  # keys that leave the window of an exact cache at a time


class MemoryConfig(Config):
    """Bytes of state that the KV heads of all layers share, each getting what it needs most.

    Either `bytes`, or the `fraction` of the teacher's cache at `of_cache_at` tokens. Heads choose among windows, an
    exact cache beside a window of 32, any other mixers, and, where the state may grow, softmax over all keys.
    """

    bytes: PositiveInt | None = Field(default=None, description="of one sequence's state, all layers together")
    fraction: float | None = Field(
        default=None, gt=0, le=1, description="of the teacher's cache at `of_cache_at` tokens"
    )
    of_cache_at: PositiveInt = Field(
        default=1024, description="tokens; heads that keep all keys are counted at them too"
    )
    grows: bool = Field(default=False, description="whether heads may keep all of their keys")
    windows: tuple[PositiveInt, ...] = Field(
        default=(4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
        description="sizes to choose from; those of `of_cache_at` tokens and more are left out",
    )
    caches: tuple[PositiveInt, ...] = Field(
        default=(32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
        description="pairs of an exact cache beside a window of 32; likewise",
    )
    score: Score = Field(default="recall_redundancy_and_age", description="which keys the exact caches keep")
    mixers: tuple[MixerConfig, ...] = Field(
        default=(), description="further ones to choose from, measured as they come: linear states, other windows"
    )
    tokens: PositiveInt = Field(default=16384, description="training tokens that the heads are measured on")
    recall: float = Field(
        default=0.2,
        ge=0,
        description="what a token counts, beside one of text, that only a span written far before it foretells; 0: the "
        "training text as it is",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> MemoryConfig:
        if (self.bytes is None) == (self.fraction is None):
            raise ValueError("memory: expected either `bytes` or `fraction`")
        if not self.candidates():
            raise ValueError(
                f"memory: expected something for heads to choose from, found no window or cache of fewer than "
                f"of_cache_at={self.of_cache_at} tokens"
            )
        if any(mixer.reads_unrotated for mixer in self.mixers):
            raise ValueError("memory.mixers: keys before RoPE are not measured; choose a map with rotation `before`")
        return self

    def budget(self, teacher: TeacherShape, dtype: torch.dtype) -> int:
        """Bytes of state of one sequence."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        growing = teacher.num_layers - len(teacher.sliding_layers)
        return int(self.fraction * self.of_cache_at * growing * teacher.num_kv_heads * pair_bytes(teacher, dtype))

    def candidates(self) -> tuple[Choice, ...]:
        """What a head can have."""
        windows = (window(size) for size in self.windows if size < self.of_cache_at)
        caches = (cached(size, self.score) for size in self.caches if size + 2 * BLOCK < self.of_cache_at)
        return (*windows, *caches, *self.mixers, *((None,) if self.grows else ()))


def window(size: int) -> MixerConfig:
    """Softmax over the last `size` keys."""
    return MixerConfig(span=SlidingSpan(window_size=size), feature_map=None, combine=WindowOnly())


def cached(size: int, score: Score) -> MixerConfig:
    """A window of two blocks, and so many exact pairs beside it."""
    span, cache = TerracedSpan(window_size=BLOCK, blocks=2), ExactCache(size=size, score=score)
    return MixerConfig(span=span, feature_map=None, combine=WindowOnly(), cache=cache)


def pair_bytes(teacher: TeacherShape, dtype: torch.dtype) -> int:
    """One key and one value of one KV head."""
    return 2 * teacher.head_dim * dtype.itemsize


def candidate_bytes(candidates: Sequence[Choice], teacher: TeacherShape, dtype: torch.dtype, length: int) -> list[int]:
    """State of one KV head of a sequence of `length` tokens, for each candidate."""
    group = teacher.num_heads // teacher.num_kv_heads
    one = replace(teacher.layer, num_heads=group, num_kv_heads=1)
    q, kv = (torch.empty(1, heads, 1, teacher.head_dim, dtype=dtype, device="meta") for heads in (group, 1))
    hidden = torch.empty(1, 1, teacher.hidden_size, dtype=dtype, device="meta")
    sizes = []
    for choice in candidates:
        if choice is None:
            sizes.append(length * pair_bytes(teacher, dtype))
            continue
        with torch.device("meta"):
            state = LinearMixer(choice, one).state_like(AttnInputs(q, kv, kv, 1.0, hidden=hidden))
        sizes.append(state.nbytes - state.seen.nbytes)
    return sizes
