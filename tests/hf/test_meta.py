"""Weights counted without weights: against published totals, and against the models that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel

from linearize.configs.training import LoRAConfig
from linearize.hf.classes import projections
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.planning.plan import lora_parameters
from tests.hf.encoders import ENCODERS
from tests.hf.test_teacher import GPT2, TINY


def config(
    model_type: str, layers: int, heads: int, h: int, inner: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    sizes = dict(num_hidden_layers=layers, num_attention_heads=heads, hidden_size=h, intermediate_size=inner)
    return {"model_type": model_type, "vocab_size": vocabulary} | sizes | more


_LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_QWEN = dict(use_sliding_window=False, sliding_window=32768, max_window_layers=21)
_MIXTRAL = dict(num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768, sliding_window=None)
_QWEN3_MOE = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1)
_OPT = dict(max_position_embeddings=2048)
# The contents of config.json as the hub has it, in the words of older versions of transformers, and the parameters.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.2-1B": (
        config("llama", 16, 32, 2048, 8192, 128256, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)
        | dict(rope_scaling=_LLAMA3, rope_theta=5e5, max_position_embeddings=131072),
        1_235_814_400,
    ),
    "Llama-3-8B": (config("llama", 32, 32, 4096, 14336, 128256, num_key_value_heads=8), 8_030_261_248),
    "Mistral-7B": (config("mistral", 32, 32, 4096, 14336, 32000, num_key_value_heads=8), 7_241_732_096),
    "Mixtral-8x7B": (config("mixtral", 32, 32, 4096, 14336, 32000, num_key_value_heads=8, **_MIXTRAL), 46_702_792_704),
    "Qwen2-0.5B": (
        config("qwen2", 24, 14, 896, 4864, 151936, num_key_value_heads=2, tie_word_embeddings=True, **_QWEN),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        config("qwen3", 28, 16, 1024, 3072, 151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": (config("qwen3", 36, 32, 4096, 12288, 151936, num_key_value_heads=8, head_dim=128), 8_190_735_360),
    "Qwen3-30B-A3B": (
        config("qwen3_moe", 48, 32, 2048, 6144, 151936, num_key_value_heads=4, head_dim=128, **_QWEN3_MOE),
        30_532_122_624,
    ),
    "gemma-2b": (config("gemma", 18, 8, 2048, 16384, 256000, num_key_value_heads=1, head_dim=256), 2_506_172_416),
    "gemma-2-2b": (config("gemma2", 26, 8, 2304, 9216, 256000, num_key_value_heads=4, head_dim=256), 2_614_341_888),
    "gemma-3-1b": (
        config("gemma3_text", 26, 4, 1152, 6912, 262144, num_key_value_heads=1, head_dim=256, sliding_window=512)
        | dict(sliding_window_pattern=6, max_position_embeddings=32768, rope_local_base_freq=10000),
        999_885_952,
    ),
    "phi-2": (config("phi", 32, 32, 2560, 10240, 51200, partial_rotary_factor=0.4), 2_779_683_840),
    "Phi-3-mini-4k": (
        config("phi3", 32, 32, 3072, 8192, 32064, num_key_value_heads=32, sliding_window=2047, rope_scaling=None),
        3_821_079_552,
    ),
    "Phi-4-mini": (
        config("phi3", 32, 24, 3072, 8192, 200064, num_key_value_heads=8, partial_rotary_factor=0.75)
        | dict(max_position_embeddings=131072, sliding_window=262144, tie_word_embeddings=True),
        3_836_021_760,
    ),
    "gpt2": (GPT2, 124_439_808),
    "pythia-70m": (config("gpt_neox", 6, 8, 512, 2048, 50304, rotary_pct=0.25, rotary_emb_base=10000), 70_426_624),
    "opt-125m": (config("opt", 12, 12, 768, 0, 50272, ffn_dim=3072, word_embed_proj_dim=768, **_OPT), 125_239_296),
    "opt-350m": (
        config("opt", 24, 16, 1024, 0, 50272, ffn_dim=4096, word_embed_proj_dim=512, do_layer_norm_before=False) | _OPT,
        331_196_416,
    ),
    "OLMo-2-7B": (config("olmo2", 32, 32, 4096, 11008, 100352, num_key_value_heads=32), 7_298_617_344),
    "SmolLM3-3B": (config("smollm3", 36, 16, 2048, 11008, 128256, num_key_value_heads=4), 3_075_098_624),
    "granite-3.1-2b": (
        config("granite", 40, 32, 2048, 8192, 49155, num_key_value_heads=8, tie_word_embeddings=True),
        2_533_531_648,
    ),
    "bert-base": (config("bert", 12, 12, 768, 3072, 30522, max_position_embeddings=512), 109_482_240),
    "ModernBERT-base": (config("modernbert", 22, 12, 768, 1152, 50368, global_attn_every_n_layers=3), 149_014_272),
}


def count(contents: dict[str, Any]) -> MetaModel:
    return MetaModel.of(TeacherShape.from_config(contents))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    contents, parameters = PUBLISHED[name]
    assert count(contents).total == parameters


# Fields that change what weights there are, besides those of the tiny models.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True, mlp_bias=True),
    "qwen3_moe": dict(decoder_sparse_step=2, mlp_only_layers=[]),
    "gpt_neox": dict(attention_bias=False),
    "opt": dict(enable_bias=False, layer_norm_elementwise_affine=False, word_embed_proj_dim=32),
    "gpt2": dict(n_inner=80),
    "albert": dict(num_hidden_groups=1),
    "modernbert": dict(norm_bias=True, attention_bias=True, mlp_bias=True),
    "vit": dict(qkv_bias=False, pooler_output_size=5),
    "dinov2": dict(use_swiglu_ffn=True, use_mask_token=False, mlp_ratio=3),
}
MODELS = {name: contents | {"tie_word_embeddings": tied} for name, contents in TINY.items() for tied in (False,)}
MODELS |= {f"{name}, tied": TINY[name] | {"tie_word_embeddings": True} for name in TINY if name not in ENCODERS}
MODELS |= {f"{name}, other": TINY[name] | fields for name, fields in VARIANTS.items()}


def real_model(contents: dict[str, Any]) -> PreTrainedModel:
    """With weights; the base model of an encoder."""
    auto = AutoModel if contents["model_type"] in ENCODERS else AutoModelForCausalLM
    return auto.from_config(CONFIG_MAPPING[contents["model_type"]](**contents))


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model(name: str) -> None:
    teacher = TeacherShape.from_config(MODELS[name])
    counted, model = MetaModel.of(teacher), real_model(MODELS[name])
    assert counted.total == model.num_parameters()
    assert len(counted.layers) == len(counted.used) == len(counted.rotary_dims) == teacher.num_layers
    head: Any = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    again = head.weight.numel() if tied else 0
    assert sum(counted.layers) + counted.embeddings + counted.outside == counted.total + again
    assert counted.outside >= again and counted.embeddings >= again
    for targets in (("q",), ("v", "o")):
        adapted: Any = projections(model, targets).values()
        fused = teacher.num_layers * len(targets)
        assert len(adapted) == fused
        expected = 3 * sum(sum(module.weight.shape) for module in adapted)
        assert lora_parameters(LoRAConfig(rank=3, targets=targets), counted) == expected


def test_where_weights_are_by_hand() -> None:
    # h = 32, H = 4 and G = 2 heads of 8, a gated MLP of 48, and two norms; 60 tokens.
    counted, layer = count(TINY["llama"]), 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert counted.layers == counted.used == (layer,) * 3
    assert (counted.embeddings, counted.outside) == (60 * 32, 60 * 32 + 32)
    # OPT's positions are learned, and two more than it has; its embeddings are narrower than its layers.
    assert count(TINY["opt"]).embeddings == 60 * 16 + 258 * 32
    # A token that stands for the image, and one for what is hidden (used in training); a position for each patch.
    assert count(TINY["dinov2"]).embeddings == (2 + 17) * 32


def test_a_token_meets_the_experts_that_it_is_sent_to() -> None:
    h, inner, experts = 32, 24, 4
    moe, expert = count(TINY["qwen3_moe"]), 3 * h * inner  # the second layer has none
    assert moe.layers[0] - moe.used[0] == (experts - 2) * expert and moe.layers[1] == moe.used[1]
    more = count(TINY["qwen3_moe"] | dict(num_experts_per_tok=3))
    assert more.used[0] - moe.used[0] == expert and more.layers == moe.layers
    router = count(TINY["qwen3_moe"] | dict(num_experts=9))
    assert router.used[0] - moe.used[0] == 5 * h and router.layers[0] - moe.layers[0] == 5 * (expert + h)


@pytest.mark.parametrize(
    ("name", "fields", "dims"),
    [
        ("phi", {}, [4, 4]),
        ("phi", dict(rope_parameters=dict(partial_rotary_factor=0.75, rope_type="default")), [6, 6]),
        ("phi3", dict(partial_rotary_factor=1.0), [8, 8]),
        ("gpt_neox", dict(rotary_pct=0.5), [4, 4]),
        ("llama", dict(partial_rotary_factor=0.5), [8, 8, 8]),
        ("smollm3", {}, [8, 0, 0]),
        ("gemma3_text", {}, [16, 16]),
        ("gpt2", {}, [0, 0, 0]),
        ("opt", {}, [0, 0]),
    ],
)
def test_rotated_dimensions(name: str, fields: dict[str, Any], dims: list[int]) -> None:
    assert list(count(TINY[name] | fields).rotary_dims) == dims


def test_counting_draws_no_random_numbers_and_builds_without_the_kernels_that_a_file_asks_for() -> None:
    before = torch.get_rng_state()
    assert count(TINY["llama"] | dict(attn_implementation="flash_attention_2")).total == count(TINY["llama"]).total
    assert torch.equal(torch.get_rng_state(), before)
