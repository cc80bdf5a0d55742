"""Stock models compute what the converted models compute, and parts without a place in them are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from linearize.base import UserError
from linearize.configs.feature_maps import HedgehogMap
from linearize.configs.mixer import HeadwiseConfig, MixerConfig
from linearize.configs.mixer_parts import SharedDenominator
from linearize.configs.spans import SlidingSpan
from linearize.export.stock import STOCK_CLASSES, stock_model
from linearize.training.memory import head_mixer, layer_mixer
from tests.export.students import WINDOW, local_global, make_student, random_ids

LLAMA_3 = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
NO_WINDOWS = {"use_sliding_window": False, "layer_types": None}
CASES: list[tuple[str, bool, dict[str, Any], str]] = [
    ("llama", True, {}, "granite_swa"),
    ("llama", True, {"tie_word_embeddings": True}, "granite_swa"),
    ("llama", True, {"attention_bias": True, "mlp_bias": True}, "granite_swa"),
    ("llama", True, {"rope_parameters": LLAMA_3}, "granite_swa"),
    ("llama", False, {}, "ministral"),
    ("llama", False, {"rope_parameters": LLAMA_3}, "ministral"),
    ("mistral", True, {"sliding_window": None}, "granite_swa"),
    ("mistral", False, {"sliding_window": None}, "ministral"),
    ("qwen2", True, NO_WINDOWS, "granite_swa"),
    ("qwen2", False, NO_WINDOWS, "qwen2"),
]


@pytest.mark.parametrize("architecture, learned_sink, fields, expected", CASES)
def test_the_stock_model_computes_the_same(
    architecture: str, learned_sink: bool, fields: dict[str, Any], expected: str
) -> None:
    student = make_student(architecture, learned_sink=learned_sink, **fields)
    stock = stock_model(student)
    assert stock.config.model_type == expected and type(stock).__module__.startswith("transformers.models.")
    assert stock.config.sliding_window == WINDOW
    ids = random_ids(2, 6 * WINDOW)
    with torch.no_grad():
        logits = student(input_ids=ids).logits
        # transformers computes softmax and RoPE of these classes in float32.
        torch.testing.assert_close(
            stock(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item()
        )
        options = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False)
        ours, theirs = (model.generate(ids[:1], **options) for model in (student, stock))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["ministral", "cwm", "granite_swa"])
def test_a_class_can_be_named(name: str) -> None:
    student = make_student(learned_sink=False)
    stock = stock_model(student, name)
    ids = random_ids(1, 5 * WINDOW)
    with torch.no_grad():
        expected = student(input_ids=ids).logits
        torch.testing.assert_close(stock(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-4)
    assert stock.config.model_type == name


def test_what_is_saved_loads_without_linearize(tmp_path: Any) -> None:
    student = make_student()
    stock = stock_model(student)
    stock.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids = random_ids(1, 30)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, stock(input_ids=ids).logits)
    assert not any("linearize" in name for name in vars(loaded.config))


def test_the_student_is_left_as_it_is() -> None:
    student = make_student()
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    stock = stock_model(student)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())


_HEDGEHOG = MixerConfig(span=SlidingSpan(window_size=WINDOW), feature_map=HedgehogMap(), combine=SharedDenominator())


@pytest.mark.parametrize(
    "mixer, expected",
    [
        (HeadwiseConfig.of([head_mixer(4, 0, 0), head_mixer(9, 0, 0)]), "KV heads with mixers of their own"),
        (head_mixer(16, 8, 0), r"a KV cache with eviction \(8 pairs per head\)"),
        (_HEDGEHOG, "a linear part .feature_map `hedgehog`."),
        (_HEDGEHOG.model_copy(update={"span": SlidingSpan(window_size=3)}), "a linear part"),
        (_HEDGEHOG.model_copy(update={"combine": SharedDenominator(learned_sink=True)}), "a linear part"),
        (head_mixer(16, 0, 2), "2 first tokens kept as sinks, which memory.learned_sink=true"),
    ],
)
def test_parts_without_a_place_are_refused_by_layer(mixer: Any, expected: str) -> None:
    window = layer_mixer(WINDOW, 0, learned_sink=False)
    student = make_student(plan=(window, None, mixer))
    with pytest.raises(UserError, match=rf"layer 2: .* found {expected}.*convert with the recipe local-global"):
        stock_model(student)


def test_windows_of_two_sizes_are_refused() -> None:
    plan = (layer_mixer(5, 0, learned_sink=True), None, layer_mixer(9, 0, learned_sink=True))
    with pytest.raises(UserError, match=r"one window in all layers .* found layer 0: 5, layer 2: 9"):
        stock_model(make_student(plan=plan))


@pytest.mark.parametrize(
    "architecture, learned_sink, fields, name, expected",
    [
        ("llama", True, {}, "ministral", "--class: expected a class that has learned sinks, found ministral"),
        ("qwen2", False, NO_WINDOWS, "cwm", "expected a class that has biases of attention, found cwm"),
        ("llama", False, {"mlp_bias": True}, "qwen2", "expected a class that has biases of the MLP, found qwen2"),
        ("llama", True, {"hidden_act": "gelu"}, None, "none: .*granite_swa has none for the activation gelu"),
        ("llama", True, {}, "gemma", "--class: expected one of ministral, cwm, qwen2, granite_swa, found 'gemma'"),
        ("qwen3", True, {}, None, "expected a converted llama, mistral, qwen2, found 'qwen3'"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    architecture: str, learned_sink: bool, fields: dict[str, Any], name: str | None, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        stock_model(make_student(architecture, learned_sink=learned_sink, **fields), name)


def test_every_class_is_one_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    assert all(CONFIG_MAPPING[name].model_type == name for name in STOCK_CLASSES)


def test_all_layers_full_or_all_windowed() -> None:
    for plan in ((layer_mixer(WINDOW, 0, learned_sink=True),) * 3, local_global()):
        student = make_student(plan=plan)
        assert stock_model(student).config.layer_types.count("sliding_attention") == 3 - plan.count(None)
