"""GGUF files hold the stock model's weights under llama.cpp's names, and the tokenizer."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from linearize.base import UserError
from linearize.export.gguf import pre_tokenizer, read_gguf, write_gguf
from linearize.export.stock import stock_model
from tests.byte_tokenizer import CHATML, byte_tokenizer
from tests.export.students import WINDOW, make_student, random_ids

gguf = pytest.importorskip("gguf", reason="gguf is not installed; the extras `dev` and `gguf` have it")
ROUNDING = {"bf16": 2**-8, "f16": 2**-10, "f32": 0, "q8_0": 2**-6}  # relative to a row's largest number


def gpt2_tokenizer(**fields: Any) -> Any:
    tokenizer = byte_tokenizer(**fields)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize(
    "fields", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
def test_weights_are_those_of_the_model(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=320)
    stock = stock_model(make_student(**(sizes | fields)), "granite_swa").float()
    path = tmp_path / "model.gguf"
    write_gguf(stock, gpt2_tokenizer(), path, kind=kind, name="tiny")
    state = read_gguf(stock, path)
    for name, tensor in stock.state_dict().items():
        matrix = tensor.ndim == 2
        largest = tensor.abs().amax(-1, keepdim=True) if matrix else torch.zeros(())
        assert ((state[name] - tensor).abs() <= ROUNDING[kind] * largest).all(), name


def test_queries_and_keys_are_in_the_order_of_llama_cpp(tmp_path: Path) -> None:
    """Two dimensions that RoPE rotates together lie side by side; transformers has them half a head apart."""
    stock = stock_model(make_student(vocab_size=320), "granite_swa").float()
    write_gguf(stock, gpt2_tokenizer(), tmp_path / "model.gguf", kind="f16", name="tiny")
    stored = {x.name: x.data for x in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weight = stock.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    width = stock.config.head_dim
    first_head = torch.from_numpy(stored["blk.0.attn_q.weight"][:width].copy()).float()
    assert torch.allclose(first_head[::2], weight[: width // 2], atol=1e-3)
    assert torch.allclose(first_head[1::2], weight[width // 2 : width], atol=1e-3)


def test_fields_say_what_the_config_says(tmp_path: Path) -> None:
    stock = stock_model(make_student(vocab_size=320), "granite_swa").float()
    tokenizer = gpt2_tokenizer(template=CHATML)
    write_gguf(stock, tokenizer, tmp_path / "model.gguf", kind="f16", name="tiny")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert fields["general.architecture"] == "granite_swa"
    assert fields["granite_swa.attention.sliding_window"] == WINDOW
    assert fields["granite_swa.attention.sliding_window_pattern"] == [True, False, True]
    assert fields["granite_swa.attention.scale"] == pytest.approx(stock.config.head_dim**-0.5)
    assert fields["tokenizer.ggml.pre"] == "gpt-2" and fields["tokenizer.chat_template"] == CHATML
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 320 and len(set(tokens)) == 320
    assert tokens[fields["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert [kinds[tokens.index(token)] for token in ("a", "<s>", "[PAD300]")] == [1, 3, 5]


def test_scaled_rotary_frequencies_are_written_as_factors(tmp_path: Path) -> None:
    rope = dict(rope_type="linear", rope_theta=10_000.0, factor=4.0)
    stock = stock_model(make_student(vocab_size=320, rope_parameters=rope), "granite_swa").float()
    write_gguf(stock, gpt2_tokenizer(), tmp_path / "model.gguf", kind="f16", name="tiny")
    stored = {x.name: x.data for x in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert stored["rope_freqs.weight"] == pytest.approx([4.0] * (stock.config.head_dim // 2))


def test_angles_that_depend_on_the_length_are_refused(tmp_path: Path) -> None:
    rope = dict(rope_type="dynamic", rope_theta=10_000.0, factor=4.0)
    stock = stock_model(make_student(vocab_size=320, rope_parameters=rope), "granite_swa").float()
    with pytest.raises(UserError, match="expected default, linear or llama3 RoPE for --to gguf, found dynamic"):
        write_gguf(stock, gpt2_tokenizer(), tmp_path / "model.gguf", kind="f16", name="tiny")


@pytest.mark.parametrize(
    "parts, expected",
    [
        ([{"type": "ByteLevel", "use_regex": True}], "gpt-2"),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}], "smollm"),
    ],
)
def test_known_ways_to_split_text(parts: list[dict[str, Any]], expected: str) -> None:
    model = {"type": "BPE", "byte_fallback": False}
    assert pre_tokenizer({"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}) == expected


@pytest.mark.parametrize(
    "model, pre, expected",
    [
        ({"type": "Unigram"}, None, "found Unigram; use `--to hf` and llama.cpp's convert_hf_to_gguf.py"),
        ({"type": "BPE", "byte_fallback": True}, None, "found BPE with byte fallback; use"),
        (
            {"type": "BPE"},
            {"type": "Split", "pattern": {"Regex": "x"}},
            "expected one that splits text as gpt-2, .*found",
        ),
    ],
)
def test_other_tokenizers_are_refused(model: dict[str, Any], pre: dict[str, Any] | None, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        pre_tokenizer({"model": model, "pre_tokenizer": pre})


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("gguf"):
            raise ImportError(name)
        return whole(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    stock = stock_model(make_student(vocab_size=320), "granite_swa").float()
    with pytest.raises(UserError, match=r"pip install 'linearize\[gguf\]'"):
        write_gguf(stock, gpt2_tokenizer(), tmp_path / "model.gguf", kind="f16", name="tiny")


def test_what_is_read_back_computes_the_same(tmp_path: Path) -> None:
    stock = stock_model(make_student(vocab_size=320), "granite_swa").float()
    with torch.no_grad():  # numbers that f16 holds exactly
        for parameter in stock.parameters():
            parameter.copy_((parameter * 64).round() / 64)
    ids = random_ids(1, 30)
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
        write_gguf(stock, gpt2_tokenizer(), tmp_path / "model.gguf", kind="f16", name="tiny")
        state = read_gguf(stock, tmp_path / "model.gguf")
        for parameter in stock.parameters():
            parameter.zero_()
        stock.load_state_dict(state)
        assert torch.equal(stock(input_ids=ids).logits, expected)
