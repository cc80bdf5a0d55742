"""Where a benchmark's numbers go: one JSON file with everything that produced them, and a Markdown page."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from linearize.base import UserError, read_json
from linearize.run.folder import versions, write_json, write_text

# What times depend on.
ENVIRONMENT = ("GLIBC_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "OMP_", "THP_")


def timing_arguments(parser: argparse.ArgumentParser, repeats: int) -> None:
    """What every benchmark that takes turns is told: how often, by how many threads, where, and where to write."""
    parser.add_argument(
        "--repeats", type=int, default=repeats, metavar="N", help="counted rounds (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (default: 2)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")


def write_results(arguments: argparse.Namespace, load: Sequence[float], **results: Any) -> None:
    """Replace the file `arguments.json`, if one is wanted, with arguments, environment, load averages and `results`."""
    if arguments.json is None:
        return
    setting = {name: value for name, value in vars(arguments).items() if name != "json"}
    environment = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    setting |= {"torch": torch.__version__, "load": list(load), "environment": environment}
    scratch = arguments.json.with_name(f".{arguments.json.name}.incomplete")
    scratch.write_text(json.dumps(setting | results, indent=2) + "\n")
    scratch.replace(arguments.json)


class Rows:
    """Rows of numbers in a JSON file and on the page beside it, written one by one as they are measured.

    The same command again measures only what is missing, and a command with more models adds their rows.
    """

    def __init__(self, path: Path, setting: dict[str, Any], markdown: Callable[[dict[str, Any]], str]) -> None:
        """Read the file, if there is one.

        Args:
            setting: what all rows of the file have in common, as JSON.
            markdown: the page, of the file's contents: the setting and the list "rows".

        Raises:
            UserError: the file is not JSON, or its rows were measured with another setting.
        """
        self.path, self.setting, self.markdown = path, setting, markdown
        contents = read_json(path) if path.exists() else setting | {"rows": []}
        for name, value in setting.items():
            if (written := contents.get(name)) != value:
                raise UserError(f"{path}: expected rows with {name} {value!r}, found {written!r}; give another --json")
        self.rows: list[dict[str, Any]] = contents["rows"]

    def add(self, key: dict[str, Any], weights: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure the row of a key, unless it is there.

        Args:
            key: what tells the row from others.
            weights: the model's `fingerprint`; a row of the same key and other weights is replaced.
        """
        others = [row for row in self.rows if key != {name: row[name] for name in key}]
        same = [row for row in self.rows if row not in others]
        if same and same[0]["weights"] == weights:
            return
        self.rows = [*others, key | {"weights": weights} | measure() | {"versions": versions()}]
        contents = self.setting | {"rows": self.rows}
        write_json(self.path, contents)
        write_text(self.path.with_suffix(".md"), self.markdown(contents))
