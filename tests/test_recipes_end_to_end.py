"""Every recipe from the teacher to the report on a tiny model: its own mixer and stages, in a few steps each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import Markup
from safetensors.torch import load_file

import linearize
from linearize import pipeline
from linearize.config import LayerPlan, Recipe, recipe_names
from linearize.evaluation.candidates import LABELS
from linearize.evaluation.report_card import ReportCard
from linearize.hf.checkpoint import load_model
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.parts import NoSpan
from linearize.pipeline import run
from linearize.report import figures
from linearize.runs import Run
from linearize.stages import FinetuneConfig, Plateau, TransferConfig
from tests import loaded, tiny

STAGES = ("transfer", "adapt", "finetune")
STEPS, BATCH, LENGTH = 4, 4, 64

NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}
ALL = {"mixer", "q_proj", "k_proj", "v_proj", "o_proj", "mlp", "embed_tokens", "lm_head"} | NORMS  # kinds of weights

# What takes seconds, and depends little on the recipe: trained controls, the examination, and drawing the report.
CONTROLLED = {"lolcats-no-transfer"}
EXAMINED = {"regla-hybrid"}
DRAWN = CONTROLLED | EXAMINED

EXAMINATION = {"fidelity_tokens": 128, "prompts": 2, "new_tokens": 4, "recall_trials": 2}


def small(name: str) -> Recipe:
    """The recipe with its own mixer and stages, but few steps, large ones, on short rows; windows they reach beyond."""
    recipe = Recipe.load(name)
    values: dict[str, Any] = {key: value for key, value in tiny.RECIPE.items() if key.startswith("data.")}
    values |= {"data.dataset": tiny.text_file(), "data.min_document_tokens": 1}
    values |= {"evaluation.bootstrap_samples": 40, "evaluation.copy_rows": 4}
    values |= {"evaluation.examine": name in EXAMINED, "evaluation.trained_controls": name in CONTROLLED}
    values |= {f"evaluation.{key}": value for key, value in EXAMINATION.items()}
    if not isinstance(recipe.mixer.span, NoSpan):
        values["mixer.span.window_size"] = 8
    for stage in STAGES:
        config = getattr(recipe, stage)
        if config is None:
            continue
        sizes = {"batch_size": BATCH, "micro_batch_size": 2, "max_tokens": STEPS * BATCH * LENGTH, "eval_every": 2}
        values |= {f"{stage}.{key}": value for key, value in sizes.items()}
        near = isinstance(config, FinetuneConfig) and not config.loss.labels
        values[f"{stage}.lr"] = config.lr if near else 1e-2  # large steps lead away from outputs that are the teacher's
        if not isinstance(config.schedule, Plateau):
            values[f"{stage}.schedule.warmup_steps"] = 1
    if recipe.transfer is not None and recipe.transfer.layers_per_block is not None:
        values["transfer.layers_per_block"] = 1
    if recipe.transfer is not None and recipe.transfer.calibration_tokens:
        values["transfer.calibration_tokens"] = BATCH * LENGTH
    return recipe.override(values)


Fresh = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def fresh_process() -> Iterator[Fresh]:
    """What a folder's model gives in another process; one process for all folders, since it takes seconds to start."""
    environment = os.environ | dict(
        PYTHONPATH=str(Path(linearize.__file__).parents[1]), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"
    )
    command = [sys.executable, str(loaded.__file__)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        source, answers = child.stdin, child.stdout

        def load(folder: Path) -> dict[str, Any]:
            source.write(f"{folder}\n")
            source.flush()
            answer = answers.readline()
            if not answer:
                errors.seek(0)
                pytest.fail(f"a fresh process cannot load {folder}: {errors.read()[-2000:]}")
            return json.loads(answer)

        yield load
        source.close()


@pytest.mark.parametrize("name", recipe_names())
def test_from_start_to_end(name: str, fresh_process: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Run(small(name), tiny.teacher_folder(), tmp_path / "run", torch.float32, torch.device("cpu"))
    saved: dict[str, Any] = {}

    def save(student: Any, *others: Any, save_student: Callable[..., None] = pipeline.save_student) -> None:
        saved.update(loaded.outputs(student), plan=read_plan(student.config))
        save_student(student, *others)

    monkeypatch.setattr(pipeline, "save_student", save)
    if name not in DRAWN:
        monkeypatch.setattr(figures, "draw", lambda *_, **__: Markup("(drawing)"))
    with tiny.quick_measures(new_tokens=1):
        card = run(made)

    check_stages(made)
    check_what_learned(made, saved["plan"])
    check_results(made, card)
    found = fresh_process(made.folder / "model")
    assert found["class"] == saved["class"] == "LinearizedLlamaForCausalLM"
    assert found["generated"] == saved["generated"] and len(saved["generated"]) == 6
    torch.testing.assert_close(torch.tensor(found["logits"]), torch.tensor(saved["logits"]))


def check_stages(made: Run) -> None:
    """The recipe's stages ran, each to its last step, and no others."""
    stages = {stage for stage in STAGES if getattr(made.recipe, stage) is not None}
    assert {path.name for path in made.folder.iterdir()} & set(STAGES) == stages
    for stage in stages:
        result = json.loads((made.folder / stage / "result.json").read_text())
        assert (result["steps"], result["tokens"]) == (STEPS, STEPS * BATCH * LENGTH)
        assert sum(result["best_loss"].values()) < sum(result["initial_loss"].values()), f"{stage} learned"
    if made.recipe.transfer is not None:
        blocks = [path.name for path in (made.folder / "transfer").glob("block-*")]
        assert len(blocks) == (2 if made.recipe.transfer.layers_per_block else 0)


def check_what_learned(made: Run, layers: LayerPlan) -> None:
    """The saved student differs from the converted teacher in what the stages train, and in nothing else."""
    teacher = load_model(made.model, dtype=made.dtype, device=made.device)
    converted = convert_layers(teacher, layers, seed=made.recipe.seed)
    before, learning = converted.state_dict(), {kind(name) for name, _ in converted.named_parameters()}
    after = load_file(made.folder / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {weight for weight in before if not torch.equal(before[weight], after[weight])}

    expected: set[str] = set()
    for stage in STAGES:
        if (config := getattr(made.recipe, stage)) is not None:
            trained = {kind(name) for name in load_file(made.folder / stage / "trained.safetensors")}
            assert trained == trains(config) & learning
            expected |= trained
    assert {kind(weight) for weight in changed} == expected
    if expected == learning:
        assert {weight for weight in before if kind(weight) != "mixer"} <= changed


def trains(config: TransferConfig | FinetuneConfig) -> set[str]:
    """The kinds of weights that a stage is to train."""
    if isinstance(config, TransferConfig):
        return {"mixer"}
    adapted = {f"{role}_proj" for role in config.lora.targets} if config.lora is not None else set()
    return adapted | ({"mixer"} if config.mixers else set()) | (ALL if config.all_weights else set())


def kind(weight: str) -> str:
    """``mixer``, ``q_proj``, ``norm``, ..."""
    return next(part for part in weight.split(".") if part in ALL)


def check_results(made: Run, card: ReportCard | None) -> None:
    """Every candidate that the recipe allows is measured, and everything is written."""
    assert card is not None
    recipe, missing = made.recipe, set()
    if recipe.transfer is None:
        missing |= {"transferred"}
    if not made.controls:
        missing |= {"teacher_lora", "window_lora"}
    assert {measured.name for measured in card.measured} == LABELS.keys() - missing
    assert (card.examination is not None) == recipe.evaluation.examine
    page = (made.folder / "report.html").read_text(encoding="utf-8")
    assert recipe.name in page and "</html>" in page
    written = f"linearized with the recipe `{recipe.name}`"
    assert written in (made.folder / "model" / "README.md").read_text(encoding="utf-8")
    assert LABELS["student"] in (made.folder / "evaluation.md").read_text(encoding="utf-8")
