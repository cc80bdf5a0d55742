"""What scripts with results of their own do with them: numbers as JSON, and the same as a page beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linearize.base import UserError
from linearize.run.folder import write_json, write_text


def write_page(path: Path, measure: Callable[[], dict[str, Any]], markdown: Callable[[dict[str, Any]], str]) -> None:
    """Measure, then write `path` (JSON) and the page beside it (.md); what a user can fix is a line and exit 2."""
    torch.set_flush_denormal(True)  # as the command line does
    try:
        found = measure()
        write_json(path, found)
        write_text(path.with_suffix(".md"), markdown(found))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
