"""What is measured of a student, beside what, and where the results go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.config import LayerPlan, Recipe
from linearize.errors import UserError
from linearize.evaluation import bench as timing
from linearize.evaluation.bench import Bench
from linearize.evaluation.candidates import Candidate
from linearize.evaluation.controls import SINKS, window_only_plan, window_reach, without_linear_part
from linearize.evaluation.report_card import ReportCard, measure
from linearize.hf.checkpoint import load_model, load_tokenizer, read_config
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.report import load_run, model_card, write_report
from linearize.runs import Run, load_dataset, versions, write_json, write_text
from linearize.teacher import TeacherShape
from linearize.training.attention_transfer import load_transferred
from linearize.training.data import Dataset
from linearize.training.finetune import load_finetuned


def candidates(
    teacher: PreTrainedModel | None, student: PreTrainedModel, layers: LayerPlan, run: Run | None
) -> tuple[list[Candidate], list[str]]:
    """Everything to measure the student against, and the names of what is not to be had.

    Trained controls are loaded from the run's folder; a student without one is measured without them.
    """

    @contextmanager
    def loaded(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        yield model

    @contextmanager
    def untrained() -> Iterator[PreTrainedModel]:
        assert teacher is not None
        yield convert_layers(teacher, layers, seed=0 if run is None else run.recipe.seed)

    @contextmanager
    def windowed(sinks: int | None) -> Iterator[PreTrainedModel]:
        with untrained() as model, without_linear_part(model, sinks):
            yield model

    @contextmanager
    def transferred() -> Iterator[PreTrainedModel]:
        with untrained() as model:
            assert run is not None and run.recipe.transfer is not None
            load_transferred(model, run.recipe.transfer, run.folder / "transfer")
            yield model

    @contextmanager
    def tuned(name: str) -> Iterator[PreTrainedModel]:
        assert run is not None and run.recipe.finetune is not None and teacher is not None
        model = convert_layers(teacher, window_only_plan(layers)) if name == "window_lora" else run.load_teacher()
        load_finetuned(model, run.recipe.finetune, run.controls[name])
        yield model

    sunk = f"softmax in the window and on the first {SINKS} tokens, nothing trained"
    every = {
        "teacher": Candidate("teacher", lambda: loaded(teacher), "softmax attention, as it came"),  # type: ignore[arg-type]
        "teacher_lora": Candidate("teacher_lora", lambda: tuned("teacher_lora"), "softmax attention, finetuned alike"),
        "swapped": Candidate("swapped", untrained, "mixers swapped in, nothing trained"),
        "transferred": Candidate("transferred", transferred, "mixers trained to match softmax outputs"),
        "student": Candidate("student", lambda: loaded(student), "the finished student"),
        "ablated": Candidate("ablated", lambda: without_linear_part(student), "the student without its linear part"),
        "window": Candidate("window", lambda: windowed(None), "softmax in the window, nothing trained"),
        "window_sinks": Candidate("window_sinks", lambda: windowed(SINKS), sunk),
        "window_lora": Candidate("window_lora", lambda: tuned("window_lora"), "softmax in the window, finetuned alike"),
    }
    trained = set() if run is None else {name for name, folder in run.controls.items() if _finished(folder)}
    if run is not None and _finished(run.folder / "transfer"):
        trained.add("transferred")
    at_hand = {"student", "ablated"}
    if teacher is not None:
        at_hand |= {"teacher", "swapped", "window", "window_sinks"} | trained
    return [c for name, c in every.items() if name in at_hand], [name for name in every if name not in at_hand]


def _finished(stage: Path) -> bool:
    return (stage / "trained.safetensors").is_file()


def measure_run(
    run: Run,
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    tokenizer: Tokenizer,
    dataset: Dataset,
    command: str | None,
) -> ReportCard:
    """Measure the finished student of a run beside everything there is to compare it with."""
    layers, started = read_plan(student.config), time.perf_counter()
    found, missing = candidates(teacher, student, layers, run)
    card = _measured(found, missing, layers, dataset, tokenizer, run.recipe, student)
    seconds = time.perf_counter() - started
    return replace(card, provenance=provenance(run.recipe, dataset, run.device, seconds, command))


def _measured(
    found: list[Candidate],
    missing: list[str],
    layers: LayerPlan,
    dataset: Dataset,
    tokenizer: Tokenizer,
    recipe: Recipe,
    student: PreTrainedModel,
) -> ReportCard:
    return measure(
        found,
        dataset.validation,
        tokenizer,
        window_size=window_reach(layers),
        max_positions=TeacherShape.from_config(student.config.to_dict()).max_positions,
        config=recipe.evaluation,
        seed=recipe.seed,
        missing=missing,
    )


def evaluate(
    model: str,
    *,
    teacher: str | None,
    dataset: str | None,
    overrides: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    command: str | None = None,
) -> ReportCard:
    """Measure a linearized model folder beside its teacher and, where it lies in a run folder, the trained controls.

    Args:
        teacher: the softmax model; by default the one of the run folder.
        dataset: held-out text is taken from it; by default the run's own data.
        overrides: dotted recipe fields under `data` and `evaluation`.
        command: what the user typed, to stand beside the results.

    Raises:
        UserError: not a linearized model, or no data to measure on.
    """
    config = require_linearized(model)
    folder = Path(model).resolve().parent
    run = Run.read(folder, dtype, device) if (folder / "run.json").is_file() else None
    recipe = Recipe(name="evaluation") if run is None else run.recipe
    if dataset is not None:
        belongs_to_the_other = {f"data.{name}": None for name in ("validation_dataset", "subset", "top_esl")}
        overrides = {"data.dataset": dataset} | belongs_to_the_other | overrides
    recipe = recipe.override(overrides)
    student = load_model(model, dtype=dtype, device=device)
    tokenizer, shape = load_tokenizer(model), TeacherShape.from_config(config)
    data = load_dataset(recipe, tokenizer, shape, run.load_teacher if run else None)
    layers, started = read_plan(student.config), time.perf_counter()
    teacher_model = None
    if run is not None:
        run = run if teacher is None else replace(run, model=teacher)
        teacher_model = run.load_teacher()
    elif teacher is not None:
        teacher_model = load_model(teacher, dtype=dtype, device=device)
    found, missing = candidates(teacher_model, student, layers, run)
    card = _measured(found, missing, layers, data, tokenizer, recipe, student)
    return replace(card, provenance=provenance(recipe, data, device, time.perf_counter() - started, command))


def bench(
    model: str,
    *,
    teacher: str | None,
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    new_tokens: int,
    repeats: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Bench:
    """Time a linearized model folder beside its teacher, by default the one of the run folder.

    Raises:
        UserError: not a linearized model, no teacher to be found, or sizes that make no sense.
    """
    require_linearized(model)
    folder = Path(model).resolve().parent
    if teacher is None and (folder / "run.json").is_file():
        teacher = Run.read(folder, dtype, device).model
    if teacher is None:
        raise UserError(f"--teacher: expected the softmax model that {model} is to be compared with, found nothing")
    models = (load_model(name, dtype=dtype, device=device) for name in (teacher, model))
    sizes = {"batch_sizes": batch_sizes, "prompt_lengths": prompt_lengths, "new_tokens": new_tokens}
    return timing.bench(*models, **sizes, repeats=repeats, seed=0)


def require_linearized(model: str) -> dict[str, Any]:
    """The config of a linearized model's folder.

    Raises:
        UserError: it is not one.
    """
    config = read_config(model)
    if not config.get("linearize"):
        raise UserError(f"model {model}: expected a linearized model, found model_type {config.get('model_type')!r}")
    return config


def write_results(folder: Path, card: ReportCard) -> None:
    """The measurements in a run's folder, for programs and for people; the model card tells them too."""
    write_json(folder / "evaluation.json", card.to_json())
    write_text(folder / "evaluation.md", card.to_markdown())
    write_text(folder / "model" / "README.md", model_card(load_run(folder)))
    write_report([folder], folder / "report.html")


def provenance(
    recipe: Recipe, dataset: Dataset, device: torch.device, seconds: float, command: str | None
) -> dict[str, Any]:
    """What a measurement rests on: command, versions, seed, text (its tokens' sha256), machine; how long it took."""
    return {
        "command": command,
        "versions": versions(),
        "seed": recipe.seed,
        "data": dataset.fingerprint,
        "tokens": dataset.validation.num_tokens,
        "device": f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device),
        "seconds": seconds,
    }
