"""The sections on downstream tasks and on generations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from linearize.evaluation.candidates import LABELS
from linearize.evaluation.harness import BenchmarkResult
from linearize.evaluation.intervals import Interval
from linearize.report.figures import DotPanel, Dots, dots
from linearize.report.findings import benchmarks
from linearize.report.html import Block, Continuation, Figure, Group, Prompts, Section, Table, Text
from linearize.report.load import RunFiles, label
from linearize.report.numbers import DASH, count, number, percent, plain, share, with_interval
from linearize.report.sections.quality import STYLES
from linearize.report.unmeasured import not_measured


def tasks(runs: Sequence[RunFiles]) -> Section:
    """Return the section with a row per task and a dot per candidate and run."""
    measured = [run for run in runs if run.results.tasks and run.results.tasks.results]
    blocks: list[Block] = [_tasks(measured)] if measured else []
    for run in measured:
        found = run.results.tasks
        assert found is not None
        shots = ", ".join(f"{task}: {plain(shots)}" for task, shots in found.shots.items())
        versions = ", ".join(f"{task} {version}" for task, version in found.versions.items())
        blocks.append(Text(f"{run.prefix}Shots: {shots or DASH}. Versions: {versions or DASH}.", "note"))
    blocks += not_measured(runs, "tasks", lambda run: run in measured)
    return Section("tasks", "Tasks", blocks)


def _tasks(runs: Sequence[RunFiles]) -> Figure:
    results = [benchmarks(run) for run in runs]
    rows = list(dict.fromkeys((task, metric) for found in results for task, metric, _ in found))
    columns = [name for name in LABELS if any(name == candidate for found in results for *_, candidate in found)]
    series, groups, said = [], [], []
    for place, (run, found) in enumerate(zip(runs, results, strict=True)):
        for marker, name in enumerate(columns):
            if any((*row, name) in found for row in rows):
                # With several runs, colours are those of runs and shapes those of candidates.
                style = place if run.beside_others else STYLES.get(name, 5)
                values = [_interval(found.get((*row, name))) for row in rows]
                series.append(Dots(run.prefix + label(name), values, style, marker))
        lines = []
        for row in rows:
            cells = [found.get((*row, name)) for name in columns]
            samples = next((result.samples for result in cells if result), None)
            lines.append([f"{row[0]} ({row[1]})", *map(_with_error, cells), count(samples)])
            pair = [found.get((*row, who)) for who in ("student", "teacher")]
            if all(pair):
                said.append(f"{run.prefix}{row[0]}: student {_with_error(pair[0])}, teacher {_with_error(pair[1])}")
        groups.append(Group(lines, run.group))
    panel = DotPanel("", series, write=share)
    return Figure(
        "Downstream tasks",
        dots("tasks", f"Scores. {'; '.join(said)}", [f"{task} ({metric})" for task, metric in rows], [panel]),
        "Scores with 95 % intervals (1.96 standard errors); a dot without one has no standard error.",
        Table("Scores, with standard errors", ["task", *map(label, columns), "samples"], groups),
    )


def _interval(result: BenchmarkResult | None) -> Interval | None:
    if result is None:
        return None
    margin = 1.96 * (result.stderr or 0.0)
    return Interval(result.value, result.value - margin, result.value + margin)


def _with_error(result: BenchmarkResult | None) -> str:
    if result is None:
        return DASH
    error = f" \N{PLUS-MINUS SIGN} {number(100 * result.stderr, 1)}" if result.stderr else ""
    return f"{number(100 * result.value, 1)}{error}"


def generations(runs: Sequence[RunFiles]) -> Section:
    """Return the section with continuations of student and teacher after the same prompts."""
    measured = [run for run in runs if run.results.generations]
    blocks: list[Block] = []
    if measured:
        found = [run.results.generations for run in measured if run.results.generations]
        lines = [
            ["tokens that agree", *(percent(g.agreement) for g in found)],
            ["common prefix, tokens", *(with_interval(g.common_prefix, 1) for g in found)],
            ["tokens generated", *(count(g.new_tokens) for g in found)],
        ]
        caption = "Greedy continuations of student and teacher compared"
        blocks.append(Table.of(caption, ["", *(run.name for run in measured)], lines))
        blocks.append(
            Text(
                "Plain: the same as the teacher's text. Marked: the student's text from the first difference on.",
                "note",
            )
        )
        blocks.append(Prompts(_prompts(measured)))
    blocks += not_measured(runs, "generations")
    return Section("generations", "Generations", blocks)


def _prompts(runs: Sequence[RunFiles]) -> dict[str, list[Continuation]]:
    """Return each prompt once, with the texts of all runs that have it; equal texts of teachers are shown once."""
    prompts: dict[str, list[Continuation]] = {}
    for run in runs:
        assert run.results.generations is not None
        for sample in run.results.generations.samples:
            texts = prompts.setdefault(sample.prompt, [])
            given = [("what the text says", sample.reference), ("teacher", sample.teacher)]
            for title, text in given:
                if not any(known.same == text and known.title.startswith(title) for known in texts):
                    again = any(known.title.startswith(title) for known in texts)
                    texts.append(Continuation(f"{title}, {run.name}" if again else title, text, ""))
            same = _common(sample.teacher, sample.student)
            title = f"student, {run.name}" if run.beside_others else "student"
            texts.append(Continuation(title, same, sample.student[len(same) :]))
    return prompts


def _common(a: str, b: str) -> str:
    """Return the common beginning of two texts."""
    return "".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
