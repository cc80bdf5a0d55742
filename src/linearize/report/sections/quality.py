"""The sections on the short evaluation, on losses (also by position), and on agreement with the teacher by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from linearize.evaluation.agreement import PositionLosses
from linearize.evaluation.candidates import LABELS
from linearize.report import tables
from linearize.report.figures import Line, LinePanel, by_run, curves, dots
from linearize.report.html import Block, Figure, Group, Section, Table
from linearize.report.load import RunFiles, label
from linearize.report.numbers import count, percent, share, with_interval
from linearize.report.unmeasured import missing_controls, not_measured

# Colours of candidates in all panels with several of them; -1 is the colour of text.
STYLES = {
    "teacher": -1,
    "student": 0,
    "window_finetuned": 1,
    "teacher_finetuned": 2,
    "ablated": 3,
    "equal_finetuned": 4,
    "window": 5,
    "exact_finetuned": 5,
}
# The table has all candidates.
_CURVES = ("teacher", "student", "window_finetuned", "equal_finetuned", "exact_finetuned", "ablated")


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


def positions(runs: Sequence[RunFiles]) -> Section:
    """Return the section on loss by the token's position in its document (SUPRA, Fig. 3)."""
    measured = [(run, found) for run in runs if (found := run.results.positions)]
    blocks: list[Block] = [_by_position(measured)] if measured else []
    blocks += not_measured(runs, "positions")
    summary = (
        "The loss of a model that uses long context keeps falling along a document. The loss of a model that sees its "
        "window only stops falling there."
    )
    return Section("positions", "Loss by position", blocks, summary=summary if measured else "")


def _by_position(measured: Sequence[tuple[RunFiles, PositionLosses]]) -> Figure:
    panels, groups, said = [], [], []
    columns = list(dict.fromkeys(name for _, found in measured for name in found.losses))
    for run, found in measured:
        bins = bin_names(found.edges)
        lines = []
        for name in _CURVES:
            if name not in found.losses:
                continue
            points = [(i, value) for i, value in enumerate(found.losses[name]) if value is not None]
            at, values = [i for i, _ in points], [value for _, value in points]
            low, high = [value.low for value in values], [value.high for value in values]
            lines.append(Line(label(name), at, [v.mean for v in values], STYLES[name], low, high))
            if values:
                last = bins[at[-1]]
                said.append(f"{run.name}, {label(name)}, at positions {last}: {with_interval(values[-1])}")
        stride = max(1, -(-len(bins) // 5))
        ticks = {float(i): name for i, name in enumerate(bins) if i % stride == 0}
        panels.append(LinePanel(f"{run.prefix}loss", lines, "position, tokens", "nats per token", ticks=ticks))
        if above := above_teacher(lines):
            panels.append(LinePanel(f"{run.prefix}loss minus the teacher's", above, "position, tokens", ticks=ticks))
        losses = [found.losses.get(name, [None] * len(bins)) for name in columns]
        rows = [[place, *(with_interval(x[i]) for x in losses)] for i, place in enumerate(bins)]
        groups.append(Group(rows, run.group))
    return Figure(
        "Held-out loss by position in the document",
        curves("positions", "Loss by position. " + "; ".join(said), panels, height=300),
        "Means over the tokens of each bin of positions, with bands of 95 % intervals. The differences from the "
        "teacher are differences of means, without intervals.",
        Table("Loss by position, nats per token", ["positions", *map(label, columns)], groups, collapsed=True),
    )


def above_teacher(lines: Sequence[Line]) -> list[Line]:
    """Return each other line minus the teacher's, where both have a point."""
    teacher = next((dict(zip(line.x, line.y, strict=True)) for line in lines if line.name == label("teacher")), {})
    found = []
    for line in lines:
        points = [(x, y - teacher[x]) for x, y in zip(line.x, line.y, strict=True) if x in teacher]
        if points and line.name != label("teacher"):
            found.append(Line(line.name, [x for x, _ in points], [y for _, y in points], line.style))
    return found


def bin_names(edges: Sequence[int]) -> list[str]:
    """Return the names of bins: for ``[0, 1, 2, 4]`` "0", "1", "2-3", as the last edge is outside."""
    return [count(a) if b - a <= 1 else f"{count(a)}\N{EN DASH}{count(b - 1)}" for a, b in pairwise(edges)]


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
        "Student and teacher, token by token",
        dots("agreement", f"Agreement. {numbers.spoken()}", ["all tokens", "beyond the window"], panels),
        "With 95 % intervals. KL(teacher || student): what the student would lose on text that the teacher wrote.",
        numbers,
    )
