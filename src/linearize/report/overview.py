"""The top of the page: the verdict, wins and losses of each run, the key numbers of all, and cautions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from linearize.evaluation.metrics import title
from linearize.hf.prefill import FULL, STREAMING
from linearize.report.findings import Finding, Kind, sides, speeds, verdict
from linearize.report.html import Table
from linearize.report.load import RunFiles, label
from linearize.report.numbers import DASH, count, memory_size, milliseconds, percent, scaled, what, with_interval


@dataclass(frozen=True)
class Overview:
    """The entries of one run in the head of the page."""

    name: str
    about: str
    verdict: Sequence[Finding]
    sides: Sequence[tuple[Kind, str, list[str]]]


def overview(run: RunFiles) -> Overview:
    return Overview(run.name, _about(run), verdict(run), sides(run))


def _about(run: RunFiles) -> str:
    """Return one line about recipe, teacher and layers."""
    parts = []
    if recipe := run.plan.recipe if run.plan else run.recipe and run.recipe.name:
        parts.append(f"recipe {recipe}")
    if teacher := _teacher(run):
        parts.append(f"teacher: {teacher}")
    if run.plan:
        layers = len(run.plan.converted_layers) + len(run.plan.kept_layers)
        parts.append(f"{len(run.plan.converted_layers)} of {layers} layers converted")
    if run.task is not None:
        parts.append(f"task: {what(run.task)}")
    if run.window is not None:
        words = "window of" if run.allocation is None else "as many bytes as a window of"
        parts.append(f"{words} {count(run.window)} tokens")
    return " \N{MIDDLE DOT} ".join(parts)


def cautions(runs: Sequence[RunFiles]) -> list[str]:
    """Return sentences on why some numbers of these runs must not be compared."""
    found = []
    if not all(runs[0].same_teacher(run) for run in runs[1:]):
        names = "; ".join(f"{run.name}: {_teacher(run) or 'unknown'}" for run in runs)
        found.append(
            f"These runs have different teachers ({names}). Compare each student with its own teacher and controls, "
            "not with the other students: numbers of different teachers say nothing about the mixers."
        )
    kinds = {_kind(run) for run in runs}
    texts = {run.run.data for run in runs if run.run}
    counts = {line.quality.tokens for run in runs if (line := run.measured("student"))}
    counts |= {run.task.examples for run in runs if run.task and not run.is_language_model}
    if len(kinds) > 1:
        names = "; ".join(f"{run.name}: {_kind(run)}" for run in runs)
        found.append(
            f"These runs have different tasks ({names}): their numbers are not of one kind, and none is paired."
        )
    elif len(texts) > 1 or len(counts) > 1:
        measured = "text, so their losses" if runs[0].is_language_model else "examples, so their scores"
        found.append(f"These runs were not all measured on the same {measured} are not paired with each other.")
    return found


def _kind(run: RunFiles) -> str:
    return "language modelling" if run.task is None else what(run.task)


def _teacher(run: RunFiles) -> str:
    parts = [run.teacher] if run.teacher else []
    if run.plan:
        parts += [run.plan.model_type, f"{scaled(run.plan.teacher_parameters)} parameters"]
    return ", ".join(parts)


def key_numbers(runs: Sequence[RunFiles]) -> Table:
    caption = "Key numbers, with 95 % intervals"
    return Table.by_run(caption, [run.name for run in runs], list(map(_key_numbers, runs)))


def _key_numbers(run: RunFiles) -> dict[str, str]:
    """Return the numbers of one run that were measured."""
    found: dict[str, str] = {}
    results = run.results
    if run.task is not None:
        metric = run.task.metrics[0]
        name = title(metric)
        found[f"Student's {name}"] = with_interval(run.score("student", metric))
        found[f"Teacher's {name}"] = with_interval(run.score("teacher", metric))
        difference = run.score_difference("teacher", metric)
        found[f"Student's minus teacher's {name}, paired"] = with_interval(difference, sign=True)
        found[f"Share of the teacher's {name}"] = percent(run.recovery(metric))
    readers = {"Student": ("student", STREAMING), "Student, prompt read in full": ("student", FULL)}
    for name, (model, way) in (readers | {"Teacher": ("teacher", None)}).items():
        if results.short is not None and (line := run.reading(model, way)) is not None:
            context = count(results.short.context)
            found[f"{name}: loss of a continuation minus teacher's"] = with_interval(line.difference, sign=True)
            found[f"{name}: needles found"] = percent(line.needles)
            found[f"{name}: memory"] = f"{memory_size(line.cache_bytes)} (after {context} tokens)"
    if run.task is not None:
        found["Same answer as the teacher"] = percent(run.agreement("student"))
        found["Held-out examples of the task"] = count(run.task.examples)
    for name, model in (("Loss of the student, nats per token", "student"), ("Loss of the teacher", "teacher")):
        if (line := run.measured(model)) is not None:
            found[name] = with_interval(line.quality.loss)
    for line in results.comparisons:
        found[f"Student minus {label(line.other)}, paired"] = with_interval(line.overall, sign=True)
        if line.other == "window_finetuned":
            found["the same, beyond the window"] = with_interval(line.beyond, sign=True)
    if results.far_context is not None:
        found["Kept of the teacher's gain beyond the window"] = percent(results.far_context.share)
    if results.copying is not None:
        found["Kept of the teacher's copying"] = percent(results.copying.share)
    for model in ("student", "teacher"):
        if entries := speeds(run, model):
            where = f"(at {count(entries[-1].prompt_length)} tokens)"
            found[f"Cache of the {model}"] = f"{memory_size(entries[-1].cache_bytes)} {where}"
            found[f"Per generated token, {model}"] = f"{milliseconds(entries[-1].decode.median)} ms {where}"
    for task in results.retrieval:
        found[f"Recall recovered: {task.name.replace('_', ' ')}"] = percent(task.recovery)
    return {name: text for name, text in found.items() if text != DASH}
