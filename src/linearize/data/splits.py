"""Which items are trained on and which are held out: by a seed, and equal items never on both sides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def copies(items: Sequence[Item], key: Callable[[Item], bytes]) -> dict[bytes, list[Item]]:
    """The items by their key, in order; those of one key are copies of each other."""
    groups: dict[bytes, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def split(
    items: Sequence[Item], key: Callable[[Item], bytes], fraction: float, seed: int
) -> tuple[list[Item], list[Item]]:
    """Items to train on and items held out, about `fraction` of all; both have some where there are two keys."""
    groups = copies(items, key)
    goal = max(1, round(fraction * len(items)))
    held_out: set[bytes] = set()
    count = 0
    for name in shuffled(list(groups), f"split {seed}"):
        if count + len(groups[name]) <= goal and len(held_out) + 1 < len(groups):
            held_out.add(name)
            count += len(groups[name])
    # Where every item is repeated more often than the goal, the least repeated one comes nearest to it.
    held_out = held_out or {min(groups, key=lambda name: len(groups[name]))}
    train = [item for name, group in groups.items() if name not in held_out for item in group]
    return train, [item for name, group in groups.items() if name in held_out for item in group]


def without(items: Sequence[Item], excluded: Sequence[Item], key: Callable[[Item], bytes]) -> list[Item]:
    """The items that have no copy among the excluded ones."""
    keys = {key(item) for item in excluded}
    return [item for item in items if key(item) not in keys]


def shuffled(items: Sequence[Item], stream: str) -> list[Item]:
    """In an order that the name of the stream decides: one per purpose, so that no shuffle depends on another one."""
    return random.Random(stream).sample(list(items), len(items))
