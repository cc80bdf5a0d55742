"""Write the standard library of the running Python as training and held-out text, for `linearize run`.

    python scripts/write_stdlib_corpus.py OUT

gives OUT/train.jsonl and OUT/held_out.jsonl, a file's source per line under `text`. Held out are the modules that the
bundled teacher never saw (see src/linearize/demo/teacher/README.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from linearize.demo.corpus import standard_library_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write to; made if it does not exist")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in zip(("train", "held_out"), standard_library_texts(), strict=True):
        (out / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")


if __name__ == "__main__":
    main()
