"""Scores at a task, for answers whose scores are known by construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.configs.tasks import TextClassification
from linearize.evaluation.candidates import LABELS
from linearize.evaluation.metrics import Answered, Predictions, Similarities
from linearize.evaluation.scores import TaskScores, score_task
from tests import tiny
from tests.evaluation.fakes import candidate

pytestmark = pytest.mark.usefixtures("few")

EXAMPLES = 200


def right(where: Tensor, metrics: tuple[str, ...] = ("accuracy",)) -> Predictions:
    """Examples of class 1 of two, which is named where `where` says so."""
    outputs = torch.nn.functional.one_hot(where.long(), 2).float()
    return Predictions(outputs, torch.ones(len(where), dtype=torch.int64), torch.arange(len(where)), metrics)


def every(step: int, size: int = EXAMPLES) -> Tensor:
    """All but each `step`-th."""
    return torch.arange(size) % step != 0


def scored(answers: dict[str, Any], opened: list[str] | None = None) -> TaskScores:
    """The models are their own answers."""

    def answer(model: Any, title: str) -> Answered:
        if opened is not None:
            opened.append(title)
        return model

    candidates = [candidate(name, model, opened) for name, model in answers.items()]
    with tiny.quick_measures():
        return score_task(candidates, answer, TextClassification(), samples=300, seed=0)


def test_scores_differences_and_recovery_are_the_known_ones() -> None:
    found = scored({"teacher": right(every(10)), "student": right(every(5)), "teacher_finetuned": right(every(5))})
    assert (found.type, found.auto_class) == ("text_classification", "AutoModelForSequenceClassification")
    assert (found.pipeline_tag, found.metrics, found.examples) == ("text-classification", ("accuracy",), EXAMPLES)
    assert (found.scored[1].label, found.scored[1].note) == ("student", "note on student")
    teacher, student, tuned = (line.scores["accuracy"] for line in found.scored)
    assert (teacher.mean, student.mean) == (0.9, 0.8)
    for interval, share in ((teacher, 0.9), (student, 0.8)):
        assert interval.low < share < interval.high
        width = 2 * 1.96 * (share * (1 - share) / EXAMPLES) ** 0.5
        assert interval.high - interval.low == pytest.approx(width, rel=0.2)

    worse, level = found.differences
    assert (worse.other, worse.metric, level.other) == ("teacher", "accuracy", "teacher_finetuned")
    assert worse.difference.mean == pytest.approx(-0.1)
    assert worse.difference.low < worse.difference.high < 0
    assert (level.difference.low, level.difference.high) == (0, 0)
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
    found = scored({"teacher": right(teacher), "student": right(student)})
    difference, score = found.differences[0].difference, found.scored[1].scores["accuracy"]
    assert difference.mean == pytest.approx(-0.01)
    assert difference.high - difference.low < 0.25 * (score.high - score.low)
    recovery = found.recovery["accuracy"]
    assert recovery is not None and 0.94 < recovery.low < 0.98 < recovery.high <= 1.0


def test_a_better_student_recovers_more_than_all_and_few_examples_decide_nothing() -> None:
    found = scored({"teacher": right(every(2)), "student": right(every(10))})
    assert found.differences[0].difference.mean == pytest.approx(0.4)
    recovery = found.recovery["accuracy"]
    assert recovery is not None and recovery.mean == pytest.approx(1.8) and recovery.low > 1
    few = scored({"teacher": right(every(5, size=10)), "student": right(every(4, size=10))}).differences[0].difference
    assert few.mean == pytest.approx(-0.1) and few.low < 0 < few.high


def test_nothing_is_recovered_of_a_teacher_without_a_score() -> None:
    flat = torch.zeros(EXAMPLES, dtype=torch.bool)
    assert scored({"teacher": right(flat), "student": right(every(2))}).recovery == {"accuracy": None}
    # Of a correlation around 0, some resamples are above 0 and some below.
    labels = torch.randn(50, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(50, 1, generator=torch.Generator().manual_seed(1))
    ranked = {
        name: Predictions(outputs, labels, torch.arange(50), ("spearman",))
        for name, outputs in (("teacher", noise), ("student", labels[:, None]))
    }
    assert scored(ranked).recovery == {"spearman": None}


def test_the_first_metric_comes_first_everywhere() -> None:
    metrics = ("matthews", "f1", "accuracy")
    answers = {"teacher": right(every(2), metrics), "student": right(every(3), metrics)}
    found = scored(answers)
    assert found.metrics == metrics and list(found.scored[0].scores) == list(metrics)
    assert [difference.metric for difference in found.differences] == list(metrics)
    assert list(found.recovery) == list(metrics)


def test_similarities_have_no_agreement() -> None:
    values = torch.rand(EXAMPLES, generator=torch.Generator().manual_seed(0))
    found = scored(
        {"teacher": Similarities({"cosine": torch.ones(EXAMPLES)}), "student": Similarities({"cosine": values})}
    )
    assert found.scored[1].scores["cosine"].mean == pytest.approx(values.double().mean().item())
    assert found.scored[1].agreement is None


def test_without_a_teacher_there_are_scores_only() -> None:
    found = scored({"student": right(every(5))})
    assert found.differences == [] and found.recovery == {}
    assert found.scored[0].agreement is None


def test_one_model_at_a_time() -> None:
    opened: list[str] = []
    scored({"teacher": right(every(2)), "student": right(every(3))}, opened)
    told = [f"measuring: {LABELS[name]}" for name in ("teacher", "student")]
    assert opened == ["teacher", told[0], "teacher closed", "student", told[1], "student closed"]
