"""A thousand requests by a hundred clients at once, of which some go away before they have their answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

CLIENTS, REQUESTS, TOKENS = 100, 1000, 5
PROMPTS = [
    f"class Reader{number}:\n    def value_{number}(self):\n        return {number}" for number in range(CLIENTS)
]
ALLOWED = 50 * 2**20  # bytes that a server may have grown by: what it logs and counts, not what it holds for a request


def answers(api: Any, asked: Callable[..., dict[str, Any]]) -> list[str]:
    """What each prompt is continued with, one request at a time."""
    found = [_whole(api, asked(prompt=prompt, max_tokens=TOKENS)) for prompt in PROMPTS]
    assert len(set(found)) > 20  # a mixed answer would be seen
    return found


def check_many_clients(
    api: Any, asked: Callable[..., dict[str, Any]], expected: Sequence[str], resident_bytes: Callable[[], int]
) -> None:
    """Every client has its own answer, and the server's memory does not grow with the requests it has had."""

    def one(number: int) -> str:
        """Whole, in pieces, or given up before or after the first piece."""
        kind, place = number % 5, number % len(PROMPTS)
        asking = asked(prompt=PROMPTS[place], max_tokens=TOKENS)
        if kind < 3:
            assert _whole(api, asking) == expected[place]
            return "whole"
        with api.completions.create(**asking, stream=True) as stream:
            if kind == 3:
                assert "".join(piece.choices[0].text for piece in stream) == expected[place]
                return "pieces"
            if number % 2:
                next(iter(stream))
        return "given up"

    first = REQUESTS // 5
    with ThreadPoolExecutor(CLIENTS) as clients:
        assert set(clients.map(one, range(first))) == {"whole", "pieces", "given up"}
        before = resident_bytes()
        done = list(clients.map(one, range(first, REQUESTS)))
    shares = {kind: done.count(kind) / len(done) for kind in ("whole", "pieces", "given up")}
    assert shares == pytest.approx({"whole": 0.6, "pieces": 0.2, "given up": 0.2})
    assert resident_bytes() - before < ALLOWED


def resident_bytes(process: int) -> int:
    """Memory of a process and of those that it has started, as Linux counts it."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident_bytes, started(process)))


def started(process: int) -> list[int]:
    """The processes that one has started and that run."""
    return [int(its) for path in Path(f"/proc/{process}/task").glob("*/children") for its in path.read_text().split()]


def _whole(api: Any, asking: dict[str, Any]) -> str:
    return api.completions.create(**asking).choices[0].text
