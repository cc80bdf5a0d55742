"""Scores against scikit-learn and scipy, whole and under resamples; what is not defined is 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.base import UserError
from linearize.evaluation.metrics import METRICS, Predictions, Similarities, bootstrapped, title

CLASSIFYING = ("accuracy", "f1", "matthews")


def oracle(metric: str, labels: Any, answers: Any, classes: int) -> float:
    import scipy.stats
    from sklearn import metrics

    average = "binary" if classes == 2 else "macro"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Callable[[], Any]] = {
            "accuracy": lambda: metrics.accuracy_score(labels, answers),
            "f1": lambda: metrics.f1_score(labels, answers, average=average),
            "matthews": lambda: metrics.matthews_corrcoef(labels, answers),
            "spearman": lambda: scipy.stats.spearmanr(labels, answers).statistic,
        }
        return float(found[metric]())


def classified(size: int, classes: int, seed: int = 0, metrics: tuple[str, ...] = CLASSIFYING) -> Predictions:
    """Answers that are right about half of the time."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (size,), generator=generator)
    outputs = torch.randn(size, classes, generator=generator) + torch.nn.functional.one_hot(labels, classes)
    return Predictions(outputs, labels, torch.arange(size), metrics)


def named(classes: Tensor, labels: Tensor, example: Tensor | None = None, size: int = 2, **options: Any) -> Predictions:
    """Answers that name these classes."""
    outputs = torch.nn.functional.one_hot(classes, size).float()
    where = torch.arange(len(labels)) if example is None else example
    return Predictions(outputs, labels, where, options.get("metrics", CLASSIFYING))


# --- against others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_scores_of_classes_are_those_of_scikit_learn(classes: int) -> None:
    found = classified(60, classes)
    answers = found.outputs.argmax(1)
    for name, score in found.scores().items():
        assert score == pytest.approx(oracle(name, found.labels, answers, classes), abs=1e-9), name
    assert list(found.scores()) == list(CLASSIFYING)


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_is_that_of_scipy(ties: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randn(50, generator=generator)
    values = labels + torch.randn(50, generator=generator)
    if ties:
        labels, values = (5 * labels / 5).round(), values.round()
        assert len(labels.unique()) < 10
    found = Predictions(values[:, None], labels, torch.arange(50), ("spearman",))
    assert found.scores()["spearman"] == pytest.approx(oracle("spearman", labels, values, 1), abs=1e-9)
    index = torch.randint(50, (50,), generator=generator)
    assert found.scores(index)["spearman"] == pytest.approx(
        oracle("spearman", labels[index], values[index], 1), abs=1e-9
    )


@pytest.mark.parametrize("classes", [2, 4])
def test_what_is_drawn_twice_counts_twice(classes: int) -> None:
    found = classified(25, classes)
    answers, generator = found.outputs.argmax(1), torch.Generator().manual_seed(2)
    for _ in range(20):
        index = torch.randint(25, (25,), generator=generator)
        for name, score in found.scores(index).items():
            assert score == pytest.approx(oracle(name, found.labels[index], answers[index], classes), abs=1e-9), name


def test_answers_of_one_example_are_drawn_together() -> None:
    # Example 7 has three answers, of which one is right; example 3 has one, and that is right.
    found = named(torch.tensor([1, 0, 0, 1]), torch.tensor([1, 1, 1, 1]), torch.tensor([7, 7, 7, 3]))
    assert len(found) == 2
    assert found.scores()["accuracy"] == 0.5
    assert found.scores(torch.tensor([0, 0]))["accuracy"] == 1.0  # the example of the lowest number comes first
    assert found.scores(torch.tensor([1]))["accuracy"] == pytest.approx(1 / 3)
    assert found.scores(torch.tensor([0, 0, 1]))["accuracy"] == pytest.approx(3 / 5)


# --- where nothing is defined -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("answered, true", [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_of_one_class_only(classes: int, answered: int, true: int) -> None:
    answers, labels = torch.full((4,), answered), torch.full((4,), true)
    scores = named(answers, labels, size=classes).scores()
    for name, score in scores.items():
        assert score == oracle(name, labels, answers, classes), name
    assert scores["matthews"] == 0.0


def test_equal_values_have_no_rank() -> None:
    level = Predictions(torch.zeros(3, 1), torch.tensor([1.0, 2.0, 3.0]), torch.arange(3), ("spearman",))
    assert level.scores() == {"spearman": 0.0}
    rising = Predictions(torch.arange(3.0)[:, None], torch.tensor([1.0, 2.0, 3.0]), torch.arange(3), ("spearman",))
    assert rising.scores() == {"spearman": 1.0}
    assert rising.scores(torch.tensor([2, 2, 2])) == {"spearman": 0.0}


@pytest.mark.usefixtures("few")
def test_resamples_of_one_class_do_not_end_the_bootstrap() -> None:
    few = named(torch.tensor([0, 1]), torch.tensor([0, 1]))
    draws = bootstrapped({"student": few}, samples=40)["student"]
    assert all(draw.isfinite().all() for draw in draws.values())
    assert draws["matthews"].unique().tolist() == [0.0, 1.0]


# --- resamples --------------------------------------------------------------------------------------------------------


def test_all_models_get_the_same_resamples() -> None:
    first = classified(40, 3)
    twin = Predictions(2 * first.outputs, first.labels, first.example, first.metrics)
    draws = bootstrapped({"teacher": first, "student": twin}, samples=30, seed=5)
    for name in CLASSIFYING:
        assert draws["teacher"][name].shape == (30,)
        assert torch.equal(draws["teacher"][name], draws["student"][name])
        assert len(draws["teacher"][name].unique()) > 3
    again = bootstrapped({"student": twin}, samples=30, seed=5)["student"]["accuracy"]
    other = bootstrapped({"student": twin}, samples=30, seed=6)["student"]["accuracy"]
    assert torch.equal(again, draws["student"]["accuracy"]) and not torch.equal(other, again)


def test_the_spread_of_resamples_is_the_standard_error() -> None:
    labels = torch.ones(200, dtype=torch.int64)
    found = named((torch.arange(200) % 4 != 0).long(), labels, metrics=("accuracy",))
    draws = bootstrapped({"student": found}, samples=2000)["student"]["accuracy"]
    assert draws.mean().item() == pytest.approx(0.75, abs=0.005)
    assert draws.std().item() == pytest.approx((0.75 * 0.25 / 200) ** 0.5, rel=0.1)


def test_answers_to_other_examples_are_not_compared() -> None:
    a, b = classified(10, 2), classified(11, 2)
    with pytest.raises(ValueError, match=r"same examples, found a: 10 \(accuracy, f1, matthews\), b: 11"):
        bootstrapped({"a": a, "b": b})
    with pytest.raises(ValueError, match="to the same examples"):
        bootstrapped({"a": a, "b": classified(10, 2, metrics=("f1",))})
    with pytest.raises(UserError, match=r"at least 16 documents or examples, .*, found 15; give more"):
        bootstrapped({"a": classified(15, 2)})


# --- agreement and similarities ---------------------------------------------------------------------------------------


def test_agreement_is_of_answers_right_or_wrong() -> None:
    labels, example = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 2])
    a, b = named(torch.tensor([1, 1, 0, 0]), labels, example), named(torch.tensor([1, 0, 0, 1]), labels, example)
    alike = a.agreement(b)
    assert alike is not None and alike.tolist() == [0.5, 1.0, 0.0]
    values = Predictions(torch.ones(2, 1), torch.ones(2), torch.arange(2), ("spearman",))
    assert values.agreement(values) is None


def test_a_similarity_is_scored_by_its_mean() -> None:
    found = Similarities({"rouge1": torch.tensor([0.2, 0.4]), "rougeL": torch.tensor([0.0, 1.0])})
    assert len(found) == 2 and found.metrics == ("rouge1", "rougeL")
    assert found.scores() == pytest.approx({"rouge1": 0.3, "rougeL": 0.5})
    assert found.scores(torch.tensor([0, 1, 1, 1])) == pytest.approx({"rouge1": 0.35, "rougeL": 0.75})
    assert found.agreement(found) is None
    assert title("rougeL") == "ROUGE-L" and title("exact_match") == "exact match"


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_numbers_must_be_finite() -> None:
    broken = torch.tensor([[0.0, 1.0], [float("nan"), 0.0]])
    with pytest.raises(FloatingPointError, match="of 1 of 2 answers are not finite"):
        Predictions(broken, torch.tensor([0, 1]), torch.arange(2), ("accuracy",))
    with pytest.raises(FloatingPointError, match="cosine has values that are not finite"):
        Similarities({"cosine": broken[1]})
    assert set(METRICS) == {"accuracy", "f1", "matthews", "spearman"}
