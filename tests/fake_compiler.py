"""What stands in the place of torch.compile, in tests of what is handed to it; `compiler` of conftest puts it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Compiler:
    """In the place of torch.compile: what it is given runs as it is, and is written down."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        self.options.append(options)

        def compiled(*args: Any, **kwargs: Any) -> Any:
            self.steps.append(kwargs)
            return function(*args, **kwargs)

        return compiled
