"""Per-head KV budget allocation as data: the budget in bytes, and what one KV head can keep for how many bytes."""

from __future__ import annotations

import math

import torch
from pydantic import Field, PositiveInt, model_validator

from linearize.base import Config, UserError
from linearize.hf.teacher import TeacherShape
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import MixerConfig
from linearize.mixers.eviction_cache import EvictionCache
from linearize.ops.layout import SlidingSpan, TerracedSpan
from linearize.ops.partial import accumulation_dtype

BLOCK = 8  # keys that leave the window of a KV cache with eviction at a time
POSITION_BYTES = 8  # of a cached pair, int64


class MemoryConfig(Config):
    """Bytes of state that the KV heads of all layers share: sinks, a window and a KV cache with eviction for each.

    Either `bytes`, or the `fraction` of the teacher's cache at `reference_length` tokens.
    """

    bytes: PositiveInt | None = Field(default=None, description="of one sequence's state, all layers together")
    fraction: float | None = Field(
        default=None, gt=0, le=1, description="of the teacher's cache at `reference_length` tokens"
    )
    reference_length: PositiveInt = Field(default=1024, description="tokens")
    sinks: int = Field(default=1, ge=0, description="first tokens of a document that every head keeps")
    recall_fraction: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="of the bytes at most, for pairs kept for recall where heads need it; the rest is divided equally",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> MemoryConfig:
        if self.bytes is None and self.fraction is None:
            raise ValueError("expected either `bytes` or `fraction`, found neither; set memory.fraction, e.g. to 0.11")
        if self.bytes is not None and self.fraction is not None:
            raise ValueError(
                f"expected either `bytes` or `fraction`, found both: memory.bytes={self.bytes} and "
                f"memory.fraction={self.fraction:g}; add `--set memory.fraction=null` to keep the bytes, or "
                "`--set memory.bytes=null` to keep the fraction"
            )
        return self

    def budget(self, teacher: TeacherShape, dtype: torch.dtype) -> int:
        """Return the bytes of state of one sequence."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        converted = teacher.num_layers - len(teacher.sliding_layers)
        return int(
            self.fraction * self.reference_length * converted * teacher.num_kv_heads * pair_bytes(teacher, dtype)
        )


def require_room(memory: MemoryConfig, teacher: TeacherShape, layers: int, dtype: torch.dtype) -> None:
    """See that the budget holds something of every KV head.

    Args:
        layers: how many are converted.

    Raises:
        UserError: it is less than the smallest window in every head takes.
    """
    smallest = layers * teacher.num_kv_heads * head_bytes(head_mixer(1, 0, memory.sinks), teacher, dtype)
    if (budget := memory.budget(teacher, dtype)) < smallest:
        fewer = ", or fewer memory.sinks" if memory.sinks else ""
        raise UserError(
            f"memory: expected at least {smallest:,} bytes, with which every KV head has its sinks and its own key, "
            f"found {budget:,}; {_enough(memory, smallest, teacher, dtype)}{fewer}"
        )


def _enough(memory: MemoryConfig, smallest: int, teacher: TeacherShape, dtype: torch.dtype) -> str:
    """Return which value of the budget suffices for so many bytes, as advice."""
    cache = memory.model_copy(update={"bytes": None, "fraction": 1.0}).budget(teacher, dtype)
    if memory.fraction is None or smallest > cache:
        null = "" if memory.fraction is None else "memory.fraction=null and "
        return f"set {null}memory.bytes to at least {smallest}"
    digits = 1 - math.floor(math.log10(smallest / cache))  # two that count
    steps = math.ceil(smallest / cache * 10**digits)
    while memory.model_copy(update={"fraction": steps / 10**digits}).budget(teacher, dtype) < smallest:
        steps += 1  # a product of floats is cut to whole bytes
    return f"set memory.fraction to at least {steps / 10**digits:g}"


def head_mixer(window: int, text: int, sinks: int, recall: int = 0) -> MixerConfig:
    """Return the mixer of a KV head with a window, sinks, and a KV cache with eviction, none where `text` is 0.

    Beside a cache, the window is as many blocks of BLOCK keys as it holds, one at least.

    Args:
        text, recall: pairs of the cache with the highest scores for text, and for recall.
    """
    plain = {"feature_map": None, "combine": WindowOnly()}
    if not text:
        return MixerConfig(span=SlidingSpan(window_size=window, sinks=sinks), **plain)
    span = TerracedSpan(window_size=BLOCK, blocks=max(1, window // BLOCK), sinks=sinks)
    return MixerConfig(span=span, cache=EvictionCache(size=text + recall, recall_size=recall), **plain)


def head_bytes(mixer: MixerConfig, teacher: TeacherShape, dtype: torch.dtype) -> int:
    """Return the bytes of state of one KV head of a sequence, as `head_mixer` makes it."""
    pair, slots = pair_bytes(teacher, dtype), mixer.span.sinks + mixer.span.context
    if mixer.cache is None:
        return slots * pair
    scored = pair + len(mixer.cache.parts) * accumulation_dtype(dtype).itemsize
    return slots * scored + mixer.cache.size * (scored + POSITION_BYTES)


def pair_bytes(teacher: TeacherShape, dtype: torch.dtype) -> int:
    """Return the bytes of one key and one value of one KV head."""
    return 2 * teacher.head_dim * dtype.itemsize
