"""A whole run in process: what it writes, that it resumes and refuses, and that its numbers can be had again."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import linearize
from linearize.base import UserError
from linearize.configs.mixer import MixerConfig, each_mixer, is_spread
from linearize.data.repeats import without_repeats
from linearize.data.rows import PackedRows
from linearize.evaluation.candidates import LABELS
from linearize.evaluation.controls import SINKS, window_only_plan, without_linear_part
from linearize.evaluation.perplexity import token_losses
from linearize.evaluation.results import Results
from linearize.hf.attention import linearized_layers
from linearize.hf.checkpoint import load_tokenizer
from linearize.hf.classes import read_plan
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import Recipe
from linearize.report.findings import sentences
from linearize.report.load import load_run
from linearize.run import allocation
from linearize.run import folder as runs
from linearize.run.evaluate import candidates, control, evaluate
from linearize.run.folder import Run
from linearize.run.pipeline import blocks_to_do, run
from linearize.training import loop
from tests import tiny

CONTROLS = ("teacher_finetuned", "window_finetuned", "equal_finetuned")
MEASURED = {
    name: label for name, label in LABELS.items() if name != "exact_finetuned"
}  # with the same window in all heads
FINISHED = {"metrics.jsonl", "result.json", "trained.safetensors"}


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


@pytest.fixture
def finished() -> Run:
    return tiny.finished_run()


class Interrupted(Exception):
    pass


@pytest.fixture
def no_training(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any) -> None:
        raise AssertionError("an optimizer step was taken")

    monkeypatch.setattr(loop.StageRun, "update", update)


@pytest.fixture
def copied(finished: Run, tmp_path: Path) -> Run:
    """The finished run in a folder of the test's own."""
    shutil.copytree(finished.folder, tmp_path / "run")
    return dataclasses.replace(finished, folder=tmp_path / "run")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def numbers(card: Results | None) -> dict[str, Any]:
    assert card is not None
    return tiny.untimed(card.to_json())


def evaluation(folder: Path) -> dict[str, Any]:
    return tiny.untimed(json.loads((folder / "evaluation.json").read_text()))


def evaluated(model: Path, **options: Any) -> Results:
    chosen = dict(teacher=None, dataset=None, overrides={}, dtype=torch.float32, device=torch.device("cpu"))
    return evaluate(str(model), **(chosen | options))


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_everything_is_written(finished: Run) -> None:
    teacher_folder = tiny.teacher_folder()
    stages = {"transfer", "finetune"}
    reports = {"recipe.yaml", "run.json", "plan.json", "evaluation.json", "evaluation.md", "report.html"}
    reports |= {"rows.safetensors"}
    assert names(finished.folder) == stages | reports | {"controls", "model"}
    assert names(finished.folder / "controls") == set(CONTROLS)
    for stage in ("transfer", "finetune", *(f"controls/{name}" for name in CONTROLS)):
        assert names(finished.folder / stage) == FINISHED
    assert Recipe.load(str(finished.folder / "recipe.yaml")) == finished.recipe
    assert Run.read(finished.folder, finished.dtype, finished.device) == finished

    about = json.loads((finished.folder / "run.json").read_text())
    assert about["model"] == teacher_folder
    assert (about["dtype"], about["device"]) == ("float32", "cpu")
    assert set(about) == {"model", "dtype", "device", "data", "versions"}
    plan = json.loads((finished.folder / "plan.json").read_text())
    assert (plan["transfer"]["tokens"], plan["finetune"]["tokens"]) == (6 * 4 * 64, 4 * 4 * 64)
    card = (finished.folder / "model" / "README.md").read_text()
    assert "linearized with the recipe `lolcats`" in card and "Not measured yet" not in card
    assert finished.recipe.to_yaml().strip() in card
    for measured in evaluation(finished.folder)["measured"]:
        assert f"| {measured['label']} | {measured['quality']['loss']['mean']:.3f} [" in card
    assert "(drawing)" in (finished.folder / "report.html").read_text()


def test_every_candidate_is_measured_and_is_its_own_model(finished: Run) -> None:
    found = evaluation(finished.folder)
    assert [measured["name"] for measured in found["measured"]] == list(MEASURED)
    assert found["missing"] == []
    assert all(measured["copying"] is not None for measured in found["measured"])
    losses = {measured["name"]: measured["quality"]["loss"]["mean"] for measured in found["measured"]}
    assert len(set(losses.values())) == 10

    def held_out(stage: str, which: str) -> float:
        return json.loads((finished.folder / stage / "result.json").read_text())[f"{which}_loss"]["model"]

    # On the rows that choose checkpoints, these are the models that the stages had at their begin and end; the numbers
    # above are of other rows.
    dataset = tiny.load_data(finished)
    assert isinstance(dataset.validation, PackedRows)
    student = AutoModelForCausalLM.from_pretrained(finished.folder / "model")
    opened = candidates(finished.load_teacher(), student, read_plan(student.config), finished.recipe, finished)[0]
    tested, losses = losses, {}
    for candidate in opened:
        with candidate.open() as model:
            loss = token_losses(model, dataset.validation, batch_size=8)
            losses[candidate.name] = loss.loss[loss.mask].mean().item()
    assert all(abs(losses[name] - tested[name]) > 1e-4 for name in losses)
    assert losses["teacher"] == pytest.approx(held_out("controls/teacher_finetuned", "initial"), abs=1e-5)
    assert losses["teacher_finetuned"] == pytest.approx(held_out("controls/teacher_finetuned", "best"), abs=1e-5)
    assert losses["window"] == pytest.approx(held_out("controls/window_finetuned", "initial"), abs=1e-5)
    assert losses["window_finetuned"] == pytest.approx(held_out("controls/window_finetuned", "best"), abs=1e-5)
    assert losses["equal_finetuned"] == pytest.approx(held_out("controls/equal_finetuned", "best"), abs=1e-5)
    assert losses["transferred"] == pytest.approx(held_out("finetune", "initial"), abs=1e-5)
    assert losses["student"] == pytest.approx(held_out("finetune", "best"), abs=1e-5)

    markdown = (finished.folder / "evaluation.md").read_text()
    for measured in found["measured"]:
        assert f"| {measured['label']} | {measured['quality']['loss']['mean']:.3f} [" in markdown


def test_the_model_loads_in_a_fresh_process(finished: Run) -> None:
    folder = finished.folder / "model"
    code = (
        "import json, sys, linearize, torch; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "tokenizer, model = (auto.from_pretrained(sys.argv[1]) for auto in (AutoTokenizer, AutoModelForCausalLM));"
        "print(json.dumps(model(**tokenizer('some text', return_tensors='pt')).logits[0, -1].tolist()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(linearize.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", code, folder], env=environment, capture_output=True, check=True)
    model, tokens = AutoModelForCausalLM.from_pretrained(folder), tiny.tokens("some text")
    assert type(model).__name__ == "LinearizedLlamaForCausalLM"
    with torch.no_grad():
        expected = model(tokens).logits[0, -1]
    torch.testing.assert_close(torch.tensor(json.loads(child.stdout)), expected)


# --- once more --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_training")
def test_once_more_does_not_train_again(copied: Run) -> None:
    expected = evaluation(copied.folder)
    before = contents(copied.folder)
    assert numbers(run(copied)) == expected
    after = contents(copied.folder)
    changed = {path.name for path in before | after if before.get(path) != after.get(path)}
    assert changed <= {"evaluation.json", "evaluation.md", "report.html", "README.md"}  # their timings
    assert evaluation(copied.folder) == expected


@pytest.mark.usefixtures("no_training")
def test_the_model_s_folder_gives_the_same_numbers(finished: Run) -> None:
    before = contents(finished.folder)
    assert numbers(evaluated(finished.folder / "model")) == evaluation(finished.folder)
    assert contents(finished.folder) == before


@pytest.mark.usefixtures("no_training")
def test_on_other_text(finished: Run, tmp_path: Path) -> None:
    other = str(tiny.write_text(tmp_path / "other.jsonl", seed=5))
    overrides = {"data.sequence_length": 48}
    found = numbers(evaluated(finished.folder / "model", dataset=other, overrides=overrides))
    assert [measured["name"] for measured in found["measured"]] == list(MEASURED)
    expected = evaluation(finished.folder)
    for measured, original in zip(found["measured"], expected["measured"], strict=True):
        assert measured["quality"]["loss"] != original["quality"]["loss"]
        assert measured["quality"]["tokens"] < original["quality"]["tokens"]


@pytest.mark.usefixtures("no_training")
def test_apart_from_its_run(finished: Run, tmp_path: Path) -> None:
    """The model's folder tells of its recipe and teacher; a model of an older run, or of no run, must be told."""
    moved, older = tmp_path / "elsewhere" / "model", tmp_path / "older"
    for folder in (moved, older):
        shutil.copytree(finished.folder / "model", folder)
    for name in ("recipe.yaml", "run.json"):
        assert (older / name).read_text() == (finished.folder / name).read_text()
        (older / name).unlink()
    with pytest.raises(UserError, match=r"data\.dataset: expected a hub id, or a local file or folder, found none"):
        evaluated(older)
    overrides = {name: value for name, value in tiny.RECIPE.items() if name.startswith(("data.", "evaluation."))}
    expected = {measured["name"]: measured for measured in evaluation(finished.folder)["measured"]}
    told: dict[str, Any] = {"dataset": tiny.text_file(), "overrides": overrides}

    alone = numbers(evaluated(older, **told))
    assert [measured["name"] for measured in alone["measured"]] == ["student", "ablated"]
    assert alone["missing"] == [label for name, label in MEASURED.items() if name not in ("student", "ablated")]
    beside = numbers(evaluated(older, **told, teacher=finished.model))
    itself = numbers(evaluated(moved, dataset=tiny.text_file()))
    for found in (beside, itself):
        assert found["missing"] == [
            LABELS[name] for name in ("teacher_finetuned", "transferred", "window_finetuned", "equal_finetuned")
        ]
        assert len(found["measured"]) == 6
    for found in (alone, beside, itself):
        for measured in found["measured"]:
            known = expected[measured["name"]]  # but not how many tokens the run trained on
            assert measured == known | {"training_tokens": known["training_tokens"] and None}


def test_stage_by_stage(finished: Run, tmp_path: Path) -> None:
    parts = dataclasses.replace(finished, folder=tmp_path / "run")
    assert run(parts, until="transfer") is None
    claimed = {"recipe.yaml", "run.json", "plan.json", "rows.safetensors"}
    assert names(parts.folder) == claimed | {"transfer"}
    transferred = contents(parts.folder / "transfer")
    assert run(parts, until="finetune") is None
    assert names(parts.folder) == claimed | {"transfer", "finetune"}
    assert numbers(run(parts)) == evaluation(finished.folder)
    assert contents(parts.folder / "transfer") == transferred
    assert names(parts.folder) == names(finished.folder)
    for stage in ("transfer", "finetune", *(f"controls/{name}" for name in CONTROLS)):
        assert tiny.untimed_metrics(parts.folder / stage) == tiny.untimed_metrics(finished.folder / stage)


@pytest.mark.parametrize(
    "changes, missing, same",
    [
        ({"transfer": None, "evaluation.trained_controls": False}, {"transferred", *CONTROLS}, None),
        ({"finetune": None}, {*CONTROLS}, "transferred"),
        ({"transfer": None, "finetune": None}, {"transferred", *CONTROLS}, "swapped"),
    ],
    ids=["no transfer", "no fine-tuning", "no training"],
)
def test_recipes_of_one_stage(
    finished: Run, tmp_path: Path, changes: dict[str, Any], missing: set[str], same: str | None
) -> None:
    """The candidate that is the `same` as the student is not measured a second time."""
    part = dataclasses.replace(finished, recipe=finished.recipe.override(changes), folder=tmp_path / "run")
    found = numbers(run(part))
    assert found["missing"] == [label for name, label in MEASURED.items() if name in missing]
    names = [name for name in MEASURED if name not in missing and name != same]
    assert [measured["name"] for measured in found["measured"]] == names
    assert not (part.folder / "controls").exists()
    losses = {measured["name"]: measured["quality"]["loss"]["mean"] for measured in found["measured"]}
    if "swapped" in losses:
        assert losses["student"] != losses["swapped"]


def test_the_short_evaluation_is_the_default(copied: Run) -> None:
    """It trains no controls, and measures teacher and student in both ways to read a prompt."""
    assert not Recipe.load("recommended").evaluation.long
    part = dataclasses.replace(copied, recipe=copied.recipe.override({"evaluation.long": False}))
    (part.folder / "recipe.yaml").write_text(part.recipe.to_yaml())
    for name in ("controls", "model"):
        shutil.rmtree(part.folder / name)
    card = run(part)
    assert card is not None and card.short is not None and not card.measured and not card.speed
    readings = [(line.model, line.prefill) for line in card.short.readings]
    assert readings == [("teacher", None), ("student", "streaming"), ("student", "full")]
    assert not (part.folder / "controls").exists()
    page, model_card = (part.folder / "evaluation.md").read_text(), (part.folder / "model" / "README.md").read_text()
    for words in ("student, streaming", "student, full", "The saved model reads a prompt with prefill=streaming"):
        assert words in page and words in model_card
    assert "Short evaluation" in (part.folder / "report.html").read_text()
    again = evaluated(part.folder / "model").short
    assert again is not None and again.readings[1].loss == card.short.readings[1].loss


def test_two_steps(finished: Run, tmp_path: Path) -> None:
    """New weights alone, then all: the second step begins where the first one ended."""
    adapt = {"lora": None, "mixers": True, "lr": 0.01, "batch_size": 4, "eval_every": 2, "max_tokens": 1024}
    changes = {"transfer": None, "adapt": adapt, "finetune.lora": None, "finetune.all_weights": True}
    changes |= {"evaluation.trained_controls": False}
    steps = dataclasses.replace(finished, recipe=finished.recipe.override(changes), folder=tmp_path / "run")
    assert run(steps, until="adapt") is None
    assert names(steps.folder) == {"recipe.yaml", "run.json", "plan.json", "rows.safetensors", "adapt"}
    trained = load_file(steps.folder / "adapt" / "trained.safetensors")
    assert trained and all(".mixer." in name for name in trained)
    run(steps)
    first, second = (json.loads((steps.folder / name / "result.json").read_text()) for name in ("adapt", "finetune"))
    assert second["initial_loss"]["model"] == pytest.approx(first["best_loss"]["model"])
    assert len(load_file(steps.folder / "finetune" / "trained.safetensors")) > len(trained)


def test_from_scratch(finished: Run, tmp_path: Path) -> None:
    """A new model of the teacher's shape: its weights are not read, and the seed says which ones it starts with."""
    changes = {"weights": "random", "transfer": None, "finetune.lora": None, "finetune.all_weights": True}
    recipe = finished.recipe.override(changes | {"evaluation.trained_controls": False})
    (shape := tmp_path / "shape").mkdir()
    for path in Path(finished.model).iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, shape)
    scratch = dataclasses.replace(finished, recipe=recipe, model=str(shape), folder=tmp_path / "run")
    card = run(scratch)
    assert card is not None
    teacher, again = scratch.load_teacher(), scratch.load_teacher()
    other = dataclasses.replace(scratch, recipe=recipe.override({"seed": 1})).load_teacher()
    before = tiny.snapshot(teacher)
    assert all(torch.equal(before[name], x) for name, x in tiny.snapshot(again).items())
    assert not torch.equal(before["lm_head.weight"], tiny.snapshot(other)["lm_head.weight"])
    trained = load_file(scratch.folder / "model" / "model.safetensors")
    moved = [name for name, x in trained.items() if name in before and not torch.equal(before[name], x)]
    assert len(moved) == len(before) - sum(name not in trained for name in before)
    losses = {measured.name: measured.quality.loss.mean for measured in card.measured}
    assert losses["student"] < losses["swapped"]
    assert numbers(evaluated(scratch.folder / "model")) == numbers(card)


def test_the_layer_of_the_largest_transfer_error_stays_softmax(finished: Run, tmp_path: Path) -> None:
    changes = {"layers.keep_softmax": {"type": "transfer_error", "n": 1}, "evaluation.trained_controls": False}
    part = dataclasses.replace(finished, recipe=finished.recipe.override(changes), folder=tmp_path / "run")
    card = run(part)
    errors = json.loads((part.folder / "transfer" / "result.json").read_text())["best_loss"]
    assert errors == json.loads((finished.folder / "transfer" / "result.json").read_text())["best_loss"], "all trained"
    worst = max(errors, key=lambda name: errors[name])
    kept = [0, 1][int(worst.split(".")[2])]
    plan, config = (json.loads((part.folder / name).read_text()) for name in ("plan.json", "model/config.json"))
    assert plan["kept_layers"] == [kept] and [x is None for x in config["linearize"]["layers"]].index(True) == kept
    transferred = load_file(part.folder / "transfer" / "trained.safetensors")
    saved = load_file(part.folder / "model" / "model.safetensors")
    mixers = {name for name in saved if ".mixer." in name}
    assert mixers == {name for name in transferred if f"layers.{1 - kept}." in name}
    assert all(torch.equal(saved[name], transferred[name]) for name in mixers)
    assert numbers(run(part)) == numbers(card), "once more"


# --- block by block ---------------------------------------------------------------------------------------------------


@pytest.fixture
def by_block(finished: Run, tmp_path: Path) -> Run:
    """The same run, one layer at a time, not begun yet."""
    recipe = finished.recipe.override({"transfer.layers_per_block": 1})
    return dataclasses.replace(finished, recipe=recipe, folder=tmp_path / "run")


def assert_same_tensors(found: Path, expected: Path) -> None:
    tensors, others = (load_file(stage / "trained.safetensors") for stage in (found, expected))
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=1e-5)


def test_blocks_as_jobs_never_load_the_teacher(finished: Run, by_block: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(self: Run) -> None:
        raise AssertionError("the teacher was loaded")

    monkeypatch.setattr(Run, "load_teacher", loaded)
    assert run(by_block, block=1) is None
    assert names(by_block.folder) == {"recipe.yaml", "run.json", "plan.json", "rows.safetensors", "transfer"}
    assert blocks_to_do(by_block) == [0]
    assert run(by_block, block=0) is None
    assert blocks_to_do(by_block) == []
    assert not (by_block.folder / "transfer" / "result.json").exists()
    assert run(by_block, until="transfer") is None
    assert names(by_block.folder / "transfer") == FINISHED | {"block-000", "block-001"}
    assert_same_tensors(by_block.folder / "transfer", finished.folder / "transfer")


def test_a_run_block_by_block_is_the_run(finished: Run, by_block: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    load_teacher, before = Run.load_teacher, []

    def loaded(self: Run) -> Any:
        before.append((self.folder / "transfer" / "result.json").is_file())
        return load_teacher(self)

    monkeypatch.setattr(Run, "load_teacher", loaded)
    assert run(by_block, until="finetune") is None
    assert before == [True]
    assert_same_tensors(by_block.folder / "finetune", finished.folder / "finetune")


def test_layers_kept_by_their_errors_block_by_block(by_block: Run) -> None:
    kept = by_block.recipe.override({"layers.keep_softmax": {"type": "transfer_error", "n": 1}})
    assert run(dataclasses.replace(by_block, recipe=kept), until="finetune") is None
    errors = json.loads((by_block.folder / "transfer" / "result.json").read_text())["best_loss"]
    worst = max(errors, key=lambda name: errors[name]).split(".")[2]
    assert json.loads((by_block.folder / "plan.json").read_text())["kept_layers"] == [int(worst)]


BLOCKS: dict[str, tuple[dict[str, Any], int, str]] = {
    "all at once": ({"transfer.layers_per_block": None}, 0, "expected a recipe with transfer.layers_per_block"),
    "no transfer": ({"transfer": None}, 0, "expected a recipe with transfer.layers_per_block"),
    "too large": ({"transfer.layers_per_block": 1}, 2, "expected one of the blocks 0 to 1, or any; found 2"),
    "negative": ({"transfer.layers_per_block": 2}, -1, "expected one of the blocks 0 to 0, or any; found -1"),
}


@pytest.mark.parametrize("changes, block, message", BLOCKS.values(), ids=BLOCKS)
def test_a_block_that_is_not_there(by_block: Run, changes: dict[str, Any], block: int, message: str) -> None:
    other = dataclasses.replace(by_block, recipe=by_block.recipe.override(changes))
    with pytest.raises(UserError, match=f"^--block: {message}"):
        run(other, block=block)
    assert not by_block.folder.exists()


def test_weights_that_cannot_be_read_by_block_are_refused_before_anything_is_written(
    by_block: Run, tmp_path: Path
) -> None:
    shutil.copytree(by_block.model, tmp_path / "teacher")
    (tmp_path / "teacher" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"expected model.safetensors or model.safetensors.index.json, found neither"):
        run(dataclasses.replace(by_block, model=str(tmp_path / "teacher")))
    assert not by_block.folder.exists()


# --- what is refused --------------------------------------------------------------------------------------------------


def with_recipe(**changes: Any) -> Callable[[Run, Path], Run]:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda given, _: dataclasses.replace(given, recipe=given.recipe.override(named))


def other_model(given: Run, scratch: Path) -> Run:
    shutil.copytree(given.model, scratch / "teacher")
    return dataclasses.replace(given, model=str(scratch / "teacher"))


def other_dtype(given: Run, _: Path) -> Run:
    return dataclasses.replace(given, dtype=torch.bfloat16)


def other_data(given: Run, _: Path) -> Run:
    """As if the file had been another one then."""
    run_file = given.folder / "run.json"
    about = json.loads(run_file.read_text())
    run_file.write_text(json.dumps(about | {"data": "0" * 64}))
    return given


def other_files(given: Run, _: Path) -> Run:
    shutil.rmtree(given.folder)
    given.folder.mkdir()
    (given.folder / "notes.txt").write_text("mine")
    return given


def other_recipe_file(given: Run, _: Path) -> Run:
    """Not a run: somebody keeps recipes here."""
    shutil.rmtree(given.folder)
    given.folder.mkdir()
    (given.folder / "recipe.yaml").write_text("name: mine\n")
    return given


def a_file(given: Run, _: Path) -> Run:
    shutil.rmtree(given.folder)
    given.folder.write_text("mine")
    return given


ANOTHERS: dict[str, tuple[Callable[[Run, Path], Run], str]] = {
    "recipe": (with_recipe(transfer__lr=0.5), "expected a run of this recipe, found one of another"),
    "seed": (with_recipe(seed=1), "expected a run of this recipe, found one of another"),
    "model": (other_model, "model: expected .*/teacher, found .*/teacher; use another folder"),
    "dtype": (other_dtype, "dtype: expected bfloat16, found float32; use another folder"),
    "data": (other_data, "data: expected tokens with sha256 [0-9a-f]{12}, found a run on 000000000000; use the same"),
    "files": (other_files, "expected an empty folder or a run to resume, found other files"),
    "recipe.yaml": (other_recipe_file, "expected an empty folder or a run to resume, found other files"),
    "not a folder": (a_file, "expected an empty folder or a run to resume, found other files"),
}


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("change, message", ANOTHERS.values(), ids=ANOTHERS)
def test_another_s_folder_is_refused(
    copied: Run, tmp_path: Path, change: Callable[[Run, Path], Run], message: str
) -> None:
    changed = change(copied, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=f"^output folder {copied.folder}: {message}") as error:
        run(changed)
    assert "\n" not in str(error.value)
    assert contents(tmp_path) == before


def test_a_linearized_model_is_refused_before_anything_is_written(finished: Run, tmp_path: Path) -> None:
    again = dataclasses.replace(finished, model=str(finished.folder / "model"), folder=tmp_path / "run")
    with pytest.raises(UserError, match="linearized already"):
        run(again)
    assert not again.folder.exists()


def test_a_softmax_model_is_not_evaluated() -> None:
    with pytest.raises(UserError, match="expected a linearized model, found model_type 'llama'"):
        evaluated(Path(tiny.teacher_folder()))


# --- claiming a folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["recipe.yaml", "run.json"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_claim_that_was_killed_is_taken_up(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, replaced: bool
) -> None:
    begun = dataclasses.replace(finished, folder=tmp_path / "run")
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if Path(target).name != moment:
            return replace(self, target)
        if replaced:
            replace(self, target)
        raise Interrupted

    dataset = tiny.load_data(finished)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        patch.setattr(Path, "unlink", lambda self, missing_ok: None)  # nothing is cleaned up after a kill
        with pytest.raises(Interrupted):
            runs.claim(begun, dataset)
    assert names(begun.folder)
    runs.check_output(begun)
    runs.claim(begun, dataset)
    assert {name for name in names(begun.folder) if not name.endswith(".incomplete")} == {"recipe.yaml", "run.json"}
    for name in ("recipe.yaml", "run.json"):
        assert (begun.folder / name).read_bytes() == (finished.folder / name).read_bytes()


def test_a_full_disk_leaves_no_half_file(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def full(self: Path, text: str, **options: Any) -> int:
        write_text(self, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    begun = dataclasses.replace(finished, folder=tmp_path / "run")
    with pytest.raises(UserError, match=f"^{begun.folder}/recipe.yaml: the disk is full"):
        runs.claim(begun, tiny.load_data(finished))
    assert contents(begun.folder) == {}


def test_heads_of_several_kinds_beside_the_same_without_linear_parts(finished: Run, tmp_path: Path) -> None:
    narrow = {"span": {"type": "sliding", "window_size": 2}, "feature_map": None, "combine": {"type": "window_only"}}
    changes = {"heads": [{"kv_heads": ["0.0"], "mixer": narrow}], "transfer": None, "evaluation.examine": False}
    spread = dataclasses.replace(finished, recipe=finished.recipe.override(changes), folder=tmp_path / "run")
    results = run(spread)
    assert results is not None
    losses = {measured.name: measured.quality.loss.mean for measured in results.measured}
    assert {"window_finetuned", "exact_finetuned"} <= losses.keys() and "equal_finetuned" not in losses
    student = AutoModelForCausalLM.from_pretrained(spread.folder / "model")
    plan = read_plan(student.config)
    alone = read_plan(control(spread, spread.load_teacher(), student, plan, "exact_finetuned").config)
    assert [mixer.span for mixer in each_mixer(alone)] == [mixer.span for mixer in each_mixer(plan)]
    assert all(x.feature_map is None for x in each_mixer(alone)) and any(x.feature_map for x in each_mixer(plan))
    assert (spread.folder / "controls" / "exact_finetuned" / "result.json").is_file()
    said = " ".join(sentences(load_run(spread.folder)))
    assert "the same memory without linear parts (fine-tuned on the same tokens)" in said


CACHED = {
    "mixer.span": {"type": "terraced", "window_size": 4},
    "mixer.combine": {"type": "absolute_scale"},
    "mixer.feature_map": {"type": "hedgehog", "activation": "exp"},
    "mixer.cache": {"size": 3},
}


def test_controls_with_caches_have_the_students_calibrated_scores(finished: Run) -> None:
    """Without its linear part a cache still chooses as it was fitted to, trained and untrained control alike."""
    cached = dataclasses.replace(finished, recipe=finished.recipe.override(CACHED))
    teacher = cached.load_teacher()
    student = linearize.convert(teacher, cached.recipe)
    for layer in linearized_layers(student).values():
        layer.mixer.scorer.weight.normal_()
    expected = [layer.mixer.scorer.weight for layer in linearized_layers(student).values()]
    made = control(cached, teacher, student, read_plan(student.config), "exact_finetuned")
    with without_linear_part(student):
        for model in (made, student):
            found = [layer.mixer for layer in linearized_layers(model).values()]
            assert [mixer.feature_map for mixer in found] == [None] * len(expected)
            assert all(torch.equal(x.scorer.weight, y) for x, y in zip(found, expected, strict=True))


def test_heads_are_measured_on_rows_without_repeats(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = dataclasses.replace(
        finished, recipe=finished.recipe.override(MEMORY | {"data.repeated_span_fraction": 0.25})
    )
    seen = []
    measure_attention = allocation.measure_attention

    def measured(teacher: Any, rows: PackedRows, *rest: Any, **options: Any) -> Any:
        seen.append(rows)
        return measure_attention(teacher, rows, *rest, **options)

    monkeypatch.setattr(allocation, "measure_attention", measured)
    dataset, teacher = tiny.load_data(spent), spent.load_teacher()
    shape = TeacherShape.from_config(teacher.config.to_dict())
    assert isinstance(dataset.train, PackedRows)
    tokenizer = load_tokenizer(spent.model)
    allocation.measure(spent.recipe, shape, resolve(spent.recipe, shape), teacher, dataset, tokenizer, spent.dtype)
    plain = without_repeats(dataset.train, 0.25, seed=spent.recipe.seed)
    (rows,) = seen
    assert torch.equal(rows.input_ids, plain.input_ids) and len(plain) < len(dataset.train)


MEMORY = {
    "transfer": None,
    "finetune.lora": None,
    "finetune.all_weights": True,
    "memory": {"fraction": 0.6, "reference_length": 64, "sinks": 2},
    "evaluation.examine": True,
}


@pytest.mark.parametrize(
    "name, contents, expected",
    [
        ("allocation.json", '{"windows": {}}', "window: expected a value, found none"),
        ("eviction_scores.safetensors", "cut", "expected eviction scores of each layer"),
    ],
)
def test_damaged_measurements_are_named(name: str, contents: str, expected: str, finished: Run, tmp_path: Path) -> None:
    spent = dataclasses.replace(finished, recipe=finished.recipe.override(MEMORY), folder=tmp_path)
    shape = TeacherShape.from_config(spent.load_teacher().config.to_dict())
    whole = {"window": 16, "text": 8, "recall": {"0": [0, 0], "1": [8, 0]}, "needs": {}, "sinks": 1}
    (tmp_path / "allocation.json").write_text(json.dumps(whole | {"budget": 0, "held": 0}))
    assert allocation.stored(spent, shape, ()) is None, "there are no scores yet"
    (tmp_path / name).write_text(contents)
    with pytest.raises(UserError, match=rf"{name}: {expected}.* delete it, and the run measures again"):
        allocation.stored(spent, shape, ())


def test_a_kv_budget_allocated_per_head(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head by what was measured of it, beside one window for all in as many bytes; measured once."""
    spent = dataclasses.replace(finished, recipe=finished.recipe.override(MEMORY), folder=tmp_path / "run")
    found = run(spent, until="finetune")
    assert found is None
    about = json.loads((spent.folder / "allocation.json").read_text())
    pair = 2 * 8 * 4  # key and value of 8 numbers, fp32
    # One more pair in each of the 4 heads, with its scores and position, would be too much.
    assert about["budget"] == int(0.6 * 64 * 4 * pair) >= about["held"] > about["budget"] - 4 * (pair + 16)
    monkeypatch.setattr(allocation, "measure_attention", lambda *_, **__: pytest.fail("measured again"))
    results = run(spent)
    assert results is not None
    result = results.to_json()
    plan = read_plan(AutoModelForCausalLM.from_pretrained(spent.folder / "model").config)
    assert is_spread(plan)
    window = window_only_plan(plan, spent.load_teacher(), 64)
    assert len(set(window)) == 1
    assert isinstance(window[0], MixerConfig)
    span = window[0].span
    assert span.sinks == SINKS and span.sinks + span.context == round(about["held"] / pair / 4)
    assert result["window_size"] == span.context
    names = {measured["name"] for measured in result["measured"]}
    assert "window_finetuned" in names and "ablated" not in names, "there is no linear part to switch off"
    of_equal_bytes = f"one window of {result['window_size']} for all heads, of as many bytes"
    assert any(of_equal_bytes in words for words in sentences(load_run(spent.folder)))
    errors = [error for layer in result["fidelity"]["layers"] for error in layer["output_relative"]]
    assert len(errors) == 8 and any(errors), "each query head is looked at, whatever its KV head has"
    assert json.loads((spent.folder / "plan.json").read_text())["state_bytes"] <= about["budget"]
    assert "KV pairs by head" in (spent.folder / "report.html").read_text(encoding="utf-8")
    assert "Per-head KV budget allocation" in (spent.folder / "model" / "README.md").read_text(encoding="utf-8")
