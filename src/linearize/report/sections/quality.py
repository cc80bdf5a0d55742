"""Held-out loss: of every candidate, paired, and token by token beside the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linearize.evaluation.candidates import LABELS
from linearize.evaluation.intervals import Interval
from linearize.report import tables
from linearize.report.figures import by_run, dots
from linearize.report.html import Block, Figure, Group, Section, Table
from linearize.report.load import RunFiles, interval, label
from linearize.report.missing import missing_controls, not_measured
from linearize.report.numbers import count, percent, share, with_interval


def quality(runs: Sequence[RunFiles]) -> Section:
    """Losses of all candidates, and the student's paired differences."""
    blocks: list[Block] = [_losses(runs)]
    if any(run.section("comparisons") for run in runs):
        blocks.append(_differences(runs))
    blocks += missing_controls(runs)
    return Section(
        "quality",
        "Quality",
        blocks,
        summary="Loss on held-out text, nats per token; lower is better. Intervals of single candidates are wide "
        "because texts differ, and all candidates share the texts: judge by the paired differences.",
    )


def _losses(runs: Sequence[RunFiles]) -> Figure:
    names = [name for name in LABELS if any(run.measured(name) for run in runs)]

    def values(run: RunFiles, key: str) -> list[Interval | None]:
        lines = [run.measured(name) for name in names]
        return [interval(line["quality"][key]) if line else None for line in lines]

    beyond = f"tokens beyond the window{tables.window(runs)}"
    panels = [
        by_run(title, runs, lambda run, key=key: values(run, key), cut=True)
        for key, title in (("loss", "all tokens"), ("beyond", beyond))
    ]
    numbers = tables.losses(runs)
    return Figure(
        "Held-out loss of all candidates",
        dots("quality-losses", f"Held-out loss. {numbers.spoken()}", [label(name) for name in names], panels),
        f"Nats per token with 95 % bootstrap intervals{tables.documents(runs) or ' over documents'}. An arrow: off the "
        "scale, with its mean.",
        numbers,
    )


def _differences(runs: Sequence[RunFiles]) -> Figure:
    names = [name for name in LABELS if any(run.comparison(name) for run in runs)]
    rows = [f"against {label(name)}" for name in names]

    def values(run: RunFiles, key: str) -> list[Interval | None]:
        lines = [run.comparison(name) for name in names]
        return [interval(line[key]) if line else None for line in lines]

    beyond = f"tokens beyond the window{tables.window(runs)}"
    panels = [
        by_run(title, runs, lambda run, key=key: values(run, key), zero=True, cut=True)
        for key, title in (("overall", "all tokens"), ("beyond", beyond))
    ]
    groups = []
    for run in runs:
        columns = ([with_interval(x, sign=True) for x in values(run, key)] for key in ("overall", "beyond"))
        groups.append(Group(list(map(list, zip(rows, *columns, strict=True))), run.group))
    caption = "Student's loss minus the other's, nats per token"
    numbers = Table(caption, ["", "all tokens", "beyond the window"], groups)
    return Figure(
        "The student minus the others, on the same tokens",
        dots("quality-pairs", f"Paired differences in loss. {numbers.spoken()}", rows, panels),
        "Left of zero the student is better. Nats per token, paired over the same documents, with 95 % intervals. An "
        "arrow: off the scale, with its mean.",
        numbers,
    )


def agreement(runs: Sequence[RunFiles]) -> Section:
    """How often the student picks the teacher's token, and how far apart the two distributions are."""
    measured = [run for run in runs if run.section("agreement")]
    blocks: list[Block] = [_agreement(measured)] if measured else []
    blocks += not_measured(runs, "agreement")
    return Section(
        "agreement",
        "Agreement with the teacher",
        blocks,
        summary="A loss can stay while the predictions change; these compare student and teacher token by token."
        if measured
        else "",
    )


def _agreement(runs: Sequence[RunFiles]) -> Figure:
    def panel(title: str, *keys: str, **options: Any) -> Any:
        return by_run(title, runs, lambda run: [interval(run.section("agreement").get(key)) for key in keys], **options)

    panels = [
        panel("same likeliest token", "top1", "top1_beyond", write=lambda value: share(value, 0)),
        panel("KL(teacher || student), nats per token", "kl", "kl_beyond"),
    ]
    shown = {
        "same likeliest token": ("top1", percent),
        "same likeliest token, beyond the window": ("top1_beyond", percent),
        "KL(teacher || student), nats per token": ("kl", with_interval),
        "the same, beyond the window": ("kl_beyond", with_interval),
        "KL(student || teacher), nats per token": ("reverse_kl", with_interval),
    }
    lines = [
        [name, *(write(interval(run.section("agreement").get(key))) for run in runs)]
        for name, (key, write) in shown.items()
    ]
    lines.append(["tokens compared", *(count(run.section("agreement")["tokens"]) for run in runs)])
    numbers = Table.of("Agreement with the teacher", ["", *(run.name for run in runs)], lines)
    return Figure(
        "Student beside teacher, token by token",
        dots("agreement", f"Agreement. {numbers.spoken()}", ["all tokens", "beyond the window"], panels),
        "With 95 % intervals. KL(teacher || student): what the student would lose on text that the teacher wrote.",
        numbers,
    )
