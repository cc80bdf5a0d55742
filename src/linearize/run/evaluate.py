"""Evaluate a student and its controls, and write the result files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan, each_mixer, is_spread
from linearize.configs.tasks import TextEmbedding
from linearize.data.load import load_dataset, load_processor
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.data.selection import reach_by
from linearize.evaluation import speed
from linearize.evaluation.answers import answering
from linearize.evaluation.candidates import Candidate
from linearize.evaluation.controls import (
    SINKS,
    copy_eviction_scores,
    equal_bytes_plan,
    exact_plan,
    window_only_plan,
    window_reach,
    without_linear_part,
)
from linearize.evaluation.harness import check_tasks
from linearize.evaluation.measure import measure, measure_quickly, measure_task
from linearize.evaluation.results import Provenance, Results
from linearize.evaluation.scores import score_task
from linearize.hf.checkpoint import CAUSAL, load_model
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.recipe import Recipe
from linearize.report.card import evaluation_page, model_card
from linearize.report.load import load_run
from linearize.run.folder import Run, student_folder, versions, write_json, write_text
from linearize.run.rows import SOURCES, refuse_local_sources, stored_rows
from linearize.run.validation import (
    GENERATES,
    check_teacher,
    compile_if_possible,
    require_head,
    require_linearized,
)
from linearize.training.attention_transfer import load_transferred
from linearize.training.finetune import load_finetuned
from linearize.training.learned_sinks import LEARNED_SINKS, LearnedSinks
from linearize.training.resumption import RESULT

# Candidates for all tasks. The others are about text beyond a window.
OF_ANY_TASK = ("teacher", "swapped", "transferred", "student")


def candidates(
    teacher: PreTrainedModel | None, student: PreTrainedModel, layers: LayerPlan, recipe: Recipe, run: Run | None
) -> tuple[list[Candidate], list[str]]:
    """Return the candidates to measure, the student among them, and the names of those that are missing.

    Trained controls are loaded from the run's folder; without a run there are none.
    """

    def untrained() -> PreTrainedModel:
        assert teacher is not None
        model = convert_layers(teacher, layers, seed=0 if run is None else run.recipe.seed)
        copy_eviction_scores(student, model)  # measured on the teacher, not trained
        if run is not None and (run.folder / LEARNED_SINKS).is_file():
            LearnedSinks.read(run.folder / LEARNED_SINKS, advice="start the run again").apply(model)
        return model

    def windowed() -> PreTrainedModel:
        assert teacher is not None
        return convert_layers(teacher, window_only_plan(layers, teacher, recipe.data.sequence_length))

    def transferred() -> PreTrainedModel:
        assert run is not None and run.recipe.transfer is not None
        model = untrained()
        load_transferred(model, run.recipe.transfer, run.folder / "transfer")
        return model

    def fine_tuned(name: str, note: str) -> tuple[Callable[[], Any], str, tuple[str, ...]]:
        def load() -> Any:
            assert run is not None and run.recipe.finetune is not None and teacher is not None
            model = control(run, teacher, student, layers, name)
            load_finetuned(model, run.recipe.finetune, run.controls[name])
            return nullcontext(model)

        return load, f"{note}, fine-tuned on the same tokens", (f"controls/{name}",)

    sunk = f"softmax in the window and on the first {SINKS} tokens, nothing trained"
    stages = ("transfer", "adapt", "finetune")
    every: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
        "teacher": (lambda: nullcontext(teacher), "softmax attention, before fine-tuning", ()),
        "teacher_finetuned": fine_tuned("teacher_finetuned", "softmax attention"),
        "swapped": (lambda: nullcontext(untrained()), "mixers with initial weights, nothing trained", ()),
        "transferred": (lambda: nullcontext(transferred()), "mixers trained to match softmax outputs", ("transfer",)),
        "student": (lambda: nullcontext(student), "the finished student", stages),
        "ablated": (lambda: without_linear_part(student), "the student without its linear part", stages),
        "window": (lambda: nullcontext(windowed()), "softmax in the window, nothing trained", ()),
        "window_sinks": (lambda: without_linear_part(windowed(), SINKS), sunk, ()),
        "window_finetuned": fine_tuned("window_finetuned", "softmax in the window"),
        "equal_finetuned": fine_tuned(
            "equal_finetuned", "one window for all heads, of the size of the student's state"
        ),
        "exact_finetuned": fine_tuned(
            "exact_finetuned", "the student's windows and KV caches with eviction, without linear parts"
        ),
    }
    trained = set[str]()
    if run is not None:
        stages_of = run.controls | {"transferred": run.folder / "transfer"}
        trained = {name for name, folder in stages_of.items() if (folder / RESULT).is_file()}
        if recipe.adapt is None and recipe.finetune is None:
            del every["swapped" if recipe.transfer is None else "transferred"]  # it is the student
    at_hand = {"student"}
    if any(mixer.feature_map is not None for mixer in each_mixer(layers)):
        at_hand.add("ablated")
        # Only one of them is a control of this plan.
        del every["equal_finetuned" if is_spread(layers) else "exact_finetuned"]
    else:  # there is no linear part to ablate, and the window-only control has as many bytes
        del every["ablated"], every["equal_finetuned"], every["exact_finetuned"]
    if teacher is not None:
        at_hand |= {"teacher", "swapped", "window", "window_sinks"} | trained
    if not recipe.data.task.language:
        # A student from scratch has no candidates to compare with: its teacher has random weights.
        names = ("student",) if recipe.weights == "random" else OF_ANY_TASK
        every = {name: every[name] for name in names if name in every}

    def tokens(stages: Sequence[str]) -> int | None:
        return 0 if not stages else None if run is None else run.training_tokens(*stages)

    found = [
        Candidate(name, opened, note, tokens(stages))
        for name, (opened, note, stages) in every.items()
        if name in at_hand
    ]
    return found, [name for name in every if name not in at_hand]


def control(
    run: Run, teacher: PreTrainedModel, student: PreTrainedModel, layers: LayerPlan, name: str
) -> PreTrainedModel:
    """Return a control before its training: its own copy of the teacher, or a student without linear parts."""
    if name == "teacher_finetuned":
        return run.load_teacher()
    if name == "exact_finetuned":
        model = convert_layers(teacher, exact_plan(layers))
        copy_eviction_scores(student, model)  # it has the student's caches
        return model
    plan = window_only_plan if name == "window_finetuned" else equal_bytes_plan
    return convert_layers(teacher, plan(layers, teacher, run.recipe.data.sequence_length))


def measure_candidates(
    teacher: PreTrainedModel | None,
    student: PreTrainedModel,
    dataset: Dataset,
    processor: Any,
    recipe: Recipe,
    run: Run | None,
    device: torch.device,
    command: str | None,
) -> Results:
    """Measure the student and all available candidates.

    Args:
        run: has the stages and controls; None: the model was made elsewhere.
        command: the user's command line, for the results.
    """
    started = time.perf_counter()
    try:
        results = _measured(teacher, student, dataset, processor, recipe, run)
    except FloatingPointError as error:
        raise UserError(
            f"evaluation: expected finite outputs, found others: {error}; check the models' weights, or --dtype float32"
        ) from None
    threads = torch.get_num_threads()
    provenance = Provenance(
        command=command,
        versions=versions(),
        seed=recipe.seed,
        data=dataset.fingerprint,
        tokens=dataset.test.num_tokens,
        device=str(device) if device.type != "cpu" else f"cpu, {threads} thread{'s' if threads > 1 else ''}",
        seconds=time.perf_counter() - started,
    )
    return results.model_copy(update={"provenance": provenance})


def _measured(
    teacher: PreTrainedModel | None,
    student: PreTrainedModel,
    dataset: Dataset,
    processor: Any,
    recipe: Recipe,
    run: Run | None,
) -> Results:
    task, layers = recipe.data.task, read_plan(student.config)
    found, missing = candidates(teacher, student, layers, recipe, run)
    if isinstance(task, TextEmbedding) and teacher is None:
        raise UserError("--teacher: expected the model whose embeddings are compared with, found nothing; name it")
    answer = answering(task, dataset, processor, teacher) if task.scores else None
    if not task.language:
        assert answer is not None
        return measure_task(
            found, answer, task, dataset.test, config=recipe.evaluation, seed=recipe.seed, missing=missing
        )
    rows = dataset.test
    assert isinstance(rows, PackedRows)
    common: dict[str, Any] = {
        "window_size": window_reach(layers, student, recipe.data.sequence_length),
        "max_positions": TeacherShape.from_config(student.config.to_dict()).max_positions,
        "config": recipe.evaluation,
        "seed": recipe.seed,
    }
    if recipe.evaluation.long:
        results = measure(found, rows, processor, missing=missing, **common)
    else:
        # With a budget, the length at which it is a fraction of the teacher's cache.
        context = recipe.data.sequence_length if recipe.memory is None else recipe.memory.reference_length
        results = measure_quickly(teacher, student, rows, processor, context=context, **common)
    if answer is None:
        return results
    of_any = [candidate for candidate in found if candidate.name in OF_ANY_TASK]
    samples = recipe.evaluation.bootstrap_samples
    scores = score_task(of_any, answer, task, samples=samples, seed=recipe.seed)
    return results.model_copy(update={"task": scores})


def evaluate(
    model: str,
    *,
    teacher: str | None,
    dataset: str | None,
    overrides: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    command: str | None = None,
    trust_tasks: bool = False,
    compiled: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Results:
    """Measure a linearized model, its teacher and, if its run folder is available, the trained controls.

    Args:
        model: a run folder, or the folder of a model; a model moved out of its run still has recipe and teacher.
        teacher: the softmax model; None: the run's own, or no teacher if that cannot be read.
        dataset: source of held-out text; None: the run's own data.
        overrides: dotted recipe fields under `data` and `evaluation`.
        command: the user's command line, for the results.
        trust_tasks: whether the recipe's tasks may be YAML files; tasks in `overrides` may be anyway.
        compiled: whether steps of generation of teacher and student are compiled; forwards of rows are not.
        note: called with each deviation from what was requested, once everything is loaded.

    Raises:
        UserError: not a linearized model, another model's teacher, no data to measure on, local files that only the
            recipe of a folder names, or a recipe field that eval cannot change.
    """
    for field in overrides:
        if not field.startswith(("data.", "evaluation.")):
            raise UserError(
                f"--set {field}: expected a field of data or evaluation, because eval does not change a model; leave "
                "it out"
            )
    model = student_folder(model)
    config = require_linearized(model)
    run = made_by = Run.of_model(model, dtype, device)
    recipe = Recipe(name="evaluation") if run is None else run.recipe
    if dataset is not None:
        belongs_to_the_other = {f"data.{name}": None for name in ("validation_dataset", "subset", "select_rows_by_esl")}
        overrides = {"data.dataset": dataset} | belongs_to_the_other | overrides
    recipe = recipe.override(overrides)
    trusted = trust_tasks or "evaluation.tasks" in overrides
    check_tasks(recipe.evaluation, trusted=trusted, files=trusted or run is None)
    task, shape, notes = recipe.data.task, TeacherShape.from_config(config), []
    if run is None and "data.sequence_length" not in overrides and shape.max_positions < recipe.data.sequence_length:
        recipe = recipe.override({"data.sequence_length": shape.max_positions})
        notes.append(
            f"rows of {shape.max_positions} tokens, the model's positions; --set data.sequence_length=... for others"
        )
    require_head(model, config, task.auto_class, "set data.task.type to the model's task")
    chooser = run  # the run's own teacher selects rows, whichever teacher the student is compared with
    if teacher is not None:
        run = Run(recipe, teacher, Path(model), dtype, device) if run is None else replace(run, model=teacher)
    if run is not None:
        try:
            check_teacher(run.model, shape)
        except UserError as error:
            if teacher is not None:
                raise
            notes.append(f"measured without the teacher; pass --teacher to name it: {error}")
            run = chooser = None
    data = None
    if made_by is not None and not any(field.startswith("data.") for field in overrides):
        data = stored_rows(made_by, shape)
    if data is None:
        refuse_local_sources(made_by, recipe.data, {field for field in SOURCES if f"data.{field}" in overrides})
    student = load_model(model, dtype=dtype, device=device, auto_class=task.auto_class)
    processor = load_processor(task, model)
    score = None if chooser is None else reach_by(chooser.load_teacher)
    if data is None:
        data = load_dataset(recipe.data, processor, config, score, seed=recipe.seed)
    teacher_model = None if run is None else run.load_teacher()
    for line in notes:
        note(line)
    if compiled:
        compile_if_possible(*[x for x in (teacher_model, student) if x is not None], note=note)
    return measure_candidates(teacher_model, student, data, processor, recipe, run, device, command)


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
    compiled: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> speed.Bench:
    """Time a linearized model, in its run folder or its own, and its teacher, by default the run's own.

    Args:
        compiled: whether the steps of both are compiled.
        note: called with the reason if they cannot be.

    Raises:
        UserError: not a linearized model, no teacher, or invalid sizes.
    """
    model = student_folder(model)
    require_head(model, require_linearized(model), CAUSAL, GENERATES)
    if teacher is None and (run := Run.of_model(model, dtype, device)) is not None:
        teacher = run.model
    if teacher is None:
        raise UserError(f"--teacher: expected the softmax model that {model} is to be compared with, found nothing")
    models = [load_model(name, dtype=dtype, device=device) for name in (teacher, model)]
    if compiled:
        compile_if_possible(*models, note=note)
    sizes = {"batch_sizes": batch_sizes, "prompt_lengths": prompt_lengths, "new_tokens": new_tokens}
    return speed.bench(*models, **sizes, repeats=repeats, seed=0)


def write_results(folder: Path, results: Results) -> None:
    """Write the measurements to a run's folder as JSON, Markdown and HTML, and to the model card."""
    from linearize.report.page import write_report  # its figures import matplotlib, which takes half a second

    write_json(folder / "evaluation.json", results.to_json())
    run = load_run(folder)
    write_text(folder / "evaluation.md", evaluation_page(run))
    write_text(folder / "model" / "README.md", model_card(run))
    write_report([folder], folder / "report.html")
