"""Colours can be read, in both themes (WCAG 2: 4.5 for text, 3 for lines)."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from linearize.report.svg import COLOURS, LEVELS, SERIES

STYLE = (resources.files("linearize") / "report" / "style.css").read_text(encoding="utf-8")
PAIRS = dict(re.findall(r"--([\w-]+): light-dark\((#\w+, #\w+)\);", STYLE))
THEMES = ("light", "dark")


def of(name: str, theme: str) -> str:
    return PAIRS[name].split(", ")[THEMES.index(theme)]


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_of_a_drawing_has_a_meaning() -> None:
    assert set(COLOURS) <= set(PAIRS)


@pytest.mark.parametrize("theme", THEMES)
def test_text_can_be_read(theme: str) -> None:
    for ground in ("paper", "panel"):
        for name in ("ink", "muted", "link", "win", "loss"):
            assert contrast(of(name, theme), of(ground, theme)) >= 4.5, (name, ground)
    assert contrast(of("ink", theme), of("mark", theme)) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
def test_lines_stand_out_and_labels_in_their_colours_can_be_read(theme: str) -> None:
    for i in range(SERIES):
        assert contrast(of(f"s{i}", theme), of("paper", theme)) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
def test_numbers_can_be_read_on_every_step_of_a_heat_map_and_steps_go_one_way(theme: str) -> None:
    steps = [of(f"h{i}", theme) for i in range(LEVELS)]
    middle = LEVELS // 2
    for i, step in enumerate(steps):
        text = "low-text" if i < middle else "mid-text" if i == middle else "high-text"
        assert contrast(of(text, theme), step) >= 4.5, i
    lightness = [luminance(step) for step in steps]
    assert lightness == sorted(lightness, reverse=theme == "light")
    assert contrast(of("muted", theme), of("empty", theme)) >= 4.5
