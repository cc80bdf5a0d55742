"""Terminal output of measurements: tables, then the findings, without interpretation of markup."""

from __future__ import annotations

from rich import box, table
from rich.console import Group
from rich.text import Text

from linearize.base import without_controls
from linearize.evaluation.timings import Bench
from linearize.report import tables
from linearize.report.findings import faster, memory, sentences
from linearize.report.html import Table
from linearize.report.load import RunFiles


def measured(run: RunFiles) -> Group:
    """Return all of a run's tables and findings."""
    return Group(*map(_table, tables.of_run(run)), *(_text(f"- {line}") for line in sentences(run)))


def timed(bench: Bench) -> Group:
    """Return the measurements of `linearize bench`: one table, and sentences on memory and speed by batch size."""
    entries, lines = bench.speed, []
    for size, crossover in bench.crossovers.items():
        batch = [entry for entry in entries if entry.batch_size == size]
        found = [memory(batch), *faster(batch, crossover)]
        lines += [f"- Batch of {size}: {finding.words}" for finding in found if finding is not None]
    rounds = f"{entries[0].new_tokens} tokens generated after each prompt, {bench.repeats} rounds ({bench.setting})"
    return Group(_table(tables.speed([(None, entries)])), *map(_text, [*lines, f"- {rounds}."]))


def _table(found: Table) -> Group:
    """Return the caption and the table without its notes."""
    shown = [i for i, column in enumerate(found.columns) if column != tables.NOTE]
    made = table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    cells = [row for group in found.groups for row in group.rows]
    for i in shown:
        name, width = found.columns[i], max(map(len, found.columns[i].split()), default=0)
        # rich narrows other columns first if this one has nothing to wrap.
        fits = " " not in name and all(len(row[i]) <= width for row in cells)
        made.add_column(_text(name), overflow="fold", min_width=width, no_wrap=fits)
    for group in found.groups:
        for row in group.rows:
            made.add_row(*(_text(row[i]) for i in shown))
        made.add_section()
    return Group(_text(found.caption), made)


def _text(words: str) -> Text:
    return Text(without_controls(words))
