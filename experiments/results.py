"""Write docs/results.md, docs/results/, and each grid's own page from the results beside the grids and claims.yaml.

python experiments/results.py
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run  # noqa: E402

INDEX = HERE.parent / "docs" / "results.md"
HEAD = """| claim: rows | paper | ours | verdict | model, tokens, command |
| --- | --- | --- | --- | --- |
"""
SECTIONS = {
    "hedgehog": "Hedgehog",
    "lolcat": "LOLCAT (workshop paper)",
    "lolcats": "LoLCATs",
    "supra": "SUPRA",
    "regla": "ReGLA",
    "real_models": "Public models, converted",
    "papers_real": "The papers' recipes on a real model",
    "recommended": "The recipe `recommended`, our own method",
}
INTRODUCTION = """# Results

Which of the papers' claims hold in our runs. **Our runs are small**: models of 0.1M to 135M parameters, a few million
tokens at most, on two CPU cores. The papers' models have 0.1B to 405B parameters. A verdict here says whether a claim
held in our setting, not whether the paper is right. Our values are perplexities on held-out text (smaller is better),
or scores in per cent on held-out examples (larger is better). The paper's are in its own measure, so compare only the
order of the values. They stand in the order of the rows named after the claim.

What we recommend, measured on SmolLM2-135M-Instruct: [per-head KV budget allocation](memory.md), compared
[with kvpress](../benchmarks/README.md#compared-with-kvpress). [Which recipe to pick](choosing.md)
lists recipes by purpose.

"""
TEACHERS = """
## Models and data

`pycode-5m` is the bundled Llama of 5.5M parameters, on the sources of Python's standard library (`python
scripts/write_stdlib_corpus.py corpus`). stories260K (karpathy/tinyllamas on the hub) reads TinyStories
(roneneldan/TinyStories). Hedgehog's teachers are all-MiniLM-L6-v2, a BERT of 22.7M parameters, models that are
fine-tuned from it, and models that are trained by the commands in
[experiments/hedgehog/README.md](../experiments/hedgehog/README.md). gpt-nano-sort (bbycroft/llm-viz on GitHub) is a
GPT-2 that sorts. An interval is a 95 % bootstrap of paired differences on the same tokens or examples. `python
experiments/run.py --help` says how to make a table again, at this size or at that of its `gpu` setting.
"""


def in_order(paths: Iterable[Path]) -> list[Path]:
    """By name, numbers as numbers: Table 3 before Table 10."""
    return sorted(paths, key=lambda path: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path.name)])


def records(folder: str) -> Iterator[tuple[Path, run.Grid, dict[str, Any]]]:
    """The results of a folder's grids: where they lie, the grid as it is now, what was measured."""
    for path in in_order((HERE / folder).glob("*.small.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        yield path, run.Grid.load(path.with_name(record["grid"])), record


def pages() -> dict[Path, str]:
    """Return the index and one page per paper, with their paths."""
    found = {INDEX: index()}
    for folder, title in SECTIONS.items():
        here = f"../../experiments/{folder}/"
        tables = [run.page(grid, record, "##", here) for _, grid, record in records(folder)]
        # What scripts of their own measured; a grid's page has its setting in its name.
        for path in in_order((HERE / folder).glob("*.md")):
            if "." not in path.stem and path.stem != "README":
                text = path.read_text(encoding="utf-8")
                text = text.replace("\n## ", "\n### ").replace("# ", "## ", 1)
                tables.append(re.sub(r"(?<=\]\()(?=[\w.]+\.svg\))", here, text))
        introduction = f"# {title}\n\nAll tables, each with its command. [The index](../results.md) summarises them.\n"
        found[INDEX.with_suffix("") / f"{folder}.md"] = "\n".join([introduction, *tables])
    return found


def index() -> str:
    """Return the page of all claims: the paper's figures, ours, the verdict, and what it was measured on."""
    claims = yaml.safe_load((HERE / "claims.yaml").read_text(encoding="utf-8"))
    counts = Counter(claim["verdict"] for claim in claims if claim["paper"] != "recommended")
    parts = [INTRODUCTION + f"Of {counts.total()} claims: {', '.join(f'{n} {x}' for x, n in counts.most_common())}.\n"]
    for folder, title in SECTIONS.items():
        parts.append(f"## {title}\n\n[All tables](results/{folder}.md).\n")
        rows = [_claim(folder, claim) for claim in claims if claim["paper"] == folder]
        if rows:
            parts.append(HEAD + "\n".join(rows) + "\n")
    return "\n".join(parts) + TEACHERS


def _claim(folder: str, claim: dict[str, Any]) -> str:
    verdict = f"**{claim['verdict']}**" + (f": {claim['why']}" if "why" in claim else "")
    if "grid" not in claim:
        return f"| {claim['claim']} | | | {verdict} | |"
    path = HERE / folder / f"{claim['grid']}.small.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    grid = run.Grid.load(path.with_name(record["grid"]))
    results = {label: [x for x in record["results"] if x["label"] == label] for label in claim["rows"]}
    seeds = set.intersection(*({x["seed"] for x in found} for found in results.values()))
    results = {label: [x for x in found if x["seed"] in seeds] for label, found in results.items()}
    cited, figures, column = grid, claim.get("figures", claim), claim.get("column", 0)
    if "figures" in claim:  # transcribed in the grid of another model
        cited = run.Grid.load(HERE / figures["grid"])
    transcribed = {cell.label: cell.paper for cell in cited.cells}
    papers = [transcribed[label] for label in figures["rows"]]
    paper = " → ".join(f"{x[column]}" if x else "-" for x in papers) if any(papers) else ""
    ours = " → ".join(f"{fmean(map(_value, found)):.4g}" for found in results.values())
    tokens = max(_tokens(recipe) for cell, recipe in grid.jobs(record["setting"]) if cell.label in claim["rows"])
    model = re.search(r"--model (\S+)", record["command"])
    assert model is not None
    name = {"src/linearize/demo/teacher": "pycode-5m"}.get(model[1], Path(model[1].removesuffix("/model")).name)
    amount = f", {tokens / 1e6:.2g}M tokens" if tokens else ""
    command = f"[command](../experiments/{folder}/{path.with_suffix('.md').name})"
    measure = f" ({cited.paper_columns[column]})" if paper else ""
    rows = "; ".join(claim["rows"])
    return f"| {claim['claim']}: {rows} | {paper}{measure} | {ours} | {verdict} | {name}{amount}; {command} |"


def _value(result: dict[str, Any]) -> float:
    """Return the student's perplexity, or its score in per cent."""
    if "loss" in result:
        return math.exp(result["loss"]["student"]["mean"])
    return 100 * result["scores"]["student"][result["metrics"][0]]["mean"]


def _tokens(recipe: Any) -> int:
    """Return the training tokens of all stages, as far as the recipe bounds them."""
    stages = (recipe.transfer, recipe.adapt, recipe.finetune)
    return sum(stage.max_tokens or 0 for stage in stages if stage is not None)


if __name__ == "__main__":
    INDEX.with_suffix("").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for folder in SECTIONS:
        for path, grid, record in records(folder):
            path.with_suffix(".md").write_text(run.page(grid, record), encoding="utf-8")
            run.draw(grid, record, path.with_suffix(".svg"))
