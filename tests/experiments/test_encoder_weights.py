"""Attention weights of encoders: the measures are those of whole matrices of the valid tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.data.rows import PackedRows
from linearize.evaluation.fidelity import Visit, visit_layers
from linearize.hf.attention import sliding_window
from tests.experiments.test_grids import load
from tests.hf.encoder_rows import encoder_rows
from tests.hf.encoders import ENCODERS, TEXT, Case, student_of

attention_weights, weight_measures = load("attention_weights"), load("weight_measures")
weight_blocks = attention_weights.weight_blocks

LENGTHS = (9, 5, 12)
every = pytest.mark.parametrize("architecture", ENCODERS)


def measured(student: PreTrainedModel, rows: PackedRows, **options: Any) -> list[Any]:
    return weight_measures.measure_weights(
        student, rows, **({"max_tokens": 10**6, "batch_size": 8, "seed": 0} | options)
    )


def matrices(student: PreTrainedModel, rows: PackedRows) -> dict[int, list[dict[str, Tensor]]]:
    """By layer, for each row of each pass: teacher's and student's weights and q.k [H,T,T], both outputs [H,T,D]."""
    found: dict[int, list[dict[str, Tensor]]] = {}

    def visit(at: Visit) -> None:
        inputs, mixer, reach = at.inputs, at.module.mixer, sliding_window(at.module)
        shape = inputs.q.shape[0], inputs.q.shape[2]
        position = torch.arange(shape[1]).expand(shape) if at.layout is None else at.layout.key_position
        features = mixer.feature_map.q(inputs.q, position), mixer.feature_map.k(inputs.k, position)
        for row, valid in enumerate(position >= 0):
            q, k, v = (x[row][:, valid] for x in (inputs.q, inputs.k, inputs.v))
            phi_q, phi_k = (x[row][:, valid] for x in features)
            kernel = phi_q @ phi_k.mT
            scores = q @ k.mT * inputs.scaling
            lag = (torch.arange(len(q[0]))[:, None] - torch.arange(len(q[0]))).abs()
            teacher = scores.masked_fill(lag >= (reach or 10**6), -torch.inf).softmax(-1)
            own = kernel / kernel.sum(-1, keepdim=True)
            parts = dict(scores=scores, teacher=teacher, student=own, lag=lag.expand_as(own))
            found.setdefault(at.index, []).append(parts | dict(y=own @ v, target=teacher @ v))

    visit_layers(student, rows, visit, batch_size=8, title="test")
    return found


def mean(values: list[Tensor]) -> list[float]:
    """Per head, over the queries of all rows [H, T]."""
    return torch.cat(values, dim=1).mean(1).tolist()


def spearman(x: Tensor, y: Tensor) -> float:
    ranks = [torch.stack([(z < one).sum() + (z == one).sum() / 2 for one in z]).double() for z in (x, y)]
    a, b = (z - z.mean() for z in ranks)
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-9))


@every
def test_measures_are_those_of_whole_matrices(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_measures, "RANKED_EVERY", 1)
    student, rows = student_of(Case(architecture)), encoder_rows(architecture, LENGTHS)
    found, expected = measured(student, rows, batch_size=2), matrices(student, rows)
    assert [layer.layer for layer in found] == list(expected)
    for layer in found:
        parts = expected[layer.layer]
        teacher, own = ([x[name] for x in parts] for name in ("teacher", "student"))
        errors = mean([(x["y"] - x["target"]).square().mean(-1) for x in parts])
        squares = mean([x["target"].square().mean(-1) for x in parts])
        assert layer.output_mse == pytest.approx(errors)
        assert layer.output_relative == pytest.approx([e / s for e, s in zip(errors, squares, strict=True)])
        both = list(zip(teacher, own, strict=True))
        cross = [-(t * s.clamp_min(1e-12).log()).sum(-1) for t, s in both]
        entropy = [torch.special.entr(t).sum(-1) for t in teacher]
        assert layer.weight_kl == pytest.approx(mean([c - e for c, e in zip(cross, entropy, strict=True)]), abs=1e-9)
        assert min(layer.weight_kl) > 0.01
        assert layer.entropy.teacher == pytest.approx(mean(entropy))
        assert layer.entropy.student == pytest.approx(mean([torch.special.entr(s).sum(-1) for s in own]))
        for head in range(4):
            cosines = [torch.cosine_similarity(t[head].flatten(), s[head].flatten(), dim=0) for t, s in both]
            assert layer.cosine[head] == pytest.approx(float(sum(cosines)) / len(cosines))
            values = [(torch.linalg.svdvals(t[head]), torch.linalg.svdvals(s[head])) for t, s in both]
            distances = [float((a - b).norm() / a.norm()) for a, b in values]
            assert layer.singular_values[head] == pytest.approx(sum(distances) / len(distances), rel=1e-5)
            rank = [
                spearman(scores, row)
                for x in parts
                for scores, row in zip(x["scores"][head], x["student"][head], strict=True)
            ]
            assert layer.monotonicity.student[head] == pytest.approx(sum(rank) / len(rank), abs=1e-6)
        assert layer.gates is None


@every
@pytest.mark.parametrize("mixer", ["hedgehog", "elu", "lolcat"])
def test_weights_by_blocks(architecture: str, mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not end with a row; padding at the left, which is left out."""
    monkeypatch.setattr(attention_weights, "QUERIES", 5)
    student = student_of(Case(architecture, mixer))
    rows = encoder_rows(architecture, LENGTHS, left=True)

    def visit(at: Visit) -> None:
        y, target = at.module.mixer(at.inputs, at.layout), at.target
        covered = {}
        for block in weight_blocks(at):
            length = block.keys.stop
            assert block.keys.start == 0 and bool(block.seen.all()) and bool(block.linear.all())
            assert block.following == (length - 1) // 5 - block.queries.start // 5
            valid = torch.arange(length)
            if at.layout is not None:
                valid = (at.layout.key_position[block.row] >= 0).nonzero()[:, 0]
            v = at.inputs.v[block.row][:, valid]
            for found, of in ((block.student, y), (block.teacher, target)):
                torch.testing.assert_close(found @ v, of[block.row][:, valid[block.queries]], rtol=0, atol=1e-9)
            covered.setdefault(block.row, []).extend(range(block.queries.start, block.queries.stop))
        assert all(slots == list(range(len(slots))) for slots in covered.values())
        sizes = [len(slots) for slots in covered.values()]
        assert sizes == (list(LENGTHS) if architecture in TEXT else [at.inputs.q.shape[2]] * 3)

    visit_layers(student, rows, visit, batch_size=8, title="test")


@pytest.mark.parametrize("architecture", ["modernbert", "vit"])
def test_norms_count_by_how_much_longer_they_make_an_output(architecture: str) -> None:
    student = student_of(Case(architecture, "unrotated"))
    rows = encoder_rows(architecture, LENGTHS)

    def visit(at: Visit) -> None:
        y = at.module.mixer(at.inputs, at.layout)
        for block in weight_blocks(at):
            valid = torch.arange(block.keys.stop)
            found = block.student @ at.inputs.v[block.row][:, valid]
            own = y[block.row][:, block.queries]
            torch.testing.assert_close(found.norm(dim=-1), own.norm(dim=-1), rtol=1e-6, atol=1e-9)

    visit_layers(student, rows, visit, batch_size=8, title="test")
    layer = measured(student, rows)[0]
    assert layer.weight_kl is None, "rotated features can give negative weights"
    assert len(layer.cosine) == len(layer.monotonicity.student) == 4


def test_padding_does_not_count() -> None:
    for name in TEXT:
        student = student_of(Case(name))
        sides = [measured(student, encoder_rows(name, LENGTHS, left=left)) for left in (False, True)]
        for one, other in zip(*sides, strict=True):
            tolerance = {"rel": 1e-4, "abs": 1e-5} if name == "modernbert" else {"rel": 1e-8}
            assert one.output_mse == pytest.approx(other.output_mse, **tolerance)
            assert one.weight_kl == pytest.approx(other.weight_kl, **tolerance)


def test_padding_that_counts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs(sums: Any, at: Visit) -> None:
        y, target = at.module.mixer(at.inputs, at.layout).double(), at.target.double()
        sums.add("output_mse", (y - target).square().mean(-1).transpose(0, 1).flatten(1))
        sums.add("output_square", target.square().mean(-1).transpose(0, 1).flatten(1))

    monkeypatch.setattr(weight_measures._LayerSums, "add_outputs", outputs)
    with pytest.raises(AssertionError):
        test_measures_are_those_of_whole_matrices("bert", monkeypatch)
