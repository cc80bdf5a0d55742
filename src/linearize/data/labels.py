"""The numbers of classes in a model's config, and cells of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from linearize.base import UserError


@dataclass(frozen=True)
class Classes:
    """The classes of a model's head, by name, as in its config's `label2id`, and their number."""

    numbers: Mapping[str, int]
    count: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Classes:
        """Return the classes in the contents of a ``config.json``; without names there are two, as in transformers."""
        names = {str(name): int(number) for name, number in (config.get("label2id") or {}).items()}
        named = config.get("id2label") or names
        return cls(names, len(named) if named else int(config.get("num_labels") or 2))

    def number(self, value: object, where: str) -> int:
        """Return the number of a class given by number or name.

        Raises:
            UserError: the model has no such class.
        """
        if isinstance(value, str) and value in self.numbers:
            return self.numbers[value]
        try:
            number = int(value)  # type: ignore[call-overload]
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or (isinstance(value, float) and not value.is_integer()):
            known = ", ".join(self.numbers) or "numbers"
            raise UserError(f"{where}: expected a class of the model ({known:.80}), found {value!r:.60}")
        if not 0 <= number < self.count:
            raise UserError(
                f"{where}: expected a class from 0 to {self.count - 1}, because the model's config has {self.count}; "
                f"found {number}; use a model with a head for these classes (num_labels)"
            )
        return number


def as_number(value: object, where: str) -> float:
    """Return a label as a number; raise UserError if it is not finite."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: expected a number, found {value!r:.60}")
    return number


def cell(row: Mapping[str, Any], column: str, where: str, field: str) -> Any:
    """Return the value of a row in a column.

    Raises:
        UserError: there is no such column; `field` of the recipe names it.
    """
    if column not in row:
        found = " ".join(", ".join(map(str, row)).split())[:200] or "no columns"
        settable = " or ".join(dict.fromkeys((field, "data.columns")))
        raise UserError(f"{where}: expected a column {column!r} ({field}), found {found}; set {settable}")
    return row[column]


def text_cell(row: Mapping[str, Any], column: str, where: str, field: str) -> str:
    """Return the text of a row in a column.

    Raises:
        UserError: there is no such column, or its value is no text.
    """
    value = cell(row, column, where, field)
    if not isinstance(value, str):
        raise UserError(f"{where}: expected text in the column {column!r} ({field}), found {value!r:.60}")
    return value
