"""Where a benchmark's numbers go: one JSON file with everything that produced them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch


def write_results(arguments: argparse.Namespace, load: Sequence[float], **results: Any) -> None:
    """Replace the file `arguments.json`, if one is wanted, with arguments, load averages and `results`."""
    if arguments.json is None:
        return
    setting = {name: value for name, value in vars(arguments).items() if name != "json"}
    setting |= {"torch": torch.__version__, "load": list(load)}
    scratch = arguments.json.with_name(f".{arguments.json.name}.incomplete")
    scratch.write_text(json.dumps(setting | results, indent=2) + "\n")
    scratch.replace(arguments.json)
