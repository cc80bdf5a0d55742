"""Shapes read from ``config.json``, as the checkpoints on the hub and transformers itself write it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from linearize.base import UserError
from linearize.hf.teacher import TeacherShape
from linearize.mixers.shape import LayerShape

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
# As in the gpt2 checkpoint, which has no head_dim, no num_key_value_heads and no n_inner.
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def numbers(shape: TeacherShape) -> list[object]:
    """All but how many weights it has."""
    return [getattr(shape, field.name) for field in fields(shape) if field.name != "sizes"]


def test_llama_3_8b() -> None:
    sizes = [32, 32, 8, 128, 4096, 14336, 128256, 8192]
    assert numbers(TeacherShape.from_config(LLAMA_3_8B)) == ["llama", *sizes, False, (), (128,) * 32, False, False]


def test_gpt2() -> None:
    sizes = [12, 12, 12, 64, 768, 3072, 50257, 1024]
    assert numbers(TeacherShape.from_config(GPT2)) == ["gpt2", *sizes, True, (), (0,) * 12, False, True]


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3),
    "mistral": MistralConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, sliding_window=None),
    "qwen3": Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, head_dim=8),
    "gpt2": GPT2Config(n_embd=64, n_head=4, n_layer=3, n_inner=100),
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_agrees_with_transformers(model_type: str) -> None:
    config = CONFIGS[model_type]
    shape = TeacherShape.from_config(config.to_dict())
    assert shape.model_type == model_type and shape.num_layers == 3 and shape.num_heads == 4
    assert shape.num_kv_heads == (config.num_key_value_heads if model_type != "gpt2" else 4)
    assert shape.head_dim == (config.head_dim if model_type != "gpt2" else 16)
    assert shape.hidden_size == 64
    assert shape.intermediate_size == (config.intermediate_size if model_type != "gpt2" else 100)
    assert shape.vocab_size == config.vocab_size
    assert shape.max_positions == config.max_position_embeddings
    assert shape.tied_embeddings == config.tie_word_embeddings
    assert shape.sliding_layers == ()
    assert shape.layer == LayerShape(4, shape.num_kv_heads, shape.head_dim, 64, config.max_position_embeddings)
    assert shape.rotary_dims == (shape.head_dim if "rope_parameters" in config.to_dict() else 0,) * 3
    assert not shape.bidirectional


def test_a_linearized_checkpoint_has_its_bases_shape() -> None:
    base = TeacherShape.from_config(LLAMA_3_8B)
    assert TeacherShape.from_config(LLAMA_3_8B | {"model_type": "linearized_llama"}) == base


@pytest.mark.parametrize(
    ("change", "sliding"),
    [
        ({"sliding_window": 4096}, (0, 1, 2)),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 4096, "use_sliding_window": False}, ()),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, (1,)),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 3}, ()),
    ],
)
def test_sliding_layers(change: dict[str, Any], sliding: tuple[int, ...]) -> None:
    assert TeacherShape.from_config(LLAMA_3_8B | {"num_hidden_layers": 3} | change).sliding_layers == sliding


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "xlnet"}, "model_type: expected one of llama, mistral, .*, granite, bert, "),
        ({"model_type": "xlnet"}, "dinov2; found 'xlnet'"),
        ({"model_type": ""}, "found 'nothing'"),
        ({"hidden_size": None}, "hidden_size: expected a positive integer, found None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive integer, found 0"),
        ({"vocab_size": "many"}, "vocab_size: expected a positive integer, found 'many'"),
    ],
)
def test_bad_config(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected) as error:
        TeacherShape.from_config(LLAMA_3_8B | change)
    assert "\n" not in str(error.value)


def test_a_missing_size_is_called_by_its_name_in_the_file() -> None:
    with pytest.raises(UserError, match="n_embd"):
        TeacherShape.from_config({name: value for name, value in GPT2.items() if name != "n_embd"})
