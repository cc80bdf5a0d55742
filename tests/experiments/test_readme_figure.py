"""The pictures of the README: the figure is what its command makes, the screenshot is one that a page can carry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import PIL.Image

ROOT = Path(__file__).parents[2]


def test_the_committed_figure_is_what_the_command_makes(tmp_path: Path) -> None:
    script = ROOT / "experiments" / "readme_figure.py"
    made = tmp_path / "conversion.svg"  # of the same name: matplotlib's ids depend on it
    subprocess.run([sys.executable, script, "--output", made], check=True)
    committed = ROOT / "docs" / "figures" / "conversion.svg"
    assert made.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8"), "make figures"


def test_the_committed_screenshot_is_small_and_sharp() -> None:
    path = ROOT / "docs" / "figures" / "report.png"
    assert path.stat().st_size < 300_000
    with PIL.Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width == 2400  # two pixels for each of a page's
