"""The script that finds retired words."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.words import RETIRED, files, main, patterns, retired_words


def test_a_planted_word_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also across lines, within a comment, and in capitals; the line is that of its first word."""
    page = tmp_path / "page.md"
    words = ["far", "gain"]
    lines = ["First line.", f"The {' '.join(words)} falls.", f"# {words[0].capitalize()}", f"# {words[1]}", ""]
    page.write_text("\n".join(lines), encoding="utf-8")
    assert list(retired_words(page, "page.md")) == [
        f"page.md:2: {' '.join(words)!r}: say 'long-context gain retained'",
        f"page.md:3: {' # '.join(words).capitalize()!r}: say 'long-context gain retained'",
    ]
    assert main([str(page)]) == 1
    assert capsys.readouterr().out.startswith(f"{page}:2: ")


def test_other_words_are_not_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Far gained, cafar gain, the exact cached size.\n", encoding="utf-8")
    assert list(retired_words(page, "page.md")) == [] and main([str(page)]) == 0


def test_every_pattern_compiles_and_the_project_has_files() -> None:
    assert [form for form, _ in patterns()] == list(RETIRED)
    names = {path.name for path in files()}
    assert {"README.md", "CHANGELOG.md", "glossary.md", "findings.py"} <= names and "words.py" not in names
