"""Takes the README's picture of a report: the top of the page about a committed run, as Debian's chromium shows it.

make figures
python scripts/report_screenshot.py experiments/recommended/pycode-5m docs/figures/report.png
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import PIL.Image
from playwright.sync_api import sync_playwright

from linearize.base import UserError
from linearize.report.page import write_report

COLOURS = 64  # of the picture: text on paper needs no more, and the file is a third


def screenshot(page: Path, width: int, height: int) -> PIL.Image.Image:
    """The top of a page, in the light theme, at two pixels per CSS pixel.

    Raises:
        UserError: no chromium.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise UserError("chromium: expected it on the PATH, found none; `make figures` installs it")
    with sync_playwright() as playwright:
        # Chromium refuses to run as root with its sandbox, and the page is our own.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        size = {"width": width, "height": height}
        opened = browser.new_page(viewport=size, device_scale_factor=2, color_scheme="light", offline=True)
        opened.goto(page.as_uri())
        taken = opened.screenshot()
        browser.close()
    return PIL.Image.open(io.BytesIO(taken))


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a folder with evaluation.json")
    parser.add_argument("output", type=Path, help="the PNG")
    parser.add_argument("--width", type=int, default=1200, help="CSS pixels")
    parser.add_argument("--height", type=int, default=955)
    a = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            page = write_report([a.run], Path(folder) / "report.html")
            picture = screenshot(page, a.width, a.height)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    picture.convert("RGB").quantize(COLOURS).save(a.output, optimize=True)


if __name__ == "__main__":
    main()
