"""Write the standard library of the running Python as training and held-out text, for `linearize run`.

    python scripts/write_stdlib_corpus.py OUT

gives OUT/train.jsonl and OUT/held_out.jsonl, a file's source per line under `text`. Held out are the modules that the
bundled teacher never saw (see src/linearize/demo/teacher/README.md). For rows of 8,192 tokens there are too few long
ones among these; files next to each other as one text, held-out ones from packages of PyPI that it never saw either:

    python scripts/write_stdlib_corpus.py OUT --join 30000 --held-out-packages fontTools hypothesis mpmath rich
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from linearize.base import UserError
from linearize.demo.corpus import module_sources, standard_library_texts


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, which is not imported.

    Raises:
        UserError: there is none of this import name, or it is a single module.
    """
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"packages: expected the import name of an installed package, found {name!r}; install it")
    return Path(spec.submodule_search_locations[0])


def joined(texts: Sequence[str], characters: int) -> list[str]:
    """Join neighbouring texts to texts of at least so many characters; the last one may be shorter."""
    found: list[str] = []
    parts: list[str] = []
    for text in texts:
        parts.append(text)
        if sum(map(len, parts)) >= characters:
            found.append("\n".join(parts))
            parts = []
    return [*found, "\n".join(parts)] if parts else found


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
