"""Every decoder: each one's own attention, as it was, under every kind of mixer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import linearize
from linearize.hf import attention, layouts
from linearize.hf.architectures import ARCHITECTURES as LINEARIZED
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.checkpoint import load_model
from linearize.hf.classes import projections
from linearize.hf.convert import convert_layers
from linearize.hf.layouts import documents_apart
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.training.finetune import OutputObjective
from tests import tiny
from tests.hf import checks
from tests.hf import generation_checks as generation
from tests.hf.decoders import ARCHITECTURES, DECODERS, EXACT
from tests.hf.models import ARCHITECTURES as FIRST
from tests.hf.models import Case, headwise, make_teacher, random_tokens, student_of, teacher_of
from tests.hf.test_inputs import positions, record

every = pytest.mark.parametrize("name", [*FIRST, *DECODERS])
plain = pytest.mark.parametrize("name", [*FIRST, *ARCHITECTURES])
WHOLE = {"mixer.span.window_size": 30}


def shape_of(name: str) -> TeacherShape:
    return TeacherShape.from_config(teacher_of(Case("", name)).config.to_dict())


# --- conversion -------------------------------------------------------------------------------------------------------


@every
def test_softmax_layers_are_the_teacher(name: str) -> None:
    """To the bit: padding and documents, which the model hands on to no layer, leave no trace."""
    teacher = teacher_of(Case("", name))
    student = convert_layers(teacher, (None,) * teacher.config.num_hidden_layers)
    ids, mask = random_tokens(2, 30), checks.left_padding([7, 0], 30)
    assert torch.equal(checks.uncached(student, ids, mask), checks.uncached(teacher, ids, mask))
    with torch.no_grad():
        documents = torch.cat([torch.arange(11), torch.arange(19)])[None]
        with documents_apart(teacher):
            found, expected = (m(ids, position_ids=documents, use_cache=False).logits for m in (student, teacher))
    assert torch.equal(found, expected)


@every
def test_documents_of_a_row_know_nothing_of_each_other(name: str, tmp_path: Path) -> None:
    """Not in teachers as commands load them, nor in students, whatever stays softmax in them."""
    make_teacher(name).save_pretrained(tmp_path)
    case = Case("", name, keep_softmax=(1,), convert_sliding=True)
    loaded = load_model(str(tmp_path), dtype=torch.float64, device=torch.device("cpu"))
    if name in ("mixtral", "qwen3_moe"):
        loaded.set_experts_implementation("eager")  # the other knows no fp64
    if name == "gemma2":
        loaded.set_attn_implementation(EXACT)
    # Longer than the positions that the models with scaled RoPE were trained on: with one such document in a row, all
    # of them turn otherwise.
    ids, lengths = random_tokens(2, 60), (20, 17, 23)
    documents = torch.cat([torch.arange(length) for length in lengths])[None]

    def apart(model: Any) -> None:
        with torch.no_grad():
            found = model(ids, position_ids=documents, use_cache=False).logits
        for part, document in zip(found.split(lengths, dim=1), ids.split(lengths, dim=1), strict=True):
            checks.assert_close(part, checks.uncached(model, document))

    for model in (loaded, student_of(case), linearize.convert(loaded, case.recipe()).eval()):
        apart(model)
    with linearize.softmax_attention(student_of(case)) as model:
        apart(model)


@every
def test_a_window_over_everything_is_the_teacher(name: str) -> None:
    case = Case("", name, overrides=WHOLE)
    converted = {layer.layer_idx for layer in linearized_layers(student_of(case)).values()}
    assert converted == set(range(shape_of(name).num_layers)) - set(shape_of(name).sliding_layers)
    checks.whole_window(case)


@plain
def test_softmax_attention_is_the_teacher(name: str) -> None:
    checks.softmax_restored(Case("", name))


# SDPA knows no soft cap, and eager attention takes its softmax in fp32.
@pytest.mark.parametrize("implementation, tolerance", [("sdpa", checks.TOLERANCE), ("eager", 1e-4)])
@plain
def test_attention_transfer_s_target_is_the_teacher(name: str, implementation: str, tolerance: float) -> None:
    """Each document by itself, within the layer's own window, with its own scale and soft cap."""
    teacher = make_teacher(name)
    if name == "gemma2":
        implementation, tolerance = "eager", 1e-4
    teacher.set_attn_implementation(implementation)
    student = linearize.convert(teacher, Case("", name, convert_sliding=True).recipe()).eval()
    assert len(linearized_layers(student)) == teacher.config.num_hidden_layers
    documents = torch.cat([torch.arange(17), torch.arange(13)])[None]
    options: dict[str, Any] = dict(input_ids=random_tokens(2, 30), position_ids=documents, use_cache=False)
    with torch.no_grad(), observed(student, softmax_output), documents_apart(teacher):
        checks.assert_close(
            student(**options).logits, teacher(**options).logits, max(tolerance, 1e-4 * (name == "gemma2"))
        )


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_finetuning_compares_the_same_function(name: str) -> None:
    """A student that is its teacher has nothing to learn from it, of packed rows either."""
    config = linearize.Recipe.load("lolcats", {"finetune.loss": dict(labels=0, kl=1)}).finetune
    student = copy.deepcopy(student_of(Case("", name, overrides=WHOLE)))
    objective = OutputObjective(student, config, teacher_of(Case("", name)))
    assert objective.evaluate(tiny.packed([[11, 19], [1, 8, 21]], vocabulary=60))["model"] < 1e-6


@pytest.mark.parametrize("name", [name for name in (*FIRST, *ARCHITECTURES) if not LINEARIZED[name].slides])
def test_a_window_that_the_architecture_does_not_have(name: str) -> None:
    """A stray `sliding_window` in a config changes nothing for a teacher, so nothing for a student."""
    checks.whole_window(Case("", name, overrides=WHOLE, teacher=dict(sliding_window=8)))
    case = Case("", name, mixer="mix", teacher=dict(sliding_window=8))
    student, ids = student_of(case), random_tokens(1, 30)
    student.config.prefill = "full"
    with torch.no_grad():
        found, expected = (model(ids, use_cache=True).logits for model in (student, teacher_of(case)))
    checks.assert_close(found, expected)


# --- generation -------------------------------------------------------------------------------------------------------


@plain
def test_left_padding_and_a_cache_leave_no_trace(name: str) -> None:
    """Of a mixer that asks for everything: queries and keys before RoPE and after it, and the hidden states."""
    generation.left_padded_cache(Case("", name, mixer="mix"))


@plain
def test_padding_without_positions_leaves_no_trace(name: str) -> None:
    """Nor does it where every other layer stays softmax."""
    for kept in ((), (1,)):
        generation.padded_without_positions(Case("", name, mixer="mix", keep_softmax=kept))


@plain
def test_a_padded_state_takes_no_other_mask(name: str) -> None:
    """Nor does it where every other layer stays softmax."""
    for kept in ((), (1,)):
        generation.padding_told_otherwise(Case("", name, mixer="mix", keep_softmax=kept))


@pytest.mark.parametrize("name", ["phi", "phi3", "gpt_neox", "smollm3", "llama-llama3", "llama-yarn", "llama-dynamic"])
def test_rotated_features_are_cached(name: str) -> None:
    """By as many cosines and sines as the layer has; it may have none."""
    generation.in_chunks(Case("", name, mixer="gated-delta"))


@plain
def test_padded_prompts_generate_what_each_does_alone(name: str) -> None:
    generation.generated_alone(Case("", name, mixer="mix"))


@plain
def test_heads_of_several_kinds(name: str) -> None:
    """A KV cache with eviction, softmax over all keys and a linear part in one layer; alone, padded and continued."""
    case = headwise(name)
    mixers = [layer.mixer for layer in linearized_layers(student_of(case)).values()]
    several = [mixer for mixer in mixers if len(list(mixer.parts())) > 1]
    assert several or case.architecture == "gemma"  # which has one KV head
    generation.left_padded_cache(case)
    generation.generated_alone(case)


# --- what a mixer is handed -------------------------------------------------------------------------------------------


@every
def test_q_k_v_are_those_of_a_mixer_that_asks_for_nothing(name: str) -> None:
    """To the bit, at positions of each row's own; every layer is converted, those that slide too."""
    student, ids = student_of(Case("", name, convert_sliding=True)), random_tokens(2, 14)
    options = dict(position_ids=positions(0, 5), use_cache=True)
    asked, dims = record(student, ids, **options), MetaModel.of(shape_of(name)).rotary_dims
    for expected, found, turned in zip(record(student, ids, wants=False, **options), asked, dims, strict=True):
        assert expected.hidden is expected.unrotated is expected.rope is None
        assert all(torch.equal(getattr(found, x), getattr(expected, x)) for x in "qkv")
        assert (found.scaling, found.softcap) == (expected.scaling, expected.softcap)
        if not turned:
            assert found.unrotated is found.rope is None
            continue
        assert found.rope[0].shape[-1] == turned
        for rotated, unrotated in zip((found.q, found.k), found.unrotated, strict=True):
            assert torch.equal(rotated[..., turned:], unrotated[..., turned:])
            assert not torch.isclose(rotated[:, :, 1:, :turned], unrotated[:, :, 1:, :turned]).all()


def inverse_frequencies(name: str) -> list[Tensor]:
    """Of each layer's rotated pairs of dimensions, as the config gives them, without scaling but a linear one."""
    config, dims = teacher_of(Case("", name)).config, MetaModel.of(shape_of(name)).rotary_dims
    kinds, found = getattr(config, "layer_types", None), []
    for index, turned in enumerate(dims):
        rope = config.rope_parameters
        rope = rope if "rope_theta" in rope else rope[kinds[index]]
        exponents = torch.arange(turned // 2, dtype=torch.float64) / max(turned // 2, 1)
        found.append(rope["rope_theta"] ** -exponents / rope.get("factor", 1.0))
    return found


@pytest.mark.parametrize(
    "name", [n for n in DECODERS if n not in {"opt", "llama-llama3", "llama-yarn", "phi3-longrope"}]
)
def test_unrotated_inputs_turn_by_the_angle_of_their_position(name: str) -> None:
    """RoPE as complex numbers, on the first R dimensions of a head, of which d and d + R / 2 are a pair."""
    if name == "llama-dynamic":
        name = "llama-linear"
    student, ids = student_of(Case("", name, convert_sliding=True)), random_tokens(2, 14)
    for inputs, frequencies in zip(
        record(student, ids, position_ids=positions(0, 5)), inverse_frequencies(name), strict=True
    ):
        half = len(frequencies)
        angle = positions(0, 5)[:, None, :, None] * frequencies
        for unrotated, rotated in zip(inputs.unrotated or (), (inputs.q, inputs.k), strict=bool(half)):
            pairs = torch.complex(unrotated[..., :half], unrotated[..., half : 2 * half])
            turned = pairs * torch.polar(torch.ones_like(angle), angle)
            # transformers takes the cosines in fp32.
            checks.assert_close(rotated[..., : 2 * half], torch.cat([turned.real, turned.imag], -1), 1e-4)


SCALES = {"gemma2": 3**-0.5, "gemma3_text": 5**-0.5, "granite": 0.2, "opt": 1.0, "gemma": 0.25}


@plain
def test_scales_and_soft_caps_are_the_model_s_own(name: str) -> None:
    for inputs in record(student_of(Case("", name)), random_tokens(1, 5)):
        assert inputs.scaling == pytest.approx(SCALES.get(name, 8**-0.5))
        assert inputs.softcap == (4.0 if name == "gemma2" else None)


PROJECTIONS = {"gpt2": ("c_attn", "c_proj"), "phi3": ("qkv_proj", "o_proj"), "gpt_neox": ("query_key_value", "dense")}
PROJECTIONS |= {"phi": ("q_proj v_proj", "dense"), "opt": ("q_proj v_proj", "out_proj")}


@plain
def test_projections_are_found_by_role(name: str) -> None:
    layers = teacher_of(Case("", name)).config.num_hidden_layers
    for roles, names in zip(("qv", "o"), PROJECTIONS.get(name, ("q_proj v_proj", "o_proj")), strict=True):
        found = [path.rpartition(".")[2] for path in projections(student_of(Case("", name)), roles)]
        assert sorted(found) == sorted(names.split() * layers)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@plain
def test_a_teacher_s_folder_with_a_linearized_config_is_a_conversion(name: str, tmp_path: Path) -> None:
    """What is called otherwise on disk, as experts are, is so for the student too."""
    teacher = make_teacher(name).float()
    teacher.save_pretrained(tmp_path)
    student = linearize.convert(teacher, Case("", name).recipe())
    config = copy.deepcopy(student.config)
    loaded, report = type(student).from_pretrained(
        tmp_path, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert report["missing_keys"] == {key for key in student.state_dict() if ".mixer." in key}
    assert not report["unexpected_keys"]
    assert all(torch.equal(loaded.get_parameter(key), p) for key, p in student.named_parameters())
    ids, mask = random_tokens(2, 20), checks.left_padding([6, 0], 20)
    assert torch.equal(checks.uncached(loaded, ids, mask), checks.uncached(student, ids, mask))
    with linearize.softmax_attention(loaded):
        assert torch.equal(checks.uncached(loaded, ids, mask), checks.uncached(teacher, ids, mask))


def test_experts_compute_as_the_teacher_s_do(tmp_path: Path) -> None:
    """Also after loading: our classes are in a module of their own, where transformers does not look for experts."""
    teacher = make_teacher("mixtral", experts_implementation=None).float()
    assert teacher.config._experts_implementation == "grouped_mm"
    student = linearize.convert(teacher, Case("", "mixtral").recipe())
    student.save_pretrained(tmp_path)
    loaded = type(student).from_pretrained(tmp_path)
    assert student.config._experts_implementation == loaded.config._experts_implementation == "grouped_mm"


# --- these tests can fail ---------------------------------------------------------------------------------------------


def softcap_dropped(patch: pytest.MonkeyPatch) -> None:
    inputs = attention.AttnInputs
    patch.setattr(attention, "AttnInputs", lambda q, k, v, scale, softcap, *more: inputs(q, k, v, scale, None, *more))


def scale_of_the_head(patch: pytest.MonkeyPatch) -> None:
    """Instead of the model's own."""
    inputs = attention.AttnInputs
    patch.setattr(attention, "AttnInputs", lambda q, k, v, scale, *more: inputs(q, k, v, q.shape[-1] ** -0.5, *more))


def whole_heads_rotated(patch: pytest.MonkeyPatch) -> None:
    """As if all dimensions had angles: those of the part are used again for the rest."""

    def wrong(module: Any, query: Tensor, key: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = (x.repeat(1, 1, query.shape[-1] // x.shape[-1]) for x in rope)
        return attention._teacher_module(module).apply_rotary_pos_emb(query, key, cos, sin)

    patch.setattr(attention, "_rotate", wrong)


def every_layer_rotated(patch: pytest.MonkeyPatch) -> None:
    for layer in linearized_layers(student_of(Case("", "smollm3", convert_sliding=True))).values():
        patch.setattr(layer, "use_rope", 1)


def cache_kept_from_no_layer(patch: pytest.MonkeyPatch) -> None:
    """GPT-NeoX calls it otherwise."""
    for cls in {type(layer) for layer in linearized_layers(student_of(Case("", "gpt_neox"))).values()}:
        patch.setattr(cls, "cache_argument", "past_key_values")


def layouts_for_the_base_model_alone(patch: pytest.MonkeyPatch) -> None:
    """OPT's language model does not call it."""
    stack: Any = student_of(Case("", "opt", overrides=WHOLE)).base_model.get_submodule("decoder")
    patch.setattr(stack, "_forward_pre_hooks", {})


def documents_forgotten(patch: pytest.MonkeyPatch) -> None:
    """As OPT's own mask does."""
    patch.setattr(layouts, "_documents_hook", lambda model, args, kwargs: (args, kwargs))


@pytest.mark.parametrize(
    "mutant, check, name",
    [
        (softcap_dropped, test_a_window_over_everything_is_the_teacher, "gemma2"),
        (scale_of_the_head, test_a_window_over_everything_is_the_teacher, "gemma3_text"),
        (scale_of_the_head, test_a_window_over_everything_is_the_teacher, "granite"),
        (scale_of_the_head, test_a_window_over_everything_is_the_teacher, "opt"),
        (whole_heads_rotated, test_q_k_v_are_those_of_a_mixer_that_asks_for_nothing, "phi"),
        (whole_heads_rotated, test_q_k_v_are_those_of_a_mixer_that_asks_for_nothing, "phi3"),
        (every_layer_rotated, test_q_k_v_are_those_of_a_mixer_that_asks_for_nothing, "smollm3"),
        (cache_kept_from_no_layer, test_rotated_features_are_cached, "gpt_neox"),
        (layouts_for_the_base_model_alone, test_a_window_over_everything_is_the_teacher, "opt"),
        (documents_forgotten, test_a_window_over_everything_is_the_teacher, "opt"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_what_is_broken_is_noticed(mutant: Any, check: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (Case("", name, overrides=WHOLE), Case("", name, convert_sliding=True)):
        student_of(case)  # made before it is broken
    mutant(monkeypatch)
    with pytest.raises((AssertionError, TypeError)):
        check(name)
