"""A sentence about a run that carries its numbers, and the side on which it falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linearize.evaluation.perplexity import Interval

Kind = Literal["win", "loss", "open", "fact"]  # a fact has nothing to be better or worse than


@dataclass(frozen=True)
class Finding:
    """One sentence, and on which side it falls.

    `lead` is its short form for the top of the page: the words before what matters, what matters, the words after.
    """

    kind: Kind
    words: str
    lead: tuple[str, str, str] = ("", "", "")


def side_of_half(found: Interval) -> Kind:
    """Whether more than half is kept for sure, or less than half."""
    return "win" if found.low > 0.5 else "loss" if found.high < 0.5 else "open"
