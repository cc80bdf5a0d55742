"""Shapes and plans of encoders, against transformers' own configs and models, and against sums done by hand."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModel

from linearize.base import UserError
from linearize.hf.attention import linearized_layers
from linearize.hf.classes import projections
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.combine import Add
from linearize.mixers.shape import LayerShape
from linearize.plan import Plan, lora_parameters, make_plan, render, teacher_parameters
from linearize.recipe import Recipe, resolve
from linearize.training import config as stages

TEXT = dict(vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4)
TEXT |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=None)
DISTILBERT = dict(vocab_size=101, dim=48, hidden_dim=80, n_layers=3, n_heads=4, max_position_embeddings=64)
MODERNBERT = TEXT | dict(cls_token_id=None, sep_token_id=None)
VISION = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4)
VISION |= dict(image_size=[32, 24], patch_size=8)
DINOV2 = {name: value for name, value in VISION.items() if name != "intermediate_size"}
# Model type, its config, and what is special about its shape.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("bert", TEXT, {}),
    "roberta": ("roberta", TEXT | dict(pad_token_id=1), dict(max_positions=62)),
    "distilbert": ("distilbert", DISTILBERT, {}),
    "albert": ("albert", TEXT | dict(embedding_size=16), dict(num_layers=1, passes=(3,))),
    "albert groups": (
        "albert",
        TEXT | dict(embedding_size=16, num_hidden_groups=2),
        dict(num_layers=2, passes=(2, 1)),
    ),
    "modernbert": ("modernbert", MODERNBERT, dict(sliding_layers=(1, 2))),
    "modernbert biases": (
        "modernbert",
        MODERNBERT | dict(norm_bias=True, attention_bias=True, mlp_bias=True, layer_types=3 * ["full_attention"]),
        {},
    ),
    "vit": ("vit", VISION, dict(vocab_size=0, max_positions=13)),
    "vit no bias": (
        "vit",
        VISION | dict(qkv_bias=False, pooler_output_size=5, image_size=32),
        dict(vocab_size=0, max_positions=17),
    ),
    "deit": ("deit", VISION, dict(vocab_size=0, max_positions=14)),
    "dinov2": ("dinov2", DINOV2, dict(vocab_size=0, max_positions=13, intermediate_size=192)),
    "dinov2 gated": (
        "dinov2",
        DINOV2 | dict(use_swiglu_ffn=True, use_mask_token=False, mlp_ratio=3),
        dict(vocab_size=0, max_positions=13, intermediate_size=96),
    ),
}
every = pytest.mark.parametrize("name", CONFIGS)
# As the checkpoint on the hub has it, without `layer_types`.
MODERNBERT_BASE: dict[str, Any] = {
    "model_type": "modernbert",
    "global_attn_every_n_layers": 3,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "max_position_embeddings": 8192,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "vocab_size": 50368,
}
BERT_BASE: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}


def config_of(name: str) -> Any:
    model_type, fields, _ = CONFIGS[name]
    return AutoConfig.for_model(model_type, **fields)


def shape_of(name: str) -> TeacherShape:
    return TeacherShape.from_config(config_of(name).to_dict())


def recipe(**fields: Any) -> Recipe:
    return Recipe.load("hedgehog", {"layers.convert_sliding": True} | fields)


def planned(teacher: TeacherShape, training_tokens: int | None = None, **fields: Any) -> Plan:
    chosen = recipe(**fields)
    return make_plan(chosen, teacher, resolve(chosen, teacher), training_tokens=training_tokens)


# --- shapes -----------------------------------------------------------------------------------------------------------


@every
def test_shapes(name: str) -> None:
    model_type, _, special = CONFIGS[name]
    expected: dict[str, Any] = dict(num_layers=3, num_heads=4, num_kv_heads=4, head_dim=12, hidden_size=48)
    expected |= dict(intermediate_size=80, vocab_size=101, max_positions=64, sliding_layers=(), passes=(1, 1, 1))
    expected |= dict(model_type=model_type, bidirectional=True) | special
    shape = shape_of(name)
    assert {field: getattr(shape, field) for field in expected} == expected
    assert shape.layer == LayerShape(4, 4, 12, 48, shape.max_positions)
    assert shape.rotary_dims == (12 if model_type == "modernbert" else 0,) * shape.num_layers


def test_published_configs() -> None:
    modernbert, bert = (TeacherShape.from_config(config) for config in (MODERNBERT_BASE, BERT_BASE))
    assert modernbert.sliding_layers == tuple(index for index in range(22) if index not in range(0, 22, 3))
    assert modernbert.max_positions == 8192
    assert teacher_parameters(bert) == 109_482_240
    assert teacher_parameters(modernbert) == 149_014_272


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", dict(is_decoder=True), "is_decoder: expected false, found true; bert converts as an encoder"),
        ("albert", dict(inner_group_num=2), "inner_group_num: expected 1, found 2"),
        ("albert", dict(num_hidden_layers=None), "num_hidden_layers: expected 1 .* found None"),
        ("distilbert", dict(n_heads=None), "n_heads: expected a positive integer, found None"),
        ("vit", dict(image_size="large"), "image_size: expected a positive integer or two, found 'large'"),
        ("vit", dict(patch_size=[8, 8, 8]), "patch_size: expected a positive integer or two, found"),
    ],
)
def test_configs_that_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TeacherShape.from_config(config_of(name).to_dict() | change)


def test_what_only_a_decoder_can_do() -> None:
    with pytest.raises(UserError, match=r"data.top_esl: expected a decoder, found the encoder 'bert'; set it to null"):
        shape_of("bert").refuse_encoder("data.top_esl", "set it to null")
    TeacherShape.from_config({**BERT_BASE, "model_type": "llama"}).refuse_encoder("data.top_esl", "set it to null")


# --- resolving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "overrides", "message"),
    [
        (
            "lolcats",
            {},
            r"mixer.span: expected `none`, because an encoder.* found `sliding`; use the recipe hedgehog-bert",
        ),
        ("retnet", {}, r"mixer.decay: expected null, .* found `fixed`"),
        ("deltanet", {}, r"mixer.update: expected `additive`, .* found `delta`"),
        ("hedgehog", {"transfer.layers_per_block": 1}, r"transfer.layers_per_block: expected null, .*found 1"),
        ("hedgehog", {"data.top_esl": 7}, r"data.top_esl: expected null, .*found 7"),
        ("hedgehog", {"layers.keep_softmax": [3]}, r"keep_softmax: expected indices from -3 to 2, found 3"),
    ],
)
def test_what_an_encoder_cannot_have(chosen: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        resolve(Recipe.load(chosen, overrides), shape_of("bert"))
    assert "\n" not in str(error.value)


def test_layers_that_share_weights_convert_alike() -> None:
    assert len(resolve(recipe(), shape_of("albert"))) == 1
    with pytest.raises(UserError, match="keep_softmax: expected indices from -1 to 0, found 2"):
        resolve(recipe(**{"layers.keep_softmax": [2]}), shape_of("albert"))


def test_local_layers_are_left_alone_unless_asked() -> None:
    layers = resolve(recipe(**{"layers.convert_sliding": False}), shape_of("modernbert"))
    assert [mixer is None for mixer in layers] == [False, True, True]
    assert None not in resolve(recipe(), shape_of("modernbert"))


def test_without_a_window_nothing_is_shared() -> None:
    layers = resolve(recipe(**{"mixer.combine.type": "shared_denominator"}), shape_of("bert"))
    assert all(mixer is not None and mixer.combine == Add() for mixer in layers)


# --- plans ------------------------------------------------------------------------------------------------------------


@every
def test_parameters_are_the_model_s(name: str) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(config_of(name))
    shape = shape_of(name)
    assert teacher_parameters(shape) == model.num_parameters()
    for targets in (("q",), ("v", "o")):
        adapted = projections(model, targets).values()
        assert len(adapted) == shape.num_layers * len(targets)
        lora = stages.LoRAConfig(rank=3, targets=targets)
        assert lora_parameters(lora, shape) == 3 * sum(sum(module.weight.shape) for module in adapted)


@every
@pytest.mark.parametrize("overrides", [{}, {"mixer.combine.type": "shared_denominator"}], ids=["add", "shared"])
def test_new_parameters_are_the_student_s(name: str, overrides: dict[str, Any]) -> None:
    shape, model = shape_of(name), AutoModel.from_config(config_of(name))
    student = convert_layers(model, resolve(recipe(**overrides), shape))
    found = sum(p.numel() for layer in linearized_layers(student).values() for p in layer.mixer.parameters())
    assert planned(shape, **overrides).new_parameters == found > 0


def test_flops_by_hand() -> None:
    shape = shape_of("albert")  # one layer, three times; h = H D = 48, H = 4, F = 24
    plan = planned(shape, training_tokens=1, **{"data.sequence_length": 16, "transfer.epochs": 1})
    layer = 4 * 48 * 48 + 8 * 48 + 2 * 48 * 80 + 80 + 48
    outside = 2 * 16 + 16 * 48 + 48 + 48 * 48 + 48
    softmax = 4 * 48 * 16  # every key, not half of them
    maps = 2 * (2 * 4 * 12 * 12)
    mixer = maps + 2 * 2 * 4 * 24 * 12
    assert plan.transfer is not None
    assert plan.transfer.flops == 2 * (outside + 3 * layer) + 3 * softmax + 3 * 3 * mixer


def test_an_image_is_a_row() -> None:
    plans = [planned(shape_of("vit"), training_tokens=1, **{"data.sequence_length": n}) for n in (16, 512)]
    assert plans[0] == plans[1]


def rendered(plan: Plan) -> str:
    text = StringIO()
    Console(file=text, width=200).print(render(plan))
    return text.getvalue()


@every
def test_an_encoder_has_no_cache_and_no_state(name: str) -> None:
    plan = planned(shape_of(name))
    assert plan.bidirectional and plan.break_even_tokens is None
    assert plan.state_bytes == plan.student_cache_bytes_per_token == plan.teacher_cache_bytes_per_token == 0
    assert json.loads(json.dumps(plan.to_json()))["bidirectional"] is True
    text = rendered(plan)
    assert "time and memory linear in length, no cache" in text
    assert "memory is saved" not in text and "per token" not in text and "as they were" not in text


def test_kept_layers_are_named() -> None:
    text = rendered(planned(shape_of("modernbert"), **{"layers.convert_sliding": False}))
    assert "1 of 3" in text and "layers that stay softmax are as they were" in text
