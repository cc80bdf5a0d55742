"""Seconds of calls that take turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from linearize.evaluation.speed import now

Name = TypeVar("Name", bound=Hashable)


def seconds_in_turns(
    calls: Mapping[Name, Callable[[], object]], repeats: int, advance: Callable[[], object] = lambda: None
) -> dict[Name, list[float]]:
    """Seconds of each call, `repeats` times; one uncounted round first. `advance` is called after every call.

    The calls take turns, in alternating order, so that a machine that slows down slows all of them, and the numbers of
    one round can be divided by each other.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    turns = (list(calls), list(calls)[::-1])
    for repeat in range(repeats + 1):
        for name in turns[repeat % 2]:
            start = now()
            calls[name]()
            took = now() - start
            if repeat > 0:
                seconds[name].append(took)
            advance()
    return seconds
