"""The blocks of a section of the page; the template selects by their `kind`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from linearize.report.numbers import DASH


@dataclass(frozen=True)
class Group:
    """Rows of a table under one heading; each row starts with its own heading."""

    rows: Sequence[Sequence[str]]
    title: str | None = None


@dataclass(frozen=True)
class Table:
    """A table with a caption; the first column heads its row."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[str]
    groups: Sequence[Group]
    collapsed: bool = False

    @classmethod
    def of(cls, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], collapsed: bool = False) -> Table:
        return cls(caption, columns, [Group(rows)], collapsed)

    @classmethod
    def by_run(cls, caption: str, runs: Sequence[str], numbers: Sequence[Mapping[str, str]]) -> Table:
        """Return a table with a column per run, and a row for each number that at least one run has."""
        names = dict.fromkeys(name for found in numbers for name in found)
        return cls.of(caption, ["", *runs], [[name, *(found.get(name, DASH) for found in numbers)] for name in names])

    def spoken(self) -> str:
        """Return the first numbers of all rows as text, for screen readers."""
        groups = [
            (f"{group.title}: " if group.title else "") + ", ".join(f"{row[0]} {row[1]}" for row in group.rows)
            for group in self.groups
        ]
        return "; ".join(groups)


@dataclass(frozen=True)
class Figure:
    """A drawing and its numbers. `svg` has the finding in words, for screen readers."""

    kind: ClassVar[str] = "figure"
    title: str
    svg: Markup
    caption: str
    numbers: Table
    half: bool = False  # narrow enough for two side by side on a wide page


@dataclass(frozen=True)
class Text:
    """A paragraph; `tone` is "plain", "note" or "missing" (what was not measured)."""

    kind: ClassVar[str] = "text"
    words: str
    tone: str = "plain"


@dataclass(frozen=True)
class Code:
    """Preformatted text, folded away."""

    kind: ClassVar[str] = "code"
    title: str
    text: str


@dataclass(frozen=True)
class Continuation:
    """One model's text after a prompt: the common beginning with the teacher's text, and the rest."""

    title: str
    same: str
    other: str


@dataclass(frozen=True)
class Prompts:
    """Prompts, each with the models' continuations side by side."""

    kind: ClassVar[str] = "prompts"
    prompts: dict[str, list[Continuation]]


Block = Table | Figure | Text | Code | Prompts


@dataclass(frozen=True)
class Section:
    """A part of the page with an entry in its contents."""

    key: str
    title: str
    blocks: Sequence[Block]
    summary: str = ""
