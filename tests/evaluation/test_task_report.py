"""The report on a task, for answers whose scores are known by construction, and for real models of a decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import linearize
from linearize.base import UserError
from linearize.evaluation import task_report
from linearize.evaluation.candidates import LABELS, Candidate
from linearize.evaluation.config import EvaluationConfig
from linearize.evaluation.metrics import Answered, Predictions, Similarities
from linearize.evaluation.task_report import TaskCard, measure_task
from tests import tiny

EXAMPLES = 200
CONFIG = EvaluationConfig(bootstrap_samples=300, examine=False)
DESCRIPTION = {"auto_class": "AutoModelForSequenceClassification", "pipeline_tag": "text-classification"}


def candidate(name: str, model: Any, opened: list[str] | None = None) -> Candidate:
    @contextmanager
    def open_() -> Iterator[Any]:
        if opened is not None:
            opened.append(name)
        yield model
        if opened is not None:
            opened.append(f"{name} closed")

    return Candidate(name, open_, f"note on {name}")


def right(where: Tensor, metrics: tuple[str, ...] = ("accuracy",)) -> Predictions:
    """Of two classes, all of them class 1, named where `where` says so."""
    outputs = torch.nn.functional.one_hot(where.long(), 2).float()
    return Predictions(outputs, torch.ones(len(where), dtype=torch.int64), torch.arange(len(where)), metrics)


def every(step: int, size: int = EXAMPLES) -> Tensor:
    """All but each `step`-th."""
    return torch.arange(size) % step != 0


def card(answers: dict[str, Any], opened: list[str] | None = None, **options: Any) -> TaskCard:
    """The models are their own answers."""

    def answer(model: Any, title: str) -> Answered:
        if opened is not None:
            opened.append(title)
        return model

    chosen = dict(task="text_classification", description=DESCRIPTION, config=CONFIG, seed=0) | options
    return measure_task([candidate(name, model, opened) for name, model in answers.items()], answer, **chosen)


@pytest.fixture(autouse=True)
def _uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage after every model would be nearly all that these tests do."""
    monkeypatch.setattr(task_report, "gc", SimpleNamespace(collect=lambda: None))


# --- known answers ----------------------------------------------------------------------------------------------------


def test_scores_differences_and_recovery_are_the_known_ones() -> None:
    found = card({"teacher": right(every(10)), "student": right(every(5)), "teacher_lora": right(every(5))}).task
    assert (found.type, found.metrics, found.examples) == ("text_classification", ("accuracy",), EXAMPLES)
    teacher, student, tuned = (line.scores["accuracy"] for line in found.scored)
    assert (teacher.mean, student.mean) == (0.9, 0.8)
    for interval, share in ((teacher, 0.9), (student, 0.8)):
        assert interval.low < share < interval.high
        width = 2 * 1.96 * (share * (1 - share) / EXAMPLES) ** 0.5
        assert interval.high - interval.low == pytest.approx(width, rel=0.2)

    worse, level = found.differences
    assert (worse.other, worse.metric, level.other) == ("teacher", "accuracy", "teacher_lora")
    assert worse.difference.mean == pytest.approx(-0.1)
    assert worse.words.startswith("Accuracy: the student is worse than the teacher: 0.100 less (95 % interval 0.0")
    assert worse.words.endswith(
        "0.800 [" + f"{student.low:.3f}, {student.high:.3f}] against 0.900 [{teacher.low:.3f}, {teacher.high:.3f}]."
    )
    assert "are level as far as this can show (+0.000, 95 % interval +0.000 to +0.000)" in level.words
    assert student == tuned

    recovery = found.recovery["accuracy"]
    assert recovery is not None and recovery.mean == pytest.approx(8 / 9)
    assert recovery.low < 8 / 9 < recovery.high < 1
    assert [line.agreement and line.agreement.mean for line in found.scored] == [None, 0.9, 0.9]


def test_differences_are_paired() -> None:
    """Both are wrong on the same examples, but for two: the interval is far narrower than that of either."""
    teacher = every(2)
    student = teacher.clone()
    student[[1, 3]] = False
    found = card({"teacher": right(teacher), "student": right(student)}).task
    difference, score = found.differences[0].difference, found.scored[1].scores["accuracy"]
    assert difference.mean == pytest.approx(-0.01)
    assert difference.high - difference.low < 0.25 * (score.high - score.low)
    recovery = found.recovery["accuracy"]
    assert recovery is not None and 0.94 < recovery.low < 0.98 < recovery.high <= 1.0


def test_a_better_student_is_called_better_and_recovers_more_than_all() -> None:
    found = card({"teacher": right(every(2)), "student": right(every(10))}).task
    assert "the student is better than the teacher: 0.400 more" in found.differences[0].words
    recovery = found.recovery["accuracy"]
    assert recovery is not None and recovery.mean == pytest.approx(1.8) and recovery.low > 1


def test_few_examples_decide_nothing() -> None:
    found = card({"teacher": right(every(5, size=10)), "student": right(every(4, size=10))}).task
    assert "are level as far as this can show (-0.100, " in found.differences[0].words


def test_nothing_is_recovered_of_a_teacher_without_a_score() -> None:
    flat = torch.zeros(EXAMPLES, dtype=torch.bool)
    found = card({"teacher": right(flat), "student": right(every(2))}).task
    assert found.recovery == {"accuracy": None}
    assert "Accuracy: the teacher's score is not above 0 for certain, so no share of it." in found.lines()
    # Of a correlation around 0, some resamples are above 0 and some below.
    labels = torch.randn(50, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(50, 1, generator=torch.Generator().manual_seed(1))
    ranked = {
        name: Predictions(outputs, labels, torch.arange(50), ("spearman",))
        for name, outputs in (("teacher", noise), ("student", labels[:, None]))
    }
    assert card(ranked).task.recovery == {"spearman": None}


def test_the_first_metric_comes_first_everywhere() -> None:
    metrics = ("matthews", "f1", "accuracy")
    labels = every(2).long()
    made = {
        name: Predictions(
            torch.nn.functional.one_hot(answers.long(), 2).float(), labels, torch.arange(EXAMPLES), metrics
        )
        for name, answers in (("teacher", every(2)), ("student", every(3)))
    }
    found = card(made)
    assert found.task.metrics == metrics and list(found.task.scored[0].scores) == list(metrics)
    assert [difference.metric for difference in found.task.differences] == list(metrics)
    assert found.lines()[0].startswith("Matthews correlation: the student is worse than the teacher")
    assert list(found.task.recovery) == list(metrics)


def test_similarities_have_no_agreement() -> None:
    values = torch.rand(EXAMPLES, generator=torch.Generator().manual_seed(0))
    found = card(
        {"teacher": Similarities({"cosine": torch.ones(EXAMPLES)}), "student": Similarities({"cosine": values})}
    )
    student = found.task.scored[1]
    assert student.scores["cosine"].mean == pytest.approx(values.double().mean().item())
    assert student.agreement is None
    assert not any("answer is the teacher's" in line for line in found.lines())


# --- without a teacher, with heads ------------------------------------------------------------------------------------


def test_without_a_teacher_there_are_scores_only() -> None:
    found = card({"student": right(every(5))}, missing=["teacher"])
    assert found.task.differences == [] and found.task.recovery == {}
    assert found.task.scored[0].agreement is None
    first, *_, last = found.lines()
    assert first.startswith("Accuracy: the student has 0.800 [0.") and first.endswith("on 200 held-out examples.")
    assert last == "Not measured: teacher."


def test_one_model_at_a_time() -> None:
    opened: list[str] = []
    card({"teacher": right(every(2)), "student": right(every(3))}, opened)
    told = [f"measuring: {LABELS[name]}" for name in ("teacher", "student")]
    assert opened == ["teacher", told[0], "teacher closed", "student", told[1], "student closed"]


def with_heads(monkeypatch: pytest.MonkeyPatch | None = None, **options: Any) -> TaskCard:
    student = linearize.convert(tiny.llama(), tiny.recipe())
    examined = CONFIG.model_copy(update={"examine": True, "fidelity_tokens": 128})
    answers = right(every(5))
    return measure_task(
        [candidate("student", student)],
        lambda model, title: answers,
        **dict(task="recall", description={}, config=examined, seed=0, rows=tiny.packed([[64]] * 4)) | options,
    )


def test_the_students_heads_are_looked_at() -> None:
    found = with_heads()
    assert found.fidelity is not None and len(found.fidelity.layers) == 2
    plain = found.to_json()
    assert plain["fidelity"]["layers"] and plain["fidelity"]["maps"] and plain["not_measured"] == {}


def test_heads_are_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_heads(config=CONFIG).not_measured == {"fidelity": "not asked for, evaluation.examine is false"}
    without = with_heads(rows=None)
    assert without.fidelity is None and without.not_measured == {}

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("fidelity: expected a model with heads, found none; use another")

    monkeypatch.setattr(task_report, "measure_fidelity", refuse)
    refused = with_heads()
    assert refused.fidelity is None
    assert refused.lines()[-1] == (
        "Not measured, fidelity: fidelity: expected a model with heads, found none; use another."
    )
    assert refused.task.scored[0].scores["accuracy"].mean == 0.8


# --- as text ----------------------------------------------------------------------------------------------------------


def test_json_markdown_and_the_terminal_say_the_same() -> None:
    found = card({"teacher": right(every(10)), "student": right(every(5))}, missing=["teacher_lora"])
    plain = found.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert list(plain) == ["task", "fidelity", "missing", "not_measured", "provenance"]
    assert plain["missing"] == [LABELS["teacher_lora"]]
    task = plain["task"]
    assert task["auto_class"] == "AutoModelForSequenceClassification" and task["type"] == "text_classification"
    assert task["metrics"] == ["accuracy"] and task["examples"] == EXAMPLES
    assert task["scored"][1]["scores"]["accuracy"]["mean"] == 0.8
    assert set(task["scored"][1]) == {"name", "label", "note", "scores", "agreement"}

    caption, table, findings = found.to_markdown().split("\n\n")
    assert caption == "Text classification, 200 examples, with 95 % intervals (higher is better)"
    lines = table.strip().splitlines()
    assert lines[0] == "| model | accuracy | teacher's answers | what it is |"
    assert lines[2].startswith("| teacher | 0.900 [") and lines[2].endswith("| - | note on teacher |")
    assert lines[3].startswith("| student | 0.800 [") and "| 90.0 % [" in lines[3]
    assert findings.splitlines() == [f"- {line}" for line in found.lines()]

    console = Console(width=300, file=StringIO())
    console.print(found.render())
    shown = console.file.getvalue()
    for text in (lines[3].split(" | ")[1], *found.lines()):
        assert text in shown
