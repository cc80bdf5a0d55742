"""Attention transfer: the gradients of an explicit definition, without the definition's memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import linearize
from linearize.base import UserError
from linearize.configs.spans import NoSpan
from linearize.data.rows import PackedRows
from linearize.evaluation.speed import peak_bytes
from linearize.hf.attention import linearized_layers
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout
from linearize.training.attention_transfer import TransferObjective, attention_transfer, load_transferred
from tests import tiny
from tests.probes import LargestTensor

ROWS = tiny.packed([[48], [20, 28], [1, 30, 17]])
SPANS: list[dict[str, Any]] = [
    {"type": "none"},
    {"type": "sliding", "window_size": 6, "sinks": 2},
    {"type": "terraced", "window_size": 5, "blocks": 2},
]
TOLERANCE = 1e-10


def mixer_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """The mixers' parameters that count; without a window, nothing depends on how it is weighted."""
    span = next(iter(linearized_layers(model).values())).mixer.config.span
    idle = "combine" if isinstance(span, NoSpan) else "none"
    return {name: p for name, p in model.named_parameters() if ".mixer." in name and idle not in name}


def explicit_losses(teacher: PreTrainedModel, student: PreTrainedModel, rows: PackedRows) -> list[Tensor]:
    """The MSE of every layer x 1000 as the papers write it: run the teacher, keep everything, compare.

    q, k and v are computed from what entered the teacher's layers; the targets are what entered its output projections.
    """
    entered: list[dict[str, Any]] = []
    targets: list[Tensor] = []
    handles = []
    for layer in teacher.model.layers:
        attention = layer.self_attn
        handles += [
            attention.register_forward_pre_hook(lambda *call: entered.append(call[2]), with_kwargs=True),
            attention.o_proj.register_forward_pre_hook(lambda _, args: targets.append(args[0])),
        ]
    with torch.no_grad():
        teacher(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False)
    for handle in handles:
        handle.remove()

    losses = []
    for name, layer in linearized_layers(student).items():
        attention, call = teacher.get_submodule(name), entered[layer.layer_idx]
        hidden, (cos, sin) = call["hidden_states"], call["position_embeddings"]
        projected = [
            linear(hidden).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        q, k = apply_rotary_pos_emb(*projected[:2], cos, sin)
        inputs = AttnInputs(q.detach(), k.detach(), projected[2].detach(), attention.scaling)
        y = layer.mixer(inputs, SequenceLayout.from_positions(rows.position_ids)).transpose(1, 2)
        losses.append(1000 * (y - targets[layer.layer_idx].view_as(y)).square().mean())
    return losses


def backward(student: PreTrainedModel, micro_batches: list[PackedRows]) -> tuple[list[float], list[Tensor]]:
    """Losses and gradients of attention transfer, by layer and by mixer parameter."""
    student.zero_grad()
    losses = TransferObjective(student, tiny.recipe().transfer).backward(micro_batches)
    assert list(losses) == list(linearized_layers(student))
    return list(losses.values()), [p.grad.clone() for p in mixer_parameters(student).values()]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


# --- what is learned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [[3], [2, 1]], ids=["whole batch", "unequal micro batches"])
@pytest.mark.parametrize("span", SPANS, ids=lambda span: span["type"])
def test_gradients_are_those_of_the_definition(span: dict[str, Any], splits: list[int]) -> None:
    teacher = tiny.llama(layers=3).double()
    student = tiny.moved_student(teacher, mixer__span=span)
    starts = [sum(splits[:index]) for index in range(len(splits))]
    losses, gradients = backward(student, [ROWS.rows(slice(a, a + n)) for a, n in zip(starts, splits, strict=True)])
    expected = explicit_losses(teacher, student, ROWS)
    assert min(expected) > 0.1
    assert_close(losses, [loss.item() for loss in expected])
    expected_gradients = torch.autograd.grad(sum(expected), list(mixer_parameters(student).values()))
    assert min(gradient.abs().max() for gradient in expected_gradients) > 1e-3
    assert_close(gradients, list(expected_gradients))


def test_gradients_add_up_over_steps() -> None:
    """Gradients are added to, as an optimizer expects, not replaced."""
    student = tiny.moved_student(tiny.llama().double())
    objective = TransferObjective(student, tiny.recipe().transfer)
    objective.backward([ROWS])
    once = [p.grad.clone() for p in mixer_parameters(student).values()]
    objective.backward([ROWS])
    assert_close([p.grad for p in mixer_parameters(student).values()], [2 * gradient for gradient in once])


def test_documents_of_a_row_count_as_they_would_alone() -> None:
    student = tiny.moved_student(tiny.llama().double())
    row = ROWS.rows([1])
    together = backward(student, [row])
    lengths = (20, 28)
    alone = []
    for part in (slice(0, 20), slice(20, 48)):
        document = PackedRows(row.input_ids[:, part], row.position_ids[:, part], row.labels[:, part])
        alone.append(backward(student, [document]))
    for index in (0, 1):  # losses, gradients
        parts = zip(alone[0][index], alone[1][index], strict=True)
        weighted = [(lengths[0] * first + lengths[1] * second) / 48 for first, second in parts]
        assert_close(together[index], weighted)


def test_held_out_losses_are_training_losses_without_gradients() -> None:
    student = tiny.moved_student(tiny.llama().double())
    expected, _ = backward(student, [ROWS])
    student.zero_grad()
    config = tiny.recipe().transfer.model_copy(update={"micro_batch_size": 2})
    assert_close(list(TransferObjective(student, config).evaluate(ROWS).values()), expected)
    assert all(p.grad is None for p in student.parameters())


# --- training ---------------------------------------------------------------------------------------------------------

TRAIN, VALIDATION = tiny.packed([[64], [20, 44]] * 8, seed=1), tiny.packed([[64], [30, 34]], seed=2)


def test_losses_fall_and_nothing_but_the_mixers_changes(tmp_path: Path) -> None:
    teacher = tiny.llama()
    before = tiny.snapshot(teacher)
    student = linearize.convert(teacher, tiny.recipe())
    config = tiny.recipe(transfer__lr=0.1, transfer__max_tokens=24 * 4 * 64, transfer__epochs=9).transfer
    result = attention_transfer(student, TRAIN, VALIDATION, config, output_dir=tmp_path)
    assert len(result.best_loss) == 2
    assert all(result.best_loss[name] < 0.9 * result.initial_loss[name] for name in result.best_loss)

    after = tiny.snapshot(teacher)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    own, mixers = dict(teacher.named_parameters()), mixer_parameters(student)
    for name, parameter in student.named_parameters():
        assert parameter.requires_grad == (name in mixers)
        assert name in mixers or (parameter.grad is None and parameter.data_ptr() == own[name].data_ptr())

    other = linearize.convert(teacher, tiny.recipe())
    load_transferred(other, config, tmp_path)
    assert_equal(mixer_parameters(other), mixers)
    initial = mixer_parameters(linearize.convert(teacher, tiny.recipe()))
    assert not any(torch.equal(mixers[name], initial[name]) for name in mixers)


def test_the_folder_of_another_model(tmp_path: Path) -> None:
    """Its weights fit: names and shapes are the same. The student's own stage is loaded, whatever it has learned."""
    config, recipe = tiny.recipe().transfer, tiny.recipe()
    student = linearize.convert(tiny.llama(), recipe)
    result = attention_transfer(student, TRAIN, VALIDATION, config, output_dir=tmp_path)
    assert attention_transfer(student, TRAIN, VALIDATION, config, output_dir=tmp_path) == result
    teacher = tiny.llama()
    with torch.no_grad():
        next(teacher.parameters()).mul_(1.5)
    others = (
        linearize.convert(teacher, recipe),
        linearize.convert(tiny.llama(), tiny.recipe(mixer__span__window_size=7)),
    )
    for other in others:
        with pytest.raises(UserError, match="belongs to another run: expected model = "):
            attention_transfer(other, TRAIN, VALIDATION, config, output_dir=tmp_path)
    # A stage of before, which does not say whose it is.
    about = json.loads((tmp_path / "result.json").read_text())
    about = {key: value for key, value in about.items() if key != "sha256"} | {"identity": dict(about["identity"])}
    del about["identity"]["model"]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    (tmp_path / "result.json").write_text(json.dumps(about | {"sha256": digest}))
    assert attention_transfer(student, TRAIN, VALIDATION, config, output_dir=tmp_path) == result


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_layer_learns_the_same_alone(tmp_path: Path, alone: int) -> None:
    teacher, config = tiny.llama().double(), tiny.recipe().transfer
    together = linearize.convert(teacher, tiny.recipe())
    attention_transfer(together, TRAIN, VALIDATION, config, output_dir=tmp_path / "together")
    student = linearize.convert(teacher, tiny.recipe(layers__keep_softmax=[1 - alone]))
    attention_transfer(student, TRAIN, VALIDATION, config, output_dir=tmp_path / "alone")

    found, expected = mixer_parameters(student), mixer_parameters(together)
    assert found.keys() == {name for name in expected if f"layers.{alone}." in name}
    # What enters the first layer is the same to the bit; softmax before the second one adds up in another order.
    tolerance = 0.0 if alone == 0 else TOLERANCE
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance)


# --- memory -----------------------------------------------------------------------------------------------------------


def step(layers: int, length: int, *, explicit: bool = False) -> Callable[[], Any]:
    """One row's gradients on a model whose weights and gradients are there already; packed, as training data are."""
    teacher = tiny.llama(layers=layers, max_position_embeddings=length)
    student = tiny.moved_student(teacher, mixer__span__window_size=64)
    rows = tiny.packed([[3, length - 3]])
    objective = TransferObjective(student, tiny.recipe().transfer)
    for parameter in mixer_parameters(student).values():
        parameter.grad = torch.zeros_like(parameter)
    if explicit:
        return lambda: sum(explicit_losses(teacher, student, rows)).backward()
    return lambda: objective.backward([rows])


def test_memory_does_not_grow_with_depth() -> None:
    shallow, deep = (peak_bytes(step(layers, 512)) for layers in (2, 8))
    assert deep < 1.03 * shallow


def test_memory_is_linear_in_length() -> None:
    short, long = (peak_bytes(step(2, length)) for length in (1024, 2048))
    assert long < 2.2 * short


def test_no_tensor_is_quadratic() -> None:
    with LargestTensor() as largest:
        step(2, 2048)()
    assert 2048 * 32 <= largest.elements < 2048 * 2048 // 2  # at least the hidden states were seen


def test_the_definition_grows_with_depth() -> None:
    """The measurement can tell."""
    shallow, deep = (peak_bytes(step(layers, 512, explicit=True)) for layers in (2, 8))
    assert deep > 1.8 * shallow
