"""The files of a run folder, or of a folder that keeps copies of them, as plain data."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Any

import yaml

from linearize.base import UserError, read_json
from linearize.evaluation.candidates import LABELS, REFERENCES
from linearize.evaluation.intervals import Interval
from linearize.plain_yaml import parse_yaml
from linearize.report.numbers import Number

CONTROLS = ("window_lora", "equal_lora", "exact_lora", "teacher_lora")
STAGES = ("transfer", "adapt", "finetune", *(f"controls/{name}" for name in CONTROLS))
_POINTS = 300  # of a training curve; longer ones are averaged over neighbours, which the page says


@dataclass(frozen=True)
class Curve:
    """Loss against training tokens, averaged over the stage's units (layers, or the model)."""

    tokens: list[int] = field(default_factory=list)
    loss: list[Number] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """What one training stage left: its result and config (empty while it runs), and its curves (empty in a copy)."""

    name: str
    result: dict[str, Any]
    config: dict[str, Any]
    training: Curve
    held_out: Curve


@dataclass(frozen=True)
class RunFiles:
    """A run folder, read. What the folder does not hold is None or empty; only the evaluation is always there."""

    folder: Path
    name: str
    evaluation: dict[str, Any]
    recipe: dict[str, Any] | None
    plan: dict[str, Any] | None
    run: dict[str, Any]
    stages: dict[str, Stage]
    allocation: dict[str, Any] | None = None
    beside_others: bool = False

    @property
    def group(self) -> str | None:
        """The name where the run stands beside others, and so must be told from them."""
        return self.name if self.beside_others else None

    @property
    def prefix(self) -> str:
        """The name with a colon, likewise."""
        return f"{self.name}: " if self.beside_others else ""

    @property
    def teacher(self) -> str | None:
        """The teacher's hub id, or the end of its folder's path."""
        model = self.run.get("model")
        return model and (model if not Path(model).is_absolute() else "/".join(Path(model).parts[-2:]))

    def same_teacher(self, other: RunFiles) -> bool:
        """Whether the two were made from one teacher, as far as the files of both tell."""
        pairs = [(self.teacher, other.teacher)]
        for name in ("model_type", "teacher_parameters"):
            pairs.append(((self.plan or {}).get(name), (other.plan or {}).get(name)))
        return all(a == b for a, b in pairs if a is not None and b is not None)

    @property
    def window(self) -> int | None:
        """Tokens that the student's window reaches; None where its task has no such thing."""
        return self.evaluation.get("window_size")

    @property
    def is_language_model(self) -> bool:
        """Whether losses of text were measured, by the long evaluation."""
        return bool(self.evaluation.get("measured"))

    @property
    def has_short_evaluation(self) -> bool:
        """Return whether a language model was measured by the short evaluation."""
        return self.section("short") is not None

    def reading(self, model: str, prefill: str | None = None) -> dict[str, Any] | None:
        """Return what the short evaluation has of the teacher, or of the student that read in this way."""
        lines = (self.section("short") or {}).get("readings") or []
        return next((line for line in lines if (line["model"], line["prefill"]) == (model, prefill)), None)

    @property
    def pairs_by_head(self) -> dict[int, list[int]]:
        """Return the key-value pairs that the KV heads of each layer keep; empty where no budget was allocated."""
        if self.allocation is None:
            return {}
        alike = sum(self.allocation[name] for name in ("sinks", "window", "text"))
        return {int(layer): [alike + pairs for pairs in heads] for layer, heads in self.allocation["recall"].items()}

    def section(self, name: str) -> Any:
        """A section of the evaluation, or None where it was not measured."""
        return self.evaluation.get(name) or None

    def measured(self, candidate: str) -> dict[str, Any] | None:
        """The line of a candidate in the table of losses."""
        return next((line for line in self.evaluation.get("measured") or [] if line["name"] == candidate), None)

    def comparison(self, other: str) -> dict[str, Any] | None:
        """The student's loss minus that of `other`, paired."""
        return next((line for line in self.evaluation.get("comparisons") or [] if line["other"] == other), None)

    @property
    def task(self) -> dict[str, Any] | None:
        """The scores at a task that is not language modelling."""
        return self.section("task")

    def scored(self, candidate: str) -> dict[str, Any] | None:
        """The line of a candidate in the table of scores."""
        return next((line for line in (self.task or {}).get("scored") or [] if line["name"] == candidate), None)

    def score(self, candidate: str, metric: str) -> Interval | None:
        return interval(((self.scored(candidate) or {}).get("scores") or {}).get(metric))

    def score_difference(self, other: str, metric: str) -> Interval | None:
        """The student's score minus that of `other`, paired."""
        lines = (self.task or {}).get("differences") or []
        found = next((x for x in lines if x["other"] == other and x["metric"] == metric), None)
        return interval(found["difference"] if found else None)

    def recovery(self, metric: str) -> Interval | None:
        """The student's score over the teacher's."""
        return interval(((self.task or {}).get("recovery") or {}).get(metric))

    def agreement(self, candidate: str) -> Interval | None:
        """The share of a candidate's answers that are the teacher's."""
        return interval((self.scored(candidate) or {}).get("agreement"))


def interval(data: dict[str, Any] | None) -> Interval | None:
    """An interval as it stands in evaluation.json; with bounds that are no numbers where only the mean is known."""
    return None if data is None else Interval(float(data["mean"]), float(data["low"]), float(data["high"]))


def label(candidate: str) -> str:
    """What people call a candidate."""
    return LABELS.get(candidate, candidate.replace("_", " "))


def load_run(folder: Path, evaluation: dict[str, Any] | None = None) -> RunFiles:
    """Read a run folder; a folder of copies (transfer.json instead of transfer/result.json, ...) does as well.

    Args:
        evaluation: new measurements, in place of those in the folder.

    Raises:
        UserError: no evaluation.json, or a file that cannot be read.
    """
    path = folder / "evaluation.json"
    if evaluation is None and not path.is_file():
        raise UserError(
            f"report {folder}: expected a run folder with evaluation.json, found none; finish the run "
            f"(`linearize run` with the same arguments goes on) or name another folder"
        )
    evaluation = read_json(path) if evaluation is None else evaluation
    if not isinstance(evaluation, dict) or not (_of_text(evaluation) or _of_a_task(evaluation)):
        raise UserError(f"{path}: expected the measurements of `linearize run`, found other JSON; run it again")
    evaluation = _upgraded(evaluation)
    recipe = folder / "recipe.yaml"
    plan, run, allocation = (
        read_json(folder / name) if (folder / name).is_file() else None
        for name in ("plan.json", "run.json", "allocation.json")
    )
    stages = {name: stage for name in STAGES if (stage := _stage(folder, name)) is not None}
    name = folder.resolve().name
    read = _read_yaml(recipe) if recipe.is_file() else None
    return RunFiles(folder, name, evaluation, read, plan, run or {}, stages, allocation)


@contextmanager
def as_written(folders: Sequence[Path]) -> Iterator[None]:
    """Turn what is raised by files that hold something else than a run writes into one line, which says where.

    Raises:
        UserError: they do; or there is a bug, which only those can tell who know what they changed.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__}: {error}, at {Path(place.filename).name}:{place.lineno}"
        raise UserError(
            f"report {', '.join(map(str, folders))}: expected files as `linearize run` writes them, found others "
            f"({found}); restore them, or run again; if nobody changed them, this is a bug"
        ) from error


def load_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Read several; runs of equal names are told apart by the folders that they lie in.

    Raises:
        UserError: as `load_run`, and for no folder, or the same one twice.
    """
    paths = [folder.resolve() for folder in folders]
    if not paths or len(set(paths)) < len(paths):
        found = ", ".join(map(str, folders)) or "none"
        raise UserError(f"report: expected one or more different run folders, found {found}; name each once")
    runs = [load_run(folder) for folder in folders]
    names = [path.name for path in paths]
    depth = 1
    while len(set(names)) < len(names):
        depth += 1
        names = ["/".join(path.parts[-depth:]) for path in paths]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _of_text(evaluation: dict[str, Any]) -> bool:
    short = evaluation.get("short") or "short" in (evaluation.get("not_measured") or {})
    return "window_size" in evaluation and bool(evaluation.get("measured") or short)


def _of_a_task(evaluation: dict[str, Any]) -> bool:
    task = evaluation.get("task")
    return isinstance(task, dict) and bool(task.get("scored"))


def _upgraded(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Measurements by a former version, in the terms of this one.

    What was not measured stood elsewhere, and a finetuned student was compared with an untrained window and teacher.
    Its share of the teacher's gain beyond the window is then the ratio of means, whose interval takes another run.
    """
    if reason := evaluation.get("copying_missing"):
        evaluation = evaluation | {"not_measured": {"copying": reason} | (evaluation.get("not_measured") or {})}
    section = evaluation.get("far_context")
    if not section or "against" in section or section["teacher_gain"] is None:
        return evaluation
    lines = {line["name"]: line["quality"]["beyond"]["mean"] for line in evaluation["measured"]}
    against = next((pair for pair in REFERENCES if lines.keys() >= set(pair)), REFERENCES[-1])
    if against != REFERENCES[-1]:
        window, teacher = (lines[name] for name in against)
        gain = _unsure(window - lines["student"])
        for line in evaluation.get("comparisons") or []:
            if line["other"] == against[0]:
                gain |= {"low": -line["beyond"]["high"], "high": -line["beyond"]["low"]}
        share = _unsure(gain["mean"] / (window - teacher)) if window > teacher else None
        section = {"teacher_gain": _unsure(window - teacher), "student_gain": gain, "share": share}
    return evaluation | {"far_context": section | {"against": against}}


def _unsure(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": nan, "high": nan}


def _stage(folder: Path, name: str) -> Stage | None:
    # A copy of a result lies beside the evaluation, under the stage's name.
    paths = [folder / name / "result.json", folder / f"{Path(name).name}.json"]
    data = next((read_json(path) for path in paths if path.is_file()), {})
    metrics = folder / name / "metrics.jsonl"
    events = _read_lines(metrics) if metrics.is_file() else []
    if not data and not events:
        return None
    steps, evaluations = ([e for e in events if e["event"] == event] for event in ("step", "evaluation"))
    result = {key: value for key, value in data.items() if key != "identity"}
    return Stage(name, result, data.get("identity", {}), _thinned(_curve(steps)), _curve(evaluations))


def _curve(events: list[dict[str, Any]]) -> Curve:
    return Curve([event["tokens"] for event in events], [event["loss"] for event in events])


def _thinned(curve: Curve) -> Curve:
    """At most `_POINTS` points, each the mean of as many neighbours."""
    size = -(-len(curve.loss) // _POINTS) or 1
    starts = range(0, len(curve.loss), size)
    chunks = [(curve.tokens[i : i + size], curve.loss[i : i + size]) for i in starts]
    return Curve([tokens[-1] for tokens, _ in chunks], [sum(loss) / len(loss) for _, loss in chunks])


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        data = parse_yaml(text) if text.endswith("\n") else None  # half of a recipe may be a recipe too
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        data = None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a recipe, found a file that cannot be read as one; restore it")
    return data


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that a killed process left half written is passed over."""
    lines = path.read_text(encoding="utf-8").splitlines()
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except (ValueError, RecursionError):
            if number < len(lines):
                raise UserError(f"{path}: expected JSON on line {number}, found other text; restore the file") from None
    return events
