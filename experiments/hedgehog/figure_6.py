"""Hedgehog's Fig. 6, a layer's time and memory over sequence length, from what `benchmarks/mixers.py` has measured.

    python benchmarks/mixers.py --recipes hedgehog taylor performer --repeats 3 --json benchmarks/results/wide.json
    python experiments/hedgehog/figure_6.py benchmarks/results/wide.json

Writes figure_6.svg and figure_6.md beside it. Performer is in that file too, and not in the paper's figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from linearize.base import UserError
from linearize.run.folder import write_text

sys.path.insert(0, str(Path(__file__).parents[1]))

import figures

MAPS = {"hedgehog": "Hedgehog", "taylor": "Taylor"}


def measured(record: dict[str, Any]) -> tuple[list[int], dict[str, dict[str, list[float]]]]:
    """Lengths in tokens; forward times in ms, and memory beyond the inputs in MiB, of softmax attention and each map.

    Raises:
        UserError: a map is not measured at every length.
    """
    by = {(r["recipe"], r["length"]): r for r in record["results"] if not r["backward"]}
    lengths = sorted({length for _, length in by})
    if missing := [(name, length) for name in MAPS for length in lengths if (name, length) not in by] or not lengths:
        raise UserError(f"expected forward times of {' and '.join(MAPS)} at all lengths; missing {missing}")
    softmax = [by["hedgehog", length] for length in lengths]
    time = {"softmax": [1e3 * r["softmax"]["median"] for r in softmax]}
    memory = {"softmax": [r["softmax_peak_bytes"] / 2**20 for r in softmax]}
    for name, label in MAPS.items():
        ours = [by[name, length] for length in lengths]
        time[label] = [1e3 * r["ours"]["median"] for r in ours]
        memory[label] = [r["peak_bytes"] / 2**20 for r in ours]
    return lengths, {"ms": time, "MiB": memory}


def page(record: dict[str, Any], source: str) -> str:
    lengths, panels = measured(record)
    header = ["tokens", *(f"{name}, {unit}" for unit, lines in panels.items() for name in lines)]
    rows = [header, ["---"] * len(header)]
    for i, length in enumerate(lengths):
        values = [line[i] for lines in panels.values() for line in lines.values()]
        rows.append([f"{length:,}", *(f"{x:,.1f}" for x in values)])
    softmax = panels["ms"]["softmax"][-1]
    faster = " and ".join(f"{softmax / panels['ms'][label][-1]:.1f} ({label})" for label in MAPS.values())
    dims = {r["recipe"]: r["feature_dim"] for r in record["results"]}
    features = ", ".join(f"{label} has {dims[name]} features" for name, label in MAPS.items())
    heads = f"{record['heads']} heads of {record['head_dim']}"
    return f"""# Hedgehog, Fig. 6: a layer's time and memory by length

Zhang et al., Hedgehog (arXiv 2402.04347), Fig. 6: one attention layer, against FlashAttention and Taylor features.
Forward, fp32, on {record["threads"]} CPU cores: torch's `scaled_dot_product_attention`, and whole mixers, of {heads}.
{features}. Times are medians of {record["repeats"]} rounds in which all took turns; memory is the most
that was held at once beyond the inputs.

![Time and memory over sequence length](figure_6.svg)

{chr(10).join("| " + " | ".join(row) + " |" for row in rows)}

Times faster than softmax attention at {lengths[-1]:,} tokens: {faster}.

    python benchmarks/mixers.py --recipes hedgehog taylor performer --repeats {record["repeats"]} --json {source}
    python experiments/hedgehog/figure_6.py {source}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what `benchmarks/mixers.py --json` wrote")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"), help="the page")
    a = parser.parse_args()
    try:
        record = json.loads(a.results.read_text(encoding="utf-8"))
        figures.curves(a.output.with_suffix(".svg"), *measured(record))
        write_text(a.output, page(record, str(a.results)))
    except (UserError, OSError, ValueError, KeyError) as error:
        missing = f"expected what `benchmarks/mixers.py --json` writes; found no {error}"
        sys.stderr.write(f"error: {a.results}: {missing if isinstance(error, KeyError) else error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
