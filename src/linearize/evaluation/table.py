"""Results as a table: for the terminal, for Markdown and as JSON; and differences in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from typing import Any

from rich.table import Table
from rich.text import Text

from linearize.evaluation.perplexity import Interval, Quality

HEADER = ("model", "loss (nats/token)", "beyond the window", "note")


@dataclass(frozen=True)
class Row:
    label: str
    quality: Quality
    note: str = ""


def interval_text(interval: Interval) -> str:
    """``2.736 [2.70, 2.77]``."""
    return f"{interval.mean:.3f} [{interval.low:.2f}, {interval.high:.2f}]"


def rich_table(rows: Sequence[Row], *, title: str) -> Table:
    table = Table(*HEADER, title=title)
    for row in rows:
        table.add_row(*map(Text, _cells(row)))  # Text: brackets are not markup here
    return table


def markdown(rows: Sequence[Row]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *(_cells(row) for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def in_words(label: str, reference: str, difference: Interval) -> str:
    """What a paired difference (`label`'s loss minus `reference`'s) means, for a newcomer."""
    mean, low, high = difference.mean, difference.low, difference.high
    if low <= 0 <= high:
        return (
            f"{label} and {reference}: no difference that this much text could show "
            f"({mean:+.3f} nats per token, 95 % interval {low:+.3f} to {high:+.3f})."
        )
    word, sign, change = ("worse", "more", "higher") if mean > 0 else ("better", "less", "lower")
    near, far = sorted((abs(low), abs(high)))
    return (
        f"{label} is {word} than {reference}: {abs(mean):.3f} nats per token {sign} "
        f"(95 % interval {near:.3f} to {far:.3f}), a perplexity {abs(exp(mean) - 1):.1%} {change}."
    )


def _cells(row: Row) -> tuple[str, str, str, str]:
    quality = row.quality
    beyond = quality.beyond_missing if quality.beyond is None else interval_text(quality.beyond)
    return row.label, interval_text(quality.loss), beyond or "", row.note
