"""Read the files of a run folder, or of a folder with copies of them, with typed contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from linearize.base import AnyRecord, Record, UserError
from linearize.evaluation.candidates import LABELS
from linearize.evaluation.intervals import Interval
from linearize.evaluation.results import Comparison, Measured, Reading, Results
from linearize.evaluation.scores import Scored, TaskScores
from linearize.planning.results import TRAINING_STAGES, Plan
from linearize.recipe import Recipe
from linearize.report.numbers import Number
from linearize.training.allocation import Allocation

CONTROLS = ("window_finetuned", "equal_finetuned", "exact_finetuned", "teacher_finetuned")
_AGAIN = "restore the file, or measure again (`linearize run`, `linearize eval`)"


class RunRecord(Record):
    """The contents of run.json: the teacher, data and versions of a run.

    Attributes:
        model: the teacher's hub id or folder.
        dtype, device: of the teacher.
        data: sha256 of the dataset's tokens.
        versions: of packages.
    """

    model: str
    dtype: str
    device: str
    data: str
    versions: dict[str, str]


class StageRecord(Record):
    """The contents of a stage's result.json: fields of `TrainResult`, the stage's identity, and digests."""

    steps: int
    tokens: int
    best_loss: dict[str, float]
    initial_loss: dict[str, float]
    seconds: float
    stopped_early: bool
    identity: dict[str, Any]
    tensors_sha256: str | None = None
    rows_sha256: dict[str, str] = Field(default_factory=dict)
    sha256: str | None = None


@dataclass(frozen=True)
class Stage:
    """The files of one training stage.

    Attributes:
        result: None while the stage runs.
        held_out: training tokens and held-out loss (mean over layers, or of the model) of each evaluation; empty in a
            copy.
    """

    result: StageRecord | None
    held_out: list[tuple[int, Number]]


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder. Missing files are None or empty; only the results must exist.

    Attributes:
        recipe_text: contents of recipe.yaml, which has fewer fields than `recipe` if an earlier version wrote it.
        beside_others: whether a page shows several runs.
    """

    folder: Path
    name: str
    results: Results
    recipe: Recipe | None
    recipe_text: str
    plan: Plan | None
    run: RunRecord | None
    stages: dict[str, Stage]
    allocation: Allocation | None = None
    beside_others: bool = False

    @property
    def group(self) -> str | None:
        """Return the run's name if a page shows several runs, else None."""
        return self.name if self.beside_others else None

    @property
    def prefix(self) -> str:
        """Return the run's name with a colon if a page shows several runs, else an empty text."""
        return f"{self.name}: " if self.beside_others else ""

    @property
    def teacher(self) -> str | None:
        """Return the teacher's hub id, or the end of its folder's path."""
        if self.run is None:
            return None
        path = Path(self.run.model)
        return "/".join(path.parts[-2:]) if path.is_absolute() else self.run.model

    def same_teacher(self, other: RunFiles) -> bool:
        """Return whether both runs have one teacher, as far as their files tell."""
        if self.teacher is not None and other.teacher is not None and self.teacher != other.teacher:
            return False
        if self.plan is None or other.plan is None:
            return True
        sizes = ((plan.model_type, plan.teacher_parameters) for plan in (self.plan, other.plan))
        return len(set(sizes)) == 1

    @property
    def window(self) -> int | None:
        """Return the tokens of the student's window; None: its task has no window."""
        return self.results.window_size

    @property
    def is_language_model(self) -> bool:
        """Return whether losses of text were measured, by the long evaluation."""
        return bool(self.results.measured)

    def reading(self, model: str, prefill: str | None = None) -> Reading | None:
        """Return the short evaluation's reading of the teacher, or of the student with this prefill."""
        lines = [] if self.results.short is None else self.results.short.readings
        return next((line for line in lines if (line.model, line.prefill) == (model, prefill)), None)

    @property
    def pairs_by_head(self) -> dict[int, list[int]]:
        """Return the key-value pairs that the KV heads of each layer keep; empty if no budget was allocated."""
        if self.allocation is None:
            return {}
        shared = self.allocation.sinks + self.allocation.window + self.allocation.text
        return {layer: [shared + pairs for pairs in heads] for layer, heads in self.allocation.recall.items()}

    def measured(self, candidate: str) -> Measured | None:
        """Return the line of a candidate in the table of losses."""
        return next((line for line in self.results.measured if line.name == candidate), None)

    def comparison(self, other: str) -> Comparison | None:
        """Return the student's loss minus that of `other`, paired."""
        return next((line for line in self.results.comparisons if line.other == other), None)

    @property
    def task(self) -> TaskScores | None:
        """Return the scores at a task that is not language modelling."""
        return self.results.task

    def scored(self, candidate: str) -> Scored | None:
        """Return the line of a candidate in the table of scores."""
        lines = [] if self.task is None else self.task.scored
        return next((line for line in lines if line.name == candidate), None)

    def score(self, candidate: str, metric: str) -> Interval | None:
        line = self.scored(candidate)
        return None if line is None else line.scores.get(metric)

    def score_difference(self, other: str, metric: str) -> Interval | None:
        """Return the student's score minus that of `other`, paired."""
        lines = [] if self.task is None else self.task.differences
        return next((x.difference for x in lines if (x.other, x.metric) == (other, metric)), None)

    def recovery(self, metric: str) -> Interval | None:
        """Return the student's score over the teacher's."""
        return None if self.task is None else self.task.recovery.get(metric)

    def agreement(self, candidate: str) -> Interval | None:
        """Return the share of a candidate's answers that equal the teacher's."""
        line = self.scored(candidate)
        return None if line is None else line.agreement


def label(candidate: str) -> str:
    """Return the label of a candidate."""
    return LABELS.get(candidate, candidate.replace("_", " "))


def load_run(folder: Path, results: Results | None = None) -> RunFiles:
    """Read a run folder, or a folder of copies (transfer.json instead of transfer/result.json, ...).

    Args:
        results: new results, in place of those in the folder.

    Raises:
        UserError: no evaluation.json, or a file that cannot be read or has another format.
    """
    path = folder / "evaluation.json"
    if results is None and not path.is_file():
        raise UserError(
            f"report {folder}: expected a run folder with evaluation.json, found none; finish the run "
            f"(`linearize run` with the same arguments continues it) or name another folder"
        )
    results = Results.read(path, advice=_AGAIN) if results is None else results
    if not (results.measured or results.short or results.task or "short" in results.not_measured):
        raise UserError(f"{path}: expected measurements, found none; {_AGAIN}")
    recipe = _read_recipe(folder / "recipe.yaml")
    stages = {name: _stage(folder, name) for name in (*TRAINING_STAGES, *(f"controls/{name}" for name in CONTROLS))}
    return RunFiles(
        folder,
        folder.resolve().name,
        results,
        recipe,
        "" if recipe is None else (folder / "recipe.yaml").read_text(encoding="utf-8"),
        _read(Plan, folder / "plan.json"),
        _read(RunRecord, folder / "run.json"),
        {name: stage for name, stage in stages.items() if stage is not None},
        _read(Allocation, folder / "allocation.json"),
    )


def load_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Read several run folders; runs with equal names get names with their parent folders.

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


def _read(kind: type[AnyRecord], path: Path) -> AnyRecord | None:
    return kind.read(path, advice=_AGAIN) if path.is_file() else None


def _read_recipe(path: Path) -> Recipe | None:
    try:
        return Recipe.load(str(path)) if path.is_file() else None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


class _Event(BaseModel):
    """The fields of a line of metrics.jsonl that are read."""

    event: str
    tokens: int
    loss: float


def _stage(folder: Path, name: str) -> Stage | None:
    # A copy of a result is in the folder of the evaluation, under the stage's name.
    result = _read(StageRecord, folder / name / "result.json") or _read(StageRecord, folder / f"{Path(name).name}.json")
    metrics = folder / name / "metrics.jsonl"
    events = _read_events(metrics) if metrics.is_file() else []
    if result is None and not events:
        return None
    return Stage(result, [(event.tokens, event.loss) for event in events if event.event == "evaluation"])


def _read_events(path: Path) -> list[_Event]:
    """Read the lines of metrics.jsonl; an incomplete last line, of a killed process, is skipped."""
    lines = path.read_bytes().splitlines()
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(_Event.model_validate_json(line))
        except ValidationError:
            if number < len(lines):
                raise UserError(f"{path}: expected an event on line {number}, found other text; restore it") from None
    return events
