"""Forward passes in fp32 of models in half precision: what an fp32 copy gives, without its memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import linearize
from linearize.evaluation.speed import peak_bytes
from linearize.training.full_precision import computed_in_fp32
from tests import tiny
from tests.hf import decoders, encoders, models

EXACT = 1e-5


def decoder(architecture: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """One layer stays softmax."""
    case = models.Case(architecture, architecture, keep_softmax=(1,))
    return models.make_student(case, models.make_teacher(architecture)), {"input_ids": models.random_tokens(2, 24)}


def encoder(architecture: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    head = "ForImageClassification" if architecture in encoders.VISION else "ForMaskedLM"
    case = encoders.Case(architecture, keep_softmax=(1,), head=head)
    inputs = encoders.inputs_of(architecture)
    return encoders.make_student(case), {
        name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()
    }


def cases() -> Iterator[Any]:
    makers = {decoder: [*models.ARCHITECTURES, *decoders.ARCHITECTURES], encoder: encoders.ENCODERS}
    for make, names in makers.items():
        yield from (pytest.param(make, name, id=name) for name in names)


def test_flash_attention_has_no_fp32() -> None:
    model, _ = decoder("llama")
    model.bfloat16()
    for implementation, computed_in in (("sdpa", torch.float32), ("flash_attention_2", torch.bfloat16)):
        model.config._attn_implementation_internal = implementation
        dtypes: list[torch.dtype] = []
        hook = model.lm_head.register_forward_hook(lambda _, args, y, seen=dtypes: seen.append(y.dtype))
        with computed_in_fp32(model):
            model.lm_head(torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16))
        hook.remove()
        assert dtypes == [computed_in]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make, architecture", [*cases()])
@torch.no_grad()
def test_outputs_are_those_of_an_fp32_copy(make: Any, architecture: str, dtype: torch.dtype) -> None:
    student, inputs = make(architecture)
    student.to(dtype)
    reference, before = copy.deepcopy(student).float(), dict(student.named_parameters())
    expected = reference(**{name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}).logits
    rounded = student(**inputs).logits
    with computed_in_fp32(student):
        found = student(**inputs).logits
    assert found.dtype == torch.float32
    scale = expected.abs().max()
    assert (found - expected).abs().max() < EXACT * scale < (rounded - expected).abs().max()
    assert torch.equal(student(**inputs).logits, rounded), "computed as before"
    after = dict(student.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


@torch.no_grad()
def test_one_part_at_a_time_is_in_fp32() -> None:
    """The memory of the largest part, a layer, is all that is needed beside the activations of an fp32 model."""
    sizes: dict[str, Any] = dict(hidden_size=128, intermediate_size=512, tie_word_embeddings=True)
    student = linearize.convert(tiny.llama(layers=8, **sizes).bfloat16(), tiny.recipe())
    reference, tokens = copy.deepcopy(student).float(), models.random_tokens(1, 16)
    alone = peak_bytes(lambda: reference(input_ids=tokens))
    layer = sum(p.numel() for p in student.model.layers[0].parameters())
    with computed_in_fp32(student):
        found = peak_bytes(lambda: student(input_ids=tokens))
    assert found < alone + 1.2 * 4 * layer


def test_weights_are_back_after_an_exception() -> None:
    student = linearize.convert(tiny.llama().bfloat16(), tiny.recipe())
    before = dict(student.named_parameters())

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    broken: nn.Module = student.model.layers[1].mlp
    handle = broken.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt), computed_in_fp32(student):
        student(input_ids=models.random_tokens(1, 8))
    handle.remove()
    after = dict(student.named_parameters())
    assert all(after[name] is before[name] for name in before)
    with torch.no_grad():
        assert student(input_ids=models.random_tokens(1, 8)).logits.dtype == torch.bfloat16
