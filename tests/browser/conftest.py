"""A browser that can reach nothing, and pages to open in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from linearize.report.page import write_report
from tests.report import sample, task_sample


@dataclass
class Opened:
    """A page under test, and what it should never do."""

    page: Any
    complaints: list[str] = field(default_factory=list)  # console errors, exceptions, dialogs
    requests: list[str] = field(default_factory=list)  # anything but the file itself


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of one run with everything, of two, and of one whose task is not language modelling."""
    folder = tmp_path_factory.mktemp("reports")
    runs = [sample.write_run(folder / "alpha"), sample.write_run(folder / "beta", sample.evaluation(1, shift=0.03))]
    return {
        "one": write_report(runs[:1], folder / "one.html"),
        "two": write_report(runs, folder / "two.html"),
        "task": write_report([task_sample.write_run(folder / "gamma")], folder / "task.html"),
    }


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # here, because only these tests need it

    path = shutil.which("chromium")
    assert path, "no chromium; `make test-browser` installs it"
    with sync_playwright() as playwright:
        # Chromium refuses to run as root with its sandbox, and the pages are our own.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any, files: dict[str, Path]) -> Iterator[Callable[..., Opened]]:
    """Open a report by name; further options are those of the browser's context."""
    contexts = []

    def open_(name: str = "one", width: int = 1200, **options: Any) -> Opened:
        context = chromium.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        context.set_default_timeout(120_000)  # a busy machine is no fault of the page
        contexts.append(context)
        opened = Opened(context.new_page())
        url = files[name].as_uri()
        page = opened.page
        page.on("console", lambda message: opened.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (opened.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: opened.requests.append(request.url) if request.url != url else None)
        page.goto(url)
        return opened

    yield open_
    for context in contexts:
        context.close()
