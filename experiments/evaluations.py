"""Write the evaluation.md of every run under experiments/ anew from its evaluation.json; nothing is measured.

python experiments/evaluations.py
"""

from __future__ import annotations

from pathlib import Path

from linearize.report.card import evaluation_page
from linearize.report.load import load_run

HERE = Path(__file__).parent


def folders() -> list[Path]:
    """The runs whose measurements are committed."""
    return sorted(path.parent for path in HERE.glob("*/*/evaluation.json"))


def main() -> None:
    for folder in folders():
        (folder / "evaluation.md").write_text(evaluation_page(load_run(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
