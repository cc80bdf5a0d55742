"""Every number in README.md and docs/*.md is a measurement in a committed result file, or a setting with a reason.

`documented_numbers.yaml` lists both for each page, so that sentences can be rewritten freely:

- `measured`: result file -> where in it -> the numbers as the page prints them.
  In a JSON file, "where" is an expression of the file's content, `data`.
  In a Markdown file, it is cells of one table row, joined by " | ", or "" for any place in the file.
  `arithmetic` stands for no file: the expression alone says what the number is.
  An interval stands in one string in the order of the page: 0.034 [0.015, 0.056].
- `settings`: reason -> numbers that nobody measured: sizes, budgets, versions, figures of a paper.

A sign is not compared, since a sentence may say it in words.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
GENERATED = {"docs/results.md", "docs/models.md"}  # from JSON files, and by tests
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
CLAIMS = "experiments/claims.yaml"  # its reasons are sentences of docs/results.md
LISTED: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "documented_numbers.yaml").read_text("utf-8"))

NUMBER = re.compile(
    r"(?<![\w.,^])(?<!\^-)[+\u2212-]?"
    r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?[MkK]?)"
    r"(?![\d^]|[.,]\d|[^\W\d]|[GM]iB-)"
)
# arXiv numbers, versions of three parts, names with digits (H100, SmolLM2-135M) and years of papers.
NOT_A_NUMBER = re.compile(
    r"arXiv:? ?\d{4}\.\d{5}|\d+\.\d+\.\d+|\b[A-Za-z]\w*-\d[\w.-]*|[A-Z]\w*\d+\w*|\(\w+ et al\., [\w ]+\)"
)
INTERVAL = re.compile(r"(?:([\d.,]+) )?\[[+-]?([\d.,]+)(?:,| to) [+-]?([\d.,]+)\]")
UNIT = re.compile(r"\s?(%|per cent|nats?\b|[KMGT]i?B\b|m?s\b|seconds?\b|minutes?\b|hours?\b|times\b|points\b|of \d)")


@cache
def texts(page: str) -> list[tuple[str, bool]]:
    """Return the texts of a page outside code and links, and whether each is in the body of a table."""
    found, in_body = [], False
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        if token.type in ("tbody_open", "tbody_close"):
            in_body = token.type == "tbody_open"
        if token.type == "inline":
            parts = [x.content if x.type == "text" else " " for x in token.children or []]
            found.append((NOT_A_NUMBER.sub(" ", "".join(parts)), in_body))
    return found


def numbers(page: str) -> list[str]:
    """Return a page's numbers as printed, without signs. A single digit in a sentence counts if it has a unit."""
    return [
        match[1].replace("K", "k")
        for text, in_body in texts(page)
        for match in NUMBER.finditer(text)
        if in_body or len(match[1]) > 1 or UNIT.match(text, match.end())
    ]


def agrees(printed: str, value: float) -> bool:
    """Return whether a value, rounded to the printed digits, is the printed number."""
    text = printed.replace(",", "")
    scale = {"M": 1e6, "k": 1e3}.get(text[-1], 1.0)
    mantissa, _, exponent = text.rstrip("Mk").partition("e")
    scale *= 10.0 ** int(exponent or 0)
    half_a_digit = 0.5 * 10.0 ** -len(mantissa.partition(".")[2])
    return abs(abs(value) / scale - float(mantissa)) <= half_a_digit * (1 + 1e-6)


def row(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the one row of a list that has these fields."""
    (found,) = [x for x in rows if all(x.get(name) == value for name, value in fields.items())]
    return found


def flat(value: Any) -> Iterator[float]:
    """Yield the numbers in nested lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from flat(part)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


@cache
def content(name: str) -> Any:
    text = (ROOT / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else text


def source_values(name: str, where: str) -> list[float]:
    """Return the values of a place in a result file."""
    if name.endswith(".md"):
        cells = [part.strip() for part in where.split(" | ")] if where else []
        lines = content(name).splitlines()
        rows = [[cell.strip(" *") for cell in line.split("|")] for line in lines]
        chosen = [line for line, row in zip(lines, rows, strict=True) if all(cell in row for cell in cells)]
        assert len(chosen) == 1 or not cells, f"{name}: {len(chosen)} rows have the cells {where!r}"
        return [
            float(x.replace(",", "")) for x in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?", "\n".join(chosen))
        ]
    names = {"row": row, "mean": fmean, "log": math.log, "exp": math.exp, "content": content}
    if name != "arithmetic":
        names["data"] = content(name)
    return list(flat(eval(where, names)))  # of a file of ours


def text_of(page: str) -> str:
    if page != CLAIMS:
        return (ROOT / page).read_text(encoding="utf-8")
    claims = yaml.safe_load((ROOT / CLAIMS).read_text(encoding="utf-8"))
    return "\n\n".join(claim["why"] for claim in claims if "why" in claim)


def listed(page: str) -> list[list[str]]:
    """Return the listed numbers of a page, one list for each place in a result file and for each reason."""
    entry = LISTED.get(page, {})
    measured = [printed for places in entry.get("measured", {}).values() for printed in places.values()]
    return [str(printed).split() for printed in [*measured, *entry.get("settings", {}).values()]]


def unlisted(page: str, text: str) -> list[str]:
    """Return the numbers of a text that its page does not list, and the intervals that it does not list as such."""
    entries = listed(page)
    known = {x for entry in entries for x in entry}
    runs = {" ".join(entry[i : i + n]) for entry in entries for n in (2, 3) for i in range(len(entry))}
    intervals = [" ".join(filter(None, found)) for part, _ in texts(text) for found in INTERVAL.findall(part)]
    return [x for x in numbers(text) if x not in known] + [x for x in intervals if x not in runs]


@pytest.mark.parametrize("page", [*(page for page in PAGES if page not in GENERATED), CLAIMS])
def test_every_number_of_a_page_has_a_source_or_is_a_setting(page: str) -> None:
    assert unlisted(page, text_of(page)) == [], (
        f"{page}: list these in tests/documented_numbers.yaml, with the result file or the reason"
    )


@pytest.mark.parametrize("page", LISTED)
def test_listed_numbers_are_those_of_the_result_files(page: str) -> None:
    for name, places in LISTED[page].get("measured", {}).items():
        for where, printed in places.items():
            values = source_values(name, where)
            wrong = [x for x in str(printed).split() if not any(agrees(x, value) for value in values)]
            assert wrong == [], f"{page}: {name}, {where!r} has {values[:20]}"


@pytest.mark.parametrize("page", [page for page in LISTED if "measured" in LISTED[page] and page != CLAIMS])
def test_a_changed_number_is_found(page: str) -> None:
    """Change the last digit of some measured numbers: few become another number that the page lists."""
    text = text_of(page)
    measured = {x for places in LISTED[page]["measured"].values() for p in places.values() for x in str(p).split()}
    ends = [x.end() - 1 for x in NUMBER.finditer(text) if x[1] in measured and text[x.end() - 1].isdigit()]
    changed = [f"{text[:n]}{(int(text[n]) + 4) % 10}{text[n + 1 :]}" for n in ends[:: 1 + len(ends) // 15]]
    changed = [x for x in changed if numbers(x) != numbers(text)]  # outside code and links
    found = [x for x in changed if unlisted(page, x)]
    assert changed and len(found) >= 0.6 * len(changed), f"{len(found)} of {len(changed)}"


def test_numbers_of_a_page() -> None:
    page = """# Page 7

    In 11 % of 46,080 KiB, `0.5`, [0.3](x/0.4.md): it loses -0.047 nats [0.021, 0.081] after 0.33M tokens; 3 heads.

        code 99

    | a 12 | b |
    | - | - |
    | x | 7; 40 of 48 (arXiv 2410.10254, SmolLM2-135M, vLLM 0.32.0) |
    """
    page = "\n".join(line.removeprefix("    ") for line in page.splitlines())
    assert numbers(page) == ["11", "46,080", "0.3", "0.047", "0.021", "0.081", "0.33M", "12", "7", "40", "48"]


@pytest.mark.parametrize(
    "printed, value, right",
    [
        ("0.047", -0.0471, True),
        ("0.047", 0.0476, False),
        ("46,080", 46080.4, True),
        ("0.33M", 327_680, True),
        ("0.33M", 337_680, False),
        ("6e-7", 6.28e-7, True),
        ("6e-7", 6.6e-7, False),
        ("1.2e+18", 1.24e18, True),
    ],
)
def test_rounding(printed: str, value: float, right: bool) -> None:
    assert agrees(printed, value) == right
