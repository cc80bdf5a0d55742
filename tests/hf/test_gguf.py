"""Teachers in GGUF files are the models that the files were made of; what transformers would drop is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from linearize.base import UserError
from linearize.hf import gguf_file as module
from linearize.hf.checkpoint import load_model, load_tokenizer, new_model, read_config
from linearize.hf.partial_model import load_block
from linearize.hf.sharded_checkpoint import load_sharded
from linearize.hf.teacher import TeacherShape
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.commands import Command, assert_refused

pytest.importorskip("gguf", reason="gguf is not installed; the extras `dev` and `gguf` have it")
from tests.hf.gguf_files import VOCABULARY, widened, write_gguf

SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192, rope_theta=500_000.0)


def made(kind: str, **fields: Any) -> PreTrainedModel:
    """A tiny random model, biases and norms other than their initial values."""
    tokens = dict(vocab_size=VOCABULARY, bos_token_id=256, eos_token_id=258, pad_token_id=None)
    config_class = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[kind]
    options = SIZES | tokens | dict(max_position_embeddings=256, initializer_range=0.2) | fields
    config = getattr(transformers, config_class)(**options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def loaded(path: Path) -> PreTrainedModel:
    return load_model(str(path), dtype=torch.float32, device=torch.device("cpu"))


MODELS: dict[str, Callable[[], tuple[PreTrainedModel, str]]] = {
    "llama": lambda: (made("llama"), "llama"),
    "llama, tied": lambda: (made("llama", tie_word_embeddings=True), "llama"),
    "qwen2": lambda: (made("qwen2"), "qwen2"),
    "qwen3, wide heads": lambda: (made("qwen3", head_dim=32), "qwen3"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_its_model(name: str, tmp_path: Path) -> None:
    """Logits, config and, saved, an ordinary folder."""
    model, architecture = MODELS[name]()
    path = write_gguf(tmp_path / "m.gguf", model, architecture)
    teacher = loaded(path)
    torch.testing.assert_close(logits(teacher), logits(model), rtol=1e-5, atol=1e-5)
    assert TeacherShape.from_config(read_config(str(path))) == TeacherShape.from_config(model.config.to_dict())
    teacher.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), logits(teacher))


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "F16"])
def test_quantized_blocks_are_widened(quantization: str, tmp_path: Path) -> None:
    model = made("qwen2")
    path = write_gguf(tmp_path / "m.gguf", model, "qwen2", quantization=quantization)
    before = logits(model)
    expected = logits(widened(model, quantization))
    assert not torch.allclose(before, expected, atol=1e-4)
    torch.testing.assert_close(logits(loaded(path)), expected, rtol=1e-5, atol=1e-5)


def llama3_divisors(factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them of Llama 3's fields, for heads of 16."""
    divisors = []
    for pair in range(8):
        wavelength = 2 * np.pi * 500_000.0 ** (2 * pair / 16)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else between)
    return np.array(divisors, dtype=np.float32)


def test_the_scaled_angles_of_llama_3(tmp_path: Path) -> None:
    """transformers itself drops them, which moves the logits."""
    model = made("llama", rope_parameters=LLAMA3)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors={"rope_freqs.weight": llama3_divisors(8.0)})
    assert not torch.allclose(
        logits(made("llama", rope_parameters={"rope_theta": 500_000.0})), logits(model), atol=1e-4
    )
    torch.testing.assert_close(logits(loaded(path)), logits(model), rtol=1e-5, atol=1e-5)
    path = write_gguf(tmp_path / "n.gguf", model, "llama", tensors={"rope_freqs.weight": np.arange(1, 9, dtype="f4")})
    with pytest.raises(UserError, match=r"n.gguf: rope_freqs.weight: expected what transformers reads, found other"):
        read_config(str(path))


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", made("llama"), "llama")


def test_the_tokenizer(llama_file: Path, tmp_path: Path) -> None:
    """Also saved beside a student."""
    text = "def f(x): return x<|im_end|>"
    tokenizer = load_tokenizer(str(llama_file))
    assert tokenizer(text)["input_ids"] == byte_tokenizer()(text)["input_ids"]
    assert tokenizer.eos_token == "<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_new_weights_for_the_shape_of_a_file(llama_file: Path) -> None:
    options = dict(dtype=torch.float32, device=torch.device("cpu"))
    new = new_model(str(llama_file), seed=0, **options)
    assert new.config.hidden_size == 64 and not torch.allclose(logits(new), logits(loaded(llama_file)), atol=1e-2)


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


def test_plan_reads_no_weights(llama_file: Path, tmp_path: Path, command: Command, monkeypatch: Any) -> None:
    """The same numbers as for the folder that the model was saved to."""
    made("llama").save_pretrained(tmp_path / "folder")
    words = ["plan", "lolcats", "--json", "--set", "data.sequence_length=64", "--model"]
    expected = json.loads(command(*words, tmp_path / "folder").out)
    monkeypatch.setattr("linearize.hf.gguf_file.load_gguf", None)
    for name in (llama_file, llama_file.parent):
        assert json.loads(command(*words, name).out) == expected


@pytest.mark.usefixtures("_quick")
def test_a_run_from_a_file(llama_file: Path, tmp_path: Path, command: Command) -> None:
    """Converted to an ordinary folder, again, and evaluated beside the teacher, which is read from the file."""
    settings = {"data.sequence_length": 64, "mixer.span.window_size": 8, "data.validation_fraction": 0.5}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    where = ["--model", llama_file, "--dataset", tiny.text_file(), "--output-dir", tmp_path / "run"]
    words = ["convert", *where, *options, "--no-evaluation"]
    for _ in range(2):
        done = command(*words)
        assert done.status == 0, done.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"] == str(llama_file)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert type(student).__name__ == "LinearizedLlamaForCausalLM"
    measured = command("eval", tmp_path / "run", "--json")
    assert measured.status == 0, measured.err
    assert "teacher" in {line["model"] for line in json.loads(measured.out)["short"]["readings"]}
    assert command("generate", str(llama_file), "--prompt", "abc", "--max-new-tokens", "3").status == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(model: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_config(str(model))
    assert "\n" not in str(error.value)


def test_several_files_and_parts(llama_file: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(llama_file, tmp_path / name)
    refused(tmp_path, r"expected one GGUF file in .*, found a.gguf, b.gguf; name the file itself")
    assert read_config(str(tmp_path / "b.gguf")) == read_config(str(llama_file))
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        shutil.copy(llama_file, parts / name)
    for model in (parts, parts / "m-00002-of-00002.gguf"):
        refused(model, r"one of 2 parts; join them by `llama-gguf-split --merge FIRST_PART OUT.gguf`")


@pytest.mark.parametrize("end", [10, 3000, -64])
def test_a_damaged_file(llama_file: Path, tmp_path: Path, end: int) -> None:
    """Cut within its header, its vocabulary and its weights."""
    (tmp_path / "m.gguf").write_bytes(llama_file.read_bytes()[:end])
    refused(tmp_path / "m.gguf", r"m.gguf: expected a whole GGUF file, found .*; copy it again")


@pytest.mark.parametrize(
    "architecture, fields, message",
    [
        ("gemma", {}, r"expected a GGUF file of llama, qwen2, qwen3, found 'gemma', which transformers cannot read"),
        ("llama", {"rope__scaling__type": "yarn"}, "llama.rope.scaling.type: .*found 'yarn', which it would drop"),
        ("llama", {"expert_count": 4}, "llama.expert_count: .*found 4, which it would drop"),
        ("qwen2", {"attention__sliding_window": 8}, "qwen2.attention.sliding_window: .*found 8, which it would drop"),
    ],
)
def test_what_transformers_would_drop(architecture: str, fields: Any, message: str, tmp_path: Path) -> None:
    model = made("qwen2" if architecture == "qwen2" else "llama")
    refused(write_gguf(tmp_path / "m.gguf", model, architecture, **fields), message)


def test_a_weight_that_is_not_read(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", made("llama"), "llama", tensors=extra)
    with pytest.raises(
        UserError, match=r"expected [\d,]+ weights of a LlamaForCausalLM, found [\d,]+; use the model's"
    ):
        loaded(path)


def test_without_the_package(llama_file: Path, monkeypatch: Any, command: Command, tmp_path: Path) -> None:
    module._read_header.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = tiny.run_arguments(tmp_path / "run")
    words[words.index("--model") + 1] = str(llama_file)
    expected = rf"model: {llama_file}: GGUF files need the package gguf; run `pip install 'linearize[gguf]'`"
    assert_refused(command(*words), expected)


def test_weights_that_are_read_in_parts(llama_file: Path) -> None:
    options = dict(dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"found a GGUF file; set transfer.layers_per_block=null"):
        load_block(str(llama_file), range(1), **options)
    with pytest.raises(UserError, match=r"found a GGUF file; set distributed.shard=none"):
        load_sharded(str(llama_file), **options)
