"""Attention transfer of encoders: losses and gradients are those of whole matrices, padding and passes apart."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.configs.training import TransferConfig
from linearize.data.rows import PackedRows
from linearize.hf.attention import linearized_layers, observed, sliding_window, softmax_output
from linearize.mixers import attention_weights
from linearize.mixers.inputs import AttnInputs
from linearize.training import attention_transfer as module
from linearize.training import transfer_losses
from linearize.training.attention_transfer import TransferObjective, attention_transfer, layer_index
from tests.hf.encoder_rows import Padded, encoder_rows
from tests.hf.encoders import ENCODERS, TEXT, Case, make_encoder, make_student
from tests.probes import LargestTensor

CONFIG = TransferConfig(output_mse=10.0, weight_cross_entropy=1.0, batch_size=4)
LENGTHS = (9, 5, 7, 12)


def recorded(student: PreTrainedModel, rows: PackedRows) -> dict[str, list[tuple[AttnInputs, Tensor]]]:
    """q, k, v and the valid tokens [B, T] of each pass through each converted layer; softmax feeds what follows."""
    names = {id(layer): name for name, layer in linearized_layers(student).items()}
    found = defaultdict(list)

    def observe(layer: Any, inputs: AttnInputs, layout: Any) -> Tensor:
        valid = torch.ones(inputs.q.shape[0], inputs.q.shape[2]) if layout is None else layout.key_position >= 0
        found[names[id(layer)]].append((inputs, valid.bool()))
        return softmax_output(layer, inputs, layout)

    with torch.no_grad(), observed(student, observe):
        student.base_model(**rows.inputs())
    return found


def explicit_losses(student: PreTrainedModel, rows: PackedRows, config: TransferConfig) -> dict[str, Tensor]:
    """By the definition, on whole T x T matrices; differentiable."""
    losses = {}
    for name, passes in recorded(student, rows).items():
        layer, values = linearized_layers(student)[name], []
        for inputs, valid in passes:
            position = torch.where(valid, valid.cumsum(1) - 1, -1)
            pairs = (valid[:, :, None] & valid[:, None])[:, None]
            phi = layer.mixer.feature_map
            kernel = phi.q(inputs.q, position) @ phi.k(inputs.k, position).mT * pairs
            student_weights = kernel / kernel.sum(-1, keepdim=True).clamp_min(1e-6)
            reach = sliding_window(layer)
            if reach is not None:
                pairs = pairs & ((position[:, :, None] - position[:, None]).abs() < reach)[:, None]
            scores = (inputs.q @ inputs.k.mT * inputs.scaling).masked_fill(~pairs, -torch.inf)
            teacher = scores.softmax(-1).nan_to_num(0)
            queries = valid[:, None, :, None].expand_as(inputs.q[..., :1])
            wrong = ((student_weights - teacher) @ inputs.v).square().mean(-1, keepdim=True)[queries].mean()
            cross = -(teacher * student_weights.clamp_min(1e-20).log()).sum(-1, keepdim=True)[queries].mean()
            values.append(config.output_mse * wrong + config.weight_cross_entropy * cross)
        losses[name] = sum(values) / len(values)
    return losses


def assert_equal_to_matrices(architecture: str, splits: list[int], *, left: bool = False) -> None:
    student, rows = make_student(Case(architecture)), encoder_rows(architecture, LENGTHS, left=left)
    objective = TransferObjective(student, CONFIG)
    starts = [sum(splits[:index]) for index in range(len(splits))]
    batches = [rows.rows(slice(start, start + n)) for start, n in zip(starts, splits, strict=True)]
    found = objective.backward(batches)
    expected = explicit_losses(student, rows, CONFIG)
    assert found.keys() == expected.keys()
    parameters = [p for layer in linearized_layers(student).values() for p in layer.mixer.parameters()]
    gradients = torch.autograd.grad(sum(expected.values()), parameters)
    for name in found:
        assert expected[name].item() > 0.1
        assert found[name] == pytest.approx(expected[name].item(), rel=1e-9)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("architecture", ENCODERS)
@pytest.mark.parametrize("splits", [[4], [1, 3]], ids=str)
def test_losses_and_gradients_are_those_of_matrices(architecture: str, splits: list[int]) -> None:
    assert_equal_to_matrices(architecture, splits)


@pytest.mark.parametrize("architecture", TEXT)
def test_padding_at_the_left(architecture: str) -> None:
    assert_equal_to_matrices(architecture, [2, 2], left=True)


@pytest.mark.parametrize("architecture", ["bert", "vit"])
def test_blocks_of_queries_make_no_difference(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_weights.BLOCK_WEIGHTS, "cpu", 1)
    monkeypatch.setattr(attention_weights, "MIN_QUERIES", 5)
    assert_equal_to_matrices(architecture, [4])


@pytest.mark.parametrize("architecture", TEXT)
def test_padding_does_not_count(architecture: str) -> None:
    objective = TransferObjective(make_student(Case(architecture)), CONFIG)
    losses = [objective.evaluate(encoder_rows(architecture, LENGTHS, left=left)) for left in (False, True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if architecture == "modernbert" else 1e-9)


def test_held_out_losses_do_not_depend_on_the_batch_size() -> None:
    rows = encoder_rows("bert", LENGTHS)
    found = [
        TransferObjective(make_student(Case("bert")), CONFIG.model_copy(update={"batch_size": n})).evaluate(rows)
        for n in (1, 3, 4)
    ]
    assert found[0] == pytest.approx(found[2]) and found[1] == pytest.approx(found[2])


@pytest.mark.parametrize("architecture", ["bert", "albert", "modernbert", "vit"])
def test_losses_fall(architecture: str, tmp_path: Path) -> None:
    student = linearize.convert(make_encoder(architecture), Case(architecture).recipe())
    rows = encoder_rows(architecture, LENGTHS * 2)
    config = TransferConfig(lr=0.05, output_mse=10.0, weight_cross_entropy=1.0, batch_size=4, epochs=12)
    result = attention_transfer(student, rows, rows, config, output_dir=tmp_path)
    layers = linearized_layers(student)
    assert [layer_index(name) for name in result.best_loss] == [layer.layer_idx for layer in layers.values()]
    assert all(result.best_loss[name] < 0.95 * result.initial_loss[name] for name in layers)


def test_no_tensor_is_quadratic() -> None:
    length = 2048
    teacher = make_encoder("bert", num_hidden_layers=1, max_position_embeddings=length, intermediate_size=1).float()
    student = linearize.convert(teacher, Case("bert").recipe()).eval()
    ids = torch.ones(1, length, dtype=torch.int64)
    rows = Padded(ids, torch.arange(length)[None], ids, (ids.cumsum(1) < length - 9).long())
    with LargestTensor() as largest:
        TransferObjective(student, CONFIG).backward([rows])
    assert length * 32 <= largest.elements < length * length // 4


# --- these tests can fail ---------------------------------------------------------------------------------------------


def padding_among_the_errors(patch: pytest.MonkeyPatch) -> None:
    def plain(y: Tensor, target: Tensor, layout: Any = None) -> Tensor:
        return torch.nn.functional.mse_loss(y, target)

    patch.setattr(transfer_losses, "mean_squared_error", plain)


def passes_added_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "layer_passes", lambda student: dict.fromkeys(linearized_layers(student), 1))


def rows_weighted_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Padded, "num_tokens", property(lambda rows: len(rows)))


@pytest.mark.parametrize(
    "mutant, architecture",
    [(padding_among_the_errors, "bert"), (passes_added_up, "albert"), (rows_weighted_alike, "distilbert")],
)
def test_what_is_broken_is_noticed(mutant: Any, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equal_to_matrices(architecture, [1, 3])
