"""The report in a real browser: without a network, by keyboard, in both themes, on any width, and on paper."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from tests.browser.conftest import Opened
from tests.report import sample

pytestmark = pytest.mark.browser
Open = Callable[..., Opened]

OPEN_ALL = "document.querySelectorAll('details').forEach(details => details.open = true)"
# Elements that stick out of the window although nothing around them scrolls.
STICKING_OUT = """() => [...document.querySelectorAll('body *')].filter(element => {
    const box = element.getBoundingClientRect();
    const out = box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
    return out && !element.closest('.scroll, pre, .skip');
}).map(element => element.outerHTML.slice(0, 120))"""


def background(page: Any) -> tuple[int, ...]:
    found = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return tuple(map(int, re.findall(r"\d+", found)[:3]))


def is_dark(page: Any) -> bool:
    return sum(background(page)) < 200


def eventually(page: Any, expression: str) -> None:
    """Wait until it holds. Playwright's own wait evaluates strings within the page, which the page's policy forbids."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {expression}")


@pytest.mark.parametrize("name", ["one", "two", "task"])
def test_it_opens_without_complaints_and_asks_for_nothing(open_page: Open, name: str) -> None:
    opened = open_page(name)
    opened.page.evaluate(OPEN_ALL)
    opened.page.wait_for_timeout(100)
    assert opened.complaints == [] and opened.requests == []


# The lowest figure: a task has one difference, which is a figure of one line.
@pytest.mark.parametrize("name, figures, lowest", [("one", 12, 100), ("two", 12, 100), ("task", 5, 80)])
def test_every_figure_is_drawn(open_page: Open, name: str, figures: int, lowest: int) -> None:
    page = open_page(name).page
    assert page.locator("figure svg").count() == figures
    shown = [svg.bounding_box() for svg in page.locator("figure svg").all() if svg.is_visible()]
    assert len(shown) == figures
    assert all(box["width"] >= 300 and box["height"] >= lowest for box in shown)
    texts = page.locator("svg text").first.evaluate("text => getComputedStyle(text).fontFamily")
    assert texts == page.evaluate("getComputedStyle(document.querySelector('nav')).fontFamily")


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_is_the_systems_until_chosen_and_then_remembered(open_page: Open, system: str) -> None:
    page = open_page(color_scheme=system).page
    heat = "() => getComputedStyle(document.querySelector('#fidelity svg path[style*=\"--h11\"]')).fill"
    ink = "() => getComputedStyle(document.querySelector('#fidelity svg text')).fill"
    dark, before = is_dark(page), (page.evaluate(heat), page.evaluate(ink))
    assert dark is (system == "dark")

    button = page.get_by_role("button", name="Light theme" if dark else "Dark theme")
    button.focus()
    page.keyboard.press("Enter")
    assert is_dark(page) is not dark
    after = page.evaluate(heat), page.evaluate(ink)
    assert before[0] != after[0] and before[1] != after[1]
    page.wait_for_timeout(1000)  # chromium writes its storage some time later
    page.reload()
    assert is_dark(page) is not dark
    page.get_by_role("button", name="Dark theme" if dark else "Light theme").click()
    assert is_dark(page) is dark


def test_the_theme_follows_the_system_while_nothing_is_chosen(open_page: Open) -> None:
    page = open_page(color_scheme="light").page
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Light theme").wait_for()  # the page hears of it by an event of its own
    assert is_dark(page)


@pytest.mark.parametrize("name", ["one", "two", "task"])
@pytest.mark.parametrize("width", [320, 400, 768, 1150, 1600])
def test_the_page_never_scrolls_sideways(open_page: Open, name: str, width: int) -> None:
    page = open_page(name, width=width).page
    page.evaluate(OPEN_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(STICKING_OUT) == []


def test_wide_figures_scroll_within_themselves_by_keyboard(open_page: Open) -> None:
    page = open_page(width=400).page
    drawing = page.locator("#quality .drawing").first
    assert drawing.get_attribute("tabindex") == "0"
    drawing.focus()
    page.keyboard.press("ArrowRight")
    eventually(page, "document.querySelector('#quality .drawing').scrollLeft > 0")
    page.set_viewport_size({"width": 1600, "height": 900})
    eventually(page, "!document.querySelector('#quality .drawing').hasAttribute('tabindex')")


def test_the_keyboard_reaches_the_report_the_contents_and_the_numbers(open_page: Open) -> None:
    page = open_page().page
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the report")
    assert skip.evaluate("link => link === document.activeElement")
    assert skip.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    summary = page.locator("#training summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#training details").first.get_attribute("open") is not None
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1


def test_on_paper_everything_is_open_and_light(open_page: Open) -> None:
    page = open_page(color_scheme="dark").page
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert is_dark(page)
    page.emulate_media(media="print")
    assert background(page) == (0xFB, 0xFA, 0xF7)
    for gone in ("nav", ".bar", "summary"):
        assert not page.locator(gone).first.is_visible(), gone
    assert all(box.is_visible() for box in page.locator("details .scroll, details > pre").all())
    page.emulate_media(media="screen")
    assert not page.locator("details .scroll").first.is_visible()
    assert page.pdf().startswith(b"%PDF")


def test_it_can_be_read_without_scripts(open_page: Open) -> None:
    page = open_page(java_script_enabled=False).page
    assert page.locator("figure svg").first.is_visible()
    assert not page.locator("#theme").is_visible()


def test_a_picture_of_a_report(tmp_path: Path) -> None:
    """As `make figures` takes the README's."""
    run, picture = sample.write_run(tmp_path / "run"), tmp_path / "report.png"
    script = Path(__file__).parents[2] / "scripts" / "report_screenshot.py"
    subprocess.run([sys.executable, script, run, picture, "--width", "600", "--height", "300"], check=True)
    with PIL.Image.open(picture) as taken:
        assert taken.size == (1200, 600)
        assert len(taken.convert("L").getcolors() or []) > 10  # something is drawn
