"""The tables that the page, the model card and the terminal share."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from linearize.evaluation.candidates import LABELS
from linearize.evaluation.metrics import title
from linearize.evaluation.results import Reading
from linearize.evaluation.timings import Speed, Spread
from linearize.report.html import Group, Table
from linearize.report.load import RunFiles, label
from linearize.report.numbers import (
    DASH,
    capital,
    count,
    duration,
    memory_size,
    milliseconds,
    percent,
    plain,
    what,
    with_interval,
)

NOTE = "what it is"  # a column that terminals leave out


def losses(runs: Sequence[RunFiles]) -> Table:
    """Return the table of held-out losses of all candidates."""
    groups = []
    for run in runs:
        rows = []
        for name in LABELS:
            if line := run.measured(name):
                loss = line.quality.loss
                perplexity = f"{exp(min(loss.mean, 700)):,.2f}"
                cells = [label(name), with_interval(loss), with_interval(line.quality.beyond), perplexity]
                rows.append([*cells, count(line.training_tokens), line.note])
        quality = run.results.measured[0].quality
        size = f"{count(quality.tokens)} tokens, {count(quality.tokens_beyond)} of them beyond the window"
        groups.append(Group(rows, f"{run.prefix}{size}"))
    columns = ["candidate", "loss", f"beyond the window{window(runs)}", "perplexity", "training tokens", NOTE]
    caption = f"Held-out loss, nats per token, with 95 % intervals{documents(runs)} (lower is better)"
    return Table(caption, columns, groups)


def documents(runs: Sequence[RunFiles]) -> str:
    """Return text on the number of documents of the intervals, for runs that record it."""
    found = {line.quality.documents for run in runs if (line := run.measured("student"))} - {None}
    return f" over {' or '.join(map(count, sorted(filter(None, found))))} documents" if found else ""


def window(runs: Sequence[RunFiles]) -> str:
    """Return text on the window of all runs; empty if they have different ones."""
    windows = {run.window for run in runs}
    return f" of {count(windows.pop())}" if len(windows) == 1 else ""


def copying(runs: Sequence[RunFiles]) -> Table:
    """Return the table of losses on random tokens and on their copies."""
    groups = []
    for run in runs:
        rows = []
        for name in LABELS:
            line = run.measured(name)
            if line is not None and (copied := line.copying) is not None:
                found = (with_interval(x, 2) for x in (copied.first, copied.second, copied.gain))
                rows.append([label(name), *found])
        groups.append(Group(rows, run.group))
    columns = ["candidate", "first copy", "second copy", "gain"]
    return Table("Copying: loss in nats per token", columns, groups, collapsed=True)


def scores(runs: Sequence[RunFiles], metrics: Sequence[str]) -> Table:
    """Return the table of scores of all candidates by these metrics."""
    groups = []
    for run in runs:
        rows = []
        for name in LABELS:
            if line := run.scored(name):
                found = (with_interval(run.score(name, metric)) for metric in metrics)
                rows.append([label(name), *found, percent(run.agreement(name)), line.note])
        groups.append(Group(rows, run.group))
    given = [run.task for run in runs if run.task]
    tasks = dict.fromkeys(f"{capital(what(task))}, {count(task.examples)} examples" for task in given)
    caption = f"{'; '.join(tasks)}, with 95 % intervals (higher is better)"
    return Table(caption, ["candidate", *map(title, metrics), "teacher's answers", NOTE], groups)


def short(runs: Sequence[RunFiles]) -> Table:
    """Return the table of the short evaluation: teacher, and student with both kinds of prefill."""
    groups, captions = [], {}
    for run in runs:
        found = run.results.short
        assert found is not None
        rows = [_reading(line, found.needles) for line in found.readings]
        groups.append(Group(rows, run.group))
        context, continuation = count(found.context), count(found.continuation)
        captions[f"{count(found.rows)} contexts of {context} tokens; loss of the next {continuation}"] = None
    columns = ["", "loss", "minus teacher", "needles found", "context, ms", "per new token, ms", "memory"]
    caption = f"{'; '.join(captions)}, nats per token; with 95 % intervals"
    return Table(caption, columns, groups)


def _reading(line: Reading, needles: int) -> list[str]:
    return [
        line.model if line.prefill is None else f"{line.model}, {line.prefill}",
        with_interval(line.loss),
        with_interval(line.difference, sign=True),
        DASH if needles == 0 else f"{percent(line.needles)} of {count(needles)}",
        *(DASH if x is None else milliseconds(x.median) for x in (line.prefill_seconds, line.decode_seconds)),
        memory_size(line.cache_bytes),
    ]


def speed(entries: Sequence[tuple[str | None, Sequence[Speed]]]) -> Table:
    """Return the table of time and memory, in groups with their titles."""
    groups = [Group([_speed(entry) for entry in found], name) for name, found in entries]
    columns = ["model", "batch", "prompt tokens", "prefill ms", "ms per token", "tokens/s", "cache", "peak", "compile"]
    caption = "Medians of all repeats, with minimum and maximum; memory of the whole batch, peak in prefill"
    # Not every measurement has the last ones.
    rows = [row for group in groups for row in group.rows]
    shown = [i for i in range(len(columns)) if any(row[i] != DASH for row in rows)]
    if shown[-1] == len(columns) - 1:
        caption += "; a step's compilation is not counted"
    groups = [Group([[row[i] for i in shown] for row in group.rows], group.title) for group in groups]
    return Table(caption, [columns[i] for i in shown], groups)


def _speed(entry: Speed) -> list[str]:
    def cell(found: Spread) -> str:
        return f"{milliseconds(found.median)} [{milliseconds(found.low)}, {milliseconds(found.high)}]"

    return [
        entry.model,
        plain(entry.batch_size),
        count(entry.prompt_length),
        cell(entry.prefill),
        cell(entry.decode),
        count(entry.batch_size / entry.decode.median),
        memory_size(entry.cache_bytes),
        memory_size(entry.prefill_bytes),
        DASH if entry.compiling is None else duration(entry.compiling),
    ]


def of_run(run: RunFiles) -> list[Table]:
    """Return the tables of one run that are not empty."""
    found = [scores([run], run.task.metrics)] if run.task else []
    found += [short([run])] if run.results.short else []
    found += [losses([run]), copying([run])] if run.is_language_model else []
    found += [speed([(None, entries)])] if (entries := run.results.speed) else []
    return [table for table in found if any(group.rows for group in table.groups)]
