"""Recipes resolved against encoders, and what their plans say."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from linearize.base import UserError
from linearize.configs.mixer_parts import Add
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.plan import Plan, make_plan, render
from linearize.recipe import Recipe
from tests.hf.encoders import ENCODERS
from tests.hf.test_teacher import TINY


def shape_of(name: str, **fields: Any) -> TeacherShape:
    return TeacherShape.from_config(TINY[name] | fields)


def recipe(**fields: Any) -> Recipe:
    return Recipe.load("hedgehog", {"layers.convert_sliding": True} | fields)


def planned(teacher: TeacherShape, training_tokens: int | None = None, **fields: Any) -> Plan:
    chosen = recipe(**fields)
    return make_plan(chosen, teacher, resolve(chosen, teacher), training_tokens=training_tokens)


# --- resolving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "overrides", "message"),
    [
        (
            "lolcats",
            {},
            r"mixer.span: expected `none`, because an encoder.* found `sliding`; use the recipe hedgehog-bert",
        ),
        ("retnet", {}, r"mixer.decay: expected null, .* found `fixed`"),
        ("deltanet", {}, r"mixer.update: expected `additive`, .* found `delta`"),
        ("hedgehog", {"transfer.layers_per_block": 1}, r"transfer.layers_per_block: expected null, .*found 1"),
        ("hedgehog", {"data.select_rows_by_esl": 7}, r"data.select_rows_by_esl: expected null, .*found 7"),
        ("hedgehog", {"layers.keep_softmax": [3]}, r"keep_softmax: expected indices from -3 to 2, found 3"),
    ],
)
def test_what_an_encoder_cannot_have(chosen: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        resolve(Recipe.load(chosen, overrides), shape_of("bert"))
    assert "\n" not in str(error.value)


def test_layers_that_share_weights_convert_alike() -> None:
    assert len(resolve(recipe(), shape_of("albert", num_hidden_groups=1))) == 1
    with pytest.raises(UserError, match="keep_softmax: expected indices from -1 to 0, found 2"):
        resolve(recipe(**{"layers.keep_softmax": [2]}), shape_of("albert", num_hidden_groups=1))


def test_local_layers_are_left_alone_unless_asked() -> None:
    layers = resolve(recipe(**{"layers.convert_sliding": False}), shape_of("modernbert"))
    assert [mixer is None for mixer in layers] == [False, True, False]
    assert None not in resolve(recipe(), shape_of("modernbert"))


def test_without_a_window_nothing_is_shared() -> None:
    layers = resolve(recipe(**{"mixer.combine.type": "shared_denominator"}), shape_of("bert"))
    assert all(mixer is not None and mixer.combine == Add() for mixer in layers)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_flops_by_hand() -> None:
    # One layer, three times; h = H D = 32, H = 4, F = 16, MLP of 48, embeddings 16 wide; 16 tokens a row.
    shape = shape_of("albert", num_hidden_groups=1)
    plan = planned(shape, training_tokens=1, **{"data.sequence_length": 16, "transfer.epochs": 1})
    layer = 4 * 32 * 32 + 8 * 32 + 2 * 32 * 48 + 48 + 32
    outside = 2 * 16 + 16 * 32 + 32 + 32 * 32 + 32
    softmax = 4 * 32 * 16  # every key, not half of them
    # Query and key are mapped, by 8 x 8 numbers, the other sign being free; folded and read are S and, for the sum, z.
    mixer = 2 * (2 * 4 * 8 * 8) + 2 * (2 * 4 * 16 * 8) + 2 * 4 * 16
    assert plan.transfer is not None
    assert plan.transfer.flops == 2 * (outside + 3 * layer) + 3 * softmax + 3 * 3 * mixer


def test_an_image_is_a_row() -> None:
    plans = [planned(shape_of("vit"), training_tokens=1, **{"data.sequence_length": n}) for n in (16, 512)]
    assert plans[0] == plans[1]


def rendered(plan: Plan) -> str:
    text = StringIO()
    Console(file=text, width=200).print(render(plan))
    return text.getvalue()


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_no_cache_and_no_state(name: str) -> None:
    plan = planned(shape_of(name))
    assert plan.bidirectional and plan.break_even_tokens is None
    assert plan.state_bytes == plan.student_cache_bytes_per_token == plan.teacher_cache_bytes_per_token == 0
    assert json.loads(json.dumps(plan.to_json()))["bidirectional"] is True
    text = rendered(plan)
    assert "time and memory linear in length, no cache" in text
    assert "memory is saved" not in text and "per token" not in text and "as they were" not in text


def test_kept_layers_are_named() -> None:
    text = rendered(planned(shape_of("modernbert"), **{"layers.convert_sliding": False}))
    assert "2 of 3" in text and "the layers that stay softmax do not change" in text
