"""The output errors of heads are those of the outputs, of decoders and encoders, with and without padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.data.rows import Rows
from linearize.evaluation.fidelity import Visit, drawn_rows, measure_fidelity, visit_layers
from linearize.evaluation.results import Fidelity
from linearize.hf.attention import linearized_layers, softmax_attention
from linearize.recipe import Recipe
from tests import tiny
from tests.hf.encoder_rows import encoder_rows
from tests.hf.encoders import TEXT, Case, student_of, teacher_of
from tests.hf.models import randomize_mixers

LENGTH = 40
ROWS = tiny.packed([[LENGTH], [9, 1, 30]])


def make_student(teacher: PreTrainedModel | None = None, **overrides: Any) -> PreTrainedModel:
    """A student with random mixers, in double precision; two underscores stand for a dot."""
    recipe = Recipe.load("lolcats", {key.replace("__", "."): value for key, value in overrides.items()})
    student = linearize.convert(tiny.llama().double() if teacher is None else teacher, recipe).eval()
    randomize_mixers(student)
    return student.requires_grad_(False)


def measured(student: PreTrainedModel, rows: Rows = ROWS, **options: Any) -> Fidelity:
    return measure_fidelity(student, rows, **({"max_tokens": 10**6, "batch_size": 8, "seed": 0} | options))


def visits(student: PreTrainedModel, rows: Rows = ROWS, batch_size: int = 8) -> list[Visit]:
    found: list[Visit] = []
    visit_layers(student, rows, found.append, batch_size=batch_size, title="test")
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        {"span__window_size": LENGTH},
        {"span": {"type": "terraced", "window_size": 32}, "combine": {"type": "mix"}},
        {"span__window_size": 64, "feature_map": None, "combine": {"type": "window_only"}},
    ],
    ids=["shared denominator", "mix", "window only"],
)
def test_a_window_over_everything_is_perfect(overrides: dict[str, Any]) -> None:
    found = measured(make_student(**{f"mixer__{key}": value for key, value in overrides.items()}))
    assert [layer.layer for layer in found.layers] == [0, 1] and found.tokens == 2 * LENGTH
    assert list(found.errors.values()) == pytest.approx([0] * 8, abs=1e-7)


def test_output_errors_are_those_of_the_outputs() -> None:
    student, expected = make_student(mixer__span__window_size=4), {}
    for visit in visits(student):
        y = visit.module.mixer(visit.inputs, visit.layout)
        for head in range(4):
            error = (y[:, head] - visit.target[:, head]).square().mean()
            expected[visit.index, head] = float(error / visit.target[:, head].square().mean())
    found = measured(student, batch_size=1)
    assert found.errors == pytest.approx(expected) and min(expected.values()) > 0.01


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_output_errors_of_encoders(name: str) -> None:
    student, rows = student_of(Case(name)), encoder_rows(name, (9, 5, 12))
    errors: dict[int, list[Tensor]] = {}
    squares: dict[int, list[Tensor]] = {}
    for visit in visits(student, rows):
        y = visit.module.mixer(visit.inputs, visit.layout)
        for row in range(3):
            valid = slice(None) if visit.layout is None else visit.layout.query_position[row] >= 0
            own, target = y[row][:, valid], visit.target[row][:, valid]
            errors.setdefault(visit.index, []).append((own - target).square().sum((1, 2)))
            squares.setdefault(visit.index, []).append(target.square().sum((1, 2)))
    found = measured(student, rows, batch_size=2)
    assert found.tokens == rows.num_tokens
    for layer in found.layers:
        relative = torch.stack(errors[layer.layer]).sum(0) / torch.stack(squares[layer.layer]).sum(0)
        assert layer.output_relative == pytest.approx(relative.tolist()) and min(layer.output_relative) > 0


@pytest.mark.parametrize("name", TEXT)
def test_padding_does_not_count(name: str) -> None:
    student = student_of(Case(name))
    sides = [measured(student, encoder_rows(name, (9, 5, 12), left=left)) for left in (False, True)]
    tolerance = {"rel": 1e-4, "abs": 1e-5} if name == "modernbert" else {"rel": 1e-8}
    assert sides[0].errors == pytest.approx(sides[1].errors, **tolerance)


def test_a_mixer_that_gives_no_numbers_is_refused() -> None:
    student = make_student()
    linearized_layers(student)["model.layers.1.self_attn"].mixer.combine.window_factor.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="layer 1: 320 outputs of heads"):
        measured(student)


def test_a_broken_head_has_the_largest_error() -> None:
    student = make_student(mixer__span__window_size=LENGTH - 8)
    layers = linearized_layers(student)
    for layer in layers.values():
        layer.mixer.combine.window_factor.fill_(5.0)
    broken = layers["model.layers.1.self_attn"].mixer
    broken.combine.window_factor[2] = -20.0
    broken.feature_map.query_weight[2] *= -9
    errors = measured(student, tiny.packed([[LENGTH], [LENGTH]])).errors
    assert max(errors, key=lambda head: errors[head]) == (1, 2)


@pytest.mark.parametrize("teacher", [tiny.llama(), teacher_of(Case("bert"))])
def test_a_model_that_is_not_linearized_is_refused(teacher: PreTrainedModel) -> None:
    with pytest.raises(UserError, match=f"expected a linearized one, found {type(teacher).__name__}"):
        visits(teacher)


# --- which layers and rows --------------------------------------------------------------------------------------------


def test_layers_are_judged_on_softmax_activations() -> None:
    teacher = tiny.llama(layers=3).double()
    found = []
    for name in ("hedgehog", "gla"):
        student = linearize.convert(teacher, Recipe.load(name)).eval().requires_grad_(False)
        randomize_mixers(student)
        found.append(visits(student))
    assert [visit.index for visit in found[0]] == [0, 1, 2]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.inputs.q, other.inputs.q) and torch.equal(one.target, other.target)
        assert (one.module.mixer(one.inputs) - other.module.mixer(other.inputs)).abs().max() > 0.1
    student, outputs = make_student(teacher), []
    handle = linearized_layers(student)["model.layers.2.self_attn"].o_proj.register_forward_pre_hook(
        lambda module, args: outputs.append(args[0])
    )
    with softmax_attention(student), torch.no_grad():
        student(input_ids=ROWS.input_ids, position_ids=ROWS.position_ids, use_cache=False)
    handle.remove()
    torch.testing.assert_close(visits(student)[2].target.transpose(1, 2).flatten(2), outputs[0], rtol=0, atol=1e-10)


def test_softmax_layers_are_not_visited_and_batches_do_not_matter() -> None:
    student = make_student(tiny.llama(layers=3).double(), layers__keep_softmax=[1], mixer__span__window_size=4)
    assert [visit.index for visit in visits(student)] == [0, 2]
    assert [(visit.index, visit.first_row) for visit in visits(student, batch_size=1)] == [
        (0, 0),
        (2, 0),
        (0, 1),
        (2, 1),
    ]
    assert measured(student).errors == pytest.approx(measured(student, batch_size=1).errors)


def test_drawn_rows_are_as_many_as_asked_for() -> None:
    rows = tiny.packed([[LENGTH]] * 20)
    sample = drawn_rows(rows, 5 * LENGTH + 3, seed=0)
    assert sample.num_tokens == 5 * LENGTH
    index = [int((rows.input_ids == row).all(1).nonzero()) for row in sample.inputs()["input_ids"]]
    assert index == sorted(set(index)) != list(range(5))
    assert not torch.equal(drawn_rows(rows, 5 * LENGTH, seed=1).inputs()["input_ids"], sample.inputs()["input_ids"])
    assert len(drawn_rows(rows, 10**6, seed=1)) == 20
    assert len(drawn_rows(rows, 10, seed=0)) == 1, "a row is whole"
    for name, per_row in (("bert", 12), ("vit", 17)):
        drawn = drawn_rows(encoder_rows(name, (12,) * 6), 3 * per_row + 2, seed=0)
        assert len(drawn) == 3 and drawn.num_tokens == 3 * per_row


def test_the_seed_draws_the_rows() -> None:
    student, rows = make_student(mixer__span__window_size=4), tiny.packed([[LENGTH]] * 6)
    first, again, other = (measured(student, rows, max_tokens=2 * LENGTH, seed=seed) for seed in (0, 0, 1))
    assert first.tokens == 2 * LENGTH and first == again != other
