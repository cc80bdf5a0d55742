"""Name missing measurements, and the commands that make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linearize.report.html import Text
from linearize.report.load import RunFiles

_EVAL = "`linearize eval DIR/model --set evaluation.long=true --output DIR/evaluation.json`"
_WITH_TEACHER = f"{_EVAL}, with the teacher available, measures"
# By section: the missing measurement, and how to get it.
_HOW = {
    "agreement": ("Agreement with the teacher is not measured", f"{_WITH_TEACHER} it"),
    "positions": ("Loss by position is not measured", f"{_EVAL} measures it"),
    "generations": ("Generations are not compared with the teacher's", f"{_WITH_TEACHER} them"),
    "copying": ("Copying is not measured", f"{_WITH_TEACHER} it"),
    "fidelity": ("Fidelity of the heads is not measured", f"{_EVAL} measures it"),
    "retrieval": ("Recall over distances is not measured", f"{_WITH_TEACHER} it"),
    "tasks": (
        "Downstream tasks are not measured",
        "`linearize eval` with `--tasks` and the extra `eval` measures them",
    ),
    "speed": ("Speed and memory are not measured", f"{_WITH_TEACHER} them"),
    "provenance": ("The command and its versions are not recorded", "a new `linearize run` records them"),
    "recipe": ("The recipe is not in the files", "recipe.yaml in the run's own folder contains it"),
    "plan": ("The plan is not in the files", "plan.json in the run's own folder contains it"),
    "curves": ("The course of the losses is not in the files", "the run's own folder contains it (metrics.jsonl)"),
    "training": ("What the stages did is not in the files", "the run's own folder contains it (result.json)"),
}

_SECTIONS = {
    "agreement": "agreement with the teacher",
    "positions": "loss by position",
    "generations": "generations",
    "retrieval": "recall over distances",
    "fidelity": "fidelity of heads",
    "tasks": "public benchmarks",
    "speed": "speed and memory",
}
_NAMES = _SECTIONS | {"short": "the short evaluation", "far_context": "long-context gain retained"}


def not_measured(runs: Sequence[RunFiles], what: str, there: Callable[[RunFiles], object] | None = None) -> list[Text]:
    """Return a line for the runs that lack `what`, and one for each that has a reason of its own; empty if none does.

    Args:
        there: whether a run has it; by default, whether its results have a section of that name.
    """
    missing, how = _HOW[what]
    without = [run for run in runs if not (what not in run.results.empty if there is None else there(run))]
    reasons = {run.name: run.results.not_measured.get(what) for run in without}
    lines = [_line(missing, [run], runs, reason) for run in without if (reason := reasons[run.name])]
    silent = [run for run in without if not reasons[run.name]]
    return [*lines, _line(missing, silent, runs, how)] if silent else lines


def missing_sections(run: RunFiles) -> list[str]:
    """Return one sentence, with the evaluation's reasons, in a list; empty if everything was measured."""
    reasons = run.results.not_measured
    found = list(run.results.missing)
    sections: list[str] = [*(_SECTIONS if run.is_language_model else []), *reasons]
    for key in dict.fromkeys(sections):
        if key in run.results.empty:
            why = f" ({reasons[key].rstrip('.')})" if key in reasons else ""
            found.append(f"{_NAMES.get(key, key)}{why}")
    if run.results.short:
        found.append(
            "controls, copying, agreement and heads, which the long evaluation measures (evaluation.long=true)"
        )
    return [f"Not measured: {'; '.join(found)}."] if found else []


def missing_controls(runs: Sequence[RunFiles]) -> list[Text]:
    return [
        Text(f"Not measured{f' for {run.name}' if run.group else ''}: {'; '.join(missing)}.", tone="missing")
        for run in runs
        if (missing := run.results.missing)
    ]


def _line(missing: str, without: Sequence[RunFiles], runs: Sequence[RunFiles], why: str) -> Text:
    where = "" if len(without) == len(runs) else f" for {', '.join(run.name for run in without)}"
    return Text(f"{missing}{where}: {why.rstrip('.')}.", tone="missing")
