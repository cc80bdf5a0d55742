"""Decoders as their checkpoints on the hub describe them, in the words of older versions of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from linearize.base import UserError
from linearize.hf.decoders import DECODERS
from linearize.hf.teacher import TeacherShape
from linearize.plan import teacher_parameters


def config(
    model_type: str, layers: int, heads: int, h: int, inner: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": h, "intermediate_size": inner}
    return {"model_type": model_type, "vocab_size": vocabulary} | sizes | more


_QWEN = dict(use_sliding_window=False, sliding_window=32768, max_window_layers=21)
_LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# The contents of config.json, what stands out in their shape, and how many parameters they have.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "Llama-3.2-1B": (
        config("llama", 16, 32, 2048, 8192, 128256, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)
        | dict(rope_scaling=_LLAMA3, rope_theta=5e5, max_position_embeddings=131072),
        dict(num_kv_heads=8, head_dim=64, tied_embeddings=True, rotary_dims=(64,) * 16, max_positions=131072),
        1_235_814_400,
    ),
    "Mixtral-8x7B": (
        config("mixtral", 32, 32, 4096, 14336, 32000, num_key_value_heads=8, sliding_window=None)
        | dict(num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768),
        dict(num_kv_heads=8, sliding_layers=()),
        46_702_792_704,
    ),
    "Qwen2-0.5B": (
        config("qwen2", 24, 14, 896, 4864, 151936, num_key_value_heads=2, tie_word_embeddings=True, **_QWEN),
        dict(head_dim=64, num_kv_heads=2, tied_embeddings=True, sliding_layers=()),
        494_032_768,
    ),
    "Qwen3-30B-A3B": (
        config("qwen3_moe", 48, 32, 2048, 6144, 151936, num_key_value_heads=4, head_dim=128, num_experts=128)
        | dict(num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[])
        | dict(max_window_layers=48, sliding_window=None, use_sliding_window=False),
        dict(head_dim=128, num_kv_heads=4, sliding_layers=()),
        30_532_122_624,
    ),
    "gemma-2b": (
        config("gemma", 18, 8, 2048, 16384, 256000, num_key_value_heads=1, head_dim=256),
        dict(head_dim=256, num_kv_heads=1, tied_embeddings=True),
        2_506_172_416,
    ),
    "gemma-2-2b": (
        config("gemma2", 26, 8, 2304, 9216, 256000, num_key_value_heads=4, head_dim=256, sliding_window=4096)
        | dict(max_position_embeddings=8192, attn_logit_softcapping=50.0, query_pre_attn_scalar=256),
        dict(head_dim=256, tied_embeddings=True, sliding_layers=tuple(range(0, 26, 2))),
        2_614_341_888,
    ),
    "gemma-3-1b": (
        config("gemma3_text", 26, 4, 1152, 6912, 262144, num_key_value_heads=1, head_dim=256, sliding_window=512)
        | dict(sliding_window_pattern=6, max_position_embeddings=32768, rope_local_base_freq=10000),
        dict(num_kv_heads=1, sliding_layers=tuple(index for index in range(26) if index % 6 != 5)),
        999_885_952,
    ),
    "phi-2": (
        config("phi", 32, 32, 2560, 10240, 51200, num_key_value_heads=32, partial_rotary_factor=0.4),
        dict(head_dim=80, rotary_dims=(32,) * 32),
        2_779_683_840,
    ),
    "Phi-3-mini-4k": (
        config("phi3", 32, 32, 3072, 8192, 32064, num_key_value_heads=32, sliding_window=2047)
        | dict(max_position_embeddings=4096, rope_scaling=None),
        dict(head_dim=96, rotary_dims=(96,) * 32, sliding_layers=tuple(range(32))),
        3_821_079_552,
    ),
    "Phi-4-mini": (
        config("phi3", 32, 24, 3072, 8192, 200064, num_key_value_heads=8, partial_rotary_factor=0.75)
        | dict(max_position_embeddings=131072, sliding_window=262144, tie_word_embeddings=True),
        dict(head_dim=128, num_kv_heads=8, rotary_dims=(96,) * 32, sliding_layers=()),
        3_836_021_760,
    ),
    "pythia-70m": (
        config("gpt_neox", 6, 8, 512, 2048, 50304, rotary_pct=0.25, rotary_emb_base=10000, tie_word_embeddings=False),
        dict(head_dim=64, num_kv_heads=8, rotary_dims=(16,) * 6, tied_embeddings=False),
        70_426_624,
    ),
    "opt-125m": (
        {k: v for k, v in config("opt", 12, 12, 768, 0, 50272, ffn_dim=3072).items() if k != "intermediate_size"}
        | dict(word_embed_proj_dim=768, max_position_embeddings=2048),
        dict(intermediate_size=3072, rotary_dims=(0,) * 12, tied_embeddings=True),
        125_239_296,
    ),
    "opt-350m": (
        config("opt", 24, 16, 1024, 0, 50272, ffn_dim=4096, word_embed_proj_dim=512, do_layer_norm_before=False)
        | dict(max_position_embeddings=2048),
        dict(intermediate_size=4096),
        331_196_416,
    ),
    "OLMo-2-7B": (
        config("olmo2", 32, 32, 4096, 11008, 100352, num_key_value_heads=32, tie_word_embeddings=False),
        dict(head_dim=128, rotary_dims=(128,) * 32),
        7_298_617_344,
    ),
    "SmolLM3-3B": (
        config("smollm3", 36, 16, 2048, 11008, 128256, num_key_value_heads=4, tie_word_embeddings=True)
        | dict(no_rope_layers=9 * [1, 1, 1, 0], no_rope_layer_interval=4, layer_types=36 * ["full_attention"]),
        dict(num_kv_heads=4, sliding_layers=(), rotary_dims=9 * (128, 128, 128, 0)),
        3_075_098_624,
    ),
    "granite-3.1-2b": (
        config("granite", 40, 32, 2048, 8192, 49155, num_key_value_heads=8, tie_word_embeddings=True),
        dict(head_dim=64, num_kv_heads=8, tied_embeddings=True),
        2_533_531_648,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    contents, expected, parameters = PUBLISHED[name]
    shape = TeacherShape.from_config(contents)
    assert {field: getattr(shape, field) for field in expected} == expected
    assert teacher_parameters(shape) == parameters


def test_every_decoder_is_here() -> None:
    types = {contents["model_type"] for contents, *_ in PUBLISHED.values()}
    assert types | {"gpt2", "mistral", "qwen3"} == DECODERS.keys(), "and those have tests in test_teacher and test_plan"


def shape(model_type: str, **fields: Any) -> TeacherShape:
    return TeacherShape.from_config(config(model_type, 4, 4, 32, 48, 60) | dict(max_position_embeddings=64) | fields)


@pytest.mark.parametrize(
    ("model_type", "fields", "sliding"),
    [
        ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=3), (3,)),
        ("qwen3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1), (1, 2, 3)),
        ("qwen3", dict(sliding_window=8, max_window_layers=1), ()),
        ("qwen3_moe", dict(use_sliding_window=True, sliding_window=8, max_window_layers=3), (0, 1, 2, 3)),
        ("mixtral", dict(sliding_window=8), (0, 1, 2, 3)),
        ("mixtral", dict(sliding_window=64), ()),
        ("gemma3_text", dict(sliding_window=8, sliding_window_pattern=2), (0, 2)),
        ("gemma3_text", dict(sliding_window=8, layer_types=3 * ["full_attention"] + ["sliding_attention"]), (3,)),
        ("smollm3", dict(use_sliding_window=True, sliding_window=8), (3,)),
        ("smollm3", dict(use_sliding_window=True, sliding_window=8, no_rope_layers=[1, 0, 1, 1]), (1,)),
        ("smollm3", dict(use_sliding_window=False, sliding_window=8), ()),
    ],
)
def test_sliding_layers(model_type: str, fields: dict[str, Any], sliding: tuple[int, ...]) -> None:
    assert shape(model_type, **fields).sliding_layers == sliding


@pytest.mark.parametrize(
    ("model_type", "fields", "dims"),
    [
        ("phi", {}, 4),
        ("phi", dict(partial_rotary_factor=0.25), 2),
        ("phi", dict(rope_parameters=dict(partial_rotary_factor=0.75)), 6),
        ("phi3", {}, 8),
        ("gpt_neox", {}, 2),
        ("gpt_neox", dict(rotary_pct=0.5, rope_parameters=dict(partial_rotary_factor=1.0)), 8),
        ("llama", dict(partial_rotary_factor=0.5), 8),
        ("opt", {}, 0),
    ],
)
def test_rotated_dimensions(model_type: str, fields: dict[str, Any], dims: int) -> None:
    assert shape(model_type, **fields).rotary_dims == (dims,) * 4


def test_a_share_that_is_none() -> None:
    with pytest.raises(UserError, match="partial_rotary_factor: expected a number from 0 to 1, found 2"):
        shape("phi", partial_rotary_factor=2)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (dict(model_type="bloom"), "model_type: .* found 'bloom': .*ALiBi"),
        (dict(model_type="mpt"), "found 'mpt': .*ALiBi"),
        (dict(model_type="falcon"), "found 'falcon': its attention is code of its own"),
        (dict(model_type="deepseek_v3"), "found 'deepseek_v3': .*MLA"),
        (dict(model_type="minicpm3", kv_lora_rank=256), "kv_lora_rank: expected none, found 256: .*MLA"),
        (dict(model_type="gpt_oss"), "found 'gpt_oss': its softmax has a learned sink"),
        (dict(model_type="mamba2"), "found 'mamba2': its layers are linear or recurrent already"),
        (dict(model_type="rwkv"), "found 'rwkv': its layers are linear"),
        (dict(model_type="jamba"), "found 'jamba': some of its layers are linear"),
        (dict(model_type="recurrent_gemma"), "found 'recurrent_gemma': some"),
        (dict(model_type="qwen3_next"), "found 'qwen3_next': some"),
        (
            dict(model_type="another", layer_types=["linear_attention", "full_attention"]),
            "layer_types: expected full_attention and sliding_attention, found 'linear_attention': some of its layers",
        ),
        (config("llama", 2, 4, 32, 48, 60, layer_types=["conv", "mamba"]), "found 'conv, mamba'"),
        (config("llama", 2, 4, 32, 48, 60, alibi=True), "alibi: expected false, found True"),
        (
            dict(model_type="gemma3", text_config=dict(model_type="gemma3_text")),
            "text_config: expected none, found 'gemma3_text': .*save its language model by itself and give that folder",
        ),
        (
            config("gemma3_text", 2, 4, 32, 48, 60, use_bidirectional_attention=True),
            "use_bidirectional_attention: expected false, found True: its tokens see those behind them",
        ),
    ],
)
def test_what_cannot_be_linearized_is_refused(contents: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        TeacherShape.from_config(contents)
    assert "\n" not in str(error.value)


def test_ordinary_values_of_these_fields_are_no_reason() -> None:
    ordinary = dict(
        kv_lora_rank=None, layer_types=None, alibi=False, text_config=None, use_bidirectional_attention=None
    )
    assert shape("llama", **ordinary, add_cross_attention=False) == shape("llama")
