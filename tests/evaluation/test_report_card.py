"""The report card on models whose losses are known by construction, and on a student that is its teacher."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import linearize
from linearize.data.packing import PackedRows
from linearize.evaluation import report_card
from linearize.evaluation.candidates import LABELS, Candidate
from linearize.evaluation.config import EvaluationConfig
from linearize.evaluation.perplexity import Interval
from linearize.evaluation.report_card import ReportCard, measure, memory_in_words
from linearize.evaluation.speed import Speed, Spread
from linearize.evaluation.task_report import Scored, TaskReport
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.evaluation.fakes import Fake

WINDOW, PERIOD, LENGTH = 8, 16, 48
VOCABULARY = tiny.VOCABULARY
UNIFORM = math.log(VOCABULARY)
POSITIONS, NEW_TOKENS = 64, 4
CONFIG = EvaluationConfig(bootstrap_samples=50, copy_rows=4, examine=False)


def periodic_rows(num_rows: int = 4) -> PackedRows:
    """Every token comes again after `PERIOD` tokens, which is beyond the window."""
    start = torch.randint(VOCABULARY, (num_rows, PERIOD), generator=torch.Generator().manual_seed(0))
    input_ids, positions = start.repeat(1, LENGTH // PERIOD), torch.arange(LENGTH).expand(num_rows, -1)
    return PackedRows(input_ids, positions, input_ids.masked_fill(positions == 0, -100))


def candidate(name: str, model: nn.Module, opened: list[str] | None = None, note: str = "") -> Candidate:
    @contextmanager
    def open_() -> Iterator[Any]:
        if opened is not None:
            opened.append(name)
        yield model
        if opened is not None:
            opened.append(f"{name} closed")

    return Candidate(name, open_, note)


def card(candidates: list[Candidate], rows: Any = None, **options: Any) -> ReportCard:
    chosen = dict(window_size=WINDOW, max_positions=POSITIONS, config=CONFIG, seed=0) | options
    return measure(candidates, periodic_rows() if rows is None else rows, byte_tokenizer(), **chosen)


@pytest.fixture(autouse=True)
def _uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage after every model would be nearly all that these tests do."""
    monkeypatch.setattr(report_card, "gc", SimpleNamespace(collect=lambda: None))


@pytest.fixture
def no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes do not generate."""
    monkeypatch.setattr(report_card, "generation_speed", lambda *_, **__: [])


@pytest.fixture(scope="module")
def real_card() -> ReportCard:
    """Of a student as it comes out of the conversion; the ablated one is missing."""
    teacher = tiny.llama()
    student = linearize.convert(teacher, tiny.recipe())
    models: dict[str, nn.Module] = dict(teacher=teacher, student=student, window=Fake(vocab_size=VOCABULARY))
    candidates = [candidate(name, model, note=f"note on {name}") for name, model in models.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_card, "NEW_TOKENS", NEW_TOKENS)
        return card(candidates, rows=tiny.packed([[64]] * 4), missing=["ablated"])


def copying(scale: float) -> Fake:
    """Loss `UNIFORM` on what comes for the first time, and `told(scale)` on what comes again."""
    return Fake(distance=PERIOD, scale=scale, vocab_size=VOCABULARY)


def told(scale: float) -> float:
    return math.log(1 + (VOCABULARY - 1) * math.exp(-scale))


def fakes(student: nn.Module, teacher: nn.Module) -> list[Candidate]:
    blind = Fake(vocab_size=VOCABULARY)
    models = dict(teacher=teacher, student=student, ablated=blind, window=blind, window_lora=blind)
    return [candidate(name, model, note=f"note on {name}") for name, model in models.items()]


# --- known answers ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_speed")
def test_losses_and_shares_are_the_known_ones() -> None:
    found = card(fakes(student=copying(4.0), teacher=copying(30.0)))
    by_name = {measured.name: measured for measured in found.measured}
    assert list(by_name) == ["teacher", "student", "ablated", "window", "window_lora"]

    first, again = PERIOD - 1, LENGTH - PERIOD
    for name, loss in (("teacher", told(30.0)), ("student", told(4.0)), ("window", UNIFORM)):
        quality = by_name[name].quality
        assert quality.tokens == 4 * (LENGTH - 1)
        assert quality.loss.mean == pytest.approx((first * UNIFORM + again * loss) / (LENGTH - 1), abs=1e-5)
        near = PERIOD - WINDOW - 1  # tokens beyond the window that come for the first time
        assert quality.beyond.mean == pytest.approx((near * UNIFORM + again * loss) / (near + again), abs=1e-5)
        recall = by_name[name].copying
        assert recall.first.mean == pytest.approx(UNIFORM, abs=1e-5)
        assert recall.second.mean == pytest.approx(loss, abs=1e-5)

    share = (UNIFORM - told(4.0)) / (UNIFORM - told(30.0))
    for verdict in (found.far_context, found.copying):
        assert verdict.measurable
        assert verdict.share.mean == pytest.approx(share, abs=1e-5)
        assert f"the student has {share:.0%}" in verdict.words

    assert [comparison.other for comparison in found.comparisons] == ["teacher", "window_lora", "ablated"]
    worse, better, _ = found.comparisons
    difference = again * told(4.0) / (LENGTH - 1)
    assert worse.overall.mean == pytest.approx(difference, abs=1e-4)
    assert worse.words.startswith(f"The student is worse than the teacher: {difference:.3f} nats per token more")
    assert better.overall.mean < 0
    assert better.words.startswith("The student is better than the window only, finetuned: ")
    for comparison in (worse, better):
        assert comparison.beyond.mean / comparison.overall.mean == pytest.approx(
            (LENGTH - 1) / (near + again), abs=1e-3
        )
        assert f"Beyond the window: {comparison.beyond.mean:+.3f} [" in comparison.words


@pytest.mark.usefixtures("no_speed")
def test_a_student_that_is_its_teacher_is_no_different() -> None:
    teacher = tiny.llama()
    models = [candidate(name, teacher) for name in ("teacher", "student", "window", "ablated", "window_lora")]
    found = card(models, rows=tiny.packed([[64]] * 4))
    for comparison in found.comparisons:
        for interval in (comparison.overall, comparison.beyond):
            assert (interval.mean, interval.low, interval.high) == (0.0, 0.0, 0.0)
        assert "no difference that this much text could show (+0.000 nats" in comparison.words
    assert found.copying.words.startswith("not measurable with this teacher: ")
    assert found.far_context.words.startswith("not measurable with this teacher: ")
    assert found.far_context.teacher_gain.mean == 0.0


def test_a_student_holds_less_than_its_teacher(real_card: ReportCard) -> None:
    short, long = POSITIONS // 4, POSITIONS - NEW_TOKENS
    held = {(speed.model, speed.prompt_length): speed.cache_bytes for speed in real_card.speed}
    assert list(held) == [(name, length) for length in (short, long) for name in ("teacher", "student")]
    kv_bytes_per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head dimension, fp32
    assert held["teacher", short] == (short + NEW_TOKENS) * kv_bytes_per_token
    assert held["teacher", long] == POSITIONS * kv_bytes_per_token
    assert held["student", short] == held["student", long]


# --- what cannot be measured ------------------------------------------------------------------------------------------


def test_without_a_teacher_the_student_is_measured_alone() -> None:
    found = card(
        [candidate("student", copying(30.0)), candidate("ablated", Fake(vocab_size=VOCABULARY))],
        missing=["teacher", "window_sinks"],
    )
    assert (found.far_context, found.copying, found.speed) == (None, None, [])
    assert [comparison.other for comparison in found.comparisons] == ["ablated"]
    assert found.lines()[-1] == f"Not measured: teacher, {LABELS['window_sinks']}."
    assert all(measured.copying is not None for measured in found.measured)


@pytest.mark.usefixtures("no_speed")
@pytest.mark.parametrize("max_positions, length", [(2 * WINDOW + 2, 2), (2 * WINDOW + 1, 0), (WINDOW, 0)])
def test_models_that_are_too_short_for_copying(max_positions: int, length: int) -> None:
    found = card(fakes(copying(30.0), copying(30.0)), max_positions=max_positions)
    if length:
        assert found.copying_missing is None
        return
    reason = f"not measurable: a repeat at 16 tokens does not fit the model's {max_positions} positions"
    assert found.copying_missing == reason
    assert found.copying is None
    assert all(measured.copying is None for measured in found.measured)
    assert f"Copying from beyond the window: {reason}." in found.lines()


@pytest.mark.usefixtures("no_speed")
def test_text_that_ends_within_the_window() -> None:
    rows = tiny.packed([[WINDOW] * 4] * 3)
    found = card(fakes(copying(30.0), copying(30.0)), rows=rows)
    assert all(comparison.beyond is None for comparison in found.comparisons)
    assert not any("Beyond" in comparison.words for comparison in found.comparisons)
    assert found.far_context.words.startswith("not measurable on this text: no token stands more than 8 tokens")
    assert "| - |" in found.to_markdown()


@pytest.mark.usefixtures("no_speed")
def test_one_model_at_a_time() -> None:
    opened: list[str] = []
    card([candidate(name, copying(3.0), opened) for name in ("window", "student", "ablated")])
    assert opened == ["window", "window closed", "student", "student closed", "ablated", "ablated closed"]


# --- as text ----------------------------------------------------------------------------------------------------------


def test_markdown_and_json_are_well_formed(real_card: ReportCard) -> None:
    found = real_card
    plain = found.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert list(plain) == [name for name in ReportCard.__dataclass_fields__ if name != "examination"]
    assert plain["missing"] == [LABELS["ablated"]]
    assert plain["measured"][1]["label"] == "student"
    assert plain["measured"][1]["quality"]["loss"]["mean"] == found.measured[1].quality.loss.mean

    quality, speed, findings = found.to_markdown().split("\n\n")
    for table, columns, rows in ((quality, 5, 3), (speed, 5, 4)):
        lines = table.strip().splitlines()
        assert len(lines) == 2 + rows
        assert lines[1] == "| " + " | ".join(["---"] * columns) + " |"
        assert all(line.startswith("| ") and line.endswith(" |") and line.count(" | ") == columns - 1 for line in lines)
    mean = found.measured[0].quality.loss
    assert quality.splitlines()[2].startswith(f"| teacher | {mean.mean:.3f} [{mean.low:.2f}, {mean.high:.2f}] | ")
    assert quality.splitlines()[2].endswith(" | note on teacher |")
    assert findings.splitlines() == [f"- {line}" for line in found.lines()]
    assert found.lines()[-1] == f"Not measured: {LABELS['ablated']}."


def test_the_terminal_shows_the_same(real_card: ReportCard) -> None:
    console = Console(width=250, file=StringIO())
    console.print(real_card.render())
    shown = console.file.getvalue()
    mean = real_card.measured[1].quality.loss
    speed = real_card.speed[0]
    for text in (f"{mean.mean:.3f} [{mean.low:.2f}, {mean.high:.2f}]", f"{speed.cache_bytes:,}", *real_card.lines()):
        assert text in shown


def test_a_task_stands_before_the_losses(real_card: ReportCard) -> None:
    rouge = Interval(0.31, 0.29, 0.33)
    lines = [Scored("student", "student", "its note", {"rouge1": rouge}, None)]
    task = TaskReport("summarization", ("rouge1",), 40, lines, [], {}, {"auto_class": "AutoModelForCausalLM"})
    found = replace(real_card, task=task)
    plain = found.to_json()
    assert plain["task"] == task.to_json() and plain["task"]["auto_class"] == "AutoModelForCausalLM"
    assert real_card.to_json()["task"] is None
    said = "ROUGE-1: the student has 0.310 [0.290, 0.330] on 40 held-out examples."
    assert found.lines() == [said, *real_card.lines()]
    caption, table, rest = found.to_markdown().split("\n\n", 2)
    assert caption.startswith("Summarization, 40 examples") and table.endswith("| - | its note |")
    assert rest.split("\n\n")[:2] == real_card.to_markdown().split("\n\n")[:2]
    console = Console(width=250, file=StringIO())
    console.print(found.render())
    assert "Summarization, 40 examples" in console.file.getvalue() and "0.310 [0.290, 0.330]" in console.file.getvalue()


def test_every_candidate_has_a_label() -> None:
    assert len(LABELS) == 9
    assert len(set(LABELS.values())) == 9


def test_memory_is_told_from_two_lengths() -> None:
    second = Spread(1.0, 1.0, 1.0)

    def held(teacher: tuple[int, int], student: tuple[int, int]) -> str:
        pairs = [("teacher", teacher), ("student", student)]
        lengths = (100, 100 + 200)
        return memory_in_words(
            [Speed(n, length, second, second, b) for n, both in pairs for length, b in zip(lengths, both, strict=True)]
        )

    # 10 bytes per token against a constant 500: 50 tokens are as much, 51 are more.
    tokens = (100 + report_card.NEW_TOKENS, 300 + report_card.NEW_TOKENS)
    constant = held((10 * tokens[0], 10 * tokens[1]), (500, 500))
    assert "grows by 10 bytes per token; the student holds 500 bytes, " in constant
    assert constant.endswith("from 51 tokens on.")
    # A layer that stays softmax: 4 bytes per token are left, 6 are saved.
    mixed = held((10 * tokens[0], 10 * tokens[1]), (500 + 4 * tokens[0], 500 + 4 * tokens[1]))
    assert "500 bytes and 4 per token" in mixed
    assert mixed.endswith("from 84 tokens on.")
    assert held((10 * tokens[0], 10 * tokens[1]), (10 * tokens[0], 10 * tokens[1])).endswith(
        "never less than the teacher."
    )
