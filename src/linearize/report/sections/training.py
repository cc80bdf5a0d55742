"""The section on the training stages and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from linearize.report.figures import Line, LinePanel, curves
from linearize.report.html import Block, Figure, Section, Table, Text
from linearize.report.load import TRAINING_STAGES, RunFiles
from linearize.report.numbers import DASH, count, duration, loss, plain, share
from linearize.report.unmeasured import not_measured

TITLES = {
    "transfer": "attention transfer",
    "adapt": "adapting new weights",
    "finetune": "fine-tuning",
    "controls/window_finetuned": "control: window only, fine-tuned",
    "controls/equal_finetuned": "control: window of equal bytes, fine-tuned",
    "controls/exact_finetuned": "control: same memory, no linear part, fine-tuned",
    "controls/teacher_finetuned": "control: teacher, fine-tuned",
}
_PANELS = {
    "Attention transfer": ("transfer",),
    "Adapting new weights": ("adapt",),
    "Fine-tuning": ("finetune", *(name for name in TITLES if name.startswith("controls/"))),
}


def training(runs: Sequence[RunFiles]) -> Section:
    """Return the section with curves (if there are metrics), results of each stage, and transfer by layer."""
    with_curves = [run for run in runs if any(stage.held_out for stage in run.stages.values())]
    blocks: list[Block] = [_curves(with_curves)] if with_curves else []
    staged = [run for run in runs if run.stages]
    if staged:
        blocks.append(_results(staged))
    transferred = [run for run in runs if "transfer" in run.stages and run.stages["transfer"].result]
    if transferred:
        blocks.append(_units(transferred))
    untrained = [run for run in runs if run.recipe and not any(getattr(run.recipe, x) for x in TRAINING_STAGES)]
    blocks += [Text(f"{run.prefix}Nothing was trained in this run.", tone="missing") for run in untrained]
    blocks += not_measured(runs, "curves", lambda run: run in with_curves or not run.stages)
    blocks += not_measured(runs, "training", lambda run: run.stages or run in untrained)
    return Section("training", "Training", blocks)


def _curves(runs: Sequence[RunFiles]) -> Figure:
    panels, rows, said = [], [], []
    for title, names in _PANELS.items():
        lines = []
        for place, run in enumerate(runs):
            for dash, name in enumerate(names):
                stage = run.stages.get(name)
                if stage is None or not stage.held_out:
                    continue
                style = place if run.beside_others else dash
                what = TITLES[name].removeprefix("control: ") if name.startswith("controls/") else "student"
                tokens, losses = zip(*stage.held_out, strict=True)
                lines.append(Line(run.prefix + what, tokens, losses, style, dash=dash))
                where = run.prefix + TITLES[name]
                said.append(f"{where}: from {loss(losses[0])} to {loss(losses[-1])}")
                rows += [[where, count(x), loss(value)] for x, value in stage.held_out]
        if lines:
            log = title == "Attention transfer"
            panels.append(LinePanel(title, lines, "training tokens", "loss", log_y=log))
    return Figure(
        "Loss during training",
        curves("training-curves", "Held-out loss during training. " + "; ".join(said), panels, height=270),
        "Held-out loss at each evaluation. For attention transfer, losses are means over layers.",
        Table.of("Held-out loss at each evaluation", ["stage", "training tokens", "loss"], rows, collapsed=True),
    )


def _results(runs: Sequence[RunFiles]) -> Table:
    rows = []
    for run in runs:
        for key, stage in run.stages.items():
            name, result = run.prefix + TITLES[key], stage.result
            if result is None:
                rows.append([name, "unfinished", *[DASH] * 5])
                continue
            first, best = fmean(result.initial_loss.values()), fmean(result.best_loss.values())
            rows.append(
                [
                    name,
                    count(result.steps) + (" (stopped early)" if result.stopped_early else ""),
                    count(result.tokens),
                    plain(result.identity.get("lr")),
                    duration(result.seconds),
                    loss(first),
                    # A teacher that is trained on its own outputs starts with a loss of 0.
                    f"{loss(best)} ({share(best / first - 1, 1)})" if first else loss(best),
                ]
            )
    columns = ["stage", "steps", "training tokens", "learning rate", "time", "held-out loss before", "best"]
    return Table.of("What each stage did", columns, rows)


def _units(runs: Sequence[RunFiles]) -> Figure:
    """Return a figure of the held-out loss of every layer's mixer before transfer and at its best."""
    results = {run.name: result for run in runs if (result := run.stages["transfer"].result)}
    names = list(dict.fromkeys(name for result in results.values() for name in result.best_loss))
    layers = list(map(_layer, names))
    losses = {
        f"{run}: {what}" if len(results) > 1 else what: [found.get(name, float("nan")) for name in names]
        for run, result in results.items()
        for what, found in (("before", result.initial_loss), ("best", result.best_loss))
    }
    lines = [
        Line(title, range(len(names)), found, style=place // 2, dash=1 - place % 2)
        for place, (title, found) in enumerate(losses.items())
    ]
    stride = max(1, -(-len(names) // 16))
    ticks = {float(i): layer.removeprefix("layer ") for i, layer in enumerate(layers) if i % stride == 0}
    panel = LinePanel("", lines, "layer", "held-out loss", log_y=True, ticks=ticks)
    rows = [[layer, *(loss(found[i]) for found in losses.values())] for i, layer in enumerate(layers)]
    best = lines[1].y
    worst = max(range(len(names)), key=lambda i: best[i])
    label = (
        f"Transfer loss of each layer before and after, on a logarithmic axis. Highest after transfer"
        f"{' in ' + runs[0].name if len(runs) > 1 else ''}: {layers[worst]}, {loss(best[worst])}."
    )
    return Figure(
        "What attention transfer did for each layer",
        curves("transfer-layers", label, [panel]),
        "Held-out transfer loss, from the untrained mixer (dashed) to its best snapshot.",
        Table.of("Held-out transfer loss by layer", ["layer", *losses], rows, collapsed=True),
    )


def _layer(name: str) -> str:
    index = next((part for part in name.split(".") if part.isdigit()), None)
    return name if index is None else f"layer {index}"
