"""YAML that comes from strangers, read as plain data."""

from __future__ import annotations

from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    """Refuse aliases: with them, a few lines can expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Do as PyYAML, except for aliases."""
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"expected no aliases, found *{event.anchor}", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


def parse_yaml(text: str) -> object:
    """Return the plain data that a YAML text stands for.

    Raises:
        yaml.YAMLError: not valid, of other objects than plain data, or with aliases.
        RecursionError: nested too deeply.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
        # PyYAML passes on what Python says of numbers of thousands of digits, of days that no month has, and so on.
        raise yaml.YAMLError(f"expected a value of its type, found another ({error})") from None
