"""Every recipe from the teacher to the report on a tiny model: its own mixer and stages, in a few steps each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import linearize
from linearize.configs.mixer import LayerPlan, each_mixer
from linearize.configs.spans import NoSpan
from linearize.configs.training import FinetuneConfig, Plateau, TransferConfig
from linearize.evaluation.candidates import LABELS
from linearize.evaluation.results import Results
from linearize.hf.checkpoint import load_model
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.recipe import Recipe, recipe_names
from linearize.run import pipeline
from linearize.run.evaluate import OF_ANY_TASK
from linearize.run.folder import Run
from linearize.run.pipeline import run
from tests import loaded, tiny

STAGES = ("transfer", "adapt", "finetune")
STEPS, BATCH, LENGTH = 4, 4, 64

NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}
# Kinds of weights, as a Llama calls them; those of other models are mixers, MLPs and all the rest.
ALL = {"mixer", "q_proj", "k_proj", "v_proj", "o_proj", "mlp", "embed_tokens", "lm_head", "rest"} | NORMS

# What takes seconds, and depends little on the recipe: trained controls, the examination, and drawing the report.
CONTROLLED = {"lolcats-no-transfer"}
EXAMINED = {"regla-hybrid"}
DRAWN = CONTROLLED | EXAMINED

EXAMINATION = {"fidelity_tokens": 128, "prompts": 2, "new_tokens": 4, "recall_trials": 2}

RECALL = "hedgehog-scratch on recall"
MADE_UP = {"vocabulary_size": 8, "length": 16, "train_examples": STEPS * BATCH, "held_out_examples": 32}


@dataclass(frozen=True)
class Case:
    """What a recipe runs on, where it is not text for the Llama: a model's folder, its class, and further fields."""

    model: Callable[[], str] = tiny.teacher_folder
    student: str = "LinearizedLlamaForCausalLM"
    fields: Callable[[], dict[str, Any]] = dict


CASES = {
    "hedgehog-bert": Case(
        tiny.encoder_folder,
        "LinearizedBertForSequenceClassification",
        lambda: {"data.dataset": tiny.sentences_file(), "data.validation_fraction": 0.3},
    ),
    "hedgehog-vit": Case(
        tiny.image_classifier_folder,
        "LinearizedViTForImageClassification",
        lambda: {"data.dataset": tiny.image_folder(), "data.validation_fraction": 0.375},
    ),
    "hedgehog-gpt2": Case(tiny.gpt2_folder, "LinearizedGPT2LMHeadModel"),
    "hedgehog-llama": Case(
        fields=lambda: {
            "data.dataset": tiny.dialogues_file(),
            "data.validation_rows": 40,
            "data.task.summaries": 2,
            "data.task.new_tokens": 4,
        }
    ),
    RECALL: Case(fields=lambda: {"data.dataset": None, "data.task": {"type": "associative_recall", **MADE_UP}}),
}
# Rows of examples differ in length, so steps are counted in rows: an epoch is STEPS batches of this size.
EPOCHS = {"hedgehog-bert": 56 // STEPS, "hedgehog-vit": 40 // STEPS, RECALL: BATCH}


def small(name: str) -> Recipe:
    """The recipe with its own mixer and stages, but few steps, large ones, on short rows; windows they reach beyond."""
    recipe = Recipe.load(name.split()[0])
    values: dict[str, Any] = {key: value for key, value in tiny.RECIPE.items() if key.startswith("data.")}
    values |= {"data.dataset": tiny.text_file(), "data.min_document_tokens": 1}
    values |= {"evaluation.long": True, "evaluation.bootstrap_samples": 40, "evaluation.copy_rows": 4}
    values |= {"evaluation.examine": name in EXAMINED, "evaluation.trained_controls": name in CONTROLLED}
    values |= {f"evaluation.{key}": value for key, value in EXAMINATION.items()}
    values |= CASES.get(name, Case()).fields()
    if not isinstance(recipe.mixer.span, NoSpan):
        values["mixer.span.window_size"] = 8
    if recipe.memory is not None:
        values["memory"] = recipe.memory.model_dump() | {"fraction": 0.5, "reference_length": LENGTH}
    for stage in STAGES:
        config = getattr(recipe, stage)
        if config is None:
            continue
        sizes: dict[str, Any] = {"batch_size": BATCH, "micro_batch_size": 2, "eval_every": 2}
        if name in EPOCHS:
            sizes |= {"batch_size": EPOCHS[name], "epochs": 1}
        else:
            sizes |= {"max_tokens": STEPS * BATCH * LENGTH}
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


# Always: what stands for the others, which have no part or stage that none of these has. Those with `make test-slow`.
ALWAYS = {"recommended", "absolute-scale", "lolcats", "lolcats-405b", "lolcats-no-transfer", "lolcat-w", "supra"}
ALWAYS |= {"regla-hybrid"}
ALWAYS |= {"gated-deltanet", "performer", "hedgehog-bert", "hedgehog-vit", "hedgehog-llama", RECALL}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in ALWAYS else pytest.mark.slow) for x in (*recipe_names(), RECALL)],
)
def test_from_start_to_end(name: str, fresh_process: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES.get(name, Case())
    made = Run(small(name), case.model(), tmp_path / "run", torch.float32, torch.device("cpu"))
    saved: dict[str, Any] = {}

    def save(student: Any, *others: Any, save_student: Callable[..., None] = pipeline.save_student) -> None:
        saved.update(loaded.outputs(student), plan=read_plan(student.config))
        save_student(student, *others)

    monkeypatch.setattr(pipeline, "save_student", save)
    with tiny.quick_measures(new_tokens=1, drawings=name in DRAWN):
        results = run(made)

    check_stages(made)
    check_what_learned(made, saved["plan"])
    check_results(made, results)
    assert ("<svg" in (made.folder / "report.html").read_text(encoding="utf-8")) == (name in DRAWN)
    found = fresh_process(made.folder / "model")
    assert found["class"] == saved["class"] == case.student
    assert found["generated"] == saved["generated"]
    assert len(saved["generated"]) == (6 if "CausalLM" in case.student or "LMHead" in case.student else 0)
    torch.testing.assert_close(torch.tensor(found["logits"]), torch.tensor(saved["logits"]))


def check_stages(made: Run) -> None:
    """The recipe's stages ran, each to its last step, and no others."""
    stages = {stage for stage in STAGES if getattr(made.recipe, stage) is not None}
    language = made.recipe.data.task.language
    assert {path.name for path in made.folder.iterdir()} & set(STAGES) == stages
    for stage in stages:
        result = json.loads((made.folder / stage / "result.json").read_text())
        assert result["steps"] == STEPS
        assert not language or result["tokens"] == STEPS * BATCH * LENGTH
        assert sum(result["best_loss"].values()) < sum(result["initial_loss"].values()), f"{stage} learned"
    if made.recipe.transfer is not None:
        blocks = [path.name for path in (made.folder / "transfer").glob("block-*")]
        assert len(blocks) == (2 if made.recipe.transfer.layers_per_block else 0)


def check_what_learned(made: Run, layers: LayerPlan) -> None:
    """The saved student differs from the converted teacher in what the stages train and in its measured scores."""
    converted = convert_layers(made.load_teacher(), layers, seed=made.recipe.seed)
    options: dict[str, Any] = {"dtype": made.dtype, "device": made.device}
    saved = load_model(str(made.folder / "model"), **options, auto_class=made.recipe.data.task.auto_class)
    before, after = converted.state_dict(), saved.state_dict()
    learning = {kind(name) for name, _ in converted.named_parameters()}
    if converted.config.model_type == "linearized_gpt2":
        del before["lm_head.weight"], after["lm_head.weight"]  # the embeddings'
    assert after.keys() == before.keys()
    changed = {weight for weight in before if not torch.equal(before[weight], after[weight])}
    scores = {weight for weight in before if ".scorer." in weight}
    assert bool(scores) == any(mixer.cache is not None for mixer in each_mixer(layers)) and scores <= changed
    changed -= scores

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
    """``mixer``, ``q_proj``, ``norm``, ..., or ``rest``."""
    return next((part for part in weight.split(".") if part in ALL), "rest")


def check_results(made: Run, results: Results | None) -> None:
    """Every candidate that the recipe allows is measured, and everything is written."""
    assert results is not None
    recipe, missing = made.recipe, set()
    if recipe.transfer is None:
        missing |= {"transferred"}
    missing |= {"exact_finetuned", "equal_finetuned"} - set(made.controls)
    if recipe.mixer.feature_map is None:
        missing |= {"ablated"}
    if not made.controls:
        missing |= {"teacher_finetuned", "window_finetuned"}
    if results.measured:
        assert {measured.name for measured in results.measured} == LABELS.keys() - missing
        assert (results.fidelity is not None) == recipe.evaluation.examine
    if recipe.data.task.scores:
        assert results.task is not None
        expected = {"student"} if recipe.weights == "random" else set(OF_ANY_TASK) - missing
        assert {line.name for line in results.task.scored} == expected
        assert results.task.metrics == recipe.data.task.scores
    page = (made.folder / "report.html").read_text(encoding="utf-8")
    assert recipe.name in page and "</html>" in page
    begun = "trained from scratch" if recipe.weights == "random" else "linearized"
    written = (made.folder / "model" / "README.md").read_text(encoding="utf-8")
    assert f"{begun} with the recipe `{recipe.name}`" in written
    assert f"pipeline_tag: {recipe.data.task.pipeline_tag}\n" in written
    assert LABELS["student"] in (made.folder / "evaluation.md").read_text(encoding="utf-8")
