"""Write Markdown in which names from users (files, data sets, tasks, models) are escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from linearize.base import without_controls
from linearize.report.html import Table

# Characters with a meaning, at the start of a line or anywhere; brackets around intervals have none.
_NUMBER = r"[-+\N{MINUS SIGN}]?[\d.,]+"
_SPECIAL = re.compile(rf"^[#=-]|^\+(?=\s|$)|^\d+(?=[.)](?:\s|$))|[\\`*_~$|]|\[(?!{_NUMBER}, {_NUMBER}\](?![\[(:]))")
_ENTITIES = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}


def escaped(text: str) -> str:
    """Return Markdown that shows a text literally, on one line, in a paragraph, a heading or a table."""
    # A digit cannot be escaped, but the dot that would make it the number of a list can.
    marked = _SPECIAL.sub(lambda found: f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}", _line(text))
    return marked.translate(_ENTITIES)


def _line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return without_controls(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)).strip()


def code(text: str) -> str:
    """Return a name as inline code."""
    line, ticks = _line(text), _longer(text, "")
    return f"{ticks} {line} {ticks}" if len(ticks) > 1 else f"`{line}`"


def fenced(language: str, text: str) -> str:
    """Return a block of code."""
    fence = _longer(text, "``")
    return f"{fence}{language}\n{text}{fence}\n"


def _longer(text: str, least: str) -> str:
    """Return more backquotes than any run of them in the text."""
    return "`" * (1 + max(map(len, [least, *re.findall("`+", text)])))


def bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {escaped(line)}\n" for line in lines)


def table(found: Table) -> str:
    """Return a table with its caption."""
    rows = [found.columns, *(row for group in found.groups for row in group.rows)]
    lines = [" | ".join(map(escaped, row)) for row in rows]
    lines.insert(1, " | ".join(["---"] * len(found.columns)))
    return f"{escaped(found.caption)}:\n\n" + "".join(f"| {line} |\n" for line in lines)
