"""Compare what engines wrote about one model: are the greedy tokens equal, how many bytes, how fast.

    python benchmarks/engines/compare.py transformers.json vllm.json llama-cpp.json [--teacher transformers=t.json ...]

The first file is the one to which the others are compared. `--teacher` names the same engine's file of the unconverted
model, for ratios of time. Exits with status 1 where tokens differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--teacher", nargs="*", default=[], metavar="NAME=FILE", help="NAME: a file's name, no suffix")
    arguments = parser.parse_args()
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in arguments.files}
    teachers = {}
    for given in arguments.teacher:
        name, _, path = given.partition("=")
        teachers[name] = json.loads(Path(path).read_text(encoding="utf-8"))
    reference = results[arguments.files[0].stem]["tokens"]
    titles = ["engine", "prompts with equal tokens", "MiB per sequence", "teacher's MiB", "per prompt", "per token"]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")  # noqa: T201
    equal = True
    for name, found in results.items():
        same = sum(a == b for a, b in zip(found["tokens"], reference, strict=True))
        equal = equal and same == len(reference)
        teacher = teachers.get(name)
        cells = [found["engine"], f"{same} of {len(reference)}", f"{found['bytes_per_sequence'] / 2**20:.1f}"]
        cells.append("" if teacher is None else f"{teacher['bytes_per_sequence'] / 2**20:.1f}")
        cells += [ratio(found, teacher, key) for key in ("seconds_of_a_prompt", "seconds_of_a_token")]
        print(f"| {' | '.join(cells)} |")  # noqa: T201
    sys.exit(not equal)


def ratio(found: dict[str, Any], teacher: dict[str, Any] | None, key: str) -> str:
    """Return a time in milliseconds, and how many times the teacher's it is."""
    milliseconds = f"{1000 * found[key]:.1f} ms"
    return milliseconds if teacher is None else f"{milliseconds} ({found[key] / teacher[key]:.2f} of the teacher's)"


if __name__ == "__main__":
    main()
