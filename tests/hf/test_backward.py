"""Gradients through a converted model: checkpointing, autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.hf.attention import linearized_layers
from tests.hf.checks import assert_close, left_padding, positions
from tests.hf.models import CASES, MIXER_CASES, Case, make_student, make_teacher, random_tokens

SOME = [case for case in CASES if case.name in {"llama-terraced", "llama-mixed", "qwen3-sinks", "gpt2-sliding"}]
SOME += [case for case in MIXER_CASES if case.name in {"gated-delta-llama", "regla-mistral", "performer-gpt2"}]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Of the next-token loss on left-padded rows."""
    ids, mask = random_tokens(2, 24), left_padding([6, 0], 24)
    labels = ids.masked_fill(mask == 0, -100)
    model.zero_grad()
    model(ids, attention_mask=mask, position_ids=positions(mask), labels=labels, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_gradient_checkpointing(case: Case) -> None:
    model = make_student(case, make_teacher(case.architecture)).train()
    plain = gradients(model)
    # The old name warns in newer releases, the new one is not in older releases.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    calls = []
    for layer in linearized_layers(model).values():
        layer.mixer.register_forward_hook(lambda *_: calls.append(1))
    checkpointed = gradients(model)
    assert len(calls) == 2 * len(linearized_layers(model))  # it does recompute
    assert list(checkpointed) == list(plain)
    for name, gradient in plain.items():
        assert_close(checkpointed[name], gradient)
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_autocast(case: Case) -> None:
    model = make_student(case, make_teacher(case.architecture).float())
    ids, mask = random_tokens(2, 40), left_padding([6, 0], 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
    exact = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=0.1)
    assert loss.item() != exact.item()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
