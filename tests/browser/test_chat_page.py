"""The page of `linearize serve --ui` in a real browser: it talks to a real server over the bundled models."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from linearize.demo.corpus import teacher_path
from tests.browser.conftest import Opened
from tests.browser.test_report_page import STICKING_OUT, eventually, is_dark
from tests.serving.server import Server, bundled_student, chatting_student, serving

pytestmark = pytest.mark.browser
Open = Callable[..., Opened]

TEXT = "def read_config(path):"
DASH = "\N{EN DASH}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = bundled_student(tmp_path_factory.mktemp("served") / "student")
    with serving(folder, "--ui", "--teacher", teacher_path()) as running:
        yield running


@pytest.fixture
def open_chat(chromium: Any, server: Server) -> Iterator[Open]:
    """Open the page of a server; further options are those of the browser's context."""
    contexts = []

    def open_(at: Server = server, width: int = 1200, **options: Any) -> Opened:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(120_000)
        contexts.append(context)
        opened = Opened(context.new_page())
        page = opened.page
        page.on("console", lambda message: opened.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (opened.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(at.address)
        page.locator("#ask:visible, #key:visible").first.wait_for()
        return opened

    yield open_
    for context in contexts:
        context.close()


def ask(page: Any, text: str, *, tokens: int = 8) -> None:
    """Send a text by keyboard, and wait until all have answered."""
    begin(page, text, tokens=tokens)
    eventually(page, "document.querySelector('#status').textContent.startsWith('Answered')")


def begin(page: Any, text: str, *, tokens: int) -> None:
    page.get_by_label("New tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill("0")
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def answer(server: Server, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.address + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as found:
        return json.load(found)


def size(num_bytes: float) -> str:
    unit, name = (2**20, "MiB") if num_bytes >= 2**20 else (2**10, "KiB")
    number = num_bytes / unit
    return f"{number:.0f} {name}" if number >= 999.5 else f"{number:#.3g} {name}".replace(". ", " ")


def test_sizes_have_three_digits_or_four(open_chat: Open) -> None:
    page = open_chat().page
    for num_bytes in (
        1023,
        1024,
        999.7 * 1024,
        1000 * 1024,
        1008 * 1024,
        1023.4 * 1024,
        2**20,
        999 * 2**20,
        1010.6 * 2**20,
    ):
        shown = page.evaluate(f"size({num_bytes})")
        assert shown == ("1023 B" if num_bytes < 1024 else size(num_bytes)) and "e" not in shown


def test_both_continue_a_text_and_what_they_hold_is_told(open_chat: Open, server: Server) -> None:
    opened = open_chat()
    page = opened.page
    about = answer(server, "/page.json")
    assert page.locator("#text").evaluate("text => text === document.activeElement")
    begun = [box.inner_text() for box in page.locator("dd").all()]
    assert begun == ["0", size(about["models"][0]["constant_bytes"]), DASH, "0", "0 B", DASH]

    ask(page, TEXT)
    ask(page, "\nimport os")  # each goes on from its own answer
    boxes = page.locator(".model").all()
    assert len(boxes) == 2
    for box, model in zip(boxes, about["models"], strict=True):
        prompt, said = TEXT, []
        for more in ("\nimport os", None):
            fields = {"model": model["name"], "prompt": prompt, "max_tokens": 8, "temperature": 0}
            found = answer(server, "/v1/completions", fields)
            said.append(found["choices"][0]["text"])
            prompt += said[-1] + (more or "")
        shown = [line.inner_text() for line in box.locator(".answer").all()]
        assert [re.sub(r"\s+", " ", text).strip() for text in shown] == [
            re.sub(r"\s+", " ", text).strip() for text in said
        ]
        total = found["usage"]["total_tokens"]
        held = model["constant_bytes"] + total * model["bytes_per_token"]
        tokens, num_bytes, speed = (number.inner_text() for number in box.locator("dd").all())
        assert (tokens, num_bytes) == (str(total), size(held)) and re.fullmatch(r"[\d.]+ tokens/s", speed)
        label = page.locator("#chart").get_attribute("aria-label")
        assert f"{model['role']}: {size(held)} at {total} tokens" in label

    # The student's line is flat, the teacher's climbs.
    heights = [
        [float(number) for number in re.findall(r",([\d.]+)", path.get_attribute("d"))]
        for path in page.locator("#chart .line").all()
    ]
    assert heights[0][0] == heights[0][1] and heights[1][0] > heights[1][1]
    assert "computed as by linearize plan" in page.locator("#caption").inner_text()
    assert opened.complaints == [] and all(url.startswith(server.address) for url in opened.requests)

    page.get_by_role("button", name="Start again").click()
    assert [box.inner_text() for box in page.locator("dd").all()] == begun
    assert page.locator(".talk p").count() == 0


def test_a_chat_takes_turns(open_chat: Open, tmp_path: Path) -> None:
    with serving(chatting_student(tmp_path / "student"), "--ui") as server:
        opened = open_chat(server)
        page = opened.page
        ask(page, "hello")
        assert page.locator(".model").count() == 1  # no teacher is known
        assert "No teacher is served" in page.locator("#about").inner_text()
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
        turns = [{"role": "user", "content": "hello"}]
        first = answer(server, "/v1/chat/completions", fields | {"messages": turns})
        ask(page, "again")
        turns += [first["choices"][0]["message"], {"role": "user", "content": "again"}]
        second = answer(server, "/v1/chat/completions", fields | {"messages": turns})
        assert page.locator("dd").first.inner_text() == str(second["usage"]["total_tokens"])
        assert opened.complaints == []


def test_escape_stops(open_chat: Open) -> None:
    page = open_chat().page
    begin(page, TEXT, tokens=4000)
    eventually(page, "parseInt(document.querySelector('dd').textContent) > 12")
    assert page.get_by_role("button", name="Send").is_disabled()
    page.keyboard.press("Escape")
    eventually(page, "document.querySelector('#status').textContent === 'Stopped.'")
    assert page.get_by_role("button", name="Stop").is_disabled()
    assert page.locator("#text").evaluate("text => text === document.activeElement")
    ask(page, "x")  # the server is free again
    page.get_by_label("New tokens").fill("4000")
    page.locator("#text").fill("y")
    page.locator("#text").press("Enter")
    eventually(page, "!document.querySelector('#stop').disabled")
    page.get_by_role("button", name="Stop").click()
    eventually(page, "document.querySelector('#status').textContent === 'Stopped.'")


def test_what_is_typed_and_answered_is_text(open_chat: Open) -> None:
    opened = open_chat()
    page = opened.page
    tags = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;<b>"
    page.locator("#text").fill("one")
    page.locator("#text").press("Shift+Enter")
    page.locator("#text").press_sequentially("two")
    assert page.locator("#text").input_value() == "one\ntwo"
    ask(page, tags)
    assert tags in page.locator(".asked").first.inner_text()
    assert page.locator(".talk img, .talk script, .talk b").count() == 0 and opened.complaints == []


def test_errors_are_told(open_chat: Open) -> None:
    page = open_chat().page
    page.evaluate("columns[0].model.name = 'gone'")
    begin(page, TEXT, tokens=2)
    eventually(page, "document.querySelector('#status').classList.contains('wrong')")
    assert "model: expected" in page.locator("#status").inner_text()


@pytest.mark.parametrize("width", [320, 400, 768, 1600])
def test_it_never_scrolls_sideways(open_chat: Open, width: int) -> None:
    page = open_chat(width=width).page
    ask(page, "x" * 200, tokens=2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(STICKING_OUT) == []
    box = page.locator("#text").bounding_box()
    assert box["y"] + box["height"] <= 900  # what one types into is in sight


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_is_the_systems(open_chat: Open, system: str) -> None:
    assert is_dark(open_chat(color_scheme=system).page) is (system == "dark")


def test_the_keyboard_goes_through_it_in_order_and_all_has_a_name(open_chat: Open) -> None:
    page = open_chat().page
    for name in ("Send", "Start again", "New tokens", "Temperature"):
        page.keyboard.press("Tab")
        focused = page.evaluate("(e => e.labels?.[0]?.innerText ?? e.innerText)(document.activeElement)")
        assert name in focused
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.get_by_role("textbox", name="Text to continue").count() == 1
    for role, name in (("region", "The student"), ("log", "What the teacher was asked"), ("img", "Bytes of cache")):
        assert page.get_by_role(role, name=name).count() == 1
    assert page.get_by_role("status").count() == 1


def test_a_key_is_asked_for(open_chat: Open, tmp_path: Path) -> None:
    with serving(bundled_student(tmp_path / "student"), "--ui", "--api-key", "s3cret") as server:
        page = open_chat(server).page
        for key in ("wrong", "s3cret"):
            page.get_by_label("The server's key").fill(key)
            assert not page.locator("#ask").is_visible()
            page.keyboard.press("Enter")
        page.locator("#ask").wait_for()
        assert not page.locator("#key").is_visible()
        ask(page, TEXT, tokens=2)
