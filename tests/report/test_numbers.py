"""Numbers as people read them."""

from __future__ import annotations

import pytest

from linearize.evaluation.intervals import Interval
from linearize.report import numbers
from linearize.report.numbers import DASH, MINUS, THIN


@pytest.mark.parametrize(
    "value, text",
    [
        (2.5309, "2.531"),
        (-0.0056, f"{MINUS}0.006"),
        (0.0, "0.000"),
        (-5.7e-05, f"{MINUS}0.00006"),
        (0.0004, "0.0004"),
        (0.00095, "0.001"),
        (1234.5678, "1,234.568"),
        (None, DASH),
        (float("nan"), DASH),
    ],
)
def test_a_number_is_never_rounded_to_a_zero_that_it_is_not(value: float | None, text: str) -> None:
    assert numbers.number(value) == text


def test_signs_intervals_and_shares() -> None:
    found = Interval(0.087, 0.054, 0.122)
    assert numbers.with_interval(found) == "0.087 [0.054, 0.122]"
    assert numbers.with_interval(found, sign=True) == "+0.087 [+0.054, +0.122]"
    assert numbers.with_interval(None) == DASH
    assert numbers.percent(found) == f"9{THIN}% [5, 12]"
    assert numbers.percent(Interval(0.8072, 0.8042, 0.8101)) == f"80.7{THIN}% [80.4, 81.0]"
    assert numbers.signed(0.0) == "0.000"


def test_a_share_that_would_be_rounded_to_nothing_is_less_than_something() -> None:
    assert [numbers.share(x) for x in (0.0, 0.004, 0.006, 1.0)] == [f"{x}{THIN}%" for x in ("0", "<1", "1", "100")]
    assert numbers.share(0.0004, 1) == f"<0.1{THIN}%"


def test_sizes_times_and_cells() -> None:
    assert numbers.scaled(6291456) == f"6.29{THIN}M"
    assert [numbers.scaled(x) for x in (999, 0)] == ["999", "0"]
    assert numbers.memory_size(6291456) == f"6{THIN}MiB" and numbers.memory_size(None) == DASH
    assert numbers.scaled(0.5) == "0.5"
    assert [numbers.scaled(x) for x in (999.7, 999_700)] == [f"1{THIN}k", f"1{THIN}M"]
    assert [numbers.scaled(x, digits=2) for x in (123, 345_000)] == ["120", f"340{THIN}k"]
    assert numbers.short(999.7) == "1k"
    assert numbers.scaled(-1500) == f"{MINUS}1.5{THIN}k"
    assert [numbers.milliseconds(x) for x in (0.0046, 0.0811, 1.2345)] == ["4.60", "81.1", "1,234"]
    assert [numbers.duration(x) for x in (48, 1200, 9000)] == [f"48{THIN}s", f"20{THIN}min", f"2.5{THIN}h"]
    assert [numbers.loss(x) for x in (2.5309, 630.04, 31500.2)] == ["2.531", "630.0", "31,500"]
    assert [numbers.short(x) for x in (0.0, 0.004, 0.5, 12.3, 31500, None)] == [
        "0.00",
        "0.00",
        "0.50",
        "12",
        "31.5k",
        DASH,
    ]
    assert numbers.plain([0, 1]) == "0, 1" and numbers.plain([]) == "none" and numbers.plain(True) == "yes"
