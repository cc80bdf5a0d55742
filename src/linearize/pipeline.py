"""`run`: a teacher and a recipe in, a student and the measure of it out, stage by stage; the same again resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize import plan as planning
from linearize.config import LayerPlan, Recipe, resolve
from linearize.errors import UserError
from linearize.evaluation import bench as timing
from linearize.evaluation.bench import Bench
from linearize.evaluation.candidates import Candidate
from linearize.evaluation.controls import SINKS, window_only_plan, window_reach, without_linear_part
from linearize.evaluation.report_card import ReportCard, measure
from linearize.hf.checkpoint import load_model, load_tokenizer, read_config, save_student
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.report import load_run, model_card, write_report
from linearize.teacher import TeacherShape
from linearize.training.attention_transfer import attention_transfer, load_transferred
from linearize.training.checkpoint import full_disk_is_user_error
from linearize.training.data import Dataset, build_dataset
from linearize.training.finetune import finetune, load_finetuned

STAGES = ("transfer", "finetune", "evaluate")


@dataclass(frozen=True)
class Run:
    """A run folder and what it is about: enough to start, resume or evaluate it."""

    recipe: Recipe
    model: str
    folder: Path
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Run:
        """The run that `folder` holds, on this machine's device."""
        recipe = Recipe.parse(yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")))
        model = json.loads((folder / "run.json").read_text(encoding="utf-8"))["model"]
        return cls(recipe, model, folder, dtype, device)

    def load_teacher(self) -> PreTrainedModel:
        return load_model(self.model, dtype=self.dtype, device=self.device)

    @property
    def controls(self) -> dict[str, Path]:
        """Folders of the trained controls, by the name of their candidate.

        None where the recipe wants none, or trains nothing that a model without a linear part has.
        """
        config = self.recipe.finetune
        if config is None or not (config.lora or config.all_weights) or not self.recipe.evaluation.trained_controls:
            return {}
        return {name: self.folder / "controls" / name for name in ("teacher_lora", "window_lora")}


def run(
    run: Run, *, dataset: Dataset | None = None, until: str = "evaluate", command: str | None = None
) -> ReportCard | None:
    """Linearize `run.model` as `run.recipe` says; returns the measure of it, or None if `until` ends before.

    Args:
        dataset: rows to use instead of what the recipe names.
        until: the last stage to run, one of `STAGES`.
        command: what the user typed, to stand beside the results.

    Raises:
        UserError: anything that the user can fix; nothing is half-written then.
    """
    shape = TeacherShape.from_config(read_config(run.model))
    layers = resolve(run.recipe, shape)
    check_output(run)
    tokenizer = load_tokenizer(run.model)
    dataset = load_dataset(run.recipe, tokenizer, shape) if dataset is None else dataset
    teacher = run.load_teacher()
    student = convert_layers(teacher, layers, seed=run.recipe.seed)
    claim(run, dataset)
    plan = planning.make_plan(
        run.recipe, shape, layers, kv_bytes_per_element=run.dtype.itemsize, training_tokens=dataset.train.num_tokens
    )
    write_json(run.folder / "plan.json", plan.to_json())

    train_student(run, student, teacher, dataset, until)
    if until != "evaluate":
        return None
    train_controls(run, teacher, layers, dataset)
    saved = run.folder / "model"
    if not saved.exists():
        save_student(student, tokenizer, f"# {run.folder.name}\n\nNot measured yet.\n", saved)
    found, missing = candidates(teacher, student, layers, run)
    started = time.perf_counter()
    card = measure(
        found,
        dataset.validation,
        tokenizer,
        window_size=window_reach(layers),
        max_positions=shape.max_positions,
        config=run.recipe.evaluation,
        seed=run.recipe.seed,
        missing=missing,
    )
    seconds = time.perf_counter() - started
    card = replace(card, provenance=provenance(run.recipe, dataset, run.device, seconds, command))
    write_results(run.folder, card)
    return card


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


def versions() -> dict[str, str]:
    return {"linearize": version("linearize"), "torch": torch.__version__, "transformers": transformers.__version__}


def load_dataset(recipe: Recipe, tokenizer: Tokenizer, shape: TeacherShape) -> Dataset:
    """The recipe's data, packed.

    Raises:
        UserError: no dataset named, rows longer than the model's positions, or data that cannot be used.
    """
    if recipe.data.dataset is None:
        raise UserError("data.dataset: expected a file, folder or hub id, found nothing; pass --dataset")
    if recipe.data.sequence_length > shape.max_positions:
        raise UserError(
            f"data.sequence_length: expected at most the model's {shape.max_positions} positions, found "
            f"{recipe.data.sequence_length}; pass --set data.sequence_length={shape.max_positions}"
        )
    return build_dataset(recipe.data, tokenizer, seed=recipe.seed)


def check_output(run: Run) -> None:
    """See that the folder is empty or holds this very recipe and model.

    Raises:
        UserError: the folder holds something else.
    """
    recipe_file, run_file = run.folder / "recipe.yaml", run.folder / "run.json"
    if recipe_file.is_file() and run_file.is_file():
        found = json.loads(run_file.read_text(encoding="utf-8"))
        if recipe_file.read_text(encoding="utf-8") != run.recipe.to_yaml():
            raise UserError(
                f"output folder {run.folder}: expected a run of this recipe, found one of another ({recipe_file}); "
                "use another folder"
            )
        for name, expected in _identity(run).items():
            if found.get(name) != expected:
                raise UserError(
                    f"output folder {run.folder}: {name}: expected {expected}, found {found.get(name)}; "
                    "use another folder"
                )
    elif not _unclaimed(run):
        raise UserError(f"output folder {run.folder}: expected an empty folder or a run to resume, found other files")


def _unclaimed(run: Run) -> bool:
    """Whether there is no folder, an empty one, or one in which `claim` was killed before its last file."""
    if not run.folder.is_dir():
        return not run.folder.exists()
    recipe, begun = run.folder / "recipe.yaml", {_scratch(run.folder / name) for name in ("recipe.yaml", "run.json")}
    found = set(run.folder.iterdir()) - begun
    return not found or (found == {recipe} and recipe.read_text(encoding="utf-8") == run.recipe.to_yaml())


def claim(run: Run, dataset: Dataset) -> None:
    """Make the folder this run's own, and see that a resumed run has the same data.

    Raises:
        UserError: the data have changed, or the folder cannot be written to.
    """
    run_file = run.folder / "run.json"
    if run_file.is_file():
        found = json.loads(run_file.read_text(encoding="utf-8")).get("data")
        if found != dataset.fingerprint:
            raise UserError(
                f"output folder {run.folder}: data: expected tokens with sha256 {dataset.fingerprint[:12]}, found a "
                f"run on {str(found)[:12]}; use the same data or another folder"
            )
        return
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / "recipe.yaml", run.recipe.to_yaml())
        write_json(run_file, _identity(run) | {"data": dataset.fingerprint, "versions": versions()})
    except OSError as error:
        raise UserError(
            f"output folder {run.folder}: expected one that can be written to, found: {error.strerror}; use another"
        ) from None


def _identity(run: Run) -> dict[str, str]:
    return {"model": run.model, "dtype": str(run.dtype).removeprefix("torch."), "device": run.device.type}


def train_student(run: Run, student: PreTrainedModel, teacher: PreTrainedModel, dataset: Dataset, until: str) -> None:
    """Run the recipe's stages up to `until` on `student`; finished ones are loaded, begun ones resumed."""
    recipe, rows = run.recipe, (dataset.train, dataset.validation)
    if recipe.transfer is not None:
        attention_transfer(student, *rows, recipe.transfer, output_dir=run.folder / "transfer", seed=recipe.seed)
    if recipe.finetune is not None and until != "transfer":
        options = {"output_dir": run.folder / "finetune", "teacher": teacher, "seed": recipe.seed}
        finetune(student, *rows, recipe.finetune, **options)


def train_controls(run: Run, teacher: PreTrainedModel, layers: LayerPlan, dataset: Dataset) -> None:
    """Train what the student must be compared with: the same LoRA budget on the teacher, and on its window alone."""
    for name, folder in run.controls.items():
        model = convert_layers(teacher, window_only_plan(layers)) if name == "window_lora" else run.load_teacher()
        config, title = run.recipe.finetune, f"control: {name.replace('_', ' ')}"
        assert config is not None
        rows = dataset.train, dataset.validation
        finetune(model, *rows, config, output_dir=folder, teacher=teacher, seed=run.recipe.seed, title=title)


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
        "teacher_lora": Candidate("teacher_lora", lambda: tuned("teacher_lora"), "softmax attention, same LoRA"),
        "swapped": Candidate("swapped", untrained, "mixers swapped in, nothing trained"),
        "transferred": Candidate("transferred", transferred, "mixers trained to match softmax outputs"),
        "student": Candidate("student", lambda: loaded(student), "the finished student"),
        "ablated": Candidate("ablated", lambda: without_linear_part(student), "the student without its linear part"),
        "window": Candidate("window", lambda: windowed(None), "softmax in the window, nothing trained"),
        "window_sinks": Candidate("window_sinks", lambda: windowed(SINKS), sunk),
        "window_lora": Candidate("window_lora", lambda: tuned("window_lora"), "softmax in the window, same LoRA"),
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
        overrides = {"data.dataset": dataset, "data.validation_dataset": None} | overrides
    recipe = recipe.override(overrides)
    teacher = teacher or (run.model if run else None)
    student = load_model(model, dtype=dtype, device=device)
    tokenizer, shape = load_tokenizer(model), TeacherShape.from_config(config)
    data = load_dataset(recipe, tokenizer, shape)
    layers, started = read_plan(student.config), time.perf_counter()
    teacher_model = load_model(teacher, dtype=dtype, device=device) if teacher else None
    found, missing = candidates(teacher_model, student, layers, replace(run, model=teacher) if run else None)
    card = measure(
        found,
        data.validation,
        tokenizer,
        window_size=window_reach(layers),
        max_positions=shape.max_positions,
        config=recipe.evaluation,
        seed=recipe.seed,
        missing=missing,
    )
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


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        UserError: the disk is full.
    """
    scratch = _scratch(path)
    try:
        with full_disk_is_user_error(path.parent, len(text)):
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.incomplete")


def generate(
    model: str,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> None:
    """Print a continuation of `prompt` as it comes; `temperature` 0 takes the likeliest token."""
    tokenizer = load_tokenizer(model)
    loaded: Any = load_model(model, dtype=dtype, device=device)
    inputs = tokenizer(prompt, return_tensors="pt").to(device)
    if not inputs["input_ids"].shape[1]:
        raise UserError("--prompt: expected some text, found none")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    streamer = transformers.TextStreamer(tokenizer, skip_special_tokens=True)
    loaded.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
