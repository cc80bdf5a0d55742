"""Gated DeltaNet students as models of the class `qwen3_5_text`, and what has no place in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from linearize.base import UserError
from linearize.configs.feature_maps import IdentityMap
from linearize.configs.mixer import HeadwiseConfig, MixerConfig
from linearize.configs.mixer_parts import ScalarDecay
from linearize.export import command
from linearize.export.command import export
from linearize.export.delta_net import CLASS, RECIPE, delta_net_model
from linearize.hf.convert import convert_layers
from linearize.recipe import Recipe
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.export.students import make_student, random_ids
from tests.hf.models import randomize_mixers

DELTA: Any = Recipe.load(RECIPE).mixer
PLAN = (DELTA, None, DELTA)
HEADS = dict(num_hidden_layers=3, head_dim=12)


def _difference(student: PreTrainedModel, stock: PreTrainedModel) -> float:
    ids = random_ids(2, 150)  # more than two chunks
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids).logits for model in (student, stock))
    return float((ours - theirs).abs().max() / ours.abs().max())


@pytest.mark.parametrize(
    "architecture, fields",
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rms_norm_eps": 1e-6}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_the_class_computes_the_same(architecture: str, fields: dict[str, Any]) -> None:
    student = make_student(architecture, PLAN, **(HEADS | fields))
    stock = delta_net_model(student)
    assert stock.config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    assert _difference(student, stock) < 1e-4  # the class computes linear layers in float32
    options = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False)
    ours, theirs = (model.generate(random_ids(1, 70), **options) for model in (student, stock))
    assert torch.equal(ours, theirs)


def test_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    student = convert_layers(tiny.llama(layers=3), PLAN).eval()
    randomize_mixers(student)
    student.save_pretrained(tmp_path / "student")
    byte_tokenizer().save_pretrained(tmp_path / "student")
    found = export(str(tmp_path / "student"), tmp_path / "out", to="hf", kind="f32")
    assert found.stock_class == CLASS and found.agreed == command.NEW_TOKENS and found.difference < 1e-4
    assert "full attention in layers 1, and gated DeltaNet in the others" in found.lines()[0]
    loaded = AutoModelForCausalLM.from_pretrained(found.path)
    assert type(loaded).__module__ == "transformers.models.qwen3_5.modeling_qwen3_5"
    assert _difference(student, loaded) < 1e-4
    half = export(str(tmp_path / "student"), tmp_path / "half", to="hf", kind="bf16")
    rounded = AutoModelForCausalLM.from_pretrained(half.path, dtype=torch.float32)
    assert _difference(student, rounded) < 2 * _difference(student, copy.deepcopy(student).bfloat16().float())
    for options, expected in (
        ({"to": "hf", "kind": "f16"}, "--type: expected bf16 or f32 for gated DeltaNet, found 'f16'"),
        ({"to": "hf", "stock_class": "cwm"}, "--class: expected qwen3_5_text for gated DeltaNet, found 'cwm'"),
        ({"to": "gguf"}, "--to: expected hf for gated DeltaNet, found 'gguf'"),
    ):
        with pytest.raises(UserError, match=expected):
            export(str(tmp_path / "student"), tmp_path / "refused", **options)


IDENTITY = DELTA.model_copy(update={"feature_map": IdentityMap(rotation="none")})
SCALED = DELTA.model_copy(update={"scale": "none"})


@pytest.mark.parametrize(
    "architecture, plan, fields, expected",
    [
        ("llama", (DELTA,) * 3, {}, "at least one layer with full attention"),
        ("llama", (DELTA, None, IDENTITY), {}, "layer 2: expected full attention or the mixer of"),
        ("llama", (SCALED, None, DELTA), {}, "layer 0: expected full attention or the mixer of"),
        ("llama", (HeadwiseConfig.of([DELTA, None]), None, DELTA), {}, "layer 0: expected full attention or the mixer"),
        ("llama", PLAN, {"attention_bias": True}, "expected no biases"),
        ("llama", PLAN, {"mlp_bias": True}, "expected no biases"),
        ("qwen3", PLAN, {}, "model_type: expected llama or mistral without a sliding window, found 'qwen3'"),
        ("mistral", PLAN, {"sliding_window": 8}, "without a sliding window, found 'mistral'"),
    ],
)
def test_parts_without_a_place_are_refused(
    architecture: str, plan: tuple[MixerConfig | HeadwiseConfig | None, ...], fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        delta_net_model(make_student(architecture, plan, **({"num_hidden_layers": 3} | fields)))


def test_another_initial_decay_has_a_place() -> None:
    other = DELTA.model_copy(update={"decay": ScalarDecay(input_scale=False, bias_init=1.0)})
    student = make_student("llama", (other, None, DELTA), **HEADS)
    assert _difference(student, delta_net_model(student)) < 1e-4
