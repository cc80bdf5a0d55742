"""Losses on outputs against sums written out, in one chunk and in many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from linearize.configs.training import LossConfig
from linearize.data.rows import PackedRows
from linearize.training import losses
from linearize.training.losses import output_losses
from tests.probes import LargestTensor

B, L, V = 2, 7, 11
LOSSES = {
    "next token": LossConfig(),
    "kl": LossConfig(labels=0, kl=1),
    "all": LossConfig(labels=0.3, kl=2),
    "top 3": LossConfig(labels=0, kl=1, top_k=3),
    "top of all": LossConfig(labels=0, kl=1, top_k=V),
    "mse": LossConfig(labels=0, output_mse=0.7),
}


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(B, L, V, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(V, (B, L), generator=generator)
    labels[0, 2], labels[1, 5:] = -100, -100
    return student.requires_grad_(), teacher, labels


def slowly(student: Tensor, teacher: Tensor, labels: Tensor, config: LossConfig) -> Tensor:
    """Token by token, probability by probability."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(B):
        for slot in range(1, L):
            label = int(labels[row, slot])
            if label == -100:
                continue
            q, p = (x[row, slot - 1].exp() / x[row, slot - 1].exp().sum() for x in (student, teacher))
            squares = (student[row, slot - 1] - teacher[row, slot - 1]) ** 2
            total = total - config.labels * q[label].log() + config.output_mse * squares.sum() / V
            if config.top_k is not None and config.top_k < V - 1:
                best = sorted(range(V), key=lambda token: -float(p[token]))[: config.top_k]
                q, p = (torch.stack([*(x[i] for i in best), 1 - sum(x[i] for i in best)]) for x in (q, p))
            total = total + config.kl * sum(p[i] * (p[i] / q[i]).log() for i in range(len(p)))
    return total


def loss_of(student: Tensor, teacher: Tensor | None, labels: Tensor, config: LossConfig) -> Tensor:
    """As packed rows pair them: the logits at t - 1 with the label at t."""
    rows = PackedRows(labels.clamp_min(0), torch.arange(L).expand(B, -1), labels)
    compared = [None if x is None else rows.compared(SimpleNamespace(logits=x)) for x in (student, teacher)]
    assert compared[0] is not None
    return output_losses(compared[0], compared[1], rows.targets(), config)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk", [3 * V, 2**20], ids=["three tokens", "all tokens"])
def test_losses_and_gradients(monkeypatch: pytest.MonkeyPatch, name: str, chunk: int) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    student, teacher, labels = drawn()
    expected = slowly(student, teacher, labels, LOSSES[name])
    found = loss_of(student, teacher if LOSSES[name].needs_teacher else None, labels, LOSSES[name])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_the_teacher_itself_has_no_divergence() -> None:
    _, teacher, labels = drawn()
    for name in ("kl", "top 3"):
        assert abs(loss_of(teacher, teacher, labels, LOSSES[name]).item()) < 1e-12


def test_no_copy_of_all_logits_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward included, which computes a chunk's distributions again."""
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 4 * 64)
    student = torch.randn(64, 64, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(64, (64,))

    class LargestFp32(LargestTensor):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float32:
                self.elements = max(self.elements, result.numel())
            return result

    with LargestFp32() as largest:
        output_losses(student, student.detach(), labels, LOSSES["all"]).backward()
    assert 0 < largest.elements <= 4 * 64


def test_numbers_as_targets() -> None:
    outputs, targets = torch.tensor([[1.0], [3.0]], requires_grad=True), torch.tensor([0.5, 4.0])
    loss = output_losses(outputs, None, targets, LossConfig(labels=2))
    assert loss.item() == 2 * (0.25 + 1.0)


def test_no_targets_make_a_loss_of_0_that_has_a_graph() -> None:
    outputs = torch.randn(0, 5, requires_grad=True)
    loss = output_losses(outputs, None, torch.zeros(0, dtype=torch.int64), LossConfig())
    loss.backward()
    assert loss.item() == 0
