"""Where a benchmark's numbers go: one JSON file with everything that produced them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

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
