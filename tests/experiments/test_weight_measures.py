"""Measures of attention weights: known answers, and the definitions on whole matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.data.rows import PackedRows
from linearize.evaluation.fidelity import Visit, visit_layers
from linearize.evaluation.metrics import rank_correlation
from linearize.recipe import Recipe
from tests import tiny
from tests.experiments.test_grids import load
from tests.hf.models import randomize_mixers

attention_weights, weight_measures = load("attention_weights"), load("weight_measures")
cosine, entropy, monotonicity = weight_measures.cosine, weight_measures.entropy, weight_measures.monotonicity
singular_value_distance = weight_measures.singular_value_distance

LENGTH = 40
ROWS = tiny.packed([[LENGTH], [9, 1, 30]])


def make_student(name: str = "lolcats", teacher: PreTrainedModel | None = None, **overrides: Any) -> PreTrainedModel:
    """A student with random mixers, in double precision; two underscores stand for a dot."""
    recipe = Recipe.load(name, {f"mixer.{key.replace('__', '.')}": value for key, value in overrides.items()})
    student = linearize.convert(tiny.llama().double() if teacher is None else teacher, recipe).eval()
    randomize_mixers(student)
    return student.requires_grad_(False)


def measured(student: PreTrainedModel, rows: PackedRows = ROWS, **options: Any) -> list[Any]:
    return weight_measures.measure_weights(
        student, rows, **({"max_tokens": 10**6, "batch_size": 8, "seed": 0} | options)
    )


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
    assert [layer.layer for layer in found] == [0, 1]
    for layer in found:
        for name in ("output_mse", "output_relative", "weight_kl", "singular_values"):
            assert getattr(layer, name) == pytest.approx([0] * 4, abs=1e-7), name
        assert layer.cosine == pytest.approx([1] * 4, abs=1e-9)
        for pair in (layer.entropy, layer.monotonicity):
            assert pair.student == pytest.approx(pair.teacher, abs=1e-9)
        assert layer.monotonicity.teacher == pytest.approx([1] * 4)


def test_measures_are_exact_in_single_precision_for_spiky_softmax() -> None:
    """Most weights of such a teacher are 0 in single precision; that is no lack of monotonicity."""
    teacher = tiny.llama()
    for layer in teacher.model.layers:
        layer.self_attn.q_proj.weight.data *= 50
    found = measured(make_student(teacher=teacher, span__window_size=LENGTH))
    for layer in found:
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


def test_weights_that_underflow_in_softmax_have_one_rank() -> None:
    scores, seen = torch.tensor([[[0.0, -200.0, -300.0, -1.0]]]), torch.ones(1, 4, dtype=torch.bool)
    assert float(monotonicity(scores, scores.softmax(-1), seen)) == pytest.approx(1)
    assert float(rank_correlation(scores, scores.softmax(-1), seen)) < 0.96


def test_entropy_by_hand() -> None:
    w = torch.tensor([[[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.25, 0.25]]])
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
    """Return the ranks of all values, where equal values share the mean rank, minus the mean of the ranks."""
    ranks = torch.stack([(x < one).sum() + (x == one).sum() / 2 for one in x]).double()
    return ranks - ranks.mean()


def whole_matrices(student: PreTrainedModel, rows: PackedRows) -> dict[int, tuple[Tensor, Tensor]]:
    """Teacher's and student's weights [B,H,T,T] by layer."""
    found = {}

    def visit(at: Visit) -> None:
        teacher, own = (torch.zeros(len(rows), 4, LENGTH, LENGTH).double() for _ in range(2))
        for block in attention_weights.weight_blocks(at):
            teacher[block.row, :, block.queries, block.keys] = block.teacher
            own[block.row, :, block.queries, block.keys] = block.student
        found[at.index] = teacher, own

    visit_layers(student, rows, visit, batch_size=8, title="test")
    return found


@pytest.mark.parametrize("name", ["lolcats", "lolcat-w", "supra"])
def test_blocks_add_up_to_the_definitions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention_weights, "QUERIES", 8
    )  # five blocks, of which those of queries 0 .. 7 and 32 .. 39 are compared
    monkeypatch.setattr(weight_measures, "RANKED_EVERY", 1)
    student = make_student(name, **({} if name == "supra" else {"span__window_size": 4}))
    found, position = measured(student, batch_size=1), ROWS.position_ids
    for layer, (teacher, own) in zip(found, whole_matrices(student, ROWS).values(), strict=True):
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
            assert layer.entropy.student[head] == pytest.approx(float(torch.special.entr(s).sum(-1).mean()))
    assert min(layer.weight_kl[0] for layer in found) > 0.1 if name != "supra" else True


def test_output_errors_are_those_of_the_outputs() -> None:
    student, expected = make_student(span__window_size=4), {}

    def visit(at: Visit) -> None:
        y = at.module.mixer(at.inputs, at.layout)
        pairs = [(y[:, head], at.target[:, head]) for head in range(4)]
        expected[at.index] = [(float((a - b).square().mean()), float(b.square().mean())) for a, b in pairs]

    visit_layers(student, ROWS, visit, batch_size=8, title="test")
    for layer in measured(student, batch_size=1):
        assert layer.output_mse == pytest.approx([mse for mse, _ in expected[layer.layer]])
        assert layer.output_relative == pytest.approx([mse / square for mse, square in expected[layer.layer]])


# --- what there is no number for --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["supra", "deltanet", "rfa", "gla"])
def test_weights_that_can_be_negative_are_no_distribution(name: str) -> None:
    for layer in measured(make_student(name)):
        assert layer.weight_kl is layer.entropy.student is None
        assert len(layer.monotonicity.student) == len(layer.cosine) == len(layer.output_mse) == 4
        assert len(layer.entropy.teacher) == 4


def test_keys_that_the_student_cannot_see_cost_a_finite_number() -> None:
    found = measured(make_student(span__window_size=4, feature_map=None, combine={"type": "window_only"}))
    assert all(1 < kl < 12 * math.log(10) for layer in found for kl in layer.weight_kl)


# --- gates ------------------------------------------------------------------------------------------------------------


def test_gates_are_counted_at_every_step() -> None:
    (layer, _) = measured(make_student("retnet"))
    for head, counts in enumerate(layer.gates):
        inside = int(20 * (1 - 2 ** (-5 - head)))
        assert counts == [2 * LENGTH * (place == inside) for place in range(20)]
    (layer, _) = measured(make_student("fast-decay"))
    assert [sum(counts) for counts in layer.gates] == [2 * LENGTH * (8 + 8)] * 2  # features and values
    assert measured(make_student())[0].gates is None
