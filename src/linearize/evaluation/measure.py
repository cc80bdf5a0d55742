"""Measure a student, its teacher and its controls: by the short or long evaluation, or by scores at another task."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError
from linearize.configs.evaluation import EvaluationConfig
from linearize.configs.tasks import AnyTask
from linearize.data.repeats import ordinary_tokens
from linearize.data.rows import PackedRows, Rows
from linearize.data.splits import ENOUGH
from linearize.distributed import barrier, is_sharded, world
from linearize.evaluation.agreement import generation_agreement, logit_agreement, loss_by_position
from linearize.evaluation.attention_statistics import TOKENS, attention_statistics
from linearize.evaluation.candidates import BATCH_SIZE, LABELS, Candidate
from linearize.evaluation.copying import Copying, copy_losses, copy_rows
from linearize.evaluation.fidelity import measure_fidelity
from linearize.evaluation.harness import Benchmarks, run_benchmarks
from linearize.evaluation.intervals import Totals
from linearize.evaluation.metrics import Answered
from linearize.evaluation.perplexity import Quality, TokenLosses, paired_difference, token_losses
from linearize.evaluation.results import Comparison, Measured, Results
from linearize.evaluation.retrieval import Answers, Retrieval, answer, retrieval_result, retrieval_tests
from linearize.evaluation.scores import score_task
from linearize.evaluation.shares import kept_copying, kept_far_context
from linearize.evaluation.short import measure_short
from linearize.evaluation.speed import generation_speed
from linearize.evaluation.timings import Crossover, Speed
from linearize.hf.attention import linearized_layers

NEW_TOKENS = 16  # tokens generated when speed is measured
RECALLING = ("teacher", "student", "window")  # the floor is the teacher within its window
SHOWN = 4  # generations kept as text
BENCHMARK_BATCH_SIZE = 16


def measure_task(
    candidates: Sequence[Candidate],
    answer: Callable[[PreTrainedModel, str], Answered],
    task: AnyTask,
    rows: Rows,
    *,
    config: EvaluationConfig,
    seed: int,
    missing: Sequence[str] = (),
) -> Results:
    """Measure a model that is no language model: scores of every candidate, and the student's fidelity by head.

    Args:
        candidates: opened one after another; "student" must be among them.
        answer: runs a model over the held-out examples; its text is the title of a progress bar.
        rows: held-out inputs for the fidelity.
        missing: names of controls that are not available.

    Raises:
        UserError: too few examples.
    """
    scores = score_task(candidates, answer, task, samples=config.bootstrap_samples, seed=seed)
    fidelity, reasons = None, {}
    if config.examine:
        with next(candidate for candidate in candidates if candidate.name == "student").open() as student:
            try:
                fidelity = measure_fidelity(
                    student, rows, max_tokens=config.fidelity_tokens, batch_size=BATCH_SIZE, seed=seed
                )
            except UserError as error:  # the model has no fidelity; scores do not depend on it
                reasons["fidelity"] = str(error)
    else:
        reasons["fidelity"] = "not asked for, evaluation.examine is false"
    return Results(task=scores, fidelity=fidelity, missing=[LABELS[name] for name in missing], not_measured=reasons)


def measure_quickly(
    teacher: PreTrainedModel | None,
    student: PreTrainedModel,
    rows: PackedRows,
    tokenizer: Tokenizer,
    *,
    context: int,
    window_size: int,
    max_positions: int,
    config: EvaluationConfig,
    seed: int,
) -> Results:
    """Measure a language model by the short evaluation on contexts of `context` tokens, and by public benchmarks."""
    reasons: dict[str, str] = {}
    samples = config.bootstrap_samples
    short, tasks = None, None
    try:
        short = measure_short(
            teacher, student, rows, tokenizer, context=context, max_positions=max_positions, samples=samples, seed=seed
        )
    except UserError as error:  # too little held-out text; the model is written anyway
        reasons["short"] = str(error)
    if config.tasks and (world().main or is_sharded(student)):
        models = {"teacher": teacher, "student": student}
        tasks = _benchmarks({name: x for name, x in models.items() if x is not None}, tokenizer, config, seed)
    barrier()  # the other processes wait for lm-eval
    return Results(window_size=window_size, short=short, tasks=tasks, not_measured=reasons)


def measure(
    candidates: Sequence[Candidate],
    rows: PackedRows,
    tokenizer: Tokenizer,
    *,
    window_size: int,
    max_positions: int,
    config: EvaluationConfig,
    seed: int,
    missing: Sequence[str] = (),
) -> Results:
    """Measure a language model by the long evaluation: all candidates on the same rows, the student in more detail.

    Args:
        candidates: opened one after another; "student" must be among them.
        window_size: in tokens, for results "beyond the window".
        missing: names of controls that are not available.
    """
    reasons: dict[str, str] = {}
    vocabulary = ordinary_tokens(len(tokenizer), tokenizer.all_special_ids)
    num_copies = max(ENOUGH, config.copy_rows)
    copies = copy_rows(vocabulary, window_size=window_size, max_positions=max_positions, rows=num_copies, seed=seed)
    if copies is None:
        reasons["copying"] = f"a repeat at {2 * window_size} tokens does not fit the model's {max_positions} positions"
    losses: dict[str, TokenLosses] = {}
    copied: dict[str, list[Totals]] = {}
    for candidate in candidates:
        with candidate.open() as model:
            title = f"measuring: {candidate.label}"
            losses[candidate.name] = token_losses(model, rows, batch_size=BATCH_SIZE, title=title)
            if copies is not None:
                copied[candidate.name] = copy_losses(model, copies, batch_size=BATCH_SIZE)
        del model
        gc.collect()

    resampling: dict[str, int] = {"samples": config.bootstrap_samples, "seed": seed}

    def measured(candidate: Candidate) -> Measured:
        quality = Quality.of(losses[candidate.name], window_size, **resampling)
        copying = Copying.of(copied[candidate.name], **resampling) if candidate.name in copied else None
        return Measured(candidate.name, candidate.label, candidate.note, candidate.training_tokens, quality, copying)

    def comparison(other: str) -> Comparison:
        a, b = losses["student"], losses[other]
        beyond = None
        if a.beyond_missing(window_size) is None:
            beyond = paired_difference(a.beyond(window_size), b.beyond(window_size), **resampling)
        return Comparison(other, paired_difference(a, b, **resampling), beyond)

    opened = {candidate.name: candidate for candidate in candidates}
    speed = _speed(opened, max_positions, seed, reasons) if "teacher" in opened else []
    barrier()  # other processes stay idle while the main process measures times
    examined: dict[str, Any] = {}
    if config.examine:
        examined = _examined(opened, rows, tokenizer, window_size, max_positions, config, seed, reasons)
    return Results(
        window_size=window_size,
        measured=list(map(measured, candidates)),
        comparisons=[
            comparison(name)
            for name in ("teacher", "window_finetuned", "equal_finetuned", "exact_finetuned", "ablated")
            if name in losses
        ],
        far_context=kept_far_context(losses, window_size, **resampling),
        copying=kept_copying(copied["teacher"], copied["student"], **resampling) if "teacher" in copied else None,
        positions=loss_by_position(losses, seed=seed),
        speed=speed,
        crossover=Crossover.of(speed) if speed else None,
        missing=[LABELS[name] for name in missing],
        **examined,
        not_measured=reasons,
    )


def _speed(opened: Mapping[str, Candidate], max_positions: int, seed: int, reasons: dict[str, str]) -> list[Speed]:
    """Return the speed of teacher and student on texts of a quarter of the positions and of nearly all of them.

    These lengths include generated tokens. A length is left out, with its reason in `reasons`, if rotary angles change
    there, since a state cannot continue beyond; all are left out if weights are divided.
    """
    lengths = (max(1, max_positions // 4 - NEW_TOKENS), max_positions - 1 - NEW_TOKENS)
    with opened["teacher"].open() as teacher, opened["student"].open() as student:
        if is_sharded(student):
            reasons["speed"] = "weights are divided among processes; `linearize bench` measures the model in one piece"
        if not world().main or is_sharded(student):
            return []
        models = {"teacher": teacher, "student": student}
        speeds: list[Speed] = []
        failures: list[str] = []
        for length in lengths:
            try:
                speeds += generation_speed(models, [length], new_tokens=NEW_TOKENS, repeats=3, seed=seed)
            except UserError as error:  # other measurements do not depend on it
                failures.append(f"of prompts of {length} tokens: {error}")
        if failures:
            reasons["speed"] = "; ".join(failures)
        return speeds


# --- measurements besides the loss ------------------------------------------------------------------------------------


def _examined(
    opened: Mapping[str, Candidate],
    rows: PackedRows,
    tokenizer: Tokenizer,
    window_size: int,
    max_positions: int,
    config: EvaluationConfig,
    seed: int,
    reasons: dict[str, str],
) -> dict[str, Any]:
    """Return the sections that compare the student with its teacher; add to `reasons` why any is missing."""
    rows = rows.spread(max(ENOUGH, config.examined_tokens // rows.input_ids.shape[1]))
    with ExitStack() as stack:
        models = {name: stack.enter_context(opened[name].open()) for name in ("teacher", "student") if name in opened}
        teacher, student = models.get("teacher"), models["student"]
        sections: dict[str, Any] = {}
        sections["fidelity"] = measure_fidelity(
            student, rows, max_tokens=config.fidelity_tokens, batch_size=BATCH_SIZE, seed=seed
        )
        if teacher is not None:
            if all(layer.mixer.causal for layer in linearized_layers(student).values()):
                tokens = rows.input_ids.flatten()[: min(TOKENS, max_positions)]
                sections["teacher_attention"] = attention_statistics(teacher, tokens[None])
            samples = config.bootstrap_samples
            sections["agreement"] = logit_agreement(
                teacher, student, rows, batch_size=BATCH_SIZE, window_size=window_size, samples=samples, seed=seed
            )
            try:
                sections["generations"] = generation_agreement(
                    teacher,
                    student,
                    tokenizer,
                    rows,
                    prompts=config.prompts,
                    prompt_length=min(window_size, max_positions // 4),
                    new_tokens=min(config.new_tokens, max_positions // 2),
                    shown=SHOWN,
                    seed=seed,
                )
            except UserError as error:  # too little held-out text; other measurements do not depend on it
                reasons["generations"] = str(error)
        else:
            reasons |= {"agreement": "no teacher at hand", "generations": "no teacher at hand"}
        if not config.tasks:
            reasons["tasks"] = "no task was named; use --tasks or evaluation.tasks"
        elif world().main or is_sharded(student):  # lm-eval's questions are not shared
            sections["tasks"] = _benchmarks(models, tokenizer, config, seed)
    return sections | {"retrieval": _retrieval(opened, rows, tokenizer, window_size, max_positions, config, seed)}


def _benchmarks(
    models: Mapping[str, PreTrainedModel], tokenizer: Tokenizer, config: EvaluationConfig, seed: int
) -> Benchmarks:
    limit = config.task_limit
    return run_benchmarks(
        models, tokenizer, config.tasks, shots=config.shots, limit=limit, batch_size=BENCHMARK_BATCH_SIZE, seed=seed
    )


def _retrieval(
    opened: Mapping[str, Candidate],
    rows: PackedRows,
    tokenizer: Tokenizer,
    window_size: int,
    max_positions: int,
    config: EvaluationConfig,
    seed: int,
) -> list[Retrieval]:
    tests = retrieval_tests(
        tokenizer,
        window_size=window_size,
        max_positions=max_positions,
        trials=config.recall_trials,
        seed=seed,
        haystack=rows.input_ids,
    )
    answers: list[dict[str, Answers]] = [{} for _ in tests]
    for name in RECALLING:
        if name not in opened:
            continue
        with opened[name].open() as model:
            for test, by_model in zip(tests, answers, strict=True):
                by_model[name] = answer(model, test, batch_size=BATCH_SIZE, title=f"recall: {opened[name].label}")
        del model
        gc.collect()
    samples = config.bootstrap_samples
    return [retrieval_result(*pair, samples=samples, seed=seed) for pair in zip(tests, answers, strict=True)]
