"""KV budget allocation: the budget in bytes, and the bytes of windows and caches."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from linearize.base import UserError
from linearize.configs.memory import MemoryConfig
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import EvictionCache, WindowOnly
from linearize.configs.spans import SlidingSpan, TerracedSpan
from linearize.hf.teacher import TeacherShape
from linearize.ops.partial import accumulation_dtype

BLOCK = 8  # keys that leave the window of a KV cache with eviction at a time
POSITION_BYTES = 8  # bytes of a cached pair's position, int64
SHORTEST = 16  # the window of a layer has at least this fraction (1 / SHORTEST) of the reference length


def budget_bytes(memory: MemoryConfig, teacher: TeacherShape, dtype: torch.dtype) -> int:
    """Return the budget in bytes of the state of one sequence."""
    if memory.bytes is not None:
        return memory.bytes
    assert memory.fraction is not None
    converted = teacher.num_layers - len(teacher.sliding_layers)
    pairs = memory.reference_length * converted * teacher.num_kv_heads
    return int(memory.fraction * pairs * pair_bytes(teacher, dtype))


def require_room(memory: MemoryConfig, teacher: TeacherShape, layers: int, dtype: torch.dtype) -> None:
    """Raise UserError if the budget is less than the smallest window in every KV head takes.

    Args:
        layers: number of converted layers.
    """
    smallest = layers * teacher.num_kv_heads * head_bytes(head_mixer(1, 0, memory.sinks), teacher, dtype)
    if (budget := budget_bytes(memory, teacher, dtype)) < smallest:
        fewer = ", or fewer memory.sinks" if memory.sinks else ""
        raise UserError(
            f"memory: expected at least {smallest:,} bytes, with which every KV head has its sinks and its own key, "
            f"found {budget:,}; {_enough(memory, smallest, teacher, dtype)}{fewer}"
        )


def _enough(memory: MemoryConfig, smallest: int, teacher: TeacherShape, dtype: torch.dtype) -> str:
    """Return advice that names a sufficient value of the budget for `smallest` bytes."""
    cache = budget_bytes(memory.model_copy(update={"bytes": None, "fraction": 1.0}), teacher, dtype)
    if memory.fraction is None or smallest > cache:
        null = "" if memory.fraction is None else "memory.fraction=null and "
        return f"set {null}memory.bytes to at least {smallest}"
    digits = 1 - math.floor(math.log10(smallest / cache))  # two that count
    steps = math.ceil(smallest / cache * 10**digits)
    while budget_bytes(memory.model_copy(update={"fraction": steps / 10**digits}), teacher, dtype) < smallest:
        steps += 1  # a product of floats is cut to whole bytes
    return f"set memory.fraction to at least {steps / 10**digits:g}"


def head_mixer(window: int, text: int, sinks: int, recall: int = 0) -> MixerConfig:
    """Return the mixer of a KV head with a window, sinks, and a KV cache with eviction (none if `text` is 0).

    With a cache, the window consists of whole blocks of BLOCK keys, at least one.

    Args:
        text, recall: sizes of the cache's parts for text and for recall, in pairs.
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

    As many layers are full as the budget allows if the others have windows of 1 / SHORTEST of the reference length. The
    windows then get the rest of the budget. At least one layer has a window.

    Args:
        layers: number of layers that can be converted.
    """
    budget, most = budget_bytes(memory, teacher, dtype), memory.reference_length

    def held(full: int, window: int) -> int:
        return layers_bytes(memory, teacher, full, layers - full, window, dtype)

    shortest = max(1, most // SHORTEST)
    full = largest(lambda count: held(count, shortest) <= budget, layers - 1)
    return full, max(1, largest(lambda window: held(full, window) <= budget, most))


def layers_bytes(
    memory: MemoryConfig, teacher: TeacherShape, full: int, windowed: int, window: int, dtype: torch.dtype
) -> int:
    """Return the bytes of all these layers for a sequence of `reference_length` tokens."""
    whole = head_bytes(head_mixer(memory.reference_length, 0, 0), teacher, dtype)
    part = head_bytes(head_mixer(window, 0, memory.sinks), teacher, dtype)
    return teacher.num_kv_heads * (full * whole + windowed * part)


def head_bytes(mixer: MixerConfig, teacher: TeacherShape, dtype: torch.dtype) -> int:
    """Return the bytes of state of one KV head with a mixer of `head_mixer`, for one sequence."""
    pair, slots = pair_bytes(teacher, dtype), mixer.span.sinks + mixer.span.context
    if mixer.cache is None:
        return slots * pair
    scored = pair + len(mixer.cache.parts) * accumulation_dtype(dtype).itemsize
    return slots * scored + mixer.cache.size * (scored + POSITION_BYTES)


def pair_bytes(teacher: TeacherShape, dtype: torch.dtype) -> int:
    """Return the bytes of one key and one value of one KV head."""
    return 2 * teacher.head_dim * dtype.itemsize


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, or 0; all smaller numbers must fit too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
