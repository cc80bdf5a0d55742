"""The results of an evaluation: everything that is measured of a student beside its teacher and its controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from linearize.base import Record
from linearize.evaluation.agreement import Agreement, Generations, PositionLosses
from linearize.evaluation.attention_statistics import AttentionStatistics
from linearize.evaluation.copying import Copying
from linearize.evaluation.fidelity import Fidelity
from linearize.evaluation.harness import Benchmarks
from linearize.evaluation.intervals import Interval
from linearize.evaluation.path_usage import PathUsage
from linearize.evaluation.perplexity import Quality
from linearize.evaluation.retrieval import Retrieval
from linearize.evaluation.scores import TaskScores
from linearize.evaluation.shares import KeptGain
from linearize.evaluation.short import ShortEvaluation
from linearize.evaluation.speed import Crossover, Speed


@dataclass(frozen=True)
class Measured:
    """Held-out loss and copying of one candidate."""

    name: str
    label: str
    note: str
    training_tokens: int | None
    quality: Quality
    copying: Copying | None


@dataclass(frozen=True)
class Comparison:
    """The student's loss minus another's, paired on the same rows."""

    other: str
    overall: Interval
    beyond: Interval | None


@dataclass(frozen=True)
class Provenance:
    """What a measurement rests on.

    Attributes:
        command: what the user typed; None where there was no command line.
        data: sha256 of the dataset's tokens.
        tokens: of the held-out rows.
        seconds: that the measurement took.
    """

    command: str | None
    versions: Mapping[str, str]
    seed: int
    data: str
    tokens: int
    device: str
    seconds: float


class Results(Record):
    """All results, by section of evaluation.json; None or empty where there are none.

    A language model has the `short` evaluation, or the long one: losses (`measured`) and all that follows them. A model
    whose answers are scored has a `task`. `missing`: labels of controls that could not be had. `not_measured`: reasons,
    by section.
    """

    window_size: int | None = None
    short: ShortEvaluation | None = None
    task: TaskScores | None = None
    measured: list[Measured] = Field(default_factory=list[Measured])
    comparisons: list[Comparison] = Field(default_factory=list[Comparison])
    far_context: KeptGain | None = None
    copying: KeptGain | None = None
    positions: PositionLosses | None = None
    speed: list[Speed] = Field(default_factory=list[Speed])
    crossover: Crossover | None = None
    teacher_attention: AttentionStatistics | None = None
    agreement: Agreement | None = None
    generations: Generations | None = None
    fidelity: Fidelity | None = None
    path_usage: PathUsage | None = None
    retrieval: list[Retrieval] = Field(default_factory=list[Retrieval])
    tasks: Benchmarks | None = None
    missing: list[str] = Field(default_factory=list)
    not_measured: dict[str, str] = Field(default_factory=dict)
    provenance: Provenance | None = None

    @property
    def empty(self) -> set[str]:
        """The names of the sections that hold nothing."""
        return {name for name, value in self if not value}
