"""Drawings that live inside a page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from linearize.evaluation.intervals import Interval
from linearize.report.figures import DotPanel, Dots, Line, LinePanel, curves, dots
from linearize.report.heatmaps import Panel, Scale, heatmaps
from linearize.report.svg import COLOURS


def line(key: str = "a", name: str = "one", label: str = "words") -> str:
    panel = LinePanel("title", [Line(name, [1, 2], [1.0, 2.0]), Line("two", [1, 2], [2.0, 3.0])], "x")
    return str(curves(key, label, [panel]))


def test_the_same_drawing_is_the_same_bytes() -> None:
    assert line() == line()


def test_ids_are_the_drawings_own_and_links_lead_to_them() -> None:
    drawings = [line("a"), line("b")]
    ids = [set(re.findall(r' id="([^"]+)"', drawing)) for drawing in drawings]
    assert ids[0] and ids[1] and not ids[0] & ids[1]
    for drawing, own in zip(drawings, ids, strict=True):
        links = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', drawing))
        assert {a or b for a, b in links} == own


def test_colours_are_the_pages_and_text_is_text() -> None:
    drawing = line()
    assert "#" not in re.sub(r'(href="|url\()#', "", drawing), "a colour of its own"
    names = set(re.findall(r"var\(--([\w-]+)\)", drawing))
    assert {"ink", "rule", "s0"} <= names <= set(COLOURS)
    assert ">title</text>" in drawing
    assert "font-family" not in drawing and "<style" not in drawing and "metadata" not in drawing


def test_a_label_and_names_are_escaped_and_a_dollar_is_a_dollar() -> None:
    drawing = line(name="$a$ <b>&", label='<"&>')
    root = ElementTree.fromstring(drawing)
    assert root.get("aria-label") == '<"&>' and root.get("role") == "img"
    assert "$a$ <b>&" in [element.text for element in root.iter("text")]
    assert "<b>" not in drawing


def test_scripts_that_the_font_lacks_make_no_noise() -> None:
    assert "\u4f60\u597d" in line(name="\u4f60\u597d")


def limits(panel: DotPanel) -> str:
    return str(dots("a", "b", ["x"] * len(panel.series[0].values), [panel]))


def test_what_is_far_off_is_an_arrow_with_its_number() -> None:
    near = [Interval(x, x - 0.1, x + 0.1) for x in (2.3, 2.4, 2.5)]
    far = Interval(6.31, 6.2, 6.4)
    assert "6.31 \u2192" in limits(DotPanel("", [Dots("a", [*near, far])], cut=True))
    assert "6.31 \u2192" in limits(DotPanel("", [Dots("a", [*near, far]), Dots("b", [*near, far])], cut=True))
    assert "\u2192" not in limits(DotPanel("", [Dots("a", [*near, far])]))
    assert "\u2192" not in limits(DotPanel("", [Dots("a", [*near, None])], cut=True))


def test_heat_maps_have_levels_numbers_and_blanks() -> None:
    scale = Scale.even("share", 0.0, 1.0)
    panel = Panel("p", [[0.0, 0.5, 1.0], [None, float("nan"), 0.999]], ["0", "1"], ["a", "b", "c"])
    drawing = str(heatmaps("a", "b", [panel], scale, row_title="layer", column_title="head"))
    assert [scale.level(x) for x in (-1.0, 0.0, 0.0834, 0.5, 1.0, 2.0)] == [0, 0, 1, 6, 11, 11]
    assert scale.level(None) is None and scale.level(float("nan")) is None
    assert "not measured" in drawing and ">0.50</text>" in drawing and "var(--mid-text)" in drawing
    assert drawing.count("var(--empty)") == 3, "both blanks, and the legend's"


def test_scales_fit_their_numbers() -> None:
    ratios = Scale.fitting("error", [0.01, 0.1, 10.0])
    assert ratios.edges[0] == pytest.approx(0.01) and ratios.edges[6] == pytest.approx(10**-0.5)
    assert "logarithmic" in ratios.title
    assert Scale.fitting("error", [0.0, 1.2]).edges[-1] == pytest.approx(1.2)
    tiny = Scale.fitting("error", [-1e-9, 1e-8, 0.5])
    assert tiny.edges[0] == pytest.approx(0.0005) and tiny.level(-1e-9) == 0
    assert Scale.fitting("nothing", []).edges[-1] == 1.0
    assert Scale.even("same", 2.0, 2.0).edges[-1] == 3.0


def test_a_title_that_would_run_into_the_next_panel_is_cut_from_the_front() -> None:
    panels = [Panel(f"{'long ' * 40}{name}", [[0.5] * 4], ["0"], ["a", "b", "c", "d"]) for name in ("one", "two")]
    drawing = str(heatmaps("a", "b", panels, Scale.even("s", 0.0, 1.0), row_title="r", column_title="c"))
    titles = re.findall(r">([^<]*long[^<]*|one|two)</text>", drawing)
    assert [title[0] == "\u2026" for title in titles] == 2 * [True, False, False], "three lines of each title"
    assert [title[-3:] for title in titles[2::3]] == ["one", "two"] and all(len(title) <= 30 for title in titles)


def test_a_title_and_a_legend_that_are_too_long_have_several_lines() -> None:
    panel = Panel("window only, untrained", [[0.1, 0.5]], ["0"], ["a", "b"])
    scale = Scale.fitting("attention weight", [0.001, 0.5])
    drawing = str(heatmaps("a", "b", [panel], scale, row_title="r", column_title="c"))
    lines = re.findall(r">([^<]+)</text>", drawing)
    for words in ("window only, untrained", "attention weight (logarithmic)"):
        assert words not in lines and set(words.split()) <= {word for line in lines for word in line.split()}
