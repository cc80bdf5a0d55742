"""Measures of fidelity: known answers, the definitions on whole matrices, and what stands out."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.data.rows import PackedRows
from linearize.evaluation import fidelity, weights
from linearize.evaluation.chosen_rows import drawn_rows
from linearize.evaluation.fidelity import (
    Fidelity,
    cosine,
    effective_length,
    entropy,
    measure_fidelity,
    monotonicity,
    rank_correlation,
    singular_value_distance,
    worst_heads,
)
from linearize.evaluation.weights import Visit, visit_layers, weight_blocks
from linearize.hf.attention import linearized_layers
from linearize.recipe import Recipe
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.hf.models import randomize_mixers

LENGTH = 40
ROWS = tiny.packed([[LENGTH], [9, 1, 30]])


def make_student(name: str = "lolcats", teacher: PreTrainedModel | None = None, **overrides: Any) -> PreTrainedModel:
    """A student with random mixers, in double precision; two underscores stand for a dot."""
    recipe = Recipe.load(name, {f"mixer.{key.replace('__', '.')}": value for key, value in overrides.items()})
    student = linearize.convert(tiny.llama().double() if teacher is None else teacher, recipe).eval()
    randomize_mixers(student)
    return student.requires_grad_(False)


def measured(student: PreTrainedModel, rows: PackedRows = ROWS, **options: Any) -> Fidelity:
    return measure_fidelity(student, rows, None, **({"max_tokens": 10**6, "batch_size": 8, "seed": 0} | options))


# --- known answers ----------------------------------------------------------------------------------------------------


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
    found = measured(make_student(**overrides))
    assert [layer.layer for layer in found.layers] == [0, 1] and found.tokens == 2 * LENGTH
    for layer in found.layers:
        for name in ("output_mse", "output_relative", "weight_kl", "singular_values"):
            assert getattr(layer, name) == pytest.approx([0] * 4, abs=1e-7), name
        assert layer.cosine == pytest.approx([1] * 4, abs=1e-9)
        for pair in (layer.entropy, layer.monotonicity, layer.esl):
            assert pair.student == pytest.approx(pair.teacher, abs=1e-9)
        assert layer.weight_cross_entropy == pytest.approx(layer.entropy.teacher, abs=1e-9)
        assert layer.monotonicity.teacher == pytest.approx([1] * 4)
    assert found.worst == []
    assert all(one.student == one.teacher for one in found.maps)


def test_measures_are_exact_in_single_precision_for_spiky_softmax() -> None:
    """Most weights of such a teacher are 0 in single precision; that is no lack of monotonicity."""
    teacher = tiny.llama()
    for layer in teacher.model.layers:
        layer.self_attn.q_proj.weight.data *= 50
    found = measured(make_student(teacher=teacher, span__window_size=LENGTH))
    for layer in found.layers:
        assert max(layer.entropy.teacher) < 0.3
        assert layer.weight_kl == pytest.approx([0] * 4, abs=1e-5)
        assert layer.monotonicity.teacher == pytest.approx([1] * 4, abs=1e-6)
        assert layer.monotonicity.student == pytest.approx([1] * 4, abs=1e-2)


def test_rank_correlation_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]]])
    y = torch.tensor([[[1.0, 3.0, 2.0, 5.0], [0.0, 0.0, 1.0, 2.0], [0.1, 0.2, 0.3, 0.9], [2.0, 2.0, 2.0, 2.0]]])
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[0, 3] = False
    # Ranks 1, 3, 2: 1 - 6 (0 + 1 + 1) / (3 (9 - 1)). Ranks 0.5, 0.5, 2, 3 about 1.5: 4.5 / sqrt(5 * 4.5).
    expected = torch.tensor([[0.5, 4.5 / math.sqrt(22.5), -1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(rank_correlation(x, y, seen), expected)
    assert monotonicity(x, y, seen).equal(rank_correlation(x, y, seen))


def test_weights_that_softmax_cannot_hold_count_alike() -> None:
    scores, seen = torch.tensor([[[0.0, -200.0, -300.0, -1.0]]]), torch.ones(1, 4, dtype=torch.bool)
    assert float(monotonicity(scores, scores.softmax(-1), seen)) == pytest.approx(1)
    assert float(rank_correlation(scores, scores.softmax(-1), seen)) < 0.96


def test_effective_length_and_entropy_by_hand() -> None:
    w = torch.tensor([[[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.25, 0.25]]])
    distance = torch.tensor([[0, -1, -2], [1, 0, -1], [2, 1, 0]])
    torch.testing.assert_close(effective_length(w, distance), torch.tensor([[0, 0.25, 1.25]]))
    torch.testing.assert_close(entropy(w)[0, 2], torch.tensor(1.5 * math.log(2)))
    assert float(entropy(torch.full((1, 1, 8), 0.125))) == pytest.approx(math.log(8))


def test_cosine_and_singular_values_by_hand() -> None:
    a, b = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    torch.testing.assert_close(cosine(a, a), torch.ones(1).double())
    torch.testing.assert_close(cosine(a, torch.tensor([[[4.0, 0.0], [0.0, 3.0]]])), torch.tensor([0.96]).double())
    assert float(cosine(a, b)) == 0
    # s(A) = 4, 3 and s(B) = 1, 1: sqrt(9 + 4) / 5; where the entries stand does not matter.
    torch.testing.assert_close(singular_value_distance(a, b), torch.tensor([math.sqrt(13) / 5]).double())
    torch.testing.assert_close(singular_value_distance(a, a.flip(1)), torch.zeros(1).double())


# --- the definitions, on whole matrices -------------------------------------------------------------------------------


def centred_ranks(x: Tensor) -> Tensor:
    """How many are less than each, of its equals half, less the mean."""
    ranks = torch.stack([(x < one).sum() + (x == one).sum() / 2 for one in x]).double()
    return ranks - ranks.mean()


def whole_matrices(student: PreTrainedModel, rows: PackedRows) -> dict[int, tuple[Tensor, Tensor]]:
    """Teacher's and student's weights [B,H,T,T] by layer."""
    found = {}

    def visit(at: Visit) -> None:
        teacher, own = (torch.zeros(len(rows), 4, LENGTH, LENGTH).double() for _ in range(2))
        for block in weight_blocks(at):
            teacher[block.row, :, block.queries, block.keys] = block.teacher
            own[block.row, :, block.queries, block.keys] = block.student
        found[at.index] = teacher, own

    visit_layers(student, drawn_rows(rows, 10**6, 0), visit, batch_size=8, title="test")
    return found


@pytest.mark.parametrize("name", ["lolcats", "lolcat-w", "supra"])
def test_blocks_add_up_to_the_definitions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        weights, "QUERIES", 8
    )  # five blocks, of which those of queries 0 .. 7 and 32 .. 39 are compared
    monkeypatch.setattr(fidelity, "RANKED_EVERY", 1)
    student = make_student(name, **({} if name == "supra" else {"span__window_size": 4}))
    found, position = measured(student, batch_size=1), ROWS.position_ids
    for layer, (teacher, own) in zip(found.layers, whole_matrices(student, ROWS).values(), strict=True):
        own = (own / own.sum(-1, keepdim=True).abs()).nan_to_num(0)  # no feature of a query may be on
        pairs = [(teacher[row, :, part], own[row, :, part]) for row in (0, 1) for part in (slice(0, 8), slice(32, 40))]
        for head in range(4):
            t, s = teacher[:, head], own[:, head]
            flat = [(a[head].flatten(), b[head].flatten()) for a, b in pairs]
            cosines = [float(a @ b / a.norm() / b.norm()) for a, b in flat]
            assert layer.cosine[head] == pytest.approx(sum(cosines) / 4)
            values = [(torch.linalg.svdvals(a[head]), torch.linalg.svdvals(b[head])) for a, b in pairs]
            distances = [float((a - b).norm() / a.norm()) for a, b in values]
            assert layer.singular_values[head] == pytest.approx(sum(distances) / 4)
            correlations = []
            for row, positions in enumerate(position.tolist()):
                for i, p in enumerate(positions):
                    a, b = (centred_ranks(x[row, i, i - p : i + 1]) for x in (t, s))
                    if p:
                        correlations.append(float(a @ b / (a.norm() * b.norm()).clamp_min(1e-9)))
            assert layer.monotonicity.student[head] == pytest.approx(sum(correlations) / len(correlations))
            if name == "supra":
                continue
            kl = torch.where(t > 0, t * (t / s).log(), 0).sum(-1).mean()
            assert layer.weight_kl[head] == pytest.approx(float(kl))
            plain = -torch.where(t > 0, t * s.log(), 0).sum(-1).mean()
            assert layer.weight_cross_entropy[head] == pytest.approx(float(plain))
            lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
            for pair, w in ((layer.esl.teacher, t), (layer.esl.student, s)):
                assert pair[head] == pytest.approx(float((w * lag).sum(-1).mean()))
            assert layer.entropy.student[head] == pytest.approx(float(torch.special.entr(s).sum(-1).mean()))
    assert min(layer.weight_kl[0] for layer in found.layers) > 0.1 if name != "supra" else True


def test_output_errors_are_those_of_the_outputs() -> None:
    student, expected = make_student(span__window_size=4), {}

    def visit(at: Visit) -> None:
        y = at.module.mixer(at.inputs, at.layout)
        expected[at.index] = [
            (float((a - b).square().mean()), float(b.square().mean())) for a, b in heads(y, at.target)
        ]

    def heads(y: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(y[:, head], target[:, head]) for head in range(4)]

    visit_layers(student, drawn_rows(ROWS, 10**6, 0), visit, batch_size=8, title="test")
    for layer in measured(student, batch_size=1).layers:
        assert layer.output_mse == pytest.approx([mse for mse, _ in expected[layer.layer]])
        assert layer.output_relative == pytest.approx([mse / square for mse, square in expected[layer.layer]])


# --- what there is no number for --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["supra", "deltanet", "rfa", "gla"])
def test_weights_that_can_be_negative_are_no_distribution(name: str) -> None:
    for layer in measured(make_student(name)).layers:
        assert layer.weight_kl is layer.weight_cross_entropy is layer.entropy.student is layer.esl.student is None
        assert len(layer.monotonicity.student) == len(layer.cosine) == len(layer.output_mse) == 4
        assert len(layer.entropy.teacher) == len(layer.esl.teacher) == 4


def test_keys_that_the_student_cannot_see_cost_a_finite_number() -> None:
    found = measured(make_student(span__window_size=4, feature_map=None, combine={"type": "window_only"}))
    assert all(1 < kl < 12 * math.log(10) for layer in found.layers for kl in layer.weight_kl)


def test_a_mixer_that_gives_no_numbers_is_refused() -> None:
    student = make_student()
    linearized_layers(student)["model.layers.1.self_attn"].mixer.combine.window_factor.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="layer 1: 320 outputs of heads"):
        measured(student)


# --- gates and mixes --------------------------------------------------------------------------------------------------


def test_histogram_of_gates_counts_every_step() -> None:
    (layer, _) = measured(make_student("retnet")).layers
    gammas = [1 - 2 ** (-5 - head) for head in range(4)]
    for gamma, counts in zip(gammas, layer.gates.counts, strict=True):
        inside = [low <= gamma < high for low, high in pairwise(layer.gates.edges)]
        assert counts == [2 * LENGTH * at for at in inside]
    assert layer.mix is None
    (layer, _) = measured(make_student("fast-decay")).layers
    assert [sum(counts) for counts in layer.gates.counts] == [2 * LENGTH * (8 + 8)] * 2  # features and values
    assert measured(make_student()).layers[0].gates is None


@pytest.mark.parametrize(("recipe", "name"), [("lolcats", "window_factor"), ("lolcat-w", "window_weight")])
def test_histogram_of_what_weighs_the_window(recipe: str, name: str) -> None:
    student = make_student(recipe)
    combine = linearized_layers(student)["model.layers.0.self_attn"].mixer.combine
    getattr(combine, name).copy_(torch.tensor([0.02, 0.03, 0.51, 0.99]).logit())
    counts = measured(student).layers[0].mix.counts
    assert (counts[0], counts[10], counts[19], sum(counts)) == (2, 1, 1, 4)


# --- heads that stand out ---------------------------------------------------------------------------------------------


def test_a_broken_head_is_pointed_at() -> None:
    student = make_student(span__window_size=LENGTH - 8)
    layers = linearized_layers(student)
    for layer in layers.values():
        layer.mixer.combine.window_factor.fill_(5.0)
    broken = layers["model.layers.1.self_attn"].mixer
    broken.combine.window_factor[2] = -20.0
    broken.feature_map.query_weight[2] *= -9
    found = measured(student, tiny.packed([[LENGTH], [LENGTH]]))
    (worst,) = found.worst
    assert (worst.layer, worst.head) == (1, 2)
    assert [(x.layer, x.head) for x in found.maps][-1] == (1, 2) and len(found.maps) == 3
    assert found.maps[-1].teacher != found.maps[-1].student


def test_only_heads_far_from_the_median_stand_out() -> None:
    errors = {(0, head): 0.001 for head in range(8)}
    assert worst_heads({}) == worst_heads(errors) == worst_heads(errors | {(1, 0): 0.019}) == []
    errors = {(0, head): 0.01 for head in range(8)}
    assert worst_heads({(0, head): 0.1 for head in range(8)} | {(1, 0): 0.5}) == []
    found = worst_heads(errors | {(1, 0): 0.06, (1, 1): 0.3, (1, 2): 0.04})
    assert [(x.layer, x.head) for x in found] == [(1, 1), (1, 0)]
    assert len(worst_heads({(0, head): float(head > 30) for head in range(50)})) == 10


def test_maps_carry_text() -> None:
    rows, student = ROWS, make_student(span__window_size=4)
    found = measure_fidelity(student, rows, byte_tokenizer(), max_tokens=10**6, batch_size=8, seed=0)
    one = found.maps[0]
    assert len(one.tokens) == len(one.teacher) == len(one.student[0]) == LENGTH
    assert one.tokens[5] == byte_tokenizer().decode(rows.input_ids[0, 5:6])
    assert one.student[3][2] == round(one.student[3][2], 4)
    assert [x.rank for x in found.maps] == ["best", "median", "worst"]


def test_the_seed_draws_the_rows() -> None:
    student, rows = make_student(span__window_size=4), tiny.packed([[LENGTH]] * 6)
    first, again, other = (measured(student, rows, max_tokens=2 * LENGTH, seed=seed) for seed in (0, 0, 1))
    assert first.tokens == 2 * LENGTH and first == again != other
