"""The top of the page: for each run the verdict, its wins and losses; the key numbers of all; what to beware of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linearize.evaluation.metrics import title
from linearize.evaluation.timings import Speed
from linearize.hf.prefill import FULL, STREAMING
from linearize.planning.results import TRAINING_STAGES
from linearize.report.findings import Finding, findings, speeds, verdict
from linearize.report.html import Table, Text
from linearize.report.load import RunFiles
from linearize.report.numbers import DASH, count, milliseconds, percent, plain, scaled, what, with_interval


@dataclass(frozen=True)
class Overview:
    """The entries of one run in the head of the page."""

    name: str
    about: str
    verdict: Sequence[Finding]
    wins: Sequence[Finding]
    losses: Sequence[Finding]
    undecided: Sequence[Finding]
    facts: Sequence[Finding]


def overview(run: RunFiles) -> Overview:
    top = verdict(run)
    every = findings(run)
    sides = ([finding for finding in every if finding.kind == kind] for kind in ("win", "loss", "open", "fact"))
    return Overview(run.name, _about(run), top, *sides)


def _about(run: RunFiles) -> str:
    """Recipe, teacher, layers: one line."""
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


def cautions(runs: Sequence[RunFiles]) -> list[Text]:
    """Why some numbers of these runs must not be set against each other."""
    found = []
    if not all(runs[0].same_teacher(run) for run in runs[1:]):
        names = "; ".join(f"{run.name}: {_teacher(run) or 'unknown'}" for run in runs)
        words = f"These runs have different teachers ({names}). Compare each student with its own teacher and controls"
        found.append(
            Text(
                f"{words}, not with the other students: numbers of different teachers say nothing about the mixers.",
                "caution",
            )
        )
    kinds = {_kind(run) for run in runs}
    texts = {run.run.data for run in runs if run.run}
    counts = {line.quality.tokens for run in runs if (line := run.measured("student"))}
    counts |= {run.task.examples for run in runs if run.task and not run.is_language_model}
    if len(kinds) > 1:
        names = "; ".join(f"{run.name}: {_kind(run)}" for run in runs)
        words = f"These runs have different tasks ({names}): their numbers are not of one kind, and none is paired."
        found.append(Text(words, "caution"))
    elif len(texts) > 1 or len(counts) > 1:
        measured = "text, so their losses" if runs[0].is_language_model else "examples, so their scores"
        words = f"These runs were not all measured on the same {measured} are not paired with each other."
        found.append(Text(words, "caution"))
    return found


def _kind(run: RunFiles) -> str:
    return "language modelling" if run.task is None else what(run.task)


def _teacher(run: RunFiles) -> str:
    parts = [run.teacher] if run.teacher else []
    if run.plan:
        parts += [run.plan.model_type, f"{scaled(run.plan.teacher_parameters)} parameters"]
    return ", ".join(parts)


def key_numbers(runs: Sequence[RunFiles]) -> Table:
    """A row per number that at least one run has, a column per run."""
    lines = [line for metric in _metrics(runs) for line in _scores(runs, metric)]
    lines += [[name, *(read(run) for run in runs)] for name, read in _KEYS.items()]
    tasks = dict.fromkeys(task.name for run in runs for task in run.results.retrieval)
    lines += [
        [f"Recall recovered: {name.replace('_', ' ')}", *(_recovery(run, name) for run in runs)] for name in tasks
    ]
    shown = [line for line in lines if set(line[1:]) != {DASH}]
    return Table.of("Key numbers, with 95 % intervals", ["", *(run.name for run in runs)], shown)


def _metrics(runs: Sequence[RunFiles]) -> list[str]:
    """The ones that count, of all tasks."""
    return list(dict.fromkeys(run.task.metrics[0] for run in runs if run.task))


def _scores(runs: Sequence[RunFiles], metric: str) -> list[list[str]]:
    name = title(metric)
    read: dict[str, Callable[[RunFiles], str]] = {
        f"Student's {name}": lambda run: with_interval(run.score("student", metric)),
        f"Teacher's {name}": lambda run: with_interval(run.score("teacher", metric)),
        f"Student's minus teacher's {name}, paired": lambda run: with_interval(
            run.score_difference("teacher", metric), sign=True
        ),
        f"Share of the teacher's {name}": lambda run: percent(run.recovery(metric)),
    }
    return [[words, *map(write, runs)] for words, write in read.items()]


def _loss(name: str) -> Callable[[RunFiles], str]:
    def read(run: RunFiles) -> str:
        line = run.measured(name)
        return with_interval(line.quality.loss if line else None)

    return read


def _difference(other: str, beyond: bool = False) -> Callable[[RunFiles], str]:
    def read(run: RunFiles) -> str:
        line = run.comparison(other)
        found = None if line is None else line.beyond if beyond else line.overall
        return with_interval(found, sign=True)

    return read


def _longest(model: str, write: Callable[[Speed], str]) -> Callable[[RunFiles], str]:
    def read(run: RunFiles) -> str:
        entries = speeds(run, model)
        return f"{write(entries[-1])} (at {count(entries[-1].prompt_length)} tokens)" if entries else DASH

    return read


def _recovery(run: RunFiles, name: str) -> str:
    found = next((task for task in run.results.retrieval if task.name == name), None)
    return DASH if found is None else percent(found.recovery)


def _short_difference(prefill: str) -> Callable[[RunFiles], str]:
    """Return the loss minus the teacher's of the student that reads a prompt in this way."""

    def read(run: RunFiles) -> str:
        line = run.reading("student", prefill)
        return with_interval(line and line.difference, sign=True)

    return read


def _short_needles(prefill: str) -> Callable[[RunFiles], str]:
    def read(run: RunFiles) -> str:
        line = run.reading("student", prefill)
        return percent(line and line.needles)

    return read


def _short_bytes(model: str, prefill: str | None) -> Callable[[RunFiles], str]:
    def read(run: RunFiles) -> str:
        line = run.reading(model, prefill)
        if line is None or run.results.short is None:
            return DASH
        return f"{scaled(line.cache_bytes, 'B')} ({count(run.results.short.context)})"

    return read


_KEYS: dict[str, Callable[[RunFiles], str]] = {
    "Continuation, student minus teacher, streaming": _short_difference(STREAMING),
    "the same, prompt read in full": _short_difference(FULL),
    "Needles found, streaming": _short_needles(STREAMING),
    "the same, of a prompt read in full": _short_needles(FULL),
    "Memory of the student (after so many tokens)": _short_bytes("student", STREAMING),
    "Memory of the teacher (after so many tokens)": _short_bytes("teacher", None),
    "Same answer as the teacher": lambda run: percent(run.agreement("student")),
    "Held-out examples of the task": lambda run: count(run.task and run.task.examples),
    "Loss of the student, nats per token": _loss("student"),
    "Loss of the teacher": _loss("teacher"),
    "Student minus teacher, paired": _difference("teacher"),
    "Student minus window-only control, paired": _difference("window_finetuned"),
    "the same, beyond the window": _difference("window_finetuned", beyond=True),
    "Student minus window of equal bytes, paired": _difference("equal_finetuned"),
    "Student minus the same memory without linear parts, paired": _difference("exact_finetuned"),
    "Student minus itself without the linear part": _difference("ablated"),
    "Kept of the teacher's gain beyond the window": lambda run: percent(
        run.results.far_context and run.results.far_context.share
    ),
    "Kept of the teacher's copying": lambda run: percent(run.results.copying and run.results.copying.share),
    "Same likeliest token as the teacher": lambda run: percent(run.results.agreement and run.results.agreement.top1),
    "KL(teacher || student), nats per token": lambda run: with_interval(
        run.results.agreement and run.results.agreement.kl
    ),
    "Generated tokens that agree with the teacher": lambda run: percent(
        run.results.generations and run.results.generations.agreement
    ),
    "Cache of the student": _longest("student", lambda entry: scaled(entry.cache_bytes, "B")),
    "Cache of the teacher": _longest("teacher", lambda entry: scaled(entry.cache_bytes, "B")),
    "Per generated token, student": _longest("student", lambda entry: f"{milliseconds(entry.decode.median)} ms"),
    "Per generated token, teacher": _longest("teacher", lambda entry: f"{milliseconds(entry.decode.median)} ms"),
    "Training tokens, all stages of the student": lambda run: plain(_tokens(run)),
}


def _tokens(run: RunFiles) -> int | None:
    results = [run.stages[name].result for name in TRAINING_STAGES if name in run.stages]
    if not results or None in results:
        return None
    return sum(result.tokens for result in results if result is not None)
