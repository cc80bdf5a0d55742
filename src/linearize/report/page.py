"""Write the report as one HTML file with styles, script and drawings inside, which loads nothing from a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from linearize.base import atomic_file, without_controls
from linearize.report.load import RunFiles, load_runs
from linearize.report.overview import cautions, key_numbers, overview
from linearize.report.sections import sections


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write the page about one or more run folders to the file `output`, atomically; equal folders give equal bytes.

    Raises:
        UserError: a folder without evaluation.json, or an output file that cannot be written.
    """
    page = render(load_runs(folders))
    with atomic_file(output, len(page), "make the report again, or name another file") as scratch:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(page, encoding="utf-8")
    return output


def render(runs: Sequence[RunFiles]) -> str:
    """Return the page as text."""
    runs = [replace(run, beside_others=len(runs) > 1) for run in runs]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_cleaned
    )
    environment.filters["rich"] = rich
    environment.tests["numeric"] = numeric
    template = environment.from_string(_read("template.html.jinja"))
    context: dict[str, Any] = {
        "title": f"linearize: {', '.join(run.name for run in runs)}",
        "overviews": [overview(run) for run in runs],
        "key_numbers": key_numbers(runs),
        "cautions": cautions(runs),
        "sections": sections(runs),
        "style": Markup(_read("style.css")),
        "script": Markup(_read("script.js")),
    }
    return template.render(context)


def rich(text: str) -> Markup:
    """Escaped text in which `backquotes` are code, whose words stay on one line: browsers break after hyphens."""

    def code(found: re.Match[str]) -> str:
        return "<code>" + re.sub(r"[^ ]+", r"<span>\g<0></span>", found[1]) + "</code>"

    return Markup(re.sub(r"`([^`]+)`", code, str(escape(without_controls(text)))))


def _cleaned(value: Any) -> Any:
    """Remove control characters from texts; markup is made of clean texts already."""
    return without_controls(value) if type(value) is str else value


def numeric(text: str) -> bool:
    """Return whether a cell is a number, perhaps with unit and interval, which must not be wrapped."""
    return len(text) <= 36 and re.match(r"[-+\N{MINUS SIGN}<>]?\d|\N{EN DASH}$", text) is not None


def _read(name: str) -> str:
    return (resources.files("linearize") / "report" / name).read_text(encoding="utf-8")
