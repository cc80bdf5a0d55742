"""The results of an evaluation: all measurements of a student, its teacher and its controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from linearize.base import Record
from linearize.evaluation.agreement import Agreement, Generations, PositionLosses
from linearize.evaluation.copying import Copying
from linearize.evaluation.harness import Benchmarks
from linearize.evaluation.intervals import Interval
from linearize.evaluation.perplexity import Quality
from linearize.evaluation.retrieval import Retrieval
from linearize.evaluation.scores import TaskScores
from linearize.evaluation.shares import KeptGain
from linearize.evaluation.timings import Crossover, Speed, Spread

NEAR = 64  # the last tokens of a query, its own included


@dataclass(frozen=True)
class Reading:
    """Measurements of one model that read the contexts in one way.

    Attributes:
        model: "teacher" or "student".
        prefill: `STREAMING` or `FULL`; None for a teacher.
        loss: of the text after the contexts.
        difference: the loss minus the teacher's, paired by rows; None for the teacher, and without one.
        needles: share of the questions that greedy decoding answers; None: no needle fits the contexts.
        prefill_seconds: of one context.
        decode_seconds: of one generated token after context and continuation.
        cache_bytes: of the cache after one context.
    """

    model: str
    prefill: str | None
    loss: Interval
    difference: Interval | None
    needles: Interval | None
    prefill_seconds: Spread | None
    decode_seconds: Spread | None
    cache_bytes: int


@dataclass(frozen=True)
class ShortEvaluation:
    """The short evaluation of a student: sizes in tokens, and one `Reading` for each model and kind of prefill."""

    context: int
    continuation: int
    rows: int
    needles: int
    saved_prefill: str
    readings: list[Reading]


@dataclass(frozen=True)
class LayerFidelity:
    """The output errors of one layer, one number per query head.

    Attributes:
        output_relative: mean of (student - teacher)^2 over tokens and head dimension, before the output projection,
            over the mean of teacher^2.
    """

    layer: int
    output_relative: list[float]

    def __post_init__(self) -> None:
        if not self.output_relative:
            raise ValueError("output_relative: expected a number per head, found none")


@dataclass(frozen=True)
class Fidelity:
    """The output errors of every converted layer, in order, and the number of tokens on which they were measured."""

    tokens: int
    layers: list[LayerFidelity]

    @property
    def errors(self) -> dict[tuple[int, int], float]:
        """Return `output_relative` by (layer, head)."""
        return {(layer.layer, head): x for layer in self.layers for head, x in enumerate(layer.output_relative)}


@dataclass(frozen=True)
class AttentionStatistics:
    """Statistics of softmax attention: means over all query heads of a model and over its queries.

    Attributes:
        entropy: of a query's weights, in nats.
        first_token: weight on the first token of a row.
        sink_heads: query heads whose mean weight on the first token is more than one half.
        heads: query heads of all layers together.
        beyond_near: weight on keys before the last `NEAR` tokens, except the first token of the row.
        queries: number of queries of each head.
    """

    entropy: float
    first_token: float
    sink_heads: int
    heads: int
    beyond_near: float
    queries: int


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
    """The command, versions and data of a measurement.

    Attributes:
        command: the user's command line; None: there was none.
        data: sha256 of the dataset's tokens.
        tokens: of the held-out rows.
        seconds: duration of the measurement.
    """

    command: str | None
    versions: Mapping[str, str]
    seed: int
    data: str
    tokens: int
    device: str
    seconds: float


class Results(Record):
    """All results, by section of evaluation.json; None or empty: not measured.

    A language model has the `short` evaluation, or the long one: losses (`measured`) and the sections after them. A
    model whose answers are scored has a `task`.

    Attributes:
        missing: labels of controls that are not available.
        not_measured: reasons, by section.
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
    retrieval: list[Retrieval] = Field(default_factory=list[Retrieval])
    tasks: Benchmarks | None = None
    missing: list[str] = Field(default_factory=list)
    not_measured: dict[str, str] = Field(default_factory=dict)
    provenance: Provenance | None = None

    @property
    def empty(self) -> set[str]:
        """Return the names of the empty sections."""
        return {name for name, value in self if not value}
