"""Write docs/results.md, and each grid's own page, from the results beside the grids: the papers' numbers and ours.

python experiments/results.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run  # noqa: E402

PAGE = HERE.parent / "docs" / "results.md"
SECTIONS = {
    "hedgehog": "Hedgehog",
    "lolcat": "LOLCAT (workshop paper)",
    "lolcats": "LoLCATs",
    "supra": "SUPRA",
    "regla": "ReGLA",
    "real_models": "Public models, converted",
    "recommended": "What `linearize run` takes when no recipe is named",
}
INTRODUCTION = """# Results: the papers' tables and ours, side by side

Every table here is made by one command from a grid under `experiments/`, on models of 0.1M to 23M parameters and 2
CPU cores, in place of the papers' 0.1B to 405B; what can be compared is the order of the rows, not the numbers. The
papers' numbers stand in the last columns, in the papers' own measures (scores: higher is better; perplexity and
errors: lower is better). Ours are perplexities on held-out text, or losses in nats per token; an interval is a 95 %
bootstrap of paired differences on the same tokens. Where a table is about a task, ours are scores on held-out
examples, in per cent, and intervals are of differences paired over the examples. `python experiments/run.py --help`
says how a grid is run, at this size or at that of its `gpu` setting.

Teachers: `pycode-5m`, the bundled 5.5M-parameter Llama, on the sources of Python's standard library (`python
scripts/write_stdlib_corpus.py corpus`); and stories260K (karpathy/tinyllamas on the hub) on TinyStories
(roneneldan/TinyStories); Hedgehog's sentence encoder is all-MiniLM-L6-v2, a BERT of 22.7M parameters; and
gpt-nano-sort (bbycroft/llm-viz on GitHub) is a GPT-2 that sorts. Hedgehog's other teachers are finetuned from the
sentence encoder, or trained, by commands in `experiments/hedgehog/README.md`. The corpus of each table stands in its
command.
"""


def in_order(paths: Iterable[Path]) -> list[Path]:
    """By name, numbers as numbers: Table 3 before Table 10."""
    return sorted(paths, key=lambda path: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path.name)])


def records(folder: str) -> Iterator[tuple[Path, run.Grid, dict[str, Any]]]:
    """The results of a folder's grids: where they lie, the grid as it is now, what was measured."""
    for path in in_order((HERE / folder).glob("*.small.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        yield path, run.Grid.load(path.with_name(record["grid"])), record


def page() -> str:
    parts = [INTRODUCTION]
    for folder, title in SECTIONS.items():
        here = f"../experiments/{folder}/"
        pages = [run.page(grid, record, "###", here) for _, grid, record in records(folder)]
        # What scripts of their own measured; a grid's page has its setting in its name.
        for path in in_order((HERE / folder).glob("*.md")):
            if "." not in path.stem and path.stem != "README":
                text = path.read_text(encoding="utf-8")
                text = text.replace("\n## ", "\n#### ").replace("# ", "### ", 1)
                pages.append(re.sub(r"(?<=\]\()(?=[\w.]+\.svg\))", here, text))
        parts += [f"## {title}\n", *pages] if pages else []
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    for folder in SECTIONS:
        for path, grid, record in records(folder):
            path.with_suffix(".md").write_text(run.page(grid, record), encoding="utf-8")
            run.draw(grid, record, path.with_suffix(".svg"))
