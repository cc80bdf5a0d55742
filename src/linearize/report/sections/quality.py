"""The sections on the short evaluation, on losses of every candidate, and on agreement with the teacher by token."""

from __future__ import annotations

from collections.abc import Sequence

from linearize.evaluation.candidates import LABELS
from linearize.report import tables
from linearize.report.figures import by_run, dots
from linearize.report.html import Block, Figure, Group, Section, Table
from linearize.report.load import RunFiles, label
from linearize.report.numbers import count, percent, share, with_interval
from linearize.report.unmeasured import missing_controls, not_measured


def quality(runs: Sequence[RunFiles]) -> Section:
    """Return the section with losses of all candidates, and the student's paired differences."""
    blocks: list[Block] = [_losses(runs)]
    if any(run.results.comparisons for run in runs):
        blocks.append(_differences(runs))
    blocks += missing_controls(runs)
    return Section(
        "quality",
        "Quality",
        blocks,
        summary="Loss on held-out text, nats per token; lower is better. Intervals of single candidates are wide "
        "because texts differ. All candidates read the same texts, so compare the paired differences.",
    )


def _losses(runs: Sequence[RunFiles]) -> Figure:
    names = [name for name in LABELS if any(run.measured(name) for run in runs)]
    lines = [list(map(run.measured, names)) for run in runs]
    overall = [[line and line.quality.loss for line in found] for found in lines]
    beyond = [[line and line.quality.beyond for line in found] for found in lines]
    panels = [
        by_run("all tokens", runs, overall, cut=True),
        by_run(f"tokens beyond the window{tables.window(runs)}", runs, beyond, cut=True),
    ]
    numbers = tables.losses(runs)
    return Figure(
        "Held-out loss of all candidates",
        dots("quality-losses", f"Held-out loss. {numbers.spoken()}", [label(name) for name in names], panels),
        f"Nats per token with 95 % bootstrap intervals{tables.documents(runs) or ' over documents'}. An arrow marks a "
        "value off the scale, with its mean.",
        numbers,
    )


def _differences(runs: Sequence[RunFiles]) -> Figure:
    names = [name for name in LABELS if any(run.comparison(name) for run in runs)]
    rows = [f"against {label(name)}" for name in names]
    lines = [list(map(run.comparison, names)) for run in runs]
    overall = [[line and line.overall for line in found] for found in lines]
    beyond = [[line and line.beyond for line in found] for found in lines]
    panels = [
        by_run("all tokens", runs, overall, zero=True, cut=True),
        by_run(f"tokens beyond the window{tables.window(runs)}", runs, beyond, zero=True, cut=True),
    ]
    groups = []
    for run, *values in zip(runs, overall, beyond, strict=True):
        columns = ([with_interval(x, sign=True) for x in column] for column in values)
        groups.append(Group(list(map(list, zip(rows, *columns, strict=True))), run.group))
    caption = "Student's loss minus the other's, nats per token"
    numbers = Table(caption, ["", "all tokens", "beyond the window"], groups)
    return Figure(
        "The student minus the others, on the same tokens",
        dots("quality-pairs", f"Paired differences in loss. {numbers.spoken()}", rows, panels),
        "Left of zero the student is better. Nats per token, paired over the same documents, with 95 % intervals. An "
        "arrow marks a value off the scale, with its mean.",
        numbers,
    )


def short(runs: Sequence[RunFiles]) -> Section:
    """Return the section with the table of the short evaluation."""
    summary = "Each context is read in one call; the text that follows and the questions for needles in one more."
    return Section("short", "Short evaluation", [tables.short(runs)], summary=summary)


def agreement(runs: Sequence[RunFiles]) -> Section:
    """Return the section on equal most likely tokens, and on the KL between student and teacher."""
    measured = [run for run in runs if run.results.agreement]
    blocks: list[Block] = [_agreement(measured)] if measured else []
    blocks += not_measured(runs, "agreement")
    summary = "Predictions can change while the loss stays the same. This section compares them token by token."
    return Section("agreement", "Agreement with the teacher", blocks, summary=summary if measured else "")


def _agreement(runs: Sequence[RunFiles]) -> Figure:
    found = [agreed for run in runs if (agreed := run.results.agreement)]
    panels = [
        by_run("same likeliest token", runs, [[x.top1, x.top1_beyond] for x in found], write=share),
        by_run("KL(teacher || student), nats per token", runs, [[x.kl, x.kl_beyond] for x in found]),
    ]
    lines = [
        ["same likeliest token", *(percent(x.top1) for x in found)],
        ["same likeliest token, beyond the window", *(percent(x.top1_beyond) for x in found)],
        ["KL(teacher || student), nats per token", *(with_interval(x.kl) for x in found)],
        ["the same, beyond the window", *(with_interval(x.kl_beyond) for x in found)],
        ["KL(student || teacher), nats per token", *(with_interval(x.reverse_kl) for x in found)],
        ["tokens compared", *(count(x.tokens) for x in found)],
    ]
    numbers = Table.of("Agreement with the teacher", ["", *(run.name for run in runs)], lines)
    return Figure(
        "Student beside teacher, token by token",
        dots("agreement", f"Agreement. {numbers.spoken()}", ["all tokens", "beyond the window"], panels),
        "With 95 % intervals. KL(teacher || student): what the student would lose on text that the teacher wrote.",
        numbers,
    )
