"""Conversion: exact where it must be, and nothing of the teacher changed."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    ElectraConfig,
    ElectraModel,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import linearize
from linearize.base import UserError
from linearize.configs.mixer import is_spread
from linearize.hf.attention import linearized_layers
from linearize.hf.checkpoint import load_model
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.hf.layouts import documents_apart
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.hf import checks, encoders
from tests.hf import generation_checks as generation
from tests.hf.decoders import ARCHITECTURES as OTHERS
from tests.hf.models import (
    ARCHITECTURES,
    CASES,
    LAYERS,
    SLIDING_TEACHERS,
    Case,
    make_teacher,
    random_tokens,
    student_of,
    teacher_of,
)

# One case per architecture, among them a mixed model and a sliding teacher, and every span with a window.
SOME = [
    case
    for case in CASES + SLIDING_TEACHERS
    if case.name in {"llama-sliding", "llama-mixed", "mistral-terraced", "mistral-sliding-kept", "qwen3-sinks"}
    or case.architecture == "gpt2"
]


@pytest.mark.parametrize("per", ["query_head", "kv_head"])
@pytest.mark.parametrize("span", ["sliding", "terraced"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_window_over_everything_is_the_teacher(architecture: str, span: str, per: str) -> None:
    checks.whole_window(Case("", architecture, span, per, overrides={"mixer.span.window_size": 30}))


KEPT = list(chain.from_iterable(combinations(range(LAYERS), count) for count in range(LAYERS)))


@pytest.mark.parametrize("keep", KEPT, ids=str)
def test_any_layers_stay_softmax(keep: tuple[int, ...]) -> None:
    case = Case("", keep_softmax=keep, overrides={"mixer.span.window_size": 30})
    layers = linearized_layers(student_of(case)).values()
    assert [layer.layer_idx for layer in layers] == [index for index in range(LAYERS) if index not in keep]
    checks.whole_window(case)
    generation.in_chunks(replace(case, overrides={}))


def test_teachers_attend_far_from_uniformly() -> None:
    for architecture in ARCHITECTURES:
        teacher = make_teacher(architecture)
        teacher.set_attn_implementation("eager")
        with torch.no_grad():
            weights = torch.stack(teacher(random_tokens(2, 40), output_attentions=True).attentions)
        # Uniform attention would have 0.025 as its greatest weight in the last row.
        assert weights[..., -1, :].amax(-1).mean() > 0.4


@pytest.mark.parametrize("case, check", checks.pairs(SOME, [checks.softmax_restored, checks.teacher_left_alone]))
def test_conversion(case: Case, check: checks.Check) -> None:
    check(case)


# --- the way back -----------------------------------------------------------------------------------------------------


def assert_ordinary(model: PreTrainedModel, teacher: PreTrainedModel, folder: Path) -> None:
    """Nothing of a model, or of the folder it is saved to, tells that it has been linearized."""
    assert type(model) is type(teacher)
    for found, expected in zip(model.modules(), teacher.modules(), strict=True):
        assert type(found) is type(expected)
        assert vars(found).keys() - {"layer_idx"} == vars(expected).keys() - {"layer_idx"}
        assert len(found._forward_pre_hooks) == len(expected._forward_pre_hooks)
    assert model.config._attn_implementation == teacher.config._attn_implementation
    for name, one in (("found", model), ("expected", teacher)):
        copy.deepcopy(one).save_pretrained(folder / name)
    files = [sorted(path.name for path in (folder / name).iterdir()) for name in ("found", "expected")]
    assert files[0] == files[1]
    for file in ("config.json", "model.safetensors"):
        assert (folder / "found" / file).read_bytes() == (folder / "expected" / file).read_bytes()


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS])
def test_an_untrained_decoder_is_its_teacher_again(name: str, tmp_path: Path) -> None:
    teacher, ids, mask = make_teacher(name), random_tokens(2, 20), checks.left_padding([6, 0], 20)
    student = linearize.convert(teacher, Case("", name, convert_sliding=True).recipe()).eval()
    model = linearize.to_softmax(student)
    assert torch.equal(checks.uncached(model, ids, mask), checks.uncached(teacher, ids, mask))
    assert linearized_layers(student) and not torch.allclose(checks.uncached(student, ids), checks.uncached(model, ids))
    with documents_apart(teacher):  # which the student saw to
        assert_ordinary(model, teacher, tmp_path)


@pytest.mark.parametrize("name", encoders.ENCODERS)
def test_an_untrained_encoder_is_its_teacher_again(name: str, tmp_path: Path) -> None:
    teacher, inputs = encoders.make_encoder(name), encoders.inputs_of(name)
    model = linearize.to_softmax(linearize.convert(teacher, encoders.Case(name).recipe()).eval())
    assert torch.equal(encoders.hidden_states(model, **inputs), encoders.hidden_states(teacher, **inputs))
    assert_ordinary(model, teacher, tmp_path)


def test_a_trained_student_keeps_what_it_learned(tmp_path: Path) -> None:
    """In softmax attention, in a folder that needs no linearize, and as a teacher that is converted again."""
    case, ids = CASES[5], random_tokens(2, 20)
    student = copy.deepcopy(student_of(case))
    with torch.no_grad():
        student.get_parameter("model.layers.0.self_attn.q_proj.weight").mul_(1.5)
    before = checks.uncached(student, ids)
    model = linearize.to_softmax(student)
    with linearize.softmax_attention(student):
        expected = checks.uncached(student, ids)
    assert torch.equal(checks.uncached(model, ids), expected)
    assert not torch.allclose(expected, checks.uncached(teacher_of(case), ids))
    assert torch.equal(checks.uncached(student, ids), before)
    model.save_pretrained(tmp_path)
    code = "import sys, torch, transformers; from safetensors.torch import save_file; model = transformers."
    code += "AutoModelForCausalLM.from_pretrained('.', dtype=torch.float64); assert 'linearize' not in sys.modules; "
    code += "save_file({'logits': model(torch.arange(20)[None]).logits.detach()}, 'logits')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    checks.assert_close(load_file(tmp_path / "logits")["logits"], checks.uncached(model, torch.arange(20)[None]))
    again = linearize.convert(model, replace(case, overrides={"mixer.span.window_size": 20}).recipe()).eval()
    checks.assert_close(checks.uncached(again, ids), expected)


def test_a_softmax_model_has_no_way_back() -> None:
    with pytest.raises(linearize.UserError, match="expected a linearized model, found 'llama', which has softmax"):
        linearize.to_softmax(teacher_of(CASES[1]))


class Wrapper(PreTrainedModel):
    """Of another class than what it holds, as PEFT's and torch.compile's."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.config)
        self.model = model


def test_a_wrapper_has_no_way_back() -> None:
    with pytest.raises(linearize.UserError, match="expected a linearized model itself, found Wrapper around one"):
        linearize.to_softmax(Wrapper(student_of(CASES[1])))


def test_what_must_be_measured_or_trained_first_is_refused() -> None:
    teacher = teacher_of(CASES[1])
    with pytest.raises(linearize.UserError, match="recipe recommended: expected a tokenizer, because attention is"):
        linearize.convert(teacher, linearize.Recipe.load("recommended"))
    kept = linearize.Recipe.load("lolcats", {"layers.keep_softmax": {"type": "transfer_error", "n": 1}})
    with pytest.raises(linearize.UserError, match="recipe lolcats: expected a plan that needs no training"):
        linearize.convert(teacher, kept)


def test_a_kv_budget_in_three_lines() -> None:
    """Measured, allocated and converted; the same as `linearize convert` makes."""
    fields = {name: value for name, value in tiny.RECIPE.items() if name.startswith("data.")}
    fields |= {"data.dataset": str(tiny.text_file()), "memory.reference_length": 64, "memory.fraction": 0.9}
    recipe = linearize.Recipe.load("recommended", fields)
    teacher, tokenizer = tiny.llama(), byte_tokenizer()
    student = linearize.convert(teacher, recipe, tokenizer)
    assert is_spread(read_plan(student.config))
    scorers = [layer.mixer for layer in linearized_layers(student).values()]
    weights = [part.scorer.weight for mixer in scorers for _, part in mixer.parts() if part.scorer is not None]
    assert weights and all(bool((x[..., :8] != 0).any()) for x in weights), "fitted"


# --- what a student is ------------------------------------------------------------------------------------------------


def test_embeddings_instead_of_tokens() -> None:
    model, ids, mask = student_of(CASES[1]), random_tokens(2, 20), checks.left_padding([6, 0], 20)
    embeddings = model.get_input_embeddings()(ids)
    with torch.no_grad():
        found = model(inputs_embeds=embeddings, attention_mask=mask, position_ids=checks.positions(mask)).logits
    checks.assert_close(found, checks.uncached(model, ids, mask))


def test_a_row_of_padding_alone_stays_finite() -> None:
    mask = checks.left_padding([12, 0], 12)
    assert checks.uncached(student_of(CASES[1]), random_tokens(2, 12), mask).isfinite().all()


def _electra() -> PreTrainedModel:
    return ElectraModel(ElectraConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))


def _gpt2_with_cross_attention() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, add_cross_attention=True))


def _two_heads() -> PreTrainedModel:
    return GPT2DoubleHeadsModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))


@pytest.mark.parametrize(
    "make, message",
    [
        (_electra, "model_type: expected one of llama, .*found 'electra'"),
        (_gpt2_with_cross_attention, "add_cross_attention: expected false, found True: .*give a decoder alone"),
        (_two_heads, "expected one of .*GPT2LMHeadModel.*; found GPT2DoubleHeadsModel"),
        (lambda: student_of(CASES[1]), "found 'linearized_llama', which is linearized already"),
        (lambda: teacher_of(SLIDING_TEACHERS[1]), "nothing to convert, .*layers.convert_sliding=true"),
    ],
)
def test_models_that_cannot_be_converted(make: Callable[[], PreTrainedModel], message: str) -> None:
    with pytest.raises(linearize.UserError, match=message) as error:
        linearize.convert(make(), CASES[1].recipe())
    assert "\n" not in str(error.value)


def test_a_soft_cap_that_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SDPA has none, and transformers used it before 5.21: no teacher for us, so we load such a model otherwise."""
    make_teacher("gemma2").save_pretrained(tmp_path)
    load = AutoModelForCausalLM.from_pretrained

    def older(*args: Any, **kwargs: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
        model, info = load(*args, **(kwargs | dict(output_loading_info=True)))
        model.config._attn_implementation_internal = "sdpa"
        return model, info

    with pytest.raises(linearize.UserError, match="attn_implementation='eager'"):
        linearize.convert(older(tmp_path)[0], CASES[1].recipe())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", older)
    loaded = load_model(str(tmp_path), dtype=torch.float64, device=torch.device("cpu"))
    assert loaded.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "method, instead", [("gguf", r"with .*GgufConfig\(dequantize=True\)"), ("quanto", "unquantized")]
)
def test_weights_that_cannot_be_saved_are_refused(method: str, instead: str) -> None:
    """Before anything is trained. What transformers' quantizers say of GGUF files, whose weights it has widened."""
    teacher: Any = tiny.llama()
    config = SimpleNamespace(quant_method=SimpleNamespace(value=method))
    teacher.hf_quantizer = SimpleNamespace(quantization_config=config, is_serializable=lambda: False)
    problem = f"found weights quantized by {method}, which it cannot; load the model {instead}"
    with pytest.raises(UserError, match=problem):
        convert_layers(teacher, (None, None))
