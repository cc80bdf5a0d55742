"""The grids of experiments/: all can be run at every setting, and the runner does what its tables say."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from linearize.base import DivergedError, UserError
from linearize.evaluation.metrics import MaskedTokens, Predictions, Similarities
from linearize.evaluation.perplexity import TokenLosses
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import Recipe
from linearize.training import loop
from tests import tiny
from tests.shapes import make_shape

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
GRIDS = sorted(path for path in EXPERIMENTS.glob("*/*.yaml") if path.name != "recipe.yaml")
UNFINISHED = ("papers_real",)  # folders of grids whose cells are measured over several days
SHAPE = make_shape("llama", 5, 8, 4, 8, 64, 172, 512, 4096, True)
ENCODER = {"model_type": "bert", "vocab_size": 30_522, "hidden_size": 384, "intermediate_size": 1536}
ENCODER |= {"num_hidden_layers": 6, "num_attention_heads": 12, "max_position_embeddings": 512}


def load(name: str) -> ModuleType:
    """A script of experiments/, which is no package."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load("run")


def shape_of(recipe: Recipe) -> TeacherShape:
    """A model that can do the recipe's task."""
    task = recipe.data.task.type
    if task in ("text_classification", "masked_language_modelling"):
        return TeacherShape.from_config(ENCODER)
    shapes = {"image_classification": "vit", "list_ops": "listops", "associative_recall": "recall"}
    if task not in shapes:
        return SHAPE
    config = EXPERIMENTS / "hedgehog" / "shapes" / shapes[task] / "config.json"
    return TeacherShape.from_config(json.loads(config.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", GRIDS, ids=[f"{path.parent.name}/{path.stem}" for path in GRIDS])
def test_every_cell_resolves_at_every_setting(path: Path) -> None:
    grid = run.Grid.load(path)
    assert {"small", "gpu"} <= grid.settings.keys()
    for setting in grid.settings:
        recipes = [recipe for _, recipe in grid.jobs(setting)]
        for recipe in recipes:
            resolve(recipe, shape_of(recipe))
        assert len({recipe.model_dump_json() for recipe in recipes}) == len(recipes), "no two cells are the same"
    budgets = {recipe.finetune.max_tokens for _, recipe in grid.jobs("small") if recipe.finetune is not None}
    assert budgets and None not in budgets, "cells of a bounded size"


@pytest.mark.parametrize("path", GRIDS, ids=[f"{path.parent.name}/{path.stem}" for path in GRIDS])
def test_committed_results_are_of_this_grid(path: Path, tmp_path: Path) -> None:
    record_file = path.with_suffix(".small.json")
    if path.parent.name in UNFINISHED and not record_file.is_file():
        return
    assert record_file.is_file(), "run it: python experiments/run.py --help"
    record = json.loads(record_file.read_text())
    cells = {cell.label: cell for cell in run.Grid.load(path).cells}
    expected = {(cell.label, recipe.seed) for cell, recipe in run.Grid.load(path).jobs("small")}
    measured = [(result["label"], result["seed"]) for result in record["results"]]
    assert len(set(measured)) == len(measured) and set(measured) <= expected
    assert set(measured) == expected or path.parent.name in UNFINISHED, "all of its cells"
    for result in record["results"]:
        cell = cells[result["label"]]
        assert (result["recipe"], result["set"], result["paper"]) == (cell.recipe, cell.set, cell.paper)
    grid, made = run.Grid.load(path), tmp_path / record_file.with_suffix(".svg").name
    assert record_file.with_suffix(".md").read_text() == run.page(grid, record), "python experiments/results.py"
    run.draw(grid, record, made)
    assert made.is_file() is bool(grid.figure)
    if grid.figure:
        assert record_file.with_suffix(".svg").read_text() == made.read_text(), "python experiments/results.py"


def test_the_pages_of_results_are_those_of_the_tables() -> None:
    pages = load("results").pages()
    assert len(pages) >= 7
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "python experiments/results.py"


def test_every_claim_has_a_verdict_and_names_committed_rows() -> None:
    """Rows are looked up when the index is made, so that a row that is not there raises."""
    claims = yaml.safe_load((EXPERIMENTS / "claims.yaml").read_text(encoding="utf-8"))
    verdicts = {"reproduced", "partly", "not reproduced", "not testable here"}
    for claim in claims:
        assert claim["verdict"] in verdicts
        assert "grid" in claim or "why" in claim or claim["verdict"] == "not testable here"


# --- the runner -------------------------------------------------------------------------------------------------------

SMALL = {
    "data.sequence_length": 64, "data.validation_fraction": 0.3, "data.validation_rows": 16,
    "transfer.batch_size": 4, "transfer.max_tokens": 512, "finetune.batch_size": 4, "finetune.max_tokens": 512,
    "evaluation.fidelity_tokens": 64, "mixer.span.window_size": 8, "finetune.lr": 1e-2,
}  # fmt: skip
GRID: dict[str, Any] = {
    "title": "A title", "source": "A paper, Table 1", "question": "Which?", "reference": "first",
    "columns": ["swapped", "transferred", "student", "minus_reference", "mse", "kl"], "paper_columns": ["score"],
    "settings": {"small": SMALL, "gpu": SMALL},
    "cells": [
        {"label": "first", "recipe": "lolcats", "paper": [12.5]},
        {"label": "rank 2", "recipe": "lolcats", "set": {"finetune.lora.rank": 2}},
        {"label": "no transfer", "recipe": "lolcats", "set": {"transfer": None}, "seeds": [0, 1]},
    ],
}  # fmt: skip


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(GRID))
    return tmp_path / "table.yaml"


def go(path: Path, monkeypatch: pytest.MonkeyPatch, *more: str, reads_data: bool = True) -> dict[str, Any]:
    data = ["--dataset", tiny.text_file()] if reads_data else []
    arguments = ["--model", tiny.teacher_folder(), *data, "--device", "cpu"]
    work = str(path.parent / "work")
    monkeypatch.setattr(sys, "argv", ["run.py", str(path), *arguments, "--work-dir", work, *more])
    run.main()
    return json.loads(path.with_suffix(".small.json").read_text())


def test_a_grid(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    train = loop.train

    def counted(*args: Any, **options: Any) -> Any:
        result = train(*args, **options)
        trained.append((options["title"], options["output_dir"]))
        return result

    for module in ("attention_transfer", "finetune"):
        monkeypatch.setattr(f"linearize.training.{module}.train", counted)
    updates, update = [], loop.StageRun.update
    monkeypatch.setattr(loop.StageRun, "update", lambda self: updates.append(1) or update(self))
    results = go(grid, monkeypatch)["results"]
    assert [(r["label"], r["seed"]) for r in results] == [
        ("first", 0),
        ("rank 2", 0),
        ("no transfer", 0),
        ("no transfer", 1),
    ]
    steps = 512 // (4 * 64)
    assert len(updates) == steps * (1 + 4), "one attention transfer for the two cells that share it"
    first, second, third, _ = results
    assert first["loss"]["transferred"] == second["loss"]["transferred"] != first["loss"]["swapped"]
    assert "minus_reference" not in first and "transferred" not in third["loss"]
    for result in (second, third):
        difference = result["loss"]["student"]["mean"] - first["loss"]["student"]["mean"]
        assert result["minus_reference"]["mean"] == pytest.approx(difference, abs=1e-6)
    assert [len(set(map(str, r["by_position"]["student"]))) > 2 for r in results] == [True] * 4
    text = grid.with_suffix(".small.md").read_text()
    assert "| **first** | 0 |" in text and "| 12.5 |" in text
    seeds = third, results[3]
    assert seeds[0]["test"] == seeds[1]["test"] and seeds[0]["data"] != seeds[1]["data"], "other rows to train on alone"
    assert seeds[0]["loss"]["teacher"] == seeds[1]["loss"]["teacher"] and seeds[0]["loss"] != seeds[1]["loss"]
    teacher = f"{math.exp(first['loss']['teacher']['mean']):.2f}"
    assert f"Teacher: perplexity {teacher} on the same {first['tokens']:,} held-out tokens of " in text
    before = [{name: x for name, x in result.items() if name != "test"} for result in results]
    assert "anew" not in text and f"perplexity {teacher}, {teacher} on" in run.described(run.Grid.load(grid), before)
    assert " documents, which each seed draws anew" in run.described(run.Grid.load(grid), before)

    updates.clear()
    assert go(grid, monkeypatch)["results"] == results and not updates, "the same again trains nothing"


def test_cells_that_are_named_leave_the_others_as_they_were(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for differences to a reference that came out otherwise, and cells that have changed."""

    def result(label: str, loss: float, **more: Any) -> dict[str, Any]:
        cell = next(cell for cell in GRID["cells"] if cell["label"] == label)
        about = {"label": label, "seed": 0, "recipe": "lolcats", "set": cell.get("set", {}), "paper": []}
        about |= {"fidelity": {}, "tokens": 1, "beyond": {}}
        return about | {"loss": {"student": {"mean": loss, "low": loss, "high": loss}}, **more}

    difference = {"minus_reference": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    first, rank, without = result("first", 2.0), result("rank 2", 2.5, **difference), result("no transfer", 3.0)
    kept, loaded = [first, rank, without], run.Grid.load(grid)
    assert run.merged(loaded, "small", [first, without | {"seconds": 1}], kept) == [
        first, rank, without | {"seconds": 1},
    ]  # fmt: skip
    other = result("first", 2.1)
    assert run.merged(loaded, "small", [other], kept) == [other, result("rank 2", 2.5), without]
    here, there = ({"data": name} for name in ("one split", "another split"))
    own_text = rank["set"] | {"data.select_rows_by_esl": 20}
    rows = [first | here, rank | there, rank | there | {"set": own_text}, without | here]
    assert run.on_other_rows(loaded, rows) == rows[1:2]
    tested = [rows[0] | {"test": "rows"}, rank | there | {"test": "rows"}, without | here | {"test": "others"}]
    assert run.on_other_rows(loaded, tested) == tested[2:]  # other training data do not matter
    text = run.table(loaded, rows) + run.described(loaded, rows)
    assert text.count("†") == 2 and "| rank 2 † |" in text
    assert "†" not in run.table(loaded, kept) + run.described(loaded, kept)
    changed = [first, rank | {"set": {}}, without]
    assert run.merged(loaded, "small", [first], changed) == [first, without]

    monkeypatch.setattr(run, "run_cell", lambda recipe, place, dataset: ({"diverged": "at once"}, grid.parent))
    run.write_table(grid, loaded, "small", kept, "python run.py table.yaml")
    results = go(grid, monkeypatch, "--only", "rank", "transfer")["results"]
    assert [(x["label"], x["seed"], x.get("diverged")) for x in results] == [
        ("first", 0, "at once"), ("rank 2", 0, "at once"), ("no transfer", 0, "at once"), ("no transfer", 1, "at once"),
    ]  # fmt: skip
    run.write_table(grid, loaded, "small", kept, "python run.py table.yaml")
    results = go(grid, monkeypatch, "--only", "rank")["results"]
    assert [x.get("diverged") for x in results] == ["at once", "at once", None] and results[2] == without
    with pytest.raises(SystemExit):
        go(grid, monkeypatch, "--only", "nothing")


def test_a_grid_that_examines(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of all positions is the teacher: what is measured of it is the teacher's, and a student is between."""
    examination = load("examination")
    monkeypatch.setattr(examination, "LENGTH", 256)
    monkeypatch.setattr(examination, "CONTEXT", 128)
    questions = grid.with_name("letters.jsonl")
    asked = [{"query": f"Question: {word}?", "choices": ["a", "b", "cc"], "gold": 1} for word in ("is", "or", "and")]
    questions.write_text("\n".join(map(json.dumps, asked)))
    alone = {"transfer": None, "finetune": None, "mixer.feature_map": None, "mixer.combine": {"type": "window_only"}}
    columns = ["minus_teacher", "minus_window", "gain_retained", "without_linear", "kl_teacher", "needles", "copying"]
    columns += ["state_mib", "training_speed"]
    controls = {"window": "near", "softmax": "softmax"}
    cells = [
        {"label": "near", "recipe": "lolcats", "set": alone},
        {"label": "linear", "recipe": "lolcats"},
        {"label": "softmax", "recipe": "lolcats", "set": alone | {"mixer.span.window_size": 256}},
    ]
    changes = {"columns": columns, "examine": True, "controls": controls, "cells": cells, "reference": None}
    changes["more"] = ["by_position"]
    grid.write_text(yaml.safe_dump(GRID | changes))
    with pytest.raises(SystemExit):
        go(grid, monkeypatch)  # --examined-text is missing
    options = ["--examined-text", tiny.text_file(), "--tasks", str(questions)]
    near, linear, softmax = results = go(grid, monkeypatch, *options)["results"]
    assert softmax["minus_teacher"]["mean"] == pytest.approx(0, abs=1e-5)
    assert softmax["examined"]["kl"]["mean"] == pytest.approx(0, abs=1e-5)
    assert linear["examined"]["kl"]["mean"] > 0.01
    assert "minus_window" not in near["examined"]["compared"] and "without_linear" not in near["examined"]
    assert softmax["examined"]["tasks"] == softmax["examined"]["teacher"]["tasks"] != linear["examined"]["tasks"]
    assert softmax["examined"]["tasks"]["letters"]["questions"] == 3
    by_hand = linear["loss"]["student"]["mean"] - near["loss"]["student"]["mean"]
    minus = linear["examined"]["compared"]["minus_window"]
    assert minus["all"]["mean"] == pytest.approx(by_hand, abs=1e-5)
    assert minus["beyond"]["mean"] != pytest.approx(by_hand, abs=1e-5)
    assert abs(linear["examined"]["without_linear"]["mean"]) > 0.01
    assert near["examined"]["cache_bytes"] < linear["examined"]["cache_bytes"] < softmax["examined"]["cache_bytes"]
    assert [result["tokens"] for result in results] == [16 * 256] * 3

    # A cell that is added later is compared with the ones that were measured before.
    cells.append({"label": "later", "recipe": "lolcats", "set": {"finetune.lora.rank": 2}})
    grid.write_text(yaml.safe_dump(GRID | changes))
    later = go(grid, monkeypatch, *options, "--only", "later")["results"][-1]
    assert later["examined"]["compared"].keys() == linear["examined"]["compared"].keys()


def test_the_gain_that_a_student_retains() -> None:
    """Three quarters of what softmax gains; of no gain there is no share, and without `softmax` it is the teacher's."""

    def totals(more: float) -> dict[str, Any]:
        beyond, every = [row + more for row in range(16)], [row + more**2 for row in range(16)]
        return {"beyond": [beyond, [1] * 16], "all": [every, [1] * 16]}

    examination, controls = load("examination"), {"window": "near", "softmax": "full"}
    students = {"near": totals(1), "linear": totals(0.25), "full": totals(0)}
    compared = examination.compare("linear", controls, students, totals(-2))
    assert compared["gain_retained"] == pytest.approx({"mean": 0.75, "low": 0.75, "high": 0.75})
    assert compared["minus_softmax"]["beyond"]["mean"] == pytest.approx(0.25)
    assert compared["minus_softmax"]["all"]["mean"] == pytest.approx(0.25**2)
    by_teacher = examination.compare("linear", {"window": "near"}, students, totals(-2))
    assert by_teacher["gain_retained"]["mean"] == pytest.approx(0.25)
    assert "gain_retained" not in examination.compare("linear", controls, students | {"full": totals(1)}, totals(-2))
    del students["full"]
    assert "gain_retained" not in examination.compare("linear", controls, students, totals(-2)), "not measured yet"


def test_losses_beyond_are_of_tokens_behind_64() -> None:
    position = torch.arange(100).expand(2, -1)
    losses = TokenLosses(position.double(), position > 0, position, torch.zeros_like(position))
    totals = load("examination")._totals(losses)
    assert totals["all"] == [[2 * sum(range(100))], [198]]
    assert totals["beyond"] == [[2 * sum(range(65, 100))], [70]]


def test_a_cell_on_chosen_rows(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid's model chooses them."""
    cell = {"label": "first", "recipe": "lolcats", "set": {"data.select_rows_by_esl": 20}}
    grid.write_text(yaml.safe_dump(GRID | {"cells": [cell]}))
    (found,) = go(grid, monkeypatch)["results"]
    grid.write_text(yaml.safe_dump(GRID | {"cells": [cell | {"set": {}}]}))
    (anything,) = go(grid, monkeypatch)["results"]
    assert found["data"] != anything["data"]


def test_a_cell_for_some_settings(grid: Path) -> None:
    cells = [cell | {"settings": ["gpu"]} if cell["label"] == "rank 2" else cell for cell in GRID["cells"]]
    grid.write_text(yaml.safe_dump(GRID | {"cells": cells}))
    small, gpu = ({cell.label for cell, _ in run.Grid.load(grid).jobs(setting)} for setting in ("small", "gpu"))
    assert gpu - small == {"rank 2"} and small < gpu


RECALL = {
    "data.task": {"type": "associative_recall", "vocabulary_size": 8, "length": 16, "train_examples": 64,
                  "held_out_examples": 40},
    "finetune.max_tokens": 16 * 8 * 40, "finetune.epochs": 100, "finetune.lr": 1e-2, "evaluation.fidelity_tokens": 64,
    "finetune.schedule.warmup_steps": 1,
}  # fmt: skip


def test_a_grid_of_a_task(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = {"mixer.span": {"type": "sliding", "window_size": 16}, "mixer.feature_map": None}
    softmax |= {"mixer.combine": {"type": "window_only"}}
    cells = [
        {"label": "softmax", "recipe": "hedgehog-scratch", "set": softmax},
        {"label": "hedgehog", "recipe": "hedgehog-scratch", "paper": [100]},
    ]
    columns = ["score", "score_minus_reference", "entropy", "monotonicity"]
    changes = {
        "cells": cells,
        "columns": columns,
        "figure": ["entropy", "monotonicity"],
        "reference": "softmax",
        "settings": {"small": RECALL, "gpu": RECALL},
    }
    grid.write_text(yaml.safe_dump(GRID | changes))
    results = go(grid, monkeypatch, reads_data=False)["results"]
    first, second = (result["scores"]["student"]["accuracy"] for result in results)
    assert "loss" not in results[0] and results[0]["examples"] == 40 and results[0]["metrics"] == ["accuracy"]
    difference = results[1]["score_minus_reference"]
    assert difference["mean"] == pytest.approx(second["mean"] - first["mean"])
    assert "score_minus_reference" not in results[0]
    assert results[0]["fidelity"]["monotonicity"] == [pytest.approx(1.0)] * 2, "softmax is monotone"
    assert results[0]["fidelity"]["entropy"] == pytest.approx(results[0]["fidelity"]["teacher_entropy"])
    assert "](table.small.svg)" in grid.with_suffix(".small.md").read_text()
    drawing = grid.with_suffix(".small.svg").read_text()
    words = ("softmax", "hedgehog", "entropy of weights", "monotonicity of weights")
    assert all(drawing.count(f">{word}</text>") == 1 for word in words)
    assert drawing.count(">accuracy, per cent</text>") == 2
    text = grid.with_suffix(".small.md").read_text()
    assert f"| {100 * second['mean']:.1f} |" in text and "Scores: accuracy, in per cent, on the same 40" in text
    assert go(grid, monkeypatch, reads_data=False)["results"] == results


def test_outcomes_are_read_as_they_were_written(tmp_path: Path) -> None:
    outcomes = load("outcomes")
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    losses = TokenLosses(draw(3, 5), draw(3, 5) > 0, torch.arange(5).expand(3, -1), torch.arange(15).view(3, 5) // 7)
    answers = Predictions(draw(6, 2), torch.tensor([0, 1] * 3), torch.arange(6), ("matthews", "accuracy"))
    alike = Similarities({"rouge1": draw(4), "rougeL": draw(4)})
    predicted = MaskedTokens(draw(6) > 0, draw(6), torch.arange(6), torch.arange(6) // 2)
    several = ({"student": losses, "teacher": losses}, {"student": answers}, {"student": predicted})
    for kept in (*several, {"teacher": alike, "student": alike}):
        outcomes.write(kept, tmp_path)
        found = outcomes.read(tmp_path)
        assert list(found) == list(kept)
        for name, outcome in kept.items():
            mine, other = outcomes._parts(found[name]), outcomes._parts(outcome)
            assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)
            assert getattr(found[name], "metrics", None) == getattr(outcome, "metrics", None)


def test_a_cell_that_diverges_is_a_result(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*args: Any, **options: Any) -> None:
        raise DivergedError("loss is not finite")

    monkeypatch.setattr("linearize.run.pipeline.finetune", diverge)
    results = go(grid, monkeypatch)["results"]
    assert [result["diverged"] for result in results] == ["loss is not finite"] * 4
    assert "| **first** | 0 | diverged |" in grid.with_suffix(".small.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"columns": ["speed"]}, "found 'speed'"), ({"reference": "none"}, "'none' among them")],
)
def test_bad_grid(grid: Path, change: dict[str, Any], message: str) -> None:
    grid.write_text(yaml.safe_dump(GRID | change))
    with pytest.raises(UserError, match=message):
        run.Grid.load(grid)


def test_overrides_of_a_stage_that_is_not_there_are_left_out() -> None:
    recipe = Recipe.load("elu")
    found = run._present(recipe, {"transfer.lr": 1.0, "finetune.lr": 0.5, "adapt.lr": 1.0, "seed": 3})
    assert found == {"finetune.lr": 0.5, "seed": 3}
    assert run._present(recipe, {"transfer": {}, "transfer.lr": 1.0}) == {"transfer": {}, "transfer.lr": 1.0}


def test_keys_of_cells_do_not_change_with_new_fields() -> None:
    default = {"a": 1, "part": {"type": "x", "size": 2}, "stage": None}
    settings = {"a": 1, "part": {"type": "x", "size": 3, "new": 0}, "stage": {"lr": 1}, "new": 5}
    assert run.changed(settings, default | {"new": 5, "part": {"type": "x", "size": 2, "new": 0}}) == {
        "part": {"size": 3},
        "stage": {"lr": 1},
    }
    assert run.changed({"part": {"type": "y", "size": 2}}, default) == {"part": {"type": "y", "size": 2}}
