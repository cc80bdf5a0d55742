"""Split items into training, validation and test; equal items stay together.

By chance, but the same whatever the seed of a run is: students of several seeds are measured on the same items.
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
"""Documents or examples that a 95 % interval needs, to cover what it says: see `evaluation.intervals.resamples`."""


Key = TypeVar("Key", bound=Hashable)


def connected(items: Iterable[Item], keys: Callable[[Item], Iterable[bytes]]) -> Callable[[Item], bytes]:
    """Return a key of these items that is equal for two that share one of their keys, or that others connect so."""
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
    """The items by their key, in order; those of one key are copies of each other."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def split(items: Sequence[Item], key: Callable[[Item], bytes], fraction: float) -> tuple[list[Item], list[Item]]:
    """Items to train on and items held out, about `fraction` of all; both have some where there are two keys."""
    groups = copies(items, key)
    goal = max(1, round(fraction * len(items)))
    held_out: set[bytes] = set()
    count = 0
    for name in shuffled(list(groups), "split 0"):
        if count + len(groups[name]) <= goal and len(held_out) + 1 < len(groups):
            held_out.add(name)
            count += len(groups[name])
    # Where every item is repeated more often than the goal, the least repeated one comes nearest to it.
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
    """The held-out items that choose checkpoints and drive schedules, and those that are measured once at the end.

    Both in a shuffled order. The first side has `wanted` by their sizes together, but no more than a
    quarter of the items, and leaves `ENOUGH` to the other where there are so many.
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
    """Check that there are enough items to test on.

    Raises:
        UserError: fewer than `ENOUGH`.
    """
    if found < ENOUGH:
        raise UserError(
            f"data: expected at least {ENOUGH} held-out {what} to test on, beside those that choose checkpoints, found "
            f"{found}; {advice}"
        )


def require_enough_of(test: Sequence[Item], items: Sequence[Item], key: Callable[[Item], bytes], what: str) -> None:
    """Check that there are enough items to test on; the message says how many of all `items` are copies.

    Raises:
        UserError: fewer than `ENOUGH`.
    """
    if len(test) >= ENOUGH:
        return
    different = len(copies(items, key))
    advice = f"{different:,} of {len(items):,} in all are different, and copies stay together; {MORE_HELD_OUT}"
    require_enough(len(test), what, MORE_HELD_OUT if different == len(items) else advice)


def spread(owners: Sequence[int], count: int, stream: str) -> list[int]:
    """The places of `count` items, ascending: of each owner as many as of any other, or all that it has."""
    taken: Counter[int] = Counter()
    turns = []
    for place in shuffled(range(len(owners)), stream):
        turns.append((taken[owners[place]], len(turns), place))
        taken[owners[place]] += 1
    return sorted(place for *_, place in sorted(turns)[:count])


def without(items: Sequence[Item], excluded: Sequence[Item], key: Callable[[Item], bytes]) -> list[Item]:
    """The items that have no copy among the excluded ones."""
    keys = {key(item) for item in excluded}
    return [item for item in items if key(item) not in keys]


def shuffled(items: Sequence[Item], stream: str) -> list[Item]:
    """In an order that the name of the stream decides: one per purpose, so that no shuffle depends on another one."""
    return random.Random(stream).sample(list(items), len(items))
