"""Read untrusted YAML as plain data."""

from __future__ import annotations

from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    """A loader that refuses aliases, with which a few lines can expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return PyYAML's node; raise an error at an alias."""
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"expected no aliases, found *{event.anchor}", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


def parse_yaml(text: str) -> object:
    """Return the plain data of a YAML text.

    Raises:
        yaml.YAMLError: it is not valid, has other objects than plain data, or aliases.
        RecursionError: it is nested too deeply.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
        # PyYAML does not catch Python's errors for numbers of thousands of digits, impossible dates, and so on.
        raise yaml.YAMLError(f"expected a value of its type, found another ({error})") from None
