"""Measure a student beside its teacher and its controls, and say in plain words what was kept and what was lost."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.text import Text
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.data.packing import PackedRows
from linearize.evaluation.agreement import PositionLosses, loss_by_position
from linearize.evaluation.candidates import BATCH_SIZE, LABELS, Candidate
from linearize.evaluation.config import EvaluationConfig
from linearize.evaluation.examination import Examination, examine
from linearize.evaluation.perplexity import Interval, Quality, TokenLosses, paired_difference, token_losses
from linearize.evaluation.recall import (
    CopyLosses,
    CopyRows,
    Recall,
    Verdict,
    copy_losses,
    copy_rows,
    copy_verdict,
    far_context_verdict,
    ordinary_tokens,
)
from linearize.evaluation.speed import Crossover, Speed, break_even, generation_speed
from linearize.evaluation.tables import markdown_table, terminal_table
from linearize.evaluation.task_report import TaskReport
from linearize.evaluation.words import in_words, interval_text

NEW_TOKENS = 16

SPEED_HEADER = ("model", "prompt tokens", "prefill, ms", "tokens/s", "cache bytes")


@dataclass(frozen=True)
class Measured:
    """One line of the table."""

    name: str
    label: str
    note: str
    quality: Quality
    copying: Recall | None


@dataclass(frozen=True)
class Comparison:
    """Student against another, paired on the same rows: the student's loss minus the other's."""

    other: str
    overall: Interval
    beyond: Interval | None
    words: str


@dataclass(frozen=True)
class ReportCard:
    """Everything measured about a student; `task` where its text is to be good for more than its likelihood."""

    window_size: int
    measured: list[Measured]
    comparisons: list[Comparison]
    far_context: Verdict | None
    copying: Verdict | None
    copying_missing: str | None
    positions: PositionLosses
    speed: list[Speed]
    crossover: Crossover | None = None
    examination: Examination | None = None
    task: TaskReport | None = None
    missing: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data; what the examination found stands beside the rest."""
        data = asdict(self)
        del data["examination"]
        data["task"] = None if self.task is None else self.task.to_json()
        return data | ({} if self.examination is None else self.examination.to_json())

    def lines(self) -> list[str]:
        """The findings, a sentence each."""
        lines = [] if self.task is None else self.task.lines()
        lines += [comparison.words for comparison in self.comparisons]
        if self.far_context is not None:
            lines.append(f"Context beyond the window of {self.window_size} tokens: {self.far_context.words}.")
        if self.copying is not None:
            lines.append(f"Copying from beyond the window: {self.copying.words}.")
        elif self.copying_missing:
            lines.append(f"Copying from beyond the window: {self.copying_missing}.")
        if self.examination is not None:
            lines += self.examination.lines()
        if self.speed:
            lines.append(memory_in_words(self.speed))
        if self.crossover is not None:
            lines.append(self.crossover.words)
        if self.missing:
            lines.append(f"Not measured: {', '.join(self.missing)}.")
        return lines

    def render(self) -> Group:
        """The table and the findings, for a terminal."""
        title = "Held-out loss, nats per token, with 95 % intervals (lower is better)"
        tables = [terminal_table(title, self._header()[:-1], [line[:-1] for line in self._cells()])]
        if self.speed:
            title = "Generation, batch of one: medians, with least and greatest"
            tables.append(terminal_table(title, SPEED_HEADER, list(map(_speed_cells, self.speed))))
        if self.task is not None:
            rows = [line[:-1] for line in self.task.cells()]
            tables.insert(0, terminal_table(self.task.caption(), self.task.header()[:-1], rows))
        return Group(*tables, *(Text(f"- {line}") for line in self.lines()))

    def to_markdown(self) -> str:
        """The same as Markdown."""
        findings = "".join(f"- {line}\n" for line in self.lines())
        costs = markdown_table(SPEED_HEADER, [_speed_cells(speed) for speed in self.speed]) if self.speed else ""
        task = ""
        if self.task is not None:
            task = f"{self.task.caption()}\n\n{markdown_table(self.task.header(), self.task.cells())}"
        return "\n".join(filter(None, [task, markdown_table(self._header(), self._cells()), costs, findings]))

    def _header(self) -> list[str]:
        return ["model", "loss", f"beyond {self.window_size} tokens", "1st, 2nd copy", "what it is"]

    def _cells(self) -> list[list[str]]:
        return [
            [m.label, _text(m.quality.loss), _text(m.quality.beyond), _copying(m.copying), m.note]
            for m in self.measured
        ]


def memory_in_words(speed: Sequence[Speed]) -> str:
    """What teacher and student hold, and from which length on the student holds less; from two lengths of each."""
    growth, constant = {}, {}
    for name in ("teacher", "student"):
        short, long = (s for s in speed if s.model == name)
        growth[name] = (long.cache_bytes - short.cache_bytes) // (long.prompt_length - short.prompt_length)
        constant[name] = long.cache_bytes - growth[name] * (long.prompt_length + NEW_TOKENS)
    words = f"Memory: the teacher's cache grows by {growth['teacher']:,} bytes per token; the student holds "
    words += f"{constant['student']:,} bytes" + (f" and {growth['student']:,} per token" if growth["student"] else "")
    saved = growth["teacher"] - growth["student"]
    if saved <= 0:
        return f"{words}, never less than the teacher."
    length = break_even(constant["student"] - constant["teacher"], saved)
    return f"{words}, however long the text: less than the teacher from {length:,} tokens on."


def _speed_cells(speed: Speed) -> list[str]:
    prefill, decode = speed.prefill, speed.decode
    return [
        speed.model,
        f"{speed.prompt_length}",
        f"{1e3 * prefill.median:.1f} [{1e3 * prefill.low:.1f}, {1e3 * prefill.high:.1f}]",
        f"{1 / decode.median:.0f} [{1 / decode.high:.0f}, {1 / decode.low:.0f}]",
        f"{speed.cache_bytes:,}",
    ]


def _text(interval: Interval | None) -> str:
    return "-" if interval is None else interval_text(interval)


def _copying(recall: Recall | None) -> str:
    return "-" if recall is None else f"{recall.first.mean:.2f}, {recall.second.mean:.2f}"


def measure(
    candidates: Sequence[Candidate],
    rows: PackedRows,
    tokenizer: Tokenizer,
    *,
    window_size: int,
    max_positions: int,
    config: EvaluationConfig,
    seed: int,
    missing: Sequence[str] = (),
) -> ReportCard:
    """Held-out loss and copying of every candidate on the same rows, the comparisons that decide, and a closer look.

    Args:
        candidates: opened one after another; "student" must be among them.
        rows: packed held-out rows.
        window_size: what counts as "beyond the window".
        missing: names of controls that could not be had.
    """
    copies, copying_missing = _copy_test(tokenizer, window_size, max_positions, config, seed)
    losses: dict[str, TokenLosses] = {}
    copied: dict[str, CopyLosses] = {}
    measured = []
    for candidate in candidates:
        with candidate.open() as model:
            title = f"measuring: {candidate.label}"
            losses[candidate.name] = token_losses(model, rows, batch_size=BATCH_SIZE, title=title)
            if copies is not None:
                copied[candidate.name] = copy_losses(model, copies, batch_size=BATCH_SIZE)
        del model
        gc.collect()
        quality = Quality.of(losses[candidate.name], window_size, samples=config.bootstrap_samples, seed=seed)
        recall = None
        if candidate.name in copied:
            recall = Recall.of(copied[candidate.name], samples=config.bootstrap_samples, seed=seed)
        measured.append(Measured(candidate.name, candidate.label, candidate.note, quality, recall))

    speed: list[Speed] = []
    opened = {candidate.name: candidate for candidate in candidates}
    if "teacher" in opened:
        # A quarter of the positions and nearly all of them.
        lengths = (max_positions // 4, max_positions - NEW_TOKENS)
        with opened["teacher"].open() as teacher, opened["student"].open() as student:
            models = {"teacher": teacher, "student": student}
            speed = generation_speed(models, lengths, new_tokens=NEW_TOKENS, repeats=3, seed=seed)
    samples = {"samples": config.bootstrap_samples, "seed": seed}
    far_context = copying = None
    if {"teacher", "window"} <= losses.keys():
        trio = losses["teacher"], losses["student"], losses["window"]
        far_context = far_context_verdict(*trio, window_size, **samples)
    if "teacher" in copied:
        copying = copy_verdict(copied["teacher"], copied["student"], **samples)
    others = [name for name in ("teacher", "window_lora", "ablated") if name in losses]
    comparisons = [_compare(losses, name, window_size, samples) for name in others]
    sizes = {"window_size": window_size, "max_positions": max_positions}
    return ReportCard(
        window_size=window_size,
        measured=measured,
        comparisons=comparisons,
        far_context=far_context,
        copying=copying,
        copying_missing=copying_missing,
        positions=loss_by_position(losses, seed=seed),
        speed=speed,
        crossover=Crossover.of(speed) if speed else None,
        examination=examine(candidates, rows, tokenizer, **sizes, config=config, seed=seed) if config.examine else None,
        missing=[LABELS[name] for name in missing],
    )


def _compare(losses: dict[str, TokenLosses], other: str, window_size: int, samples: dict[str, int]) -> Comparison:
    student = losses["student"]
    overall = paired_difference(student, losses[other], **samples)
    words, beyond = in_words("The student", f"the {LABELS[other]}", overall), None
    if student.beyond_missing(window_size) is None:
        beyond = paired_difference(student.beyond(window_size), losses[other].beyond(window_size), **samples)
        words += f" Beyond the window: {beyond.mean:+.3f} [{beyond.low:+.3f}, {beyond.high:+.3f}]."
    return Comparison(other, overall, beyond, words)


def _copy_test(
    tokenizer: Tokenizer, window_size: int, max_positions: int, config: EvaluationConfig, seed: int
) -> tuple[CopyRows | None, str | None]:
    """Rows of the copying test, or the reason why these models cannot take it."""
    distance = 2 * window_size
    length = min(window_size, max_positions - distance)
    if length < 2:
        return None, f"not measurable: a repeat at {distance} tokens does not fit the model's {max_positions} positions"
    vocabulary = ordinary_tokens(len(tokenizer), tokenizer.all_special_ids)
    rows = copy_rows(
        vocabulary,
        length=length,
        distance=distance,
        rows=config.copy_rows,
        seed=seed,
        window_size=window_size,
        max_positions=max_positions,
    )
    return rows, None
