"""Run a grid of small experiments, each cell a recipe with overrides, and write its table. The same again resumes.

    python experiments/run.py experiments/lolcats/table_6.yaml --model M --dataset D --work-dir W

A grid is a YAML file: `title`, `source` (the paper's table), `question`, `finding` (what came out, in words), `columns`
(of `COLUMNS`, below), `more` (of `MORE`: more tables), `figure` (of `MEASURES`: the score over each), `paper_columns`
(what the numbers under `paper` are), `reference` (the cell that others are compared with), `seeds`, `set` (overrides of
every cell), `settings` (overrides by size of the machine: `small`, `gpu`), and `cells`: `label`, `recipe`, and
optionally `set`, `paper`, `seeds`, `settings` (those it is for). Beside it come NAME.SETTING.json, NAME.SETTING.md and,
where there is a figure, NAME.SETTING.svg. Runs lie in W, where cells that differ after attention transfer only share
that stage. With `--only LABEL ...` the cells named are run, and the reference that they are compared with; the others'
results stay as they are in NAME.SETTING.json. A grid with `examine` is measured on `--examined-text` and `--tasks`, by
`examination.py`; `controls` names the cells that each of its cells is compared with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field

from linearize.base import DivergedError, UserError
from linearize.data.load import load_dataset, load_processor
from linearize.data.packing import Dataset, fingerprint
from linearize.data.rows import PackedRows
from linearize.data.selection import reach_by
from linearize.evaluation.answers import answering
from linearize.evaluation.metrics import title
from linearize.evaluation.perplexity import token_losses
from linearize.hf.checkpoint import load_model, load_tokenizer, read_config
from linearize.hf.teacher import TeacherShape
from linearize.recipe import Recipe
from linearize.run.allocation import stored
from linearize.run.folder import Run, check_output, claim, versions, write_json, write_text
from linearize.run.pipeline import final_layers
from linearize.run.pipeline import run as run_pipeline
from linearize.training.attention_transfer import load_transferred
from linearize.training.finetune import load_finetuned

sys.path.insert(0, str(Path(__file__).parent))

import examination
import figures
import outcomes
from examination import Examination
from outcomes import FAR, POSITIONS, Outcome
from weight_measures import LayerMeasures, measure_weights

BATCH_SIZE = 8
EXAMINED = ("examined_text", "tasks", "task_limit")
SHOWN = ("model", "dataset", "validation_dataset", *EXAMINED, "dtype", "setting", "work_dir")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Cell(BaseModel):
    """One experiment: a recipe, with overrides."""

    model_config = ConfigDict(extra="forbid")
    label: str
    recipe: str
    set: dict[str, Any] = Field(default_factory=dict)
    paper: list[float | str | None] = Field(default_factory=list)
    controls: dict[str, str] | None = None
    seeds: list[int] | None = None
    settings: list[str] | None = None


class Grid(BaseModel):
    """The experiments of one table."""

    model_config = ConfigDict(extra="forbid")
    title: str
    source: str
    question: str
    finding: str = ""
    columns: list[str]
    more: list[str] = Field(default_factory=list)
    figure: list[str] = Field(default_factory=list)
    paper_columns: list[str] = Field(default_factory=list)
    reference: str | None = None
    examine: bool = False
    controls: dict[str, str] = Field(default_factory=dict)
    seeds: list[int] = Field(default_factory=lambda: [0])
    set: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, dict[str, Any]]
    cells: list[Cell]

    @classmethod
    def load(cls, path: Path) -> Grid:
        grid = cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        labels = [cell.label for cell in grid.cells]
        if len(set(labels)) < len(labels) or (grid.reference is not None and grid.reference not in labels):
            raise UserError(f"{path}: expected cells of different labels, the reference {grid.reference!r} among them")
        for cell in grid.cells:
            if unknown := set(grid.controls_of(cell).values()) - set(labels):
                raise UserError(f"{path}: controls: expected labels of cells; found {min(unknown)!r}")
        for field, known in (("columns", COLUMNS), ("more", MORE), ("figure", MEASURES)):
            if unknown := set(getattr(grid, field)) - set(known):
                raise UserError(f"{path}: {field}: expected some of {', '.join(known)}; found {min(unknown)!r}")
        return grid

    def controls_of(self, cell: Cell) -> dict[str, str]:
        """Return the labels of the cells that a cell is compared with, by role."""
        return self.controls if cell.controls is None else cell.controls

    def jobs(self, setting: str) -> Iterator[tuple[Cell, Recipe]]:
        """Each cell with its recipe, once per seed; without those that are for other settings."""
        for cell in self.cells:
            if cell.settings is not None and setting not in cell.settings:
                continue
            for seed in cell.seeds or self.seeds:
                overrides = self.set | self.settings[setting] | cell.set | {"seed": seed}
                yield cell, Recipe.load(cell.recipe, _present(Recipe.load(cell.recipe), overrides))


def _present(recipe: Recipe, overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides of a stage count where there is that stage, in the recipe or by an override."""
    stages = {
        name: overrides.get(name, getattr(recipe, name)) is not None for name in ("transfer", "adapt", "finetune")
    }
    return {
        field: value for field, value in overrides.items() if "." not in field or stages.get(field.split(".")[0], True)
    }


@dataclass(frozen=True)
class Place:
    """What all cells of a call have in common."""

    model: str
    dataset: str | None
    validation_dataset: str | None
    work: Path
    device: torch.device
    dtype: torch.dtype
    examination: Examination | None

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe on this text, unless a cell has a text of its own to train on; trained controls are cells."""
        texts = {
            "data.dataset": recipe.data.dataset or self.dataset,
            "data.validation_dataset": self.validation_dataset,
        }
        return recipe.override(texts | {"evaluation.trained_controls": False})

    def key(self, *parts: Any) -> str:
        dtype = [] if self.dtype == torch.float32 else [str(self.dtype)]
        return hashlib.sha256(json.dumps([self.model, *dtype, *parts], sort_keys=True).encode()).hexdigest()[:12]


# --- one cell ---------------------------------------------------------------------------------------------------------


def run_cell(recipe: Recipe, place: Place, dataset: Callable[[Recipe], Dataset]) -> tuple[dict[str, Any], Path]:
    """Train and measure one cell, unless that is done; its result, and the folder with its token losses."""
    recipe = place.recipe(recipe)
    settings = changed(recipe.model_dump(mode="json"), Recipe(name="").model_dump(mode="json"))
    examined = [] if place.examination is None else place.examination.identity
    folder = place.work / "cells" / place.key(settings, *examined)
    if (folder / "cell.json").is_file():
        return json.loads((folder / "cell.json").read_text(encoding="utf-8")), folder
    data, started = dataset(recipe), time.perf_counter()
    stages = ("weights", "mixer", "transfer", "data", "seed")
    shared = place.work / "transfer" / place.key({name: settings.get(name) for name in (*stages, "layers")})
    run = Run(recipe, place.model, folder / "run", place.dtype, place.device)
    if recipe.transfer is not None and shared.is_dir() and not (run.folder / "transfer").exists():
        claim_folder(run, data)
        shutil.copytree(shared, run.folder / "transfer", dirs_exist_ok=True)
    try:
        run_pipeline(run, dataset=data, until="finetune")
    except DivergedError as error:
        write_json(folder / "cell.json", {"diverged": str(error)})
        return {"diverged": str(error)}, folder
    if recipe.transfer is not None and not shared.exists():
        scratch = shared.with_name(f"{shared.name}.{time.time_ns()}")
        shutil.copytree(run.folder / "transfer", scratch)
        try:
            scratch.rename(shared)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    kept, found = measure_cell(run, data, place)
    outcomes.write(kept, folder)
    rows = data.test if place.examination is None else place.examination.rows
    found |= {"seconds": time.perf_counter() - started, "tokens": rows.num_tokens}
    found |= {"data": data.fingerprint, "test": fingerprint(rows)}
    write_json(folder / "cell.json", found)
    return found, folder


def changed(settings: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What differs from the default, so that a field that is new to recipes does not make every cell a new one."""
    found = {}
    for name, value in settings.items():
        other = default.get(name)
        if isinstance(value, dict) and isinstance(other, dict) and value.get("type") == other.get("type"):
            value = changed(value, other)
            if not value:
                continue
        elif value == other:
            continue
        found[name] = value
    return found


def claim_folder(run: Run, data: Dataset) -> None:
    """Make the run's folder, as `run` would, so that a finished stage can be laid into it."""
    check_output(run)
    claim(run, data)


def measure_cell(run: Run, data: Dataset, place: Place) -> tuple[dict[str, Outcome], dict[str, Any]]:
    """What every stage's model makes of the held-out rows; what comes out of the transfer, and of the heads."""
    recipe, teacher, task = run.recipe, run.load_teacher(), run.recipe.data.task
    shape = TeacherShape.from_config(read_config(run.model))
    measured = stored(run, shape, final_layers(run, shape))
    assert measured is not None
    student = measured.convert(teacher, recipe.seed)
    kept, stages, examined = {}, {}, place.examination
    answer = answering(task, data, load_processor(task, run.model), teacher) if task.scores else None

    def measure(name: str, model: Any) -> None:
        if examined is not None:
            kept[name] = examined.losses(model, name)
        elif answer is not None:
            kept[name] = answer(model, name)
        else:
            assert isinstance(data.test, PackedRows)
            kept[name] = token_losses(model, data.test, batch_size=BATCH_SIZE, title=name)

    def by_head() -> list[LayerMeasures]:
        tokens = recipe.evaluation.fidelity_tokens
        return measure_weights(student, data.test, max_tokens=tokens, batch_size=2, seed=recipe.seed)

    # A new model is no teacher; but one that has weights, which the recipe does not read, can stand beside it.
    if examined is not None:
        folder = place.work / "teacher" / place.key(*examined.identity)
        kept["teacher"], of_teacher = examined.teacher(run.load_teacher, folder)
    elif recipe.weights == "pretrained" or any(Path(run.model).glob("*.safetensors")):
        options: dict[str, Any] = {"dtype": run.dtype, "device": run.device, "auto_class": task.auto_class}
        measure("teacher", load_model(run.model, **options))
        measure("swapped", student)
    learned = recipe.mixer.decay is not None and not recipe.mixer.decay.constant
    before = gates(by_head()) if learned else None
    if recipe.transfer is not None:
        load_transferred(student, recipe.transfer, run.folder / "transfer")
        measure("transferred", student)
        stages["transfer"] = json.loads((run.folder / "transfer" / "result.json").read_text(encoding="utf-8"))
    for name in ("adapt", "finetune"):
        config = getattr(recipe, name)
        if config is not None:
            load_finetuned(student, config, run.folder / name)
            stages[name] = json.loads((run.folder / name / "result.json").read_text(encoding="utf-8"))
    measure("student", student)
    after = by_head()
    heads = {
        "layers": [layer.layer for layer in after],
        "output_mse": [mean(layer.output_mse) for layer in after],
        "output_relative": [mean(layer.output_relative) for layer in after],
        "weight_kl": [mean(layer.weight_kl) for layer in after if layer.weight_kl is not None] or None,
        "cosine": [mean(layer.cosine) for layer in after],
        "entropy": _students(after, "entropy"),
        "teacher_entropy": [mean(layer.entropy.teacher) for layer in after],
        "monotonicity": _students(after, "monotonicity"),
        "singular_values": [mean(layer.singular_values) for layer in after],
    }
    stages = {name: {k: v for k, v in stage.items() if k != "identity"} for name, stage in stages.items()}
    if before is not None:
        heads["gates"] = {"before": before, "after": gates(after)}
    found = {"fidelity": heads, "stages": stages, "kept": [i for i, x in enumerate(measured.layers) if x is None]}
    if examined is not None:
        found["examined"] = examined.student(run.load_teacher(), student, kept["student"], of_teacher)
    return kept, found


def _students(layers: list[LayerMeasures], name: str) -> list[float] | None:
    """Means over heads of one number of the student's weights, by layer; None where they are no distribution."""
    pairs = [getattr(layer, name) for layer in layers]
    return [mean(pair.student) for pair in pairs if pair.student is not None] or None


def gates(layers: list[LayerMeasures]) -> list[float]:
    """The share of the gates' values in each of 20 bins from 0 to 1, over layers, heads and tokens."""
    counts = [head for layer in layers if layer.gates is not None for head in layer.gates]
    total = [sum(bins) for bins in zip(*counts, strict=True)]
    return [count / sum(total) for count in total]


# --- the table --------------------------------------------------------------------------------------------------------


def _perplexity(name: str) -> Callable[[dict[str, Any]], str]:
    def text(result: dict[str, Any]) -> str:
        interval = result["loss"].get(name)
        return "" if interval is None else _number(math.exp(interval["mean"]))

    return text


def _score(name: str) -> Callable[[dict[str, Any]], str]:
    """Of all metrics, in per cent."""

    def text(result: dict[str, Any]) -> str:
        scores = result["scores"].get(name, {})
        return " / ".join(f"{100 * interval['mean']:.1f}" for interval in scores.values())

    return text


def _percent(name: str, sign: str = "") -> Callable[[dict[str, Any]], str]:
    def text(result: dict[str, Any]) -> str:
        x = result.get(name)
        if x is None:
            return ""
        mean, low, high = (format(100 * x[key], f"{sign}.1f") for key in ("mean", "low", "high"))
        return f"{mean} [{low}, {high}]"

    return text


def _interval(name: str) -> Callable[[dict[str, Any]], str]:
    def text(result: dict[str, Any]) -> str:
        x = result.get(name)
        return "" if x is None else f"{x['mean']:+.3f} [{x['low']:+.3f}, {x['high']:+.3f}]"

    return text


def _heads(name: str, resolution: float = 0.0) -> Callable[[dict[str, Any]], str]:
    """Less than `resolution` is what fp32 makes of 0."""

    def text(result: dict[str, Any]) -> str:
        values = result["fidelity"].get(name)
        return "" if not values else _number(0 if abs(mean(values)) < resolution else mean(values))

    return text


def _number(value: float) -> str:
    return f"{value:.2e}" if value >= 1e4 else f"{value:.4g}" if value < 1 else f"{value:.2f}"


def _beyond(result: dict[str, Any]) -> str:
    interval = result["beyond"].get("student")
    return "" if interval is None else _number(math.exp(interval["mean"]))


def _examined(text: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """Of what a grid with `examine` measures; nothing where that is not measured."""

    def cell(result: dict[str, Any]) -> str:
        try:
            return text(result["examined"])
        except KeyError:
            return ""

    return cell


def _compared(*names: str) -> Callable[[dict[str, Any]], str]:
    def text(examined: dict[str, Any]) -> str:
        interval = examined["compared"]
        for name in names:
            interval = interval[name]
        return _interval("it")({"it": interval})

    return _examined(text)


def _right(task: str, metric: str) -> Callable[[dict[str, Any]], str]:
    """Right answers in per cent, and as a share of the teacher's."""

    def text(examined: dict[str, Any]) -> str:
        own, teacher = (of["tasks"][task][metric] for of in (examined, examined["teacher"]))
        return f"{100 * own:.1f} ({own / teacher:.0%})"

    return _examined(text)


def _training_speed(result: dict[str, Any]) -> str:
    """Of all stages, the held-out losses in between included."""
    tokens, seconds = (sum(stage[name] for stage in result["stages"].values()) for name in ("tokens", "seconds"))
    return f"{tokens / seconds:.0f}" if seconds else ""


COLUMNS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "swapped": ("perplexity, untrained", _perplexity("swapped")),
    "transferred": ("after transfer", _perplexity("transferred")),
    "student": ("perplexity at the end", _perplexity("student")),
    "beyond": (f"beyond {FAR} tokens", _beyond),
    "minus_teacher": ("loss, minus the teacher's", _interval("minus_teacher")),
    "minus_reference": ("loss, minus the reference's", _interval("minus_reference")),
    "minus_reference_beyond": (f"the same beyond {FAR} tokens", _interval("minus_reference_beyond")),
    "mse": ("MSE of outputs", _heads("output_mse")),
    "relative_mse": ("MSE over mean square", _heads("output_relative")),
    "kl": ("KL of weights", _heads("weight_kl", resolution=1e-7)),
    "cosine": ("cosine of weights", _heads("cosine")),
    "singular_values": ("distance of singular values", _heads("singular_values")),
    "entropy": ("entropy of weights", _heads("entropy")),
    "teacher_entropy": ("of softmax's", _heads("teacher_entropy")),
    "monotonicity": ("monotonicity", _heads("monotonicity")),
    "teacher_score": ("teacher", _score("teacher")),
    "swapped_score": ("untrained", _score("swapped")),
    "transferred_score": ("after transfer", _score("transferred")),
    "score": ("at the end", _score("student")),
    "recovered": ("% of the teacher's", _percent("recovered")),
    "kl_teacher": ("KL to the teacher", _examined(lambda x: f"{x['kl']['mean']:.3f}")),
    "minus_window": ("loss, minus the window's", _compared("minus_window", "all")),
    "minus_equal_bytes": ("loss, minus the window's of equal bytes", _compared("minus_equal_bytes", "all")),
    "gain_retained": (
        f"gain beyond {FAR} tokens retained, %",
        _examined(lambda x: _percent("gain_retained")(x["compared"])),
    ),
    "without_linear": ("loss without the linear part, minus its own", _examined(_interval("without_linear"))),
    "copying": ("copying retained, %", _examined(lambda x: _percent("share")(x["copying"]))),
    "needles": ("needles", _examined(lambda x: "{} of {}".format(*x["needles"]))),
    "arc_easy": ("ARC-easy, % (of the teacher's)", _right("arc_easy", "acc")),
    "piqa": ("PIQA, % (of the teacher's)", _right("piqa", "acc")),
    "state_mib": ("state, MiB", _examined(lambda x: f"{x['cache_bytes'] / 2**20:.2f}")),
    "training_speed": ("training, tokens/s", _training_speed),
    "score_minus_reference": ("minus the reference's", _percent("score_minus_reference", "+")),
}


def table(grid: Grid, results: list[dict[str, Any]]) -> str:
    """The grid's results as Markdown: a line per cell and seed, the paper's numbers at the end."""
    seeds = len({result["seed"] for result in results}) > 1
    header = ["", *(["seed"] if seeds else []), *(COLUMNS[name][0] for name in grid.columns)]
    header += [f"paper: {name}" for name in grid.paper_columns]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    elsewhere = on_other_rows(grid, results)
    for result in results:
        label = f"**{result['label']}**" if result["label"] == grid.reference else result["label"]
        label += " †" if result in elsewhere else ""
        cells = [label, *([str(result["seed"])] if seeds else [])]
        cells += _measured(grid, result)
        paper = [*result["paper"], *[None] * (len(grid.paper_columns) - len(result["paper"]))]
        lines.append(
            "| "
            + " | ".join(cells + ["" if x is None else f"{x:g}" if isinstance(x, float | int) else x for x in paper])
            + " |"
        )
    return "\n".join(lines)


def on_other_rows(grid: Grid, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results on other rows than the reference of their seed, or the first: those of before the data were split anew.

    The fingerprint of the test rows decides, or that of all data, which older results have alone. Cells that train on
    data of their own are left out.
    """

    def same_rows(a: dict[str, Any], b: dict[str, Any]) -> bool:
        name = "test" if "test" in a and "test" in b else "data"
        return a[name] == b[name]

    first: dict[int, dict[str, Any]] = {}
    compared = [r for r in results if "data" in r and not any(field.startswith("data.") for field in r["set"])]
    for result in sorted(compared, key=lambda result: result["label"] != grid.reference):
        first.setdefault(result["seed"], result)
    return [result for result in compared if not same_rows(result, first[result["seed"]])]


def _measured(grid: Grid, result: dict[str, Any]) -> list[str]:
    if "diverged" in result:
        return ["diverged", *[""] * (len(grid.columns) - 1)]
    return [COLUMNS[name][1](result) for name in grid.columns]


def by_position(results: list[dict[str, Any]]) -> str:
    """Mean loss of tokens by their position in the document, of the teacher and of every cell."""
    measured = [result for result in results if "by_position" in result]
    ranges = [f"{low} to {high - 1}" for low, high in pairwise(POSITIONS)]
    used = [i for i in range(len(ranges)) if measured[0]["by_position"]["teacher"][i] is not None]
    rows = [["teacher", measured[0]["by_position"]["teacher"]]]
    rows += [[result["label"], result["by_position"]["student"]] for result in measured]
    lines = [["loss at position", *(ranges[i] for i in used)], ["---"] * (len(used) + 1)]
    lines += [[label, *(f"{values[i]:.3f}" for i in used)] for label, values in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_layer(results: list[dict[str, Any]]) -> str:
    """Held-out loss of attention transfer, by layer, of every cell that has that stage."""
    stages = [(r["label"], r["stages"]["transfer"]["best_loss"]) for r in results if "transfer" in r.get("stages", {})]
    layers = [next(part for part in name.split(".") if part.isdigit()) for name in stages[0][1]]
    lines = [["transfer loss of layer", *layers], ["---"] * (len(layers) + 1)]
    lines += [[label, *(_number(loss) for loss in losses.values())] for label, losses in stages]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_gate(results: list[dict[str, Any]]) -> str:
    """How much of the gates lies near 0, between, and near 1, before and after training."""
    lines = [["gates", "below 0.05", "0.05 to 0.5", "0.5 to 0.95", "above 0.95"], ["---"] * 5]
    for result in results:
        for moment, bins in result.get("fidelity", {}).get("gates", {}).items():
            parts = bins[:1], bins[1:10], bins[10:19], bins[19:]
            lines.append([f"{result['label']}, {moment}", *(f"{sum(part):.0%}" for part in parts)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


MORE = {"by_position": by_position, "by_layer": by_layer, "by_gate": by_gate}


# Of attention weights: what a figure has over its x axis, and the same of the teacher's.
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "entropy": lambda fidelity: mean(fidelity["teacher_entropy"]),
    "monotonicity": lambda fidelity: 1.0,
}


def draw(grid: Grid, record: dict[str, Any], path: Path) -> None:
    """The first of the scores over each measure of the weights, a point per cell of the first seed, and the teacher.

    The teacher's weights are those beside the reference's: they are of the student's own queries and keys.
    """
    results: dict[str, dict[str, Any]] = {}
    for result in record["results"]:
        if "diverged" not in result:
            results.setdefault(result["label"], result)
    if not grid.figure or not results:
        return
    first = results.get(grid.reference or "", next(iter(results.values())))
    metric = first["metrics"][0]
    panels = {}
    for name in grid.figure:
        points = {
            label: (mean(r["fidelity"][name]), r["scores"]["student"][metric]["mean"]) for label, r in results.items()
        }
        if "teacher" in first["scores"]:
            points["softmax"] = MEASURES[name](first["fidelity"]), first["scores"]["teacher"][metric]["mean"]
        panels[f"{name} of weights"] = {label: (x, 100 * y) for label, (x, y) in points.items()}
    figures.scatter(path, f"{title(metric)}, per cent", panels)


def described(grid: Grid, results: list[dict[str, Any]]) -> str:
    """What a reader of the table must know."""
    elsewhere = on_other_rows(grid, results)
    measured = {r["seed"]: r for r in results if "diverged" not in r and r not in elsewhere}
    if not measured:
        return ""
    first = next(iter(measured.values()))
    tests = [result.get("test") for result in measured.values()]
    drawn = "" if len(tests) == 1 or (None not in tests and len({*tests}) == 1) else ", which each seed draws anew"
    text = ""
    if "loss" in first:
        tokens = f"{first['tokens']:,} held-out tokens"
        tokens += f" of {first['documents']:,} documents" if "documents" in first else ""
        from_scratch = all(Recipe.load(cell.recipe).weights == "random" for cell in grid.cells)
        if "teacher" in first["loss"] and not from_scratch:  # which read nothing of it but its shape
            teachers = [_number(math.exp(result["loss"]["teacher"]["mean"])) for result in measured.values()]
            text += (
                f"Teacher: perplexity {', '.join(teachers if drawn else teachers[:1])} on the same {tokens}{drawn}. "
            )
        else:
            text += f"On the same {tokens}{drawn}. "
        if "documents" not in first:
            text += (
                "Measured before held-out documents were divided into those that choose a checkpoint and those of the "
                "test: these rows chose, too, and the command now measures others. "
            )
        brackets = "In brackets: 95 % bootstrap intervals of paired differences, in nats per token."
    else:
        names = " / ".join(title(metric) for metric in first["metrics"])
        text += f"Scores: {names}, in per cent, on the same {first['examples']:,} held-out examples{drawn}. "
        brackets = "In brackets: 95 % bootstrap intervals, paired over the examples."
    if grid.reference is not None:
        text += "The reference is in bold. "
    if elsewhere:
        text += "†: measured on another split of the same data, to be compared with each other only. "
    return "\n\n".join([text + brackets, *(MORE[name](results) for name in grid.more)])


def page(grid: Grid, record: dict[str, Any], heading: str = "#", folder: str = "") -> str:
    """What is written of a grid: its question, the table, a figure (in `folder`), what came out, the command."""
    results = record["results"]
    missing = len(list(grid.jobs(record["setting"]))) - len(results)
    parts = [f"{heading} {grid.title}", f"{grid.source}. {grid.question}"]
    parts += [table(grid, results), described(grid, results)]
    drawing = Path(record["grid"]).with_suffix(f".{record['setting']}.svg")
    parts += (
        [f"![Score over {' and '.join(grid.figure)} of attention weights]({folder}{drawing})"] if grid.figure else []
    )
    parts += [f"**Finding.** {grid.finding.strip()}"] if grid.finding else []
    parts += [f"{missing} more cells of this grid have not been run."] if missing else []
    return "\n\n".join([*parts, f"    {record['command']}"]) + "\n"


def compare_examined(grid: Grid, results: list[dict[str, Any]]) -> None:
    """Set `compared` of the results that are examined, from their own losses and those of their controls."""
    examined = [result for result in results if "examined" in result]
    cells = {cell.label: cell for cell in grid.cells}
    for result in examined:
        same_seed = [other for other in examined if other["seed"] == result["seed"]]
        students = {other["label"]: other["examined"]["totals"] for other in same_seed}
        controls = grid.controls_of(cells[result["label"]])
        teacher = result["examined"]["teacher"]["totals"]
        result["examined"]["compared"] = examination.compare(result["label"], controls, students, teacher)


def write_table(path: Path, grid: Grid, setting: str, results: list[dict[str, Any]], command: str) -> None:
    compare_examined(grid, results)
    name = path.with_suffix(f".{setting}.json")
    record = {"grid": path.name, "setting": setting, "command": command, "versions": versions(), "results": results}
    write_json(name, record)
    write_text(name.with_suffix(".md"), page(grid, record))
    draw(grid, record, name.with_suffix(".svg"))


def run_grid(path: Path, place: Place, *, setting: str, only: list[str], command: str) -> None:
    """Run what is missing of a grid, or of its cells with one of `only` in their label and of the reference.

    After every cell its table is written, of what is there; where cells are named, of what was there too.
    """
    grid = Grid.load(path)
    if setting not in grid.settings:
        raise UserError(f"--setting: expected one of {', '.join(grid.settings)}; found {setting!r}")
    config = read_config(place.model)
    datasets: dict[str, Dataset] = {}

    def dataset(recipe: Recipe) -> Dataset:
        key = json.dumps([recipe.data.model_dump(mode="json"), recipe.seed])
        if key not in datasets:
            task = recipe.data.task
            options: dict[str, Any] = {"dtype": torch.float32, "device": place.device, "auto_class": task.auto_class}
            processor = load_processor(task, place.model)
            datasets[key] = load_dataset(
                recipe.data, processor, config, reach_by(lambda: load_model(place.model, **options)), seed=recipe.seed
            )
        return datasets[key]

    done: list[tuple[Cell, Recipe, dict[str, Any], Path]] = []
    jobs = [job for job in grid.jobs(setting) if not only or any(name in job[0].label for name in only)]
    if not jobs:
        raise UserError(f"--only: expected parts of the labels of {path}; found {', '.join(only)}")
    if only:
        named = {cell.label for cell, _ in jobs} | {grid.reference}
        jobs = [job for job in grid.jobs(setting) if job[0].label in named]
    before = path.with_suffix(f".{setting}.json")
    kept = json.loads(before.read_text(encoding="utf-8"))["results"] if only and before.is_file() else []
    for number, (cell, recipe) in enumerate(jobs, 1):
        sys.stderr.write(f"{path.stem}: {number} of {len(jobs)}: {cell.label}, seed {recipe.seed}" + "\n")
        done.append((cell, recipe, *run_cell(recipe, place, dataset)))
        write_table(path, grid, setting, merged(grid, setting, collected(grid, done), kept), command)


def merged(grid: Grid, setting: str, results: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New results and those kept of other cells, in the grid's order; without those of cells that have changed.

    Where the reference came out otherwise than the kept one, kept results lose their differences to that.
    """

    def by_cell(found: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
        return {(result["label"], result["seed"]): result for result in found}

    new, old, found = by_cell(results), by_cell(kept), []
    for cell, recipe in grid.jobs(setting):
        result, reference = old.get((cell.label, recipe.seed)), (grid.reference or "", recipe.seed)
        if (cell.label, recipe.seed) in new:
            found.append(new[cell.label, recipe.seed])
        elif result is not None and (result["recipe"], result["set"]) == (cell.recipe, cell.set):
            if reference in new and _student(new[reference]) != _student(old.get(reference, {})):
                result = {name: value for name, value in result.items() if "minus_reference" not in name}
            found.append(result)
    return found


def _student(result: dict[str, Any]) -> Any:
    return result.get("loss", result.get("scores", {})).get("student")


def collected(grid: Grid, done: list[tuple[Cell, Recipe, dict[str, Any], Path]]) -> list[dict[str, Any]]:
    """Every finished cell's result with its differences to the reference of the same seed."""
    references = {
        recipe.seed: outcomes.read(folder)["student"]
        for cell, recipe, found, folder in done
        if cell.label == grid.reference and "diverged" not in found
    }
    results = []
    for cell, recipe, found, folder in done:
        reference = None if cell.label == grid.reference else references.get(recipe.seed)
        about = {"label": cell.label, "recipe": cell.recipe, "set": cell.set, "seed": recipe.seed, "paper": cell.paper}
        results.append(
            about | ({} if "diverged" in found else outcomes.summary(outcomes.read(folder), reference)) | found
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--model", required=True, help="the teacher: a folder or hub id")
    parser.add_argument("--dataset", help="text or examples: a file, a folder or a hub id; built-in tasks need none")
    parser.add_argument("--validation-dataset", help="held-out text of its own")
    parser.add_argument("--examined-text", help="of a grid with `examine`: text that is neither trained nor chosen on")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="the same: .jsonl files of questions")
    parser.add_argument("--task-limit", type=int, metavar="N", help="the first questions of each task (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the teacher and of what is computed")
    parser.add_argument("--setting", default="small")
    parser.add_argument("--work-dir", type=Path, required=True, help="where runs lie; the same again resumes")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="LABEL",
        help="only cells with one of these in their label, and the reference; the others' results stay as they are",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    torch.set_flush_denormal(True)  # as the command line does
    shown = {name: " ".join(value) if isinstance(value, list) else value for name, value in vars(a).items()}
    named = [f"--{name.replace('_', '-')} {value}" for name, value in shown.items() if name in SHOWN and value]
    command = f"python experiments/run.py {a.grid} {' '.join(named)}"
    try:
        examined = None
        if Grid.load(a.grid).examine:
            if a.examined_text is None:
                raise UserError("--examined-text: expected a text for a grid with `examine`, found nothing")
            tokenizer = load_tokenizer(a.model)
            examined = Examination.of(a.examined_text, tokenizer, tuple(a.tasks), a.task_limit)
        device, dtype = torch.device(a.device), DTYPES[a.dtype]
        place = Place(a.model, a.dataset, a.validation_dataset, a.work_dir, device, dtype, examined)
        run_grid(a.grid, place, setting=a.setting, only=a.only, command=command)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
