"""Write the standard library of the running Python as training and held-out text, for `linearize run`.

    python scripts/write_stdlib_corpus.py OUT

gives OUT/train.jsonl and OUT/held_out.jsonl, a file's source per line under `text`. Held out are the modules that the
bundled teacher never saw (see src/linearize/demo/teacher/README.md). For rows of 8,192 tokens there are too few long
ones among these; files next to each other as one text, held-out ones from packages of PyPI that it never saw either:

    python scripts/write_stdlib_corpus.py OUT --join 30000 --held-out-packages fontTools hypothesis mpmath rich
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from linearize.base import UserError
from linearize.demo.corpus import joined, module_sources, package_folder, standard_library_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write to; made if it does not exist")
    parser.add_argument("--join", type=int, default=1, metavar="CHARACTERS", help="texts of at least so many (1)")
    parser.add_argument(
        "--held-out-packages", nargs="+", default=[], metavar="NAME", help="installed packages to hold out instead"
    )
    a = parser.parse_args()
    try:
        train, held_out = standard_library_texts()
        if a.held_out_packages:
            held_out = [text for name in a.held_out_packages for _, text in module_sources(package_folder(name))]
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    a.out.mkdir(parents=True, exist_ok=True)
    for name, texts in ("train", train), ("held_out", held_out):
        lines = (json.dumps({"text": text}) + "\n" for text in joined(texts, a.join))
        (a.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
