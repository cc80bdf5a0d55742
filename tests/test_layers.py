"""Which layers stay softmax, by every rule."""

from __future__ import annotations

from typing import Any

import pytest

from linearize.base import UserError
from linearize.layer_plan import resolve
from linearize.recipe import Recipe
from tests.shapes import make_shape

SHAPE = make_shape("llama", 6, 4, 4, 16, 64, 128, 256, 512, False)


def kept(rule: Any, layers: int = 6, errors: list[float] | None = None) -> list[int]:
    shape = make_shape("llama", layers, 4, 4, 16, 64, 128, 256, 512, False)
    plan = resolve(Recipe.load("lolcats", {"layers.keep_softmax": rule}), shape, errors)
    return [index for index, mixer in enumerate(plan) if mixer is None]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ([], []),
        ([0, -1], [0, 5]),
        ({"type": "listed", "layers": [2]}, [2]),
        ({"type": "all_but", "layers": [1, -1]}, [0, 2, 3, 4]),
        ({"type": "every", "n": 2}, [1, 3, 5]),
        ({"type": "every", "n": 4}, [3]),
        ({"type": "ratio", "ratio": 0.5}, [1, 3, 5]),
        ({"type": "ratio", "ratio": 0.34}, [1, 4]),
        ({"type": "ratio", "ratio": 0.1}, [3]),
        ({"type": "ratio", "ratio": 0.0}, []),
    ],
)
def test_rule(rule: Any, expected: list[int]) -> None:
    assert kept(rule) == expected


def test_the_layers_of_the_largest_error() -> None:
    rule, errors = {"type": "transfer_error", "n": 2}, [0.1, 5.0, 0.3, 0.0, 7.0, 1.0]
    assert kept(rule) == [], "not measured yet: all are converted"
    assert kept(rule, errors=errors) == [1, 4]
    assert kept({"type": "transfer_error", "n": 3}, errors=errors) == [1, 4, 5]


def test_no_error_counts_where_it_is_not_asked_for() -> None:
    assert kept([2], errors=[1.0] * 6) == [2]


@pytest.mark.parametrize("rule", [[6], {"type": "all_but", "layers": [-7]}])
def test_no_such_layer(rule: Any) -> None:
    with pytest.raises(UserError, match=r"layers\.keep_softmax: expected indices from -6 to 5, found"):
        kept(rule)


@pytest.mark.parametrize("rule", [{"type": "every", "n": 1}, {"type": "all_but", "layers": []}])
def test_nothing_left_to_convert(rule: Any) -> None:
    with pytest.raises(UserError, match="nothing to convert"):
        kept(rule)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.keep_softmax": {"type": "transfer_error", "n": 1}, "transfer": None}, "needs a transfer stage"),
        ({"weights": "random"}, "no attention to transfer from: set transfer=null"),
        ({"weights": "random", "transfer": None, "finetune.loss.kl": 1}, "no outputs to train on"),
        ({"weights": "random", "transfer": None, "data.select_rows_by_esl": 10}, "no attention to choose documents by"),
        ({"layers.keep_softmax": {"type": "all"}}, "keep_softmax"),
        ({"layers.keep_softmax": {"type": "ratio", "ratio": 1}}, "ratio"),
    ],
)
def test_stages_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Recipe.load("lolcats", changes)
