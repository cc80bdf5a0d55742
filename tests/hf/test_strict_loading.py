"""Checkpoints are loaded whole or refused, in one line; what transformers makes up otherwise is random."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.hf import checkpoint
from linearize.hf.checkpoint import load_model, read_config
from tests.hf.encoders import make_encoder
from tests.hf.models import CASE, Case, make_teacher, student_of

CPU = torch.device("cpu")
QUERY = "model.layers.1.self_attn.q_proj.weight"
Tensors = dict[str, Tensor]


def changed(model: PreTrainedModel, folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The folder of a model whose tensors were changed afterwards."""
    copy.deepcopy(model).save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(change(load_file(weights)), weights, {"format": "pt"})
    return folder


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: x for name, x in tensors.items() if not any(part in name for part in parts)}


def with_other(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a tensor missing": (without(QUERY), f"found none for {QUERY}; use a whole copy"),
    "a layer missing": (without("layers.1."), "found none for model.layers.1.input_layernorm.weight and [0-9]+ more;"),
    "no head": (without("lm_head"), "found none for lm_head.weight;"),
    "left over": (with_other(f"{QUERY}.lora", torch.ones(1)), f"found {QUERY}.lora, which it has not;"),
    "beside the model": (with_other("more.weight", torch.ones(1)), "found more.weight, which it has not;"),
    "of another shape": (with_other(QUERY, torch.ones(3, 4)), rf"found {QUERY} of shape \[3, 4\] for \[32, 32\];"),
}
STUDENT = BROKEN | {
    "a mixer's tensor missing": (without("1.self_attn.mixer.feature_map.key_weight"), "found none for .*key_weight;"),
    "no mixers": (without(".mixer."), "found none for model.layers.0.self_attn.mixer.*more;"),
}


def assert_refused(load: Callable[[], Any], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In one line, and no report of transformers before it."""
    capfd.readouterr()
    with pytest.raises(UserError, match=message) as error:
        load()
    assert "\n" not in str(error.value)
    assert "REPORT" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_teacher(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, message = BROKEN[case]
    folder = changed(make_teacher("llama").float(), tmp_path, change)
    assert_refused(lambda: load_model(str(folder), dtype=torch.float32, device=CPU), message, capfd)


@pytest.mark.parametrize("case", STUDENT)
def test_a_broken_student(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In plain Python, too."""
    change, message = STUDENT[case]
    folder = str(changed(student_of(CASE["llama-sliding"]), tmp_path, change))
    assert_refused(lambda: AutoModelForCausalLM.from_pretrained(folder), message, capfd)
    assert_refused(lambda: load_model(folder, dtype=torch.float32, device=CPU), message, capfd)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_left_in_a_student(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its projections have other names then, and would be random."""
    student = copy.deepcopy(student_of(CASE["llama-sliding"]))
    get_peft_model(student, LoraConfig(r=2, target_modules=["q_proj"]))
    student.save_pretrained(tmp_path)
    message = "none for model.layers.0.self_attn.q_proj.weight and 2 more, and .*q_proj.base_layer.weight and 8 more"
    assert_refused(lambda: AutoModelForCausalLM.from_pretrained(tmp_path), message, capfd)


def test_experts_that_do_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They lie otherwise in files, and what puts them together fails first."""
    change = with_other("model.layers.0.block_sparse_moe.experts.0.w1.weight", torch.ones(3, 4))
    folder = str(changed(make_teacher("mixtral").float(), tmp_path, change))
    message = "expected weights that fit config.json, found others for model.layers.0.mlp.experts.gate_up_proj"
    assert_refused(lambda: load_model(folder, dtype=torch.float32, device=CPU), message, capfd)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_weights_of_which_no_config_says_how(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = changed(make_teacher("llama").float(), tmp_path, lambda x: x | {QUERY: x[QUERY].to(dtype)})
    with pytest.raises(UserError, match=rf"expected {QUERY} as F16, BF16, F32, F64, found \S+; weights that are quant"):
        load_model(str(folder), dtype=torch.float32, device=CPU)


# --- what is fine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, extra", [("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"), ("gpt2", "transformer.h.0.attn.bias")]
)
def test_what_transformers_declares_to_be_of_no_account(name: str, extra: str, tmp_path: Path) -> None:
    """Buffers of older releases; and tied weights, which a file has once."""
    teacher = make_teacher(name, tie_word_embeddings=True)
    folder = changed(teacher, tmp_path, with_other(extra, torch.ones(2)))
    load_model(str(folder), dtype=torch.float32, device=CPU)
    student = linearize.convert(teacher, Case("", name).recipe())
    AutoModelForCausalLM.from_pretrained(changed(student, tmp_path / "student", with_other(extra, torch.ones(2))))


def test_a_head_that_a_checkpoint_is_not_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is new, the same each time, and one line says so; what stands behind the layers otherwise is left over."""
    make_encoder("bert", "ForPreTraining").float().save_pretrained(tmp_path / "bert")
    options: dict[str, Any] = dict(dtype=torch.float32, device=CPU)
    with caplog.at_level(logging.WARNING, logger="linearize"):
        models = [
            load_model(str(tmp_path / "bert"), auto_class="AutoModelForSequenceClassification", **options)
            for _ in range(2)
        ]
    assert torch.equal(*(model.get_parameter("classifier.weight") for model in models))
    line = f"model {tmp_path / 'bert'}: the checkpoint has no weights of this head: "
    line += "classifier.bias and 1 more are new and random"
    assert [record.getMessage() for record in caplog.records] == [line] * 2
    load_model(str(tmp_path / "bert"), auto_class="AutoModel", **options)
    # A student's folder likewise, in plain Python.
    student_of(CASE["llama-sliding"]).save_pretrained(tmp_path / "student")
    AutoModel.from_pretrained(tmp_path / "student")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "student")


def test_a_head_that_predicts_tokens_is_never_new(tmp_path: Path) -> None:
    make_teacher("llama", "Model").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"all weights of a LlamaForCausalLM .* found none for lm_head.weight;"):
        load_model(str(tmp_path), dtype=torch.float32, device=CPU)


def test_shapes_that_may_differ(tmp_path: Path) -> None:
    """Where the user says so, as in transformers."""
    folder = changed(student_of(CASE["llama-sliding"]), tmp_path, with_other(QUERY, torch.ones(3, 4)))
    AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)


# --- where models are -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that nobody answers at, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    checkpoint._hub_answers.cache_clear()


@pytest.mark.usefixtures("no_hub")
def test_without_a_network_it_is_said_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    started = time.perf_counter()
    for model in ("someone/model", "mistyped"):
        with pytest.raises(UserError, match=f"model: no folder '{model}', and the hub gave no config") as error:
            read_config(model)
        assert "\n" not in str(error.value)
    assert time.perf_counter() - started < 8
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.usefixtures("no_hub")
def test_a_path_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_hub_answers", lambda _: pytest.fail("the hub was asked"))
    Path("runs").mkdir()
    for model in ("runs/model", "./model", "/model", "~/model", "a/b/c"):
        with pytest.raises(UserError, match=f"model: expected a model folder, found nothing at '{model}'; check"):
            read_config(model)
