"""Takes the picture of the chat page in docs/serving.md: a run's student and its teacher, after some tokens.

linearize demo --output-dir demo-output
linearize serve demo-output --ui --teacher src/linearize/demo/teacher
python scripts/chat_screenshot.py http://127.0.0.1:8000 docs/figures/serve.png
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from pathlib import Path

import PIL.Image
from playwright.sync_api import sync_playwright

COLOURS = 64  # of the picture: text on paper needs no more, and the file is a third
PROMPT = "def read_config(path):\n"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of a running `linearize serve --ui`")
    parser.add_argument("output", type=Path, help="the PNG")
    parser.add_argument("--tokens", type=int, default=200, help="that each model generates")
    a = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.stderr.write("error: chromium: expected it on the PATH, found none; `make chromium` installs it\n")
        sys.exit(2)
    with sync_playwright() as playwright:
        # Chromium refuses to run as root with its sandbox, and the page is our own.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(viewport={"width": 1200, "height": 900}, device_scale_factor=2, color_scheme="light")
        page.set_default_timeout(600_000)
        page.goto(a.address)
        page.get_by_label("New tokens").fill(str(a.tokens))
        page.locator("#text").fill(PROMPT)
        page.locator("#text").press("Enter")
        page.get_by_text("Answered: ").wait_for()
        taken = page.screenshot()
        browser.close()
    PIL.Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLOURS).save(a.output, optimize=True)


if __name__ == "__main__":
    main()
