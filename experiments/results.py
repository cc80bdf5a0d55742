"""Write docs/results.md from the tables that lie beside the grids: every paper's numbers and ours, side by side.

python experiments/results.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from run import Grid, described, table  # noqa: E402

PAGE = HERE.parent / "docs" / "results.md"
SECTIONS = {
    "lolcat": "LOLCAT (workshop paper)",
    "lolcats": "LoLCATs",
    "supra": "SUPRA",
    "regla": "ReGLA",
    "recommended": "What `linearize run` takes when no recipe is named",
}
INTRODUCTION = """# Results: the papers' tables and ours, side by side

Every table here is made by one command from a grid under `experiments/`, on models of 0.26M and 5.5M parameters and
2 CPU cores, in place of the papers' 1B to 405B; what can be compared is the order of the rows, not the numbers. The
papers' numbers stand in the last columns, in the papers' own measures (scores: higher is better; perplexity and errors:
lower is better). Ours are perplexities on held-out text, or losses in nats per token; an interval is a 95 % bootstrap
of paired differences on the same tokens. `python experiments/run.py --help` says how a grid is run, at this size or at
that of its `gpu` setting.

Teachers: `pycode-5m`, the bundled 5.5M-parameter Llama, on the sources of Python's standard library
(`python scripts/write_stdlib_corpus.py corpus`); and stories260K (karpathy/tinyllamas on the hub) on TinyStories
(roneneldan/TinyStories). The corpus of each table stands in its command.
"""


def page() -> str:
    parts = [INTRODUCTION]
    for folder, title in SECTIONS.items():
        grids = [path for path in sorted((HERE / folder).glob("*.yaml")) if path.with_suffix(".small.json").is_file()]
        figures = HERE / folder / "figures.md"
        if grids or figures.is_file():
            parts.append(f"## {title}\n")
        for path in grids:
            record = json.loads(path.with_suffix(".small.json").read_text(encoding="utf-8"))
            grid, results = Grid.load(path), record["results"]
            missing = len(list(grid.jobs("small"))) - len(results)
            parts.append(f"### {grid.title}\n\n{grid.source}. {grid.question}\n")
            parts.append(f"{table(grid, results)}\n\n{described(grid, results)}\n")
            parts.append(f"**Found.** {grid.finding.strip()}\n" if grid.finding else "")
            parts.append(f"{missing} more cells of this grid have not been run.\n" if missing else "")
            parts.append(f"    {record['command']}\n")
        if figures.is_file():
            parts.append(figures.read_text(encoding="utf-8").replace("\n## ", "\n#### ").replace("# ", "### ", 1))
    return "\n".join(part for part in parts if part)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
