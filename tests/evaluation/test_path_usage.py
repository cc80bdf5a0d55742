"""How much goes through the linear part, by known answers, and what the ablations are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.configs.mixer_parts import Add
from linearize.configs.spans import NoSpan
from linearize.data.rows import PackedRows
from linearize.evaluation.chosen_rows import drawn_rows
from linearize.evaluation.controls import without_linear_part
from linearize.evaluation.intervals import Interval
from linearize.evaluation.path_usage import (
    PathUsage,
    distance_edges,
    measure_path_usage,
    without_window,
)
from linearize.evaluation.perplexity import paired_difference, token_losses
from linearize.evaluation.weights import Visit, visit_layers, weight_blocks
from linearize.hf.attention import linearized_layers
from linearize.hf.convert import convert_layers
from linearize.recipe import Recipe
from tests import tiny
from tests.hf.models import randomize_mixers

pytestmark = pytest.mark.usefixtures("few")

LENGTH = 40
WINDOW = 8
ROWS = tiny.packed([[LENGTH], [LENGTH]])
PACKED = tiny.packed([[LENGTH], [9, 1, 30]])
WINDOW_ONLY = {"feature_map": None, "combine": {"type": "window_only"}}


def make_student(name: str = "lolcats", window: int | None = WINDOW, **overrides: Any) -> PreTrainedModel:
    """A student with random mixers, in double precision; two underscores stand for a dot."""
    fields = overrides if window is None else {"span__window_size": window} | overrides
    recipe = Recipe.load(name, {f"mixer.{key.replace('__', '.')}": value for key, value in fields.items()})
    student = linearize.convert(tiny.llama().double(), recipe).eval()
    randomize_mixers(student)
    return student.requires_grad_(False)


def set_combine(student: PreTrainedModel, name: str, values: Tensor) -> None:
    for layer in linearized_layers(student).values():
        getattr(layer.mixer.combine, name).copy_(values)


def measured(student: PreTrainedModel, rows: PackedRows = ROWS) -> PathUsage:
    return measure_path_usage(student, rows, max_tokens=10**6, batch_size=8, seed=0, samples=20)


def logits(model: PreTrainedModel, rows: PackedRows = PACKED) -> Tensor:
    with torch.no_grad():
        return model(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False).logits


# --- known answers ----------------------------------------------------------------------------------------------------


def test_a_window_alone_has_no_linear_part() -> None:
    found = measured(make_student(**WINDOW_ONLY))
    for layer in found.layers:
        assert layer.linear_share == [0] * 4
        assert not torch.tensor(layer.by_distance.linear).any()
        mass = torch.tensor(layer.by_distance.mass)
        torch.testing.assert_close(mass.sum(1), torch.ones(4))
        assert not mass[:, found.edges.index(WINDOW) :].any()
    assert found.without_linear == Interval(0.0, 0.0, 0.0) and found.without_window is None


def test_a_window_over_everything_leaves_nothing_to_the_linear_part() -> None:
    found = measured(make_student(window=LENGTH))
    assert all(layer.linear_share == [0] * 4 for layer in found.layers)
    assert found.without_linear == Interval(0.0, 0.0, 0.0)


def test_linear_attention_alone_has_it_all() -> None:
    found = measured(make_student("supra", window=None))
    for layer in found.layers:
        assert layer.linear_share == pytest.approx([1] * 4)
        assert torch.tensor(layer.by_distance.linear).allclose(torch.ones(4, len(found.edges) - 1))
    assert found.without_window is None


def test_without_weight_on_the_window_all_lies_beyond() -> None:
    """g = 0: a query with linear keys has all its mass there, one without any all in its window."""
    student = make_student()
    set_combine(student, "window_factor", torch.full((4,), -60.0))
    found = measured(student)
    beyond = found.edges.index(WINDOW)
    for layer in found.layers:
        assert layer.linear_share == pytest.approx([(LENGTH - WINDOW) / LENGTH] * 4)
        mass, linear = torch.tensor(layer.by_distance.mass), torch.tensor(layer.by_distance.linear)
        torch.testing.assert_close(mass[:, beyond:].sum(1), torch.full((4,), (LENGTH - WINDOW) / LENGTH))
        torch.testing.assert_close(linear[:, beyond:], torch.ones_like(linear[:, beyond:]))
        assert linear[:, :beyond].max() < 1e-9


def test_a_mix_shares_as_it_says() -> None:
    student, s = make_student("lolcat-w"), torch.tensor([0.1, 0.5, 0.75, 0.9])
    set_combine(student, "window_weight", s.logit())
    for rows, documents in ((ROWS, [LENGTH, LENGTH]), (PACKED, [LENGTH, 9, 1, 30])):
        queries = sum(max(0, length - WINDOW) for length in documents)
        for layer in measured(student, rows).layers:
            assert layer.linear_share == pytest.approx(((1 - s) * queries / (2 * LENGTH)).tolist())


@pytest.mark.parametrize("name", ["lolcats", "deltanet with a window"])
def test_shares_by_distance_are_those_of_the_whole_matrix(name: str) -> None:
    delta = {"span": {"type": "sliding", "window_size": WINDOW}, "window": None}
    student = make_student() if name == "lolcats" else make_student("deltanet", **delta)
    expected: dict[int, Tensor] = {}
    edges = distance_edges(LENGTH)

    def visit(at: Visit) -> None:
        sums = torch.zeros(2, 4, len(edges) - 1, dtype=torch.float64)
        for block in weight_blocks(at):
            share = block.student.abs() / block.student.abs().sum(-1, keepdim=True)
            for index, low in enumerate(edges[:-1]):
                inside = (block.distance >= low) & (block.distance < edges[index + 1])
                sums[0, :, index] += (share * inside).sum((1, 2))
                sums[1, :, index] += (share * inside * block.linear).sum((1, 2))
        expected[at.index] = sums

    visit_layers(student, drawn_rows(PACKED, 10**6, 0), visit, batch_size=8, title="test")
    found = measured(student, PACKED)
    assert found.edges == [0, 1, 2, 4, 8, 16, 32, 40]
    for layer in found.layers:
        mass, linear = expected[layer.layer]
        assert layer.linear_share == pytest.approx((linear.sum(1) / 80).tolist())
        torch.testing.assert_close(torch.tensor(layer.by_distance.mass).double(), mass / 80, rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.tensor(layer.by_distance.linear).double(), linear / mass, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "edges"), [(1, [0, 1]), (2, [0, 1, 2]), (8, [0, 1, 2, 4, 8]), (9, [0, 1, 2, 4, 8, 9])]
)
def test_edges_are_powers_of_two(length: int, edges: list[int]) -> None:
    assert distance_edges(length) == edges


# --- ablations --------------------------------------------------------------------------------------------------------


def test_losses_of_the_ablated_student_are_paired_with_its_own() -> None:
    student = make_student()
    found, own = measured(student), token_losses(student, ROWS, batch_size=8)
    for difference, ablation in ((found.without_linear, without_linear_part), (found.without_window, without_window)):
        with ablation(student):
            ablated = token_losses(student, ROWS, batch_size=8)
        assert difference == paired_difference(ablated, own, samples=20, seed=0)
        assert abs(difference.mean) > 0.01


@pytest.mark.parametrize("name", ["lolcats", "lolcats-terraced", "lolcat-w", "added", "cached"])
def test_without_window_is_the_linear_part_on_every_key(name: str) -> None:
    """As if converted without a span, with the same weights; afterwards nothing has changed."""
    added = {"combine": {"type": "add"}, "normalizer": {"type": "group_norm"}}
    cached = {"span": {"type": "terraced", "window_size": 4}, "window": None, "cache": {"size": 3}}
    other_fields = {"added": added, "cached": cached}
    student = make_student("lolcats", **other_fields[name]) if name in other_fields else make_student(name)
    layers, before = linearized_layers(student), logits(student)
    config = layers["model.layers.0.self_attn"].mixer.config
    combine = config.combine if name.startswith("lolcats") or name == "cached" else Add()
    linear = config.model_copy(update={"span": NoSpan(), "cache": None, "combine": combine})
    other = convert_layers(tiny.llama().double(), (linear, linear))
    for layer, copied in zip(layers.values(), linearized_layers(other).values(), strict=True):
        state = {key: x for key, x in layer.mixer.state_dict().items() if not key.startswith("scorer.")}
        copied.mixer.load_state_dict(state, strict=not isinstance(combine, Add))
    with without_window(student):
        found = logits(student)
    torch.testing.assert_close(found, logits(other), rtol=0, atol=1e-10)
    assert (found - before).abs().max() > 0.1
    assert torch.equal(logits(student), before)


def test_layers_with_one_part_stay_as_they_are_without_a_window() -> None:
    for student in (make_student(**WINDOW_ONLY), make_student("supra", window=None)):
        before = logits(student)
        with without_window(student):
            assert torch.equal(logits(student), before)


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_softmax_layers_are_left_out() -> None:
    recipe = Recipe.load("lolcats", {"layers.keep_softmax": [0], "mixer.span.window_size": WINDOW})
    found = measured(linearize.convert(tiny.llama(), recipe).eval())
    assert [layer.layer for layer in found.layers] == [1] and found.without_window is not None


def test_one_row_is_too_little_for_an_interval() -> None:
    with pytest.raises(UserError, match="at least 2 documents"):
        measured(make_student(), tiny.packed([[LENGTH]]))
