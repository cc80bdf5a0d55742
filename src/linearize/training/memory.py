"""Per-head KV budget allocation as data: the budget in bytes, and what one KV head can keep for how many bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

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
SHORTEST = 16  # share of the reference length that the window of a layer has at least


class MemoryConfig(Config):
    """A KV budget: the bytes of one sequence's state, all layers together, and what they are allocated to.

    Either `bytes`, or the `fraction` of the teacher's cache at `reference_length` tokens. With `per: kv_head`, every KV
    head has sinks, a window and a KV cache with eviction, and the state does not grow. With `per: layer`, some layers
    keep full softmax attention, whose cache grows, and the others have one window; the bytes are those at
    `reference_length` tokens.
    """

    per: Literal["kv_head", "layer"] = Field(default="kv_head", description="what the budget is allocated to")

    bytes: PositiveInt | None = Field(default=None, description="of one sequence's state, all layers together")
    fraction: float | None = Field(
        default=None, gt=0, le=1, description="of the teacher's cache at `reference_length` tokens"
    )
    reference_length: PositiveInt = Field(default=1024, description="tokens")
    sinks: int = Field(default=1, ge=0, description="first tokens of a document that every head keeps")
    learned_sink: bool = Field(
        default=False, description="with per `layer`: windows also have a learned sink, as stock engines know it"
    )
    recall_fraction: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="with per `kv_head`: of the bytes at most, for pairs kept for recall where heads need it; the rest "
        "is divided equally",
    )

    @model_validator(mode="after")
    def _for_layers(self) -> MemoryConfig:
        if self.learned_sink and self.per != "layer":
            raise ValueError("learned_sink is a part of windows with per `layer`: set memory.per=layer, or it to false")
        return self

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


def layer_mixer(window: int, sinks: int, *, learned_sink: bool) -> MixerConfig:
    """Return the mixer of a layer with one window."""
    mixer = head_mixer(window, 0, sinks)
    return mixer.model_copy(update={"combine": WindowOnly(learned_sink=learned_sink)})


def layer_sizes(memory: MemoryConfig, teacher: TeacherShape, layers: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many layers are full and how many tokens the windows of the others have.

    As many layers are full as the budget allows beside windows of a SHORTEST of the reference length. The windows take
    what is left. At least one layer has a window.

    Args:
        layers: how many can be converted.
    """
    budget, most = memory.budget(teacher, dtype), memory.reference_length

    def held(full: int, window: int) -> int:
        return layers_bytes(memory, teacher, full, layers - full, window, dtype)

    shortest = max(1, most // SHORTEST)
    full = largest(lambda count: held(count, shortest) <= budget, layers - 1)
    return full, max(1, largest(lambda window: held(full, window) <= budget, most))


def layers_bytes(
    memory: MemoryConfig, teacher: TeacherShape, full: int, windowed: int, window: int, dtype: torch.dtype
) -> int:
    """Return the bytes that layers hold of a sequence of `reference_length` tokens."""
    whole = head_bytes(head_mixer(memory.reference_length, 0, 0), teacher, dtype)
    part = head_bytes(head_mixer(window, 0, memory.sinks), teacher, dtype)
    return teacher.num_kv_heads * (full * whole + windowed * part)


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


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, 0 where none does; whatever is less fits, too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
