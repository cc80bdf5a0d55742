"""Score a model's answers to held-out examples, by metric, and in resamples of the examples.

The first metric of a model's answers is the main one, and higher scores are better. A score is 0 if a resample does not
define it, because it has a single class or equal values; scikit-learn has the same default.

Axes: E examples, N answers (one or more per example, like the tokens of a sentence), C classes, I drawn examples, S
bootstrap resamples; in `rank_correlation` K numbers, of H rows or more axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.evaluation.intervals import resamples

Score = Callable[["Predictions", Tensor], float]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Classes (integer labels, the greatest of C outputs is the answer) or values (real labels, C = 1).

    Args:
        outputs: logits, or the value.
        example: the example of each answer; resamples draw examples with all of their answers.
        metrics: names in `METRICS`.

    Raises:
        FloatingPointError: an output is not a finite number.
    """

    outputs: Float[Tensor, "N C"]
    labels: Int[Tensor, " N"] | Float[Tensor, " N"]
    example: Int[Tensor, " N"]
    metrics: tuple[str, ...]

    def __post_init__(self) -> None:
        if bad := int((~self.outputs.isfinite()).any(dim=1).sum()):
            raise FloatingPointError(f"predictions: the outputs of {bad} of {len(self.outputs)} answers are not finite")

    def __len__(self) -> int:
        return int(self.place.max()) + 1

    def scores(self, index: Int[Tensor, " I"] | None = None) -> dict[str, float]:
        """Return the score of each metric, over all examples or those drawn; one drawn twice counts twice."""
        drawn = torch.arange(len(self)) if index is None else index
        weight = torch.bincount(drawn, minlength=len(self)).double()[self.place]
        return {name: METRICS[name](self, weight) for name in self.metrics}

    def agreement(self, other: Answered) -> Float[Tensor, " E"] | None:
        """Return the share of equal answers to the same examples, by example; None: the answers are values."""
        assert isinstance(other, Predictions)
        if self.labels.is_floating_point():
            return None
        equal = torch.bincount(self.place, (self.classes == other.classes).double(), minlength=len(self))
        return (equal / torch.bincount(self.place, minlength=len(self))).float()

    @cached_property
    def place(self) -> Int[Tensor, " N"]:
        """Return the index of each answer's example among all that have answers, from 0."""
        return self.example.cpu().unique(return_inverse=True)[1]

    @cached_property
    def classes(self) -> Int[Tensor, " N"]:
        """Return the predicted class of each answer."""
        return self.outputs.argmax(dim=1).cpu()

    @cached_property
    def truth(self) -> Int[Tensor, " N"] | Float[Tensor, " N"]:
        return self.labels.cpu()


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """Predictions of masked tokens in a text.

    Args:
        right: whether the most likely token is the right one.
        log_likelihood: of the right token, in nats.
        tokens: the most likely token.
        example: as in `Predictions`.

    Raises:
        FloatingPointError: a likelihood is not a finite number.
    """

    right: Bool[Tensor, " N"]
    log_likelihood: Float[Tensor, " N"]
    tokens: Int[Tensor, " N"]
    example: Int[Tensor, " N"]

    metrics = ("accuracy", "likelihood")

    def __post_init__(self) -> None:
        if not self.log_likelihood.isfinite().all():
            raise FloatingPointError("predictions: likelihoods of masked tokens are not finite")

    def __len__(self) -> int:
        return int(self.example.max()) + 1

    def scores(self, index: Int[Tensor, " I"] | None = None) -> dict[str, float]:
        """Return the share of right tokens, and the geometric mean of likelihoods (the mean loss is minus its log)."""
        drawn = torch.arange(len(self)) if index is None else index
        weight = torch.bincount(drawn, minlength=len(self)).double()[self.example]
        accuracy, log = (float(x.double() @ weight / weight.sum()) for x in (self.right, self.log_likelihood))
        return {"accuracy": accuracy, "likelihood": math.exp(log)}

    def agreement(self, other: Answered) -> Float[Tensor, " E"] | None:
        """Return the share of equal answers to the same examples, by example."""
        assert isinstance(other, MaskedTokens)
        equal = torch.bincount(self.example, (self.tokens == other.tokens).double())
        return (equal / torch.bincount(self.example)).float()


@dataclass(frozen=True, eq=False)
class Similarities:
    """A number per example and metric, such as the cosine to the teacher's embedding or ROUGE; scores are means.

    Raises:
        FloatingPointError: a value is not a finite number.
    """

    values: dict[str, Float[Tensor, " _"]]

    def __post_init__(self) -> None:
        if bad := [name for name, x in self.values.items() if not x.isfinite().all()]:
            raise FloatingPointError(f"similarities: {', '.join(bad)} has values that are not finite numbers")

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.values)

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def scores(self, index: Int[Tensor, " I"] | None = None) -> dict[str, float]:
        chosen = slice(None) if index is None else index
        return {name: x.cpu().double()[chosen].mean().item() for name, x in self.values.items()}

    def agreement(self, other: Answered) -> None:
        """Return None, because the answers are values."""


Answered = Predictions | MaskedTokens | Similarities
"""The answers of one model to E examples."""


def bootstrapped(
    answered: Mapping[str, Answered], *, samples: int = 1000, seed: int = 0
) -> dict[str, dict[str, Float[Tensor, " S"]]]:
    """Return each model's scores in the same `samples` resamples of the examples, so that differences are paired.

    Raises:
        ValueError: the models' numbers of examples or metrics differ.
        UserError: too few examples (`intervals.resamples`).
    """
    if len({(len(answers), answers.metrics) for answers in answered.values()}) != 1:
        found = ", ".join(f"{name}: {len(x)} ({', '.join(x.metrics)})" for name, x in answered.items())
        raise ValueError(f"expected answers of all models to the same examples, found {found or 'none'}")
    size = len(next(iter(answered.values())))
    draws: dict[str, list[dict[str, float]]] = {name: [] for name in answered}
    for index in resamples(size, samples=samples, seed=seed):
        for name, answers in answered.items():
            draws[name].append(answers.scores(index))
    return {
        name: {metric: torch.tensor([d[metric] for d in found], dtype=torch.float64) for metric in answers.metrics}
        for (name, answers), found in zip(answered.items(), draws.values(), strict=True)
    }


# --- formulas: `weight` is how often each answer counts ---------------------------------------------------------------


def accuracy(found: Predictions, weight: Float[Tensor, " N"]) -> float:
    """Return the share of right answers."""
    return _ratio(float(weight[found.classes == found.truth].sum()), float(weight.sum()))


def f1(found: Predictions, weight: Float[Tensor, " N"]) -> float:
    """Return F1, 2 right / (named + true): of class 1 if there are two, else the mean over classes that occur."""
    right, named, true = _counts(found, weight)
    classes = [1] if len(right) == 2 else (named + true).nonzero().flatten().tolist()
    return sum(_ratio(float(2 * right[c]), float(named[c] + true[c])) for c in classes) / max(1, len(classes))


def matthews(found: Predictions, weight: Float[Tensor, " N"]) -> float:
    """Return the correlation of two classifications (Gorodkin 2004); for two classes, Matthews' coefficient."""
    right, named, true = _counts(found, weight)
    total = weight.sum()
    covariance = right.sum() * total - named @ true
    spread = (total**2 - named @ named) * (total**2 - true @ true)
    return _ratio(float(covariance), float(spread.clamp(min=0)) ** 0.5)


def spearman(found: Predictions, weight: Float[Tensor, " N"]) -> float:
    """Return Spearman's rank correlation of outputs and true values."""
    drawn = torch.arange(len(weight)).repeat_interleave(weight.long())
    x, y = found.outputs[:, 0].cpu()[drawn], found.truth[drawn]
    return float(rank_correlation(x, y, torch.ones(len(drawn), dtype=torch.bool)))


def rank_correlation(
    x: Float[Tensor, "*H K"], y: Float[Tensor, "*H K"], seen: Bool[Tensor, "*C K"]
) -> Float[Tensor, "*H"]:
    """Return Spearman's rho over the numbers where `seen`; equal ones share their mean rank; 0 if all are equal."""
    count = seen.sum(-1, keepdim=True)
    # The mean of the ranks 0 .. count - 1 is the same with and without ties.
    x, y = ((_ranks(z, seen) - (count - 1) / 2) * seen for z in (x, y))
    spread = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return (x * y).sum(-1) / spread.clamp_min(1e-9)


def _ranks(x: Float[Tensor, "*H K"], seen: Bool[Tensor, "*C K"]) -> Float[Tensor, "*H K"]:
    """Return ranks from 0 among the numbers where `seen`; equal ones share their mean rank."""
    x = x.masked_fill(~seen, torch.inf).contiguous()
    ordered = x.sort(-1).values
    first, end = (torch.searchsorted(ordered, x, right=right) for right in (False, True))
    return (first + end - 1).double() / 2


METRICS: dict[str, Score] = {"accuracy": accuracy, "f1": f1, "matthews": matthews, "spearman": spearman}
TITLES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews correlation",
    "spearman": "Spearman correlation",
    "cosine": "cosine similarity",
    "likelihood": "likelihood of masked tokens",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
}


def title(metric: str) -> str:
    """Return the title of a metric."""
    return TITLES.get(metric, metric.replace("_", " "))


def _counts(found: Predictions, weight: Float[Tensor, " N"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each class how often it is named and right, how often named, and how often true."""
    size = found.outputs.shape[1]
    right = weight * (found.classes == found.truth)
    pairs = ((found.classes, right), (found.classes, weight), (found.truth, weight))
    named_right, named, true = (torch.bincount(classes, w, minlength=size) for classes, w in pairs)
    return named_right, named, true


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
