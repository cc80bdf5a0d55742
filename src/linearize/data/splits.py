"""Split items into training, validation and test; equal items stay together.

The split is random but does not depend on the run's seed: students of several seeds are measured on the same items.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from linearize.base import UserError

Item = TypeVar("Item")

ENOUGH = 16
"""The least documents or examples for a reliable 95 % interval: see `evaluation.intervals.resamples`."""


Key = TypeVar("Key", bound=Hashable)


def connected(items: Iterable[Item], keys: Callable[[Item], Iterable[bytes]]) -> Callable[[Item], bytes]:
    """Return a key that is equal for items that share one of their keys, directly or through other items."""
    above: dict[bytes, bytes] = {}

    def top(key: bytes) -> bytes:
        while above.setdefault(key, key) != key:
            above[key] = key = above[above[key]]
        return key

    for item in items:
        first, *others = keys(item)
        for other in others:
            above[top(other)] = top(first)
    return lambda item: top(next(iter(keys(item))))


def copies(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group the items by their key, in order; items with one key are copies of each other."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def split(items: Sequence[Item], key: Callable[[Item], bytes], fraction: float) -> tuple[list[Item], list[Item]]:
    """Return training items and held-out items, about `fraction` of all; with two keys, neither is empty."""
    groups = copies(items, key)
    goal = max(1, round(fraction * len(items)))
    held_out: set[bytes] = set()
    count = 0
    for name in shuffled(list(groups), "split 0"):
        if count + len(groups[name]) <= goal and len(held_out) + 1 < len(groups):
            held_out.add(name)
            count += len(groups[name])
    # If every item has more copies than the goal, the one with the fewest copies is held out.
    held_out = held_out or {min(groups, key=lambda name: len(groups[name]))}
    train = [item for name, group in groups.items() if name not in held_out for item in group]
    return train, [item for name, group in groups.items() if name in held_out for item in group]


def validation_and_test(
    held_out: Sequence[Item],
    key: Callable[[Item], bytes],
    *,
    size: Callable[[Item], int],
    wanted: int,
) -> tuple[list[Item], list[Item]]:
    """Divide held-out items into those that choose checkpoints and drive schedules, and the test, both shuffled.

    The sizes of the first part sum to `wanted`, but it has at most a quarter of the items, and leaves `ENOUGH` items to
    the test if there are as many.
    """
    items = shuffled(held_out, "validation 0")
    most = max(1, min(len(items) // 4, len(items) - ENOUGH))
    count = min(most, 1 + bisect_left(list(accumulate(map(size, items))), wanted))
    return items[:count], without(items[count:], items[:count], key)


MORE_HELD_OUT = (
    "use more data (data.max_tokens ends the reading), hold out more of it (data.validation_fraction), or set "
    "data.validation_dataset"
)


def require_enough(found: int, what: str, advice: str = MORE_HELD_OUT) -> None:
    """Raise UserError if there are fewer than `ENOUGH` test items."""
    if found < ENOUGH:
        raise UserError(
            f"data: expected at least {ENOUGH} held-out {what} to test on, besides those that choose checkpoints, "
            f"found {found}; {advice}"
        )


def require_enough_of(test: Sequence[Item], items: Sequence[Item], key: Callable[[Item], bytes], what: str) -> None:
    """Raise UserError if there are fewer than `ENOUGH` test items; the message counts copies among all `items`."""
    if len(test) >= ENOUGH:
        return
    different = len(copies(items, key))
    advice = f"{different:,} of {len(items):,} in all are different, and copies stay together; {MORE_HELD_OUT}"
    require_enough(len(test), what, MORE_HELD_OUT if different == len(items) else advice)


def spread(owners: Sequence[int], count: int, stream: str) -> list[int]:
    """Return indices of `count` items, ascending: equally many of each owner, or all that it has."""
    taken: Counter[int] = Counter()
    turns = []
    for place in shuffled(range(len(owners)), stream):
        turns.append((taken[owners[place]], len(turns), place))
        taken[owners[place]] += 1
    return sorted(place for *_, place in sorted(turns)[:count])


def without(items: Sequence[Item], excluded: Sequence[Item], key: Callable[[Item], bytes]) -> list[Item]:
    """Return the items that have no copy among the excluded ones."""
    keys = {key(item) for item in excluded}
    return [item for item in items if key(item) not in keys]


def shuffled(items: Sequence[Item], stream: str) -> list[Item]:
    """Shuffle items by the name of the stream: one per purpose, so that shuffles do not depend on each other."""
    return random.Random(stream).sample(list(items), len(items))
