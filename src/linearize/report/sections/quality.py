"""Held-out loss: of every candidate, paired, by position, and token by token beside the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any

from linearize.evaluation.candidates import LABELS
from linearize.evaluation.perplexity import Interval
from linearize.report.blocks import Block, Figure, Group, Section, Table, Text
from linearize.report.figures import DotPanel, Dots, dots
from linearize.report.load import RunFiles, interval, label
from linearize.report.numbers import count, percent, share, with_interval
from linearize.report.sections.missing import lacking, not_measured


def quality(runs: Sequence[RunFiles]) -> Section:
    """Losses of all candidates, and the student's paired differences."""
    blocks: list[Block] = [_losses(runs)]
    if any(run.section("comparisons") for run in runs):
        blocks.append(_differences(runs))
    for run in runs:
        where = f" for {run.name}" if len(runs) > 1 else ""
        if run.section("missing"):
            names = ", ".join(run.evaluation["missing"])
            blocks.append(Text(f"Not measured{where}: {names}.", tone="missing"))
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

    panels = [
        DotPanel(title, [Dots(run.name, values(run, key), place, place) for place, run in enumerate(runs)], cut=True)
        for key, title in (("loss", "all tokens"), ("beyond", f"tokens beyond the window{_window(runs)}"))
    ]
    groups = [
        Group(
            [
                [label(name), with_interval(loss), with_interval(beyond), _perplexity(loss), _note(run, name)]
                for name, loss, beyond in zip(names, values(run, "loss"), values(run, "beyond"), strict=True)
                if run.measured(name)
            ],
            title=_tokens(run) if len(runs) == 1 else f"{run.name}: {_tokens(run)}",
        )
        for run in runs
    ]
    said = "; ".join(
        f"{run.name}: "
        + ", ".join(f"{label(n)} {with_interval(v)}" for n, v in zip(names, values(run, "loss"), strict=True))
        for run in runs
    )
    return Figure(
        "Held-out loss of all candidates",
        dots("quality-losses", f"Held-out loss with 95 % intervals. {said}", [label(name) for name in names], panels),
        "Nats per token with 95 % bootstrap intervals over texts. An arrow: off the scale, with its mean.",
        Table(
            "Held-out loss, nats per token",
            ["candidate", "loss", "beyond the window", "perplexity", "what it is"],
            groups,
        ),
    )


def _differences(runs: Sequence[RunFiles]) -> Figure:
    names = [name for name in LABELS if any(run.comparison(name) for run in runs)]

    def values(run: RunFiles, key: str) -> list[Interval | None]:
        lines = [run.comparison(name) for name in names]
        return [interval(line[key]) if line else None for line in lines]

    panels = [
        DotPanel(
            title,
            [Dots(run.name, values(run, key), place, place) for place, run in enumerate(runs)],
            zero=True,
            cut=True,
        )
        for key, title in (("overall", "all tokens"), ("beyond", f"tokens beyond the window{_window(runs)}"))
    ]
    groups = [
        Group(
            [
                [f"against {label(name)}", with_interval(overall, sign=True), with_interval(beyond, sign=True)]
                for name, overall, beyond in zip(names, values(run, "overall"), values(run, "beyond"), strict=True)
            ],
            title=run.name if len(runs) > 1 else None,
        )
        for run in runs
    ]
    said = "; ".join(
        f"{run.name} against {label(n)} {with_interval(v, sign=True)}"
        for run in runs
        for n, v in zip(names, values(run, "overall"), strict=True)
    )
    return Figure(
        "The student minus the others, on the same tokens",
        dots("quality-pairs", f"Paired differences in loss. {said}", [f"against {label(n)}" for n in names], panels),
        "Left of zero the student is better. Nats per token, paired over the same texts, with 95 % intervals. An "
        "arrow: off the scale, with its mean.",
        Table("Student's loss minus the other's, nats per token", ["", "all tokens", "beyond the window"], groups),
    )


def agreement(runs: Sequence[RunFiles]) -> Section:
    """How often the student picks the teacher's token, and how far apart the two distributions are."""
    measured = [run for run in runs if run.section("agreement")]
    blocks: list[Block] = [_agreement(measured)] if measured else []
    blocks += not_measured(runs, lacking(runs, "agreement"), "agreement")
    return Section(
        "agreement",
        "Agreement with the teacher",
        blocks,
        summary="A loss can stay while the predictions change; these compare student and teacher token by token."
        if measured
        else "",
    )


def _agreement(runs: Sequence[RunFiles]) -> Figure:
    found: list[dict[str, Any]] = [run.section("agreement") for run in runs]
    rows = ["all tokens", "beyond the window"]

    def panel(title: str, *keys: str, **options: Any) -> DotPanel:
        series = [
            Dots(run.name, [interval(a.get(key)) for key in keys], place, place)
            for place, (run, a) in enumerate(zip(runs, found, strict=True))
        ]
        return DotPanel(title, series, **options)

    panels = [
        panel("same likeliest token", "top1", "top1_beyond", write=lambda value: share(value, 0)),
        panel("KL(teacher || student), nats per token", "kl", "kl_beyond"),
    ]
    lines = [
        ["same likeliest token", *(percent(interval(a["top1"])) for a in found)],
        ["same likeliest token, beyond the window", *(percent(interval(a.get("top1_beyond"))) for a in found)],
        ["KL(teacher || student), nats per token", *(with_interval(interval(a["kl"])) for a in found)],
        ["the same, beyond the window", *(with_interval(interval(a.get("kl_beyond"))) for a in found)],
        ["KL(student || teacher), nats per token", *(with_interval(interval(a["reverse_kl"])) for a in found)],
        ["tokens compared", *(count(a["tokens"]) for a in found)],
    ]
    said = "; ".join(
        f"{run.name}: same likeliest token {percent(interval(a['top1']))}, KL {with_interval(interval(a['kl']))}"
        for run, a in zip(runs, found, strict=True)
    )
    return Figure(
        "Student beside teacher, token by token",
        dots("agreement", f"Agreement. {said}", rows, panels),
        "With 95 % intervals. KL(teacher || student): what the student would lose on text that the teacher wrote.",
        Table.of("Agreement with the teacher", ["", *(run.name for run in runs)], lines),
    )


def _window(runs: Sequence[RunFiles]) -> str:
    windows = {run.window for run in runs}
    return f" of {count(windows.pop())}" if len(windows) == 1 else ""


def _tokens(run: RunFiles) -> str:
    measured = run.measured("student")
    quality = measured["quality"] if measured else {"tokens": None, "tokens_beyond": None}
    return f"{count(quality['tokens'])} tokens, {count(quality['tokens_beyond'])} of them beyond the window"


def _note(run: RunFiles, name: str) -> str:
    measured = run.measured(name)
    return measured["note"] if measured else ""


def _perplexity(loss: Interval | None) -> str:
    return "\N{EN DASH}" if loss is None else f"{exp(min(loss.mean, 700)):,.2f}"
