"""Shapes read from ``config.json``, as the hub's checkpoints and transformers itself write it; and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from linearize.base import UserError
from linearize.configs.shape import LayerShape
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape, break_even_tokens
from tests.hf.decoders import DECODERS
from tests.hf.encoders import ENCODERS
from tests.hf.models import ARCHITECTURES as FIRST

# The contents of a tiny model's config.json, by its type.
TINY: dict[str, dict[str, Any]] = {
    **{name: fields | {"model_type": name} for name, (_, fields) in (FIRST | ENCODERS).items()},
    **{name: fields | {"model_type": kind} for name, (kind, fields) in DECODERS.items() if name == kind},
}
# As in the gpt2 checkpoint, which has no head_dim, no num_key_value_heads and no n_inner.
GPT2 = dict(model_type="gpt2", n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257)


def shape(model_type: str, **fields: Any) -> TeacherShape:
    return TeacherShape.from_config(TINY[model_type] | fields)


def four_layers(model_type: str, **fields: Any) -> TeacherShape:
    sizes = dict(num_hidden_layers=4, num_attention_heads=4, hidden_size=32, intermediate_size=48, vocab_size=60)
    return TeacherShape.from_config(
        {"model_type": model_type, "max_position_embeddings": 64, "pad_token_id": 0} | sizes | fields
    )


def test_gpt2() -> None:
    found = TeacherShape.from_config(GPT2)
    assert found == TeacherShape("gpt2", 12, 12, 12, 64, 768, 50257, 1024, (), (1,) * 12, False, GPT2)
    assert found.layer == LayerShape(12, 12, 64, 768, 1024)


@pytest.mark.parametrize("name", TINY)
def test_transformers_own_config_has_the_same_shape(name: str) -> None:
    """It writes every field; and so does a linearized checkpoint, under a name of ours."""
    written = CONFIG_MAPPING[name](**TINY[name]).to_dict()
    assert TeacherShape.from_config(written) == shape(name)
    assert TeacherShape.from_config(written | {"model_type": f"linearized_{name}", "linearize": {}}) == shape(name)


def test_encoders() -> None:
    assert all(shape(name).bidirectional == (name in ENCODERS) for name in TINY)
    # Positions behind the padding token's; patches of an image, height x width, and the tokens before them.
    assert shape("bert").max_positions == 64 and shape("roberta", pad_token_id=3).max_positions == 60
    sizes = dict(image_size=[32, 24], patch_size=8)
    assert [shape(name, **sizes).max_positions for name in ("vit", "deit", "dinov2")] == [13, 14, 13]
    assert shape("vit").vocab_size == 0 and shape("vit", patch_size=[8, 4]).max_positions == 9
    # ALBERT's layers are those with weights of their own.
    groups = shape("albert", num_hidden_layers=5, num_hidden_groups=2)
    assert (groups.num_layers, groups.passes) == (2, (3, 2))


@pytest.mark.parametrize(
    ("model_type", "fields", "sliding"),
    [
        ("mistral", dict(sliding_window=8), (0, 1, 2, 3)),
        ("mistral", dict(sliding_window=None), ()),
        ("mixtral", dict(sliding_window=64), ()),  # which is all positions
        ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=3), (3,)),
        ("qwen3", dict(sliding_window=8, max_window_layers=1), ()),
        ("qwen3_moe", dict(use_sliding_window=True, sliding_window=8, num_key_value_heads=2), (0, 1, 2, 3)),
        ("gemma3_text", dict(sliding_window=8, sliding_window_pattern=2), (0, 2)),
        ("gemma3_text", dict(sliding_window=8, layer_types=3 * ["full_attention"] + ["sliding_attention"]), (3,)),
        ("smollm3", dict(use_sliding_window=True, sliding_window=8, no_rope_layers=[1, 0, 1, 1]), (1,)),
        ("modernbert", dict(global_attn_every_n_layers=3, local_attention=8), (1, 2)),
        ("modernbert", dict(local_attention=8, layer_types=3 * ["full_attention"] + ["sliding_attention"]), (3,)),
    ],
)
def test_sliding_layers(model_type: str, fields: dict[str, Any], sliding: tuple[int, ...]) -> None:
    kv_heads = dict(num_key_value_heads=4, head_dim=8) if model_type != "modernbert" else {}
    assert four_layers(model_type, **kv_heads | fields).sliding_layers == sliding


@pytest.mark.parametrize("model_type", ["llama", "gemma", "phi", "gpt2", "gpt_neox", "opt", "olmo2", "granite"])
def test_windows_that_the_architecture_does_not_have(model_type: str) -> None:
    """Its forward reads neither field; that a student does not either: `test_decoders`."""
    kinds = ["sliding_attention", "full_attention"] * 2
    fields = dict(num_key_value_heads=4, sliding_window=8)
    assert four_layers(model_type, **fields).sliding_layers == ()
    assert four_layers(model_type, **fields, layer_types=kinds).sliding_layers == ()


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "qwen3_moe", "phi3"])
def test_layer_types_that_the_architecture_does_not_read(model_type: str) -> None:
    fields = dict(num_key_value_heads=4, sliding_window=8, use_sliding_window=True)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert four_layers(model_type, **fields, layer_types=kinds).sliding_layers == (0, 1, 2, 3)


def test_what_only_a_decoder_can_do() -> None:
    with pytest.raises(
        UserError, match=r"data.select_rows_by_esl: expected a decoder, found the encoder 'bert'; set it to null"
    ):
        shape("bert").refuse_encoder("data.select_rows_by_esl", "set it to null")
    shape("llama").refuse_encoder("data.select_rows_by_esl", "set it to null")


def test_break_even() -> None:
    assert break_even_tokens(1000, 10, 0) == break_even_tokens(1000, 14, 4) == 101, "equal at 100"
    assert break_even_tokens(999, 10, 0) == 100 and break_even_tokens(-50, 10, 0) == 0
    assert break_even_tokens(1000, 10, 10) is None and break_even_tokens(1000, 0, 0) is None


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_whatever_a_field_holds_there_is_a_plan_or_a_line(name: str) -> None:
    """Nothing that transformers raises of a config, or of the model, comes out as a traceback."""
    refused = []
    for field in TINY[name]:
        without = {other: value for other, value in TINY[name].items() if other != field}
        for contents in (without, *(TINY[name] | {field: value} for value in (None, 0, -1, "x", [], 1.5))):
            try:
                MetaModel.of(TeacherShape.from_config(contents))
            except UserError as error:
                refused.append(str(error))
    assert len(refused) > 3 * len(TINY[name])
    assert all(re.fullmatch(r"(config\.json: )?\w+: expected .*[,;] found .*", line) for line in refused)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (dict(model_type="xlnet"), "model_type: expected one of llama, mistral, .*, granite, bert, .*; found 'xlnet'"),
        ({}, "found 'nothing'"),
        # As the file calls it, also where transformers would take the size of some other model.
        (GPT2 | dict(n_embd=None), "config.json: n_embd: expected a positive integer, found None"),
        (TINY["llama"] | dict(num_hidden_layers=0), "num_hidden_layers: expected a positive integer, found 0"),
        (
            TINY["llama"] | dict(vocab_size="many"),
            "vocab_size: expected a value that transformers accepts, found 'many': .* expected int",
        ),
        (TINY["llama"] | dict(hidden_size=33), r"hidden_size: .*found 33: The hidden size \(33\) is not a multiple of"),
        (TINY["llama"] | dict(num_key_value_heads=3), "num_key_value_heads: expected a divisor of 4 heads, found 3"),
        (TINY["phi"] | dict(partial_rotary_factor=2), "rotary_factor: expected a number from 0 to 1, found 2"),
        (TINY["bert"] | dict(is_decoder=True), "is_decoder: expected false, found true; bert converts as an encoder"),
        (
            TINY["albert"] | dict(num_hidden_groups=4),
            r"num_hidden_layers: expected 4 \(num_hidden_groups\) or more, fou",
        ),
        (TINY["vit"] | dict(patch_size=[8, 8, 8]), "patch_size: expected a positive integer or two, found"),
        # What cannot be linearized.
        (dict(model_type="bloom"), "model_type: .* found 'bloom': .*ALiBi"),
        (dict(model_type="falcon"), "found 'falcon': its attention is code of its own"),
        (dict(model_type="deepseek_v3"), "found 'deepseek_v3': .*MLA"),
        (dict(model_type="minicpm3", kv_lora_rank=256), "kv_lora_rank: expected none, found 256: .*MLA"),
        (dict(model_type="gpt_oss"), "found 'gpt_oss': its softmax has a learned sink"),
        (dict(model_type="mamba2"), "found 'mamba2': its layers are linear or recurrent already"),
        (dict(model_type="jamba"), "found 'jamba': some of its layers are linear"),
        (dict(model_type="qwen3_next"), "found 'qwen3_next': some"),
        (
            dict(model_type="another", layer_types=["linear_attention", "full_attention"]),
            "layer_types: expected full_attention and sliding_attention, found 'linear_attention': some of its layers",
        ),
        (dict(model_type="another", alibi=True), "alibi: expected false, found True"),
        (
            TINY["llama"] | dict(layer_types=["chunked_attention"]),
            "layer_types: .*, found 'chunked_attention'",
        ),
        (
            dict(model_type="gemma3", text_config=dict(model_type="gemma3_text")),
            "text_config: expected none, found 'gemma3_text': .*save its language model by itself and give that folder",
        ),
        (
            TINY["gemma3_text"] | dict(use_bidirectional_attention=True),
            "use_bidirectional_attention: expected false, found True: its tokens attend to later tokens",
        ),
        (TINY["gpt2"] | dict(add_cross_attention=True), "add_cross_attention: expected false, found True"),
        (TINY["albert"] | dict(inner_group_num=2), "inner_group_num: expected 1, found 2"),
    ],
)
def test_refused(contents: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        TeacherShape.from_config(contents)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in TINY if name not in ENCODERS])
def test_a_decoder_without_causal_masks(name: str) -> None:
    """transformers lets every token of it attend to later tokens."""
    with pytest.raises(UserError, match=f"is_causal: expected true, found false; {name} converts as a decoder"):
        TeacherShape.from_config(TINY[name] | dict(is_causal=False))
    assert shape(name, is_causal=True) == shape(name)


STRAY = dict(kv_lora_rank=3, alibi=True, use_bidirectional_attention=True, inner_group_num=2, add_cross_attention=True)


@pytest.mark.parametrize("name", TINY)
def test_fields_that_a_model_does_not_have_are_no_reason(name: str) -> None:
    """They change nothing: its config class and its code know nothing of them."""
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[name])}
    stray = {field: value for field, value in STRAY.items() if field not in known}
    assert len(stray) >= 4
    assert shape(name, **stray) == shape(name)


def test_ordinary_values_of_these_fields_are_no_reason() -> None:
    ordinary = dict(
        kv_lora_rank=None, layer_types=None, alibi=False, text_config=None, use_bidirectional_attention=None
    )
    assert shape("llama", **ordinary, add_cross_attention=False, inner_group_num=1) == shape("llama")
