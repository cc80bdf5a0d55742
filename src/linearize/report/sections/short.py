"""The section on the short evaluation: loss of a continuation, needles, speed and memory."""

from __future__ import annotations

from collections.abc import Sequence

from linearize.report import tables
from linearize.report.findings import short_findings
from linearize.report.html import Block, Section, Text
from linearize.report.load import RunFiles


def short(runs: Sequence[RunFiles]) -> Section:
    """Return the section with the table and its findings."""
    blocks: list[Block] = [tables.short(runs)]
    for run in runs:
        blocks.append(Text(run.prefix + " ".join(finding.words for finding in short_findings(run))))
    summary = "Each context is read in one call; the text that follows and the questions for needles in one more."
    return Section("short", "Short evaluation", blocks, summary=summary)
