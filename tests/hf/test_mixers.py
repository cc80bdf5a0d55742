"""Mixers of every kind inside transformers: generated with, saved, loaded, trained."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import linearize
from linearize.configs.spans import NoSpan
from linearize.hf.attention import linearized_layers
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.mixers.linear import LinearMixer
from linearize.recipe import recipe_names
from linearize.training.attention_transfer import TransferObjective
from tests import tiny
from tests.hf import checks
from tests.hf import generation_checks as generation
from tests.hf.models import (
    ARCHITECTURES,
    MIXER_CASES,
    MIXERS,
    VOCABULARY,
    Case,
    make_student,
    make_teacher,
    random_tokens,
    student_of,
)

# Each mixer once, on one architecture after the other.
ONCE = [MIXER_CASES[len(ARCHITECTURES) * index + index % len(ARCHITECTURES)] for index in range(len(MIXERS))]
WINDOWED = [case for case in MIXER_CASES if MIXERS[case.mixer]["span"]["type"] != "none"]
WITH_BUFFERS = [case for case in MIXER_CASES if case.mixer in ("rfa", "performer")]


ELSEWHERE = [case for case in MIXER_CASES if case not in ONCE]


def named(cases: list[Case]) -> pytest.MarkDecorator:
    """Each mixer on one architecture always, on the others among the slow tests."""
    rows = [pytest.param(case, id=case.name, marks=[] if case in ONCE else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize("case", rows)


def mixer_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers of all mixers."""
    return {
        f"{name}.mixer.{key}": tensor
        for name, layer in linearized_layers(model).items()
        for key, tensor in (*layer.mixer.named_parameters(), *layer.mixer.named_buffers())
    }


def first_mixer(model: PreTrainedModel) -> LinearMixer:
    return next(iter(linearized_layers(model).values())).mixer


def test_the_selection_asks_for_everything() -> None:
    """Every architecture and mixer is there, and between them they use all that a layer hands them."""
    assert {case.architecture for case in ONCE} == set(ARCHITECTURES)
    assert {case.mixer for case in ONCE} == set(MIXERS)
    wanted, slots = set(), set()
    for case in MIXER_CASES[:: len(ARCHITECTURES)]:
        cache = DynamicCache(config=student_of(case).config)
        checks.cached(student_of(case), random_tokens(1, 3), (0, 3), cache=cache)
        slots |= set(cache.layers[0].state.slots)
        mixer = first_mixer(student_of(case))
        wanted.add((mixer.wants_hidden, mixer.wants_unrotated))
    assert wanted == {(True, True), (True, False), (False, True)}
    assert slots >= {"map_keys", "cos", "sin", "log_decay_k", "log_decay_v", "input_scale", "beta", "offset"}


# --- generation -------------------------------------------------------------------------------------------------------


SOME = [generation.beams, generation.token_by_token, generation.left_padded, generation.two_turns]
SOME += [
    generation.padded_without_positions,
    generation.padding_told_otherwise,
    generation.interior_padding,
    generation.packed,
    checks.softmax_restored,
    checks.teacher_left_alone,
]
OTHERS = [generation.in_chunks, generation.next_turn, generation.copied, generation.rows_selected]
OTHERS += [generation.rows_repeated, generation.emptied, generation.chunked_prefill]


@pytest.mark.parametrize(
    "case, check",
    [
        *checks.alternating([case for case in MIXER_CASES if case in ONCE], SOME),
        *(pytest.param(*pair.values, id=pair.id, marks=pytest.mark.slow) for pair in checks.pairs(ELSEWHERE, SOME)),
    ],
)
def test_conversion_and_generation(case: Case, check: checks.Check) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("check", OTHERS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", MIXER_CASES, ids=lambda case: case.name)
def test_generation_in_every_way(case: Case, check: checks.Check) -> None:
    check(case)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_generates(name: str) -> None:
    """Each recipe is unchanged, except for a window that is smaller than 40 tokens."""
    architecture = list(ARCHITECTURES)[recipe_names().index(name) % len(ARCHITECTURES)]
    recipe = linearize.Recipe.load(name)
    if not isinstance(recipe.mixer.span, NoSpan):
        recipe = recipe.override({"mixer.span.window_size": 6})
    teacher, ids = make_teacher(architecture), random_tokens(2, 40)
    plan = resolve(recipe, TeacherShape.from_config(teacher.config.to_dict()))  # before anything is measured
    model = convert_layers(teacher, plan).eval()
    expected = checks.uncached(model, ids)
    assert expected.isfinite().all()
    checks.assert_close(checks.cached(model, ids, (0, 17, 18, 19, 32, 40)), expected)


@named(WINDOWED)
def test_a_window_over_everything_is_the_teacher(case: Case) -> None:
    checks.whole_window(replace(case, overrides={"mixer.span.window_size": 30}))


@named(MIXER_CASES)
def test_bfloat16_keeps_mixers_and_states_in_float32(case: Case) -> None:
    teacher = make_teacher(case.architecture, **case.teacher).bfloat16()
    model = make_student(case, teacher)
    assert {tensor.dtype for tensor in mixer_tensors(model).values()} == {torch.float32}
    ids, cache = random_tokens(2, 20), DynamicCache(config=model.config)
    found, expected = checks.cached(model, ids, range(21), cache=cache), checks.uncached(model, ids)
    exact = checks.uncached(make_student(case, copy.deepcopy(teacher).double()), ids)
    assert cache.layers[0].state.linear.S.dtype == torch.float32
    assert (found - exact).abs().mean() < 1.5 * (expected - exact).abs().mean() < 1


# --- checkpoints ------------------------------------------------------------------------------------------------------


@named(MIXER_CASES)
def test_saved_and_loaded(case: Case, tmp_path: Path) -> None:
    student = student_of(case)
    copy.deepcopy(student).save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = mixer_tensors(student)
    assert mixer_tensors(loaded).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in mixer_tensors(loaded).items())
    ids, mask = random_tokens(2, 20), checks.left_padding([6, 0], 20)
    assert torch.equal(checks.uncached(loaded, ids, mask), checks.uncached(student, ids, mask))


@named(MIXER_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_s_folder_is_a_conversion(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    """Everything of the mixers is missing: learned weights and fixed random ones are drawn, in fp32."""
    teacher = make_teacher(case.architecture, **case.teacher).float()
    teacher.save_pretrained(tmp_path)
    student = linearize.convert(teacher, case.recipe())
    loaded, report = type(student).from_pretrained(
        tmp_path, config=student.config, dtype=dtype, output_loading_info=True
    )
    found, expected = mixer_tensors(loaded), mixer_tensors(student)
    assert report["missing_keys"] == set(expected) == set(found)
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape, tensor.isfinite().all()) == (torch.float32, expected[name].shape, True)
        # What is set is the same; what is drawn is as large, and memory that nobody wrote is neither.
        spread = expected[name].std(correction=0).item()
        assert tensor.std(correction=0).item() == pytest.approx(spread, rel=0.5, abs=1e-7)
        assert spread or torch.equal(tensor, expected[name])
    assert checks.uncached(loaded, random_tokens(2, 20)).isfinite().all()


@named(WITH_BUFFERS)
def test_layers_draw_projections_of_their_own(case: Case, tmp_path: Path) -> None:
    teacher = make_teacher(case.architecture, **case.teacher).float()
    teacher.save_pretrained(tmp_path)
    student = linearize.convert(teacher, case.recipe())
    loaded = type(student).from_pretrained(tmp_path, config=student.config)
    drawn = [b for model in (student, loaded) for n, b in model.named_buffers() if ".mixer." in n]
    assert len(drawn) == 4
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_transformers_initialises_no_part_of_a_mixer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own idea of how a module is initialised goes by the name of the module's class."""
    case, seen = ONCE[0], []
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda model, module: seen.append(module))
    teacher = make_teacher(case.architecture, **case.teacher).float()
    teacher.save_pretrained(tmp_path)
    student, before = linearize.convert(teacher, case.recipe()), len(seen)
    loaded = type(student).from_pretrained(tmp_path, config=student.config)
    mixers = {module for layer in linearized_layers(loaded).values() for module in layer.mixer.modules()}
    assert len(seen) > before
    assert mixers.isdisjoint(seen)


@named(WITH_BUFFERS)
def test_random_projections_are_a_function_of_the_seed(case: Case) -> None:
    """The files of a training stage do not hold them."""
    teacher, buffers = make_teacher(case.architecture, **case.teacher), []
    for seed in (0, 0, 1):
        torch.rand(1)  # whatever else was drawn before
        student = linearize.convert(teacher, case.recipe().override({"seed": seed}))
        buffers.append([b for n, b in student.named_buffers() if ".mixer." in n])
    state = torch.get_rng_state()
    with torch.device("meta"):  # the model's device counts, and the CPU draws
        student = convert_layers(teacher, read_plan(student.config))
    buffers.append([b for n, b in student.named_buffers() if ".mixer." in n])
    assert torch.equal(torch.get_rng_state(), state)
    first, same, other, by_default = buffers
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, same, by_default, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@named(MIXER_CASES)
def test_parts_are_reset_in_place_and_checkpoints_hold_all_of_them(case: Case) -> None:
    """Both are needed by what a checkpoint lacks: only what is in the state dict is known to be missing."""
    mixer = first_mixer(make_student(case, make_teacher(case.architecture, **case.teacher)))
    tensors = dict((*mixer.named_parameters(), *mixer.named_buffers()))
    assert tensors.keys() == mixer.state_dict().keys()
    mixer.reset_parameters()
    after = dict((*mixer.named_parameters(), *mixer.named_buffers()))
    assert all(after[name] is tensor and tensor.dtype == torch.float64 for name, tensor in tensors.items())
    assert tensors.keys() == {f"{name}.{key}" for name, part in mixer.named_children() for key in part.state_dict()}


# --- training ---------------------------------------------------------------------------------------------------------


@named(MIXER_CASES)
def test_attention_transfer_reaches_every_parameter(case: Case) -> None:
    student = make_student(case, make_teacher(case.architecture, **case.teacher))
    rows = tiny.packed([[24], [10, 14]], vocabulary=VOCABULARY)
    objective = TransferObjective(student, case.recipe().transfer)
    losses = objective.backward([rows])
    assert len(losses) == 2 and min(losses.values()) > 0
    # Without a window, nothing depends on how it is weighted.
    idle = "combine" if isinstance(first_mixer(student).config.span, NoSpan) else "none"
    parameters = {name: p for unit in objective.units for name, p in unit.parameters.items() if idle not in name}
    assert parameters
    for name, parameter in parameters.items():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0, name
    assert not any(p.grad is not None for n, p in student.named_parameters() if ".mixer." not in n)


def test_layers_without_parameters_are_left_out() -> None:
    mixer = MIXERS["cosformer"] | dict(normalizer=dict(type="group_norm"), combine=dict(type="add"))
    teacher, rows = tiny.llama().double(), tiny.packed([[24]])
    recipe = tiny.recipe(mixer=mixer)
    with pytest.raises(linearize.UserError, match="expected mixers with parameters to train, found none; set"):
        TransferObjective(linearize.convert(teacher, recipe), recipe.transfer)
    shape = TeacherShape.from_config(teacher.config.to_dict())
    student = convert_layers(teacher, (resolve(tiny.recipe(), shape)[0], resolve(recipe, shape)[1]))
    objective = TransferObjective(student, recipe.transfer)
    trained = [unit.name for unit in objective.units]
    assert list(objective.backward([rows])) == trained == ["model.layers.0.self_attn"]


def test_a_loss_that_no_parameter_moves() -> None:
    """Without a window, and with a map that learns nothing, the window factor alone is left, and idle."""
    recipe = tiny.recipe(mixer=MIXERS["cosformer"] | dict(span=dict(type="none")))
    objective = TransferObjective(linearize.convert(tiny.llama(), recipe), recipe.transfer)
    losses = objective.backward([tiny.packed([[24]])])
    assert list(losses) == [unit.name for unit in objective.units]
    assert all(p.grad is None for unit in objective.units for p in unit.parameters.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_config_makes_a_model_in_any_dtype(dtype: torch.dtype) -> None:
    """transformers draws weights in the model's dtype, which orthogonal matrices do not exist in."""
    case = next(case for case in ONCE if case.mixer == "performer")
    model = AutoModelForCausalLM.from_config(student_of(case).config, dtype=dtype)
    weight = first_mixer(model).feature_map.weight
    assert weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    directions = torch.nn.functional.normalize(weight[:8], dim=-1)
    checks.assert_close(directions @ directions.mT, torch.eye(8).to(weight.dtype), 1e-6)
