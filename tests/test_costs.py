"""What a plan says of mixers, against the mixers and the caches of real students, and against sums done by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from linearize.configs.mixer import MixerConfig
from linearize.costs import MixerCost, mixer_cost
from linearize.hf.attention import linearized_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.plan import Plan, make_plan
from tests.hf import encoders
from tests.hf.models import CASES, MIXERS, SPANS, Case, random_tokens, student_of, teacher_of
from tests.shapes import make_shape

# H = 4, G = 2, D = 8, hidden size 32.
SMALL = make_shape("llama", 2, 4, 2, 8, 32, 80, 101, 64, False)
# Each mixer with RoPE, without it, with some of a head's dimensions rotated, and with layers that do not rotate.
STUDENTS = [
    *CASES,
    *(Case("", name, mixer=mixer) for name in ("llama", "gpt2", "phi", "smollm3") for mixer in MIXERS),
    Case("", overrides={"mixer.feature_map": {"type": "taylor2"}}, span="none"),
    Case("", overrides={"mixer.feature_map": dict(type="exp"), "mixer.combine.type": "absolute_scale"}),
]


def planned(case: Any, teacher: Any, dtype: torch.dtype) -> Plan:
    shape = TeacherShape.from_config(teacher.config.to_dict())
    return make_plan(case.recipe(), shape, resolve(case.recipe(), shape), dtype=dtype, training_tokens=None)


def parameters(student: Any) -> int:
    return sum(p.numel() for layer in linearized_layers(student).values() for p in layer.mixer.parameters())


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float64) for case in STUDENTS), *((case, torch.bfloat16) for case in CASES)]
)
def test_parameters_and_states_are_those_of_the_student(case: Case, dtype: torch.dtype) -> None:
    student, plan = student_of(case), planned(case, teacher_of(case), dtype)
    if dtype != torch.float64:  # mixers are fp32 in all other models
        student = copy.deepcopy(student).to(dtype)
        for layer in linearized_layers(student).values():
            layer.mixer.float()
    assert plan.new_parameters == parameters(student)
    with torch.no_grad():
        cache = student(random_tokens(1, 20), use_cache=True).past_key_values
    states = [cache.layers[index].state for index in plan.converted_layers]
    assert plan.state_bytes == sum(state.nbytes - state.seen.nbytes for state in states)


@pytest.mark.parametrize("mixer", encoders.MIXERS)
@pytest.mark.parametrize("name", encoders.ENCODERS)
def test_parameters_are_those_of_the_encoder(name: str, mixer: str) -> None:
    case = encoders.Case(name, mixer)
    plan = planned(case, encoders.teacher_of(case), torch.float64)
    assert plan.new_parameters == parameters(encoders.student_of(case)) and plan.state_bytes == 0


def cost(teacher: TeacherShape = SMALL, **parts: Any) -> MixerCost:
    return mixer_cost(MixerConfig.model_validate(parts), teacher, torch.bfloat16, rotary_dims=8)


def hedgehog(**fields: Any) -> dict[str, Any]:
    return dict(type="hedgehog", feature_dim=6) | fields


@pytest.mark.parametrize(
    ("parts", "parameters", "state"),
    [
        # A slot has 2 x 2 x 8 numbers in bf16; S and z have F x 9 numbers per head of the state, in fp32.
        (dict(span=SPANS["sliding"], feature_map=hedgehog()), 4 * 24 + 4 * 24 + 4, 4 * (4 * 54) + 2 * (6 * 32)),
        # A state and a map per KV head; two states, of which one is being folded; 9 slots.
        (
            dict(span=SPANS["terraced"], feature_map=hedgehog(per="kv_head")),
            4 * 24 + 2 * 24 + 4,
            4 * (2 * 2 * 54) + 2 * (9 * 32),
        ),
        # Performer's running maximum is fp64; a slot has its step and its offset besides.
        (
            dict(span=SPANS["sliding"], feature_map=dict(type="performer", feature_dim=6)),
            4,
            4 * (2 * 54) + 8 * 2 + 6 * (2 * 32 + 4 * 2 + 8 * 2),
        ),
        # In bfloat16, S alone.
        (
            dict(span=SPANS["sliding"], feature_map=dict(type="performer", feature_dim=6), state_dtype="bfloat16"),
            4,
            2 * (2 * 48) + 4 * (2 * 6) + 8 * 2 + 6 * (2 * 32 + 4 * 2 + 8 * 2),
        ),
        # Maps that see unrotated keys keep them too, and features that are rotated need cosines and sines.
        (
            dict(span=SPANS["sinks"], feature_map=dict(type="elu1", rotation="after"), normalizer=dict(type="none"))
            | dict(combine=dict(type="mix")),
            4,
            4 * (2 * 72) + 7 * (2 * (32 + 16 + 16)),
        ),
    ],
    ids=["slots", "terraced", "maximum", "bfloat16", "unrotated"],
)
def test_by_hand(parts: dict[str, Any], parameters: int, state: int) -> None:
    found = cost(**parts)
    assert (found.parameters, found.state_bytes) == (parameters, state)


ELU = dict(span=SPANS["none"], feature_map=dict(type="elu1"), combine=dict(type="add"))


def test_flops_by_hand() -> None:
    """2 per product: H = 4 queries read S [F = 8, D = 8] and z [8]; keys are folded into G = 2 of these S."""
    read, fold = 2 * 4 * 8 * (8 + 1), 2 * 2 * 8 * 8
    assert cost(**ELU).flops == read + fold
    # The delta rule reads once more what is there, and its strength is a product with the hidden state.
    delta = dict(update=dict(type="delta"), normalizer=dict(type="none"))
    assert cost(**ELU | delta).flops == read + fold + 2 * 2 * 8 * 8 + 2 * 32 * 2
    # A map is two more products, per model as wide as all heads; a window of 6 keys, and the query's own behind it.
    learned = dict(type="t2r", per="model", bias=False)
    assert cost(**ELU | dict(feature_map=learned)).flops == read + fold + 2 * (32**2 + 16**2)
    window = cost(span=SPANS["sliding"], feature_map=None, combine=dict(type="window_only"))
    assert window.flops == 2 * 2 * 4 * 8 * 6


def test_counting_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    cost(feature_map=dict(type="performer"))
    cost(feature_map=dict(type="t2r", init="kaiming"))
    assert torch.equal(torch.get_rng_state(), before)
