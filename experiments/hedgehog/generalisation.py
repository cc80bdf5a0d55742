"""Hedgehog's Tables 4, 5, 14 and 15: are maps that were distilled on one task good on other text, lengths and tasks?

    python experiments/hedgehog/generalisation.py --run "Hedgehog (CoLA)=RUN" --run "T2R-HH (CoLA)=RUN2" \
        --data "{name: CoLA, dataset: dev.tsv, columns: [source, label, mark, sentence], text_column: sentence}" \
        --data "{name: SST-2, dataset: sst2/dev.tsv, text_column: sentence}" --onto "SST-2=RUN3" [--finetune W]

RUN are run folders of converted models (a grid's lie in its --work-dir, cells/KEY/run). Their maps as distilled, the
same untrained, and maps that learn nothing are swapped into the first run's teacher; measured is the KL divergence of
their attention weights from softmax, a mean over heads and layers, on each --data (Tables 4 and 14), and on the first
of these joined to longer and longer rows (Table 5). With --onto all are swapped into that run's teacher, too, and
measured on its own task: KL, the score before fine-tuning, and with --finetune the score after its last stage (Table
15).
Writes generalisation.json and the same as tables beside it (.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.data.examples import Example, unlabelled_texts
from linearize.data.labels import text_cell
from linearize.data.load import load_dataset, load_processor
from linearize.data.rows import Rows
from linearize.data.sources import read_rows
from linearize.evaluation.answers import answering
from linearize.hf.checkpoint import load_tokenizer, read_config
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import Recipe
from linearize.run.folder import Run, versions
from linearize.training.attention_transfer import load_transferred
from linearize.training.finetune import finetune

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import write_page
from weight_measures import measure_weights

FIXED: dict[str, dict[str, Any]] = {
    "1 + ELU": {"type": "elu1"},
    "exp(x)": {"type": "exp"},
    "Performer": {"type": "performer"},
    "cosFormer": {"type": "cosformer"},
}
LENGTHS = (32, 64, 128, 256, 512)
BATCH_SIZE = 4
PAPER = (
    "Paper, Table 4 (BERT-base): KL on CoLA 0.172 for Hedgehog distilled on CoLA, 0.191 T2R-HH, 0.694 Hedgehog "
    "untrained, 1.223 1 + ELU, 1.293 Performer, 1.196 cosFormer; on MRPC 0.663, 1.128, 1.250, 2.165, 2.234, "
    "1.982. Table 5: 0.182, 0.187, 0.190, 0.181 at 256, 1,024, 2,048 and 4,096 tokens. Table 15, finetuned on SST-2: "
    "91.9 Hedgehog distilled on CoLA, 89.5 untrained, 85.9 1 + ELU, 85.1 Performer, 88.4 cosFormer."
)


@dataclass(frozen=True)
class Maps:
    """Feature maps that can be swapped into a teacher: those of a run as it distilled them, or untrained."""

    label: str
    recipe: Recipe
    distilled: Run | None

    def student(self, teacher: PreTrainedModel) -> PreTrainedModel:
        """A student of any teacher of the shape of the run's own; nothing of it is finetuned."""
        layers = resolve(self.recipe, TeacherShape.from_config(teacher.config.to_dict()))
        student = convert_layers(teacher, layers, seed=self.recipe.seed)
        if self.distilled is not None:
            assert self.recipe.transfer is not None
            load_transferred(student, self.recipe.transfer, self.distilled.folder / "transfer")
        return student


def all_maps(runs: dict[str, Run]) -> list[Maps]:
    """Of every run; the same untrained, once for each kind; and those that learn nothing.

    Raises:
        UserError: a run without attention transfer.
    """
    distilled, untrained = [], dict[str, Maps]()
    for label, run in runs.items():
        if run.recipe.transfer is None or run.recipe.mixer.feature_map is None:
            raise UserError(f"--run {label}: expected a run with attention transfer, found one without; name another")
        distilled.append(Maps(label, run.recipe, run))
        kind = run.recipe.mixer.feature_map.type
        untrained.setdefault(kind, Maps(f"{kind}, untrained", run.recipe, None))
    first = next(iter(runs.values())).recipe
    fixed = [
        Maps(label, first.override({"transfer": None, "mixer.feature_map": feature_map}), None)
        for label, feature_map in FIXED.items()
    ]
    return [*distilled, *untrained.values(), *fixed]


def divergence(student: PreTrainedModel, rows: Any, max_tokens: int) -> float | None:
    """KL(softmax || student) of attention weights, nats per query: a mean over heads and layers."""
    found = measure_weights(student, rows, max_tokens=max_tokens, batch_size=BATCH_SIZE, seed=0)
    layers = [mean(layer.weight_kl) for layer in found if layer.weight_kl is not None]
    return mean(layers) if layers else None


# --- text -------------------------------------------------------------------------------------------------------------


def sources_of(given: Sequence[str]) -> dict[str, DataConfig]:
    """``{name: ..., dataset: ..., text_column: ...}`` by name: the fields of a recipe's data.

    Raises:
        UserError: anything else.
    """
    found = {}
    for text in given:
        try:
            fields = yaml.safe_load(text)
        except yaml.YAMLError:
            fields = None
        if not isinstance(fields, dict) or "name" not in fields:
            raise UserError(f"--data {text}: expected {{name: ..., dataset: ...}}, with a space after each colon")
        name = str(fields.pop("name"))
        overrides = {f"data.{field}": value for field, value in ({"sequence_length": 128} | fields).items()}
        found[name] = Recipe.parse({"name": name}).override(overrides).data
    return found


def read_texts(config: DataConfig) -> list[str]:
    """The texts of one column."""
    rows = islice(read_rows(config), config.max_documents)
    texts = (text_cell(row, config.text_column, where, "text_column") for where, row in rows)
    return [text for text in texts if text.strip()]


def sentences(texts: Sequence[str], tokenizer: Any, length: int) -> Rows:
    """A row for each text."""
    return _rows(tokenizer(list(texts), truncation=True, max_length=length)["input_ids"], tokenizer)


def joined(texts: Sequence[str], tokenizer: Any, length: int) -> Rows | None:
    """All texts one after the other, cut into rows of `length` tokens, each with the special tokens of one text.

    None where there is not enough text for a row.
    """
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    tokens = [token for ids in encoded for token in ids]
    starts_with = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    before, after = ([x] if x is not None else [] for x in (starts_with, tokenizer.sep_token_id))
    step = length - len(before) - len(after)
    starts = range(0, len(tokens) - step + 1, step)
    rows = [[*before, *tokens[start : start + step], *after] for start in starts]
    return _rows(rows, tokenizer) if rows else None


def _rows(ids: Sequence[list[int]], tokenizer: Any) -> Rows:
    return unlabelled_texts([Example(row, None, None) for row in ids], tokenizer.pad_token_id or 0, None)


# --- the tables -------------------------------------------------------------------------------------------------------


def on_text(
    maps: Sequence[Maps], teacher: PreTrainedModel, rows: dict[str, Rows], max_tokens: int
) -> dict[str, dict[str, float | None]]:
    """KL by maps and by name of the rows (Tables 4, 5 and 14)."""
    found: dict[str, dict[str, float | None]] = {}
    for one in maps:
        student = one.student(teacher)
        found[one.label] = {name: divergence(student, some, max_tokens) for name, some in rows.items()}
        sys.stderr.write(f"{one.label}: {found[one.label]}\n")
    return found


def moved(maps: Sequence[Maps], run: Run, max_tokens: int, work: Path | None) -> dict[str, Any]:
    """KL and scores at the task of `run`, whose teacher the maps are swapped into (Table 15).

    Args:
        work: where each is finetuned as the run's recipe says; None: none is.
    """
    recipe, config = run.recipe, read_config(run.model)
    processor = load_processor(recipe.data.task, run.model)
    dataset = load_dataset(recipe.data, processor, config, seed=recipe.seed)
    teacher = run.load_teacher()
    answer = answering(recipe.data.task, dataset, processor, teacher)
    found: dict[str, Any] = {"softmax": {"score": first(answer(teacher, "softmax").scores())}}
    for one in [Maps("of its own", recipe, run), *maps]:
        student = one.student(teacher)
        found[one.label] = {
            "kl": divergence(student, dataset.test, max_tokens),
            "score": first(answer(student, one.label).scores()),
        }
        if work is not None and recipe.finetune is not None:
            options = {"output_dir": work / one.label, "teacher": teacher, "seed": recipe.seed, "title": one.label}
            finetune(student, dataset.train, dataset.validation, recipe.finetune, **options)
            found[one.label]["finetuned"] = first(answer(student.eval(), one.label).scores())
        sys.stderr.write(f"{one.label}: {found[one.label]}\n")
    return {"metric": recipe.data.task.scores[0], "maps": found}


def first(scores: dict[str, float]) -> float:
    """The score that counts."""
    return next(iter(scores.values()))


def generalisation(a: argparse.Namespace) -> dict[str, Any]:
    """All tables, as plain data.

    Raises:
        UserError: a run or text that cannot be used.
    """
    device = torch.device(a.device)
    runs, onto = (dict(_read_runs(given, device)) for given in (a.run, a.onto))
    maps, sources = all_maps(runs), sources_of(a.data)
    run = next(iter(runs.values()))
    teacher, tokenizer = run.load_teacher(), load_tokenizer(run.model)
    texts = {name: read_texts(config) for name, config in sources.items()}
    rows = {name: sentences(texts[name], tokenizer, config.sequence_length) for name, config in sources.items()}
    longest = TeacherShape.from_config(read_config(run.model)).max_positions
    lengths = {str(n): joined(next(iter(texts.values())), tokenizer, n) for n in a.lengths if n <= longest}
    long = {name: some for name, some in lengths.items() if some is not None}
    return {
        "data": on_text(maps, teacher, rows, a.tokens),
        "lengths": on_text(maps, teacher, long, a.tokens),
        "moved": {name: moved(maps, to, a.tokens, a.finetune and a.finetune / name) for name, to in onto.items()},
        "tokens": a.tokens,
        "title": a.title,
        "finding": a.finding,
        "versions": versions(),
    }


def _read_runs(given: Sequence[str], device: torch.device) -> Iterator[tuple[str, Run]]:
    for text in given:
        label, equals, folder = text.partition("=")
        if not equals or not (Path(folder) / "run.json").is_file():
            raise UserError(f"run {text!r}: expected LABEL=FOLDER, a folder with a run.json; found none")
        yield label, Run.read(Path(folder), torch.float32, device)


def markdown(found: dict[str, Any]) -> str:
    """The same as tables."""
    lines = [f"# {found['title']}", ""]
    lines += ["KL divergence of attention weights from softmax, nats per query, a mean over heads and layers.", ""]
    lines += ["## Other text (Tables 4 and 14)", "", *_table(found["data"]), ""]
    lines += ["## Longer text (Table 5)", "", "By tokens of a row; the first text, joined.", ""]
    lines += [*_table(found["lengths"]), "", PAPER]
    for name, task in found["moved"].items():
        titles: dict[str, Callable[[dict[str, Any]], Any]] = {"KL": lambda row: row.get("kl")}
        titles[f"{task['metric']}, before fine-tuning"] = lambda row: row["score"]
        if any("finetuned" in row for row in task["maps"].values()):
            titles["finetuned"] = lambda row: row.get("finetuned")
        rows = {label: {title: get(row) for title, get in titles.items()} for label, row in task["maps"].items()}
        lines += ["", f"## In the teacher of another task: {name} (Table 15)", "", *_table(rows)]
    lines += ["", f"**Finding.** {found['finding']}"] if found["finding"] else []
    return "\n".join(lines) + "\n"


def _table(rows: dict[str, dict[str, float | None]]) -> list[str]:
    names = next(iter(rows.values()))
    lines = [["maps", *names], ["---"] * (len(names) + 1)]
    lines += [[label, *("" if x is None else f"{x:.3f}" for x in row.values())] for label, row in rows.items()]
    return ["| " + " | ".join(line) + " |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", required=True, metavar="LABEL=FOLDER", help="distilled maps")
    parser.add_argument("--data", action="append", required=True, metavar="{name: ..., dataset: ...}", help="a text")
    parser.add_argument("--onto", action="append", default=[], metavar="LABEL=FOLDER", help="a run of another task")
    parser.add_argument("--finetune", type=Path, help="finetune on the other task, too; the folder for that")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of joined rows")
    parser.add_argument("--tokens", type=int, default=4096, help="at most so many are looked at, of each text")
    parser.add_argument(
        "--title", default="Hedgehog, Tables 4, 5, 14 and 15: feature maps on other text", help="the page's"
    )
    parser.add_argument("--finding", default="", help="what came out, in words, for the page")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    write_page(a.json, lambda: generalisation(a), markdown)


if __name__ == "__main__":
    main()
