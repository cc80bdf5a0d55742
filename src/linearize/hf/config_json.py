"""Numbers of a ``config.json``, checked as they are read."""

from __future__ import annotations

from typing import Any

from linearize.base import UserError


class ConfigJson:
    """The contents of a ``config.json``; `names` are the fields that this model type calls otherwise."""

    def __init__(self, config: dict[str, Any], names: dict[str, str]) -> None:
        self.contents, self._names = config, names

    def size(self, field: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            UserError: anything else, or nothing where there is no default.
        """
        name = self._names.get(field, field)
        value = self.contents.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise UserError(f"config.json: {name}: expected a positive integer, found {value!r}")
        return value

    def sides(self, field: str) -> tuple[int, int]:
        """Height and width, of an image or a patch: two positive integers, or one for a square.

        Raises:
            UserError: anything else.
        """
        value = self.contents.get(field)
        sides: list[Any] = list(value) if isinstance(value, list | tuple) else [value, value]
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise UserError(f"config.json: {field}: expected a positive integer or two, found {value!r}")
        return sides[0], sides[1]

    def rope(self, field: str) -> float | None:
        """A number that says how positions rotate: among `rope_parameters`, or as a field of its own, as of old."""
        parameters = self.contents.get("rope_parameters")
        value = parameters.get(field) if isinstance(parameters, dict) else None
        value = self.contents.get(self._names.get(field, field)) if value is None else value
        if value is not None and (not isinstance(value, int | float) or not 0 < value <= 1):
            raise UserError(f"config.json: {field}: expected a number from 0 to 1, found {value!r}")
        return value

    def flag(self, field: str, default: bool) -> bool:
        value = self.contents.get(field)
        return default if value is None else bool(value)
