"""Statistics of a teacher's attention, beside the weights that transformers' own eager attention returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from linearize import convert
from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.evaluation import attention_statistics as module
from linearize.evaluation.attention_statistics import attention_statistics, measured_attention
from linearize.hf.checkpoint import read_config
from linearize.hf.teacher import TeacherShape
from linearize.mixers import attention_weights
from tests import tiny
from tests.hf.decoders import DECODERS
from tests.hf.models import ARCHITECTURES, make_teacher, random_tokens

ROWS, LENGTH = 2, 48


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *DECODERS}))
def test_statistics_are_those_of_the_weights(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every decoder: grouped heads, soft-capped logits, layers that slide; in blocks of a few queries."""
    monkeypatch.setattr(module, "NEAR", 5)
    monkeypatch.setitem(attention_weights.BLOCK_WEIGHTS, "cpu", 1)
    teacher, tokens = make_teacher(architecture), random_tokens(ROWS, LENGTH)
    teacher.set_attn_implementation("eager")  # of which the weights can be had
    found = attention_statistics(teacher, tokens)
    with torch.no_grad():
        of_layers = teacher(tokens, output_attentions=True, use_cache=False).attentions
    assert len(of_layers) > 1
    weights = torch.cat([x.double() for x in of_layers], dim=1)[:, :, LENGTH // 3 :]
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
    first = weights[..., 0]
    distance = torch.arange(LENGTH // 3, LENGTH)[:, None] - torch.arange(LENGTH)
    far = (weights * (distance >= 5))[..., 1:].sum(-1)
    expected = [x.mean().item() for x in (entropy, first, far)]
    assert [found.entropy, found.first_token, found.beyond_near] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found.sink_heads == int((first.mean((0, 2)) > 0.5).sum())
    assert (found.heads, found.queries) == (weights.shape[1], ROWS * (LENGTH - LENGTH // 3))


def test_queries_that_like_all_keys_alike() -> None:
    teacher = tiny.llama()
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = attention_statistics(teacher, torch.arange(1, 61)[None])
    even = torch.arange(21, 61, dtype=torch.float64)  # keys of a query, all alike
    assert found.entropy == pytest.approx(even.log().mean().item()) and found.sink_heads == 0
    assert found.first_token == pytest.approx((1 / even).mean().item()) and found.beyond_near == 0


def test_the_teacher_is_left_as_it_was() -> None:
    teacher, tokens = tiny.llama(), random_tokens(1, 30)
    before = teacher(tokens).logits
    attention_statistics(teacher, tokens)
    assert torch.equal(teacher(tokens).logits, before)


def test_of_a_folder_and_a_text(tmp_path: Path) -> None:
    folder, where = tiny.teacher_folder(), {"dtype": torch.float32, "device": torch.device("cpu")}
    shape = TeacherShape.from_config(read_config(folder))
    found = measured_attention(folder, shape, DataConfig(dataset=tiny.text_file()), **where)
    assert found.queries == 256 - 256 // 3  # the model's positions
    short = tmp_path / "short.txt"
    short.write_text("a" * 100)
    with pytest.raises(UserError, match="--dataset: expected more than 128 tokens to measure attention on, found 102"):
        measured_attention(folder, shape, DataConfig(dataset=str(short)), **where)
    encoder = tiny.encoder_folder()
    with pytest.raises(UserError, match="--dataset: expected a decoder, found bert, an encoder"):
        shape = TeacherShape.from_config(read_config(encoder))
        measured_attention(encoder, shape, DataConfig(dataset=tiny.text_file()), **where)


def test_what_is_linearized_already_is_refused() -> None:
    with pytest.raises(UserError, match="expected a softmax model"):
        attention_statistics(convert(tiny.llama(), tiny.recipe()), random_tokens(1, 30))


def test_heads_that_give_the_first_token_most_are_counted() -> None:
    """Positions of GPT-2 tell the first token: here all keys are 0 but its, which one layer's queries like."""
    teacher = tiny.gpt2()
    with torch.no_grad():
        teacher.transformer.wpe.weight.zero_()
        teacher.transformer.wte.weight.normal_(std=1e-3)
        teacher.transformer.wte.weight[:, 0] = 0
        teacher.transformer.wpe.weight[0, 0] = 1.0
        attention = teacher.transformer.h[0].attn.c_attn
        attention.weight.zero_()
        attention.bias.zero_()
        # Queries of two heads of eight dimensions: they give the first token about 0.8 and 0.3.
        attention.bias[:8], attention.bias[8:16] = 0.32, 0.16
        attention.weight[0, 32:64] = 1.0  # keys
    found = attention_statistics(teacher, random_tokens(1, 48))
    assert (found.sink_heads, found.heads) == (1, 8)
