"""Tables of text, for Markdown and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A line each for the header, the rule below it, and every row."""
    return "".join("| " + " | ".join(line) + " |\n" for line in [header, ["---"] * len(header), *cells])


def terminal_table(title: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    """The same for rich; nothing in a cell is read as markup."""
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name)
    for line in cells:
        table.add_row(*map(Text, line))
    return table
