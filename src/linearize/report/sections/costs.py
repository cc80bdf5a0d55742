"""The sections on costs of student and teacher, and on the provenance of all numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linearize.evaluation.timings import Spread
from linearize.report import tables
from linearize.report.figures import Line, LinePanel, curves
from linearize.report.findings import speeds
from linearize.report.html import Block, Figure, Section, Table
from linearize.report.load import RunFiles
from linearize.report.numbers import count, duration, milliseconds, plain
from linearize.report.unmeasured import not_measured


def speed(runs: Sequence[RunFiles]) -> Section:
    """Return the section with prefill, generation and memory by the length of the prompt."""
    measured = [run for run in runs if run.results.speed]
    blocks: list[Block] = [_speed(measured)] if measured else []
    blocks += not_measured(runs, "speed")
    return Section("speed", "Speed and memory", blocks)


def _speed(runs: Sequence[RunFiles]) -> Figure:
    kinds = (
        ("Prefill of the prompt", "milliseconds", lambda entry: _spread(entry.prefill)),
        ("Generation, per token", "milliseconds", lambda entry: _spread(entry.decode)),
        ("Memory of the cache", "bytes", lambda entry: (entry.cache_bytes,) * 3),
    )
    panels = []
    for title, unit, read in kinds:
        lines = []
        for place, run in enumerate(runs):
            for dash, model in enumerate(("student", "teacher")):
                entries = speeds(run, model)
                lengths, values = [e.prompt_length for e in entries], [read(e) for e in entries]
                style = place if run.beside_others else (0 if model == "student" else -1)
                middle, low, high = ([value[i] for value in values] for i in range(3))
                lines.append(Line(run.prefix + model, lengths, middle, style, low, high, dash=dash))
        ticks = {float(x): count(x) for line in lines for x in line.x}
        if len(ticks) > 5:
            ticks = {}
        panels.append(LinePanel(title, lines, "prompt, tokens", unit, log_x=True, log_y=True, ticks=ticks))
    every = [entry for run in runs for entry in run.results.speed]
    batches = sorted({entry.batch_size for entry in every})
    more = f" The table has batches of {plain(batches[1:])} too." if len(batches) > 1 else ""
    said = "; ".join(
        f"{run.name}, {model} at {count(last.prompt_length)} tokens: prefill "
        f"{milliseconds(last.prefill.median)} ms, "
        f"{milliseconds(last.decode.median)} ms per generated token, {count(last.cache_bytes)} bytes"
        for run in runs
        for model in ("student", "teacher")
        for last in speeds(run, model)[-1:]
    )
    return Figure(
        "Time and memory against length",
        curves("speed", f"Time and memory against length. {said}", panels, height=270),
        f"Batch of {plain(batches[0])}; medians, with bands from the minimum to the maximum; both axes "
        f"logarithmic.{more}",
        tables.speed([(run.group, run.results.speed) for run in runs]),
    )


def _spread(found: Spread) -> tuple[float, float, float]:
    return 1e3 * found.median, 1e3 * found.low, 1e3 * found.high


def provenance(runs: Sequence[RunFiles]) -> Section:
    """Return the section with command, versions, seeds and data, which reproduce these numbers."""
    lines = list(map(_provenance, runs))
    blocks: list[Block] = []
    if any(lines):
        blocks.append(Table.by_run("Where these numbers come from", [run.name for run in runs], lines))
    blocks += not_measured(runs, "provenance")
    return Section("provenance", "Provenance", blocks)


def _provenance(run: RunFiles) -> dict[str, str]:
    found = run.results.provenance
    lines: dict[str, Any] = {}
    if run.run is not None:
        lines["teacher"] = run.run.model
        lines["dtype"] = run.run.dtype
    if run.recipe is not None:
        lines["dataset"] = run.recipe.data.dataset
    if found is not None:
        lines["command"] = found.command
        lines["seed"] = found.seed
        lines["data, sha256"] = found.data
        lines["tokens"] = found.tokens
        lines["time"] = duration(found.seconds)
        lines["device"] = found.device
        lines |= {f"version of {name}": version for name, version in found.versions.items()}
    return {name: plain(value) for name, value in lines.items() if value is not None}
