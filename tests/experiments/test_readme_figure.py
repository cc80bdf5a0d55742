"""The pictures of the README: the figures are what their command makes, the screenshot is one that a page can carry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_committed_figures_are_what_the_command_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "experiments" / "readme_figure.py", "--folder", tmp_path], check=True)
    for name in ("conversion.svg", "conversion-narrow.svg"):
        committed = (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8")
        assert (tmp_path / name).read_text(encoding="utf-8") == committed, "make figures"
        assert "prefers-color-scheme: dark" in committed


def test_the_committed_screenshot_is_small_and_sharp() -> None:
    path = ROOT / "docs" / "figures" / "report.png"
    assert path.stat().st_size < 300_000
    with PIL.Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width == 2400  # two pixels for each of a page's
