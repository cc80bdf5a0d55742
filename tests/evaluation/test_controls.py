"""The controls are what they are called: softmax under an explicit mask, and afterwards nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.configs.mixer import MixerConfig, each_mixer
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import NoSpan, SlidingSpan, TerracedSpan
from linearize.evaluation import controls
from linearize.evaluation.controls import (
    SINKS,
    control_span,
    equal_bytes_plan,
    exact_plan,
    window_only,
    window_only_plan,
    window_reach,
    without_linear_part,
)
from linearize.hf.attention import linearized_layers, observed, softmax_attention, softmax_output
from linearize.hf.classes import read_plan
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from tests import tiny
from tests.oracles.spans import SpanSpec, span_keys

LENGTH = 48
TOLERANCE = 1e-10
ROWS = tiny.packed([[LENGTH], [20, 1, 27]])


@torch.no_grad()
def logits(model: PreTrainedModel, mask: Tensor | None = None) -> Tensor:
    """Logits for `ROWS`; with an explicit mask [B, 1, T, T], which transformers applies as it is."""
    rows = dict(input_ids=ROWS.input_ids, position_ids=ROWS.position_ids)
    return model(**rows, attention_mask=mask, use_cache=False).logits


def explicit_mask(spec: SpanSpec) -> Tensor:
    """0 where a query sees a key, -inf elsewhere: the softmax keys of `spec`, document by document."""
    mask = torch.full((len(ROWS), 1, LENGTH, LENGTH), -torch.inf, dtype=torch.float64)
    for row, positions in enumerate(ROWS.position_ids.tolist()):
        for query, position in enumerate(positions):
            start = query - position
            visible, _ = span_keys(spec, position)
            mask[row, 0, query, [start + key for key in visible]] = 0
    return mask


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


each_teacher = pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2], ids=["llama", "gpt2"])
Make = Callable[..., PreTrainedModel]


@each_teacher
@pytest.mark.parametrize("window_size", [LENGTH, 64])
def test_a_window_over_everything_is_the_teacher(make: Make, window_size: int) -> None:
    teacher = make().double()
    student = tiny.moved_student(teacher, mixer__span__window_size=window_size)
    with without_linear_part(student) as model:
        assert_close(logits(model), logits(teacher))


# What a student has, the sinks asked for, and what its queries then see.
SPANS: dict[str, tuple[SlidingSpan | TerracedSpan, int | None, SpanSpec]] = {
    "sliding": (SlidingSpan(window_size=6), None, SpanSpec("sliding", 6)),
    "oneself": (SlidingSpan(window_size=1), None, SpanSpec("sliding", 1)),
    "own sinks": (SlidingSpan(window_size=6, sinks=2), None, SpanSpec("sliding", 6, sinks=2)),
    "given sinks": (SlidingSpan(window_size=6), 3, SpanSpec("sliding", 6, sinks=3)),
    "no sinks": (SlidingSpan(window_size=6, sinks=2), 0, SpanSpec("sliding", 6)),
    "terraced": (TerracedSpan(window_size=5, blocks=2), None, SpanSpec("terraced", 5, 2)),
    "terraced and sinks": (TerracedSpan(window_size=5, blocks=3), SINKS, SpanSpec("terraced", 5, 3, SINKS)),
}


@each_teacher
@pytest.mark.parametrize("span, sinks, spec", SPANS.values(), ids=SPANS)
def test_without_the_linear_part_softmax_is_masked(
    make: Make, span: SlidingSpan | TerracedSpan, sinks: int | None, spec: SpanSpec
) -> None:
    teacher = make().double()
    student = tiny.moved_student(teacher, mixer__span=span.model_dump())
    expected = logits(teacher, explicit_mask(spec))
    with without_linear_part(student, sinks) as model:
        assert_close(logits(model), expected)
    for other in (logits(student), logits(teacher)):
        assert (other - expected).abs().max() > 0.1  # the linear part, and the keys beyond the window, matter


def test_without_the_linear_part_a_learned_sink_stays_in_the_window() -> None:
    """And goes where there is no window, whose scale it has not."""
    teacher = tiny.llama().double()
    student = tiny.moved_student(teacher, mixer__combine__learned_sink=True)
    plan = tuple(layer.mixer.config for layer in linearized_layers(student).values())
    window = plan[0].model_copy(update={"feature_map": None, "combine": WindowOnly(learned_sink=True)})
    expected = convert_layers(teacher, (window,) * 2)
    for one, other in zip(*(linearized_layers(model).values() for model in (student, expected)), strict=True):
        for name in ("sink_logit", "sink_value"):
            other.mixer.combine.get_parameter(name).data.copy_(one.mixer.combine.get_parameter(name))
    with without_linear_part(student):
        assert_close(logits(student), logits(expected))
    assert not any(mixer.learned_sink for mixer in each_mixer(exact_plan(plan)))
    alone = tiny.moved_student(teacher, mixer__span={"type": "none"}, mixer__combine__learned_sink=True)
    with without_linear_part(alone) as model:
        assert not any(layer.mixer.config.learned_sink for layer in linearized_layers(model).values())


def test_pure_linear_attention_is_compared_with_a_default_window() -> None:
    teacher = tiny.llama(max_position_embeddings=512).double()
    student = tiny.moved_student(teacher, mixer__span={"type": "none"})
    spans = []
    with without_linear_part(student):
        spans += [layer.mixer.config.span for layer in linearized_layers(student).values()]
    assert spans == [SlidingSpan(window_size=64)] * 2


def test_a_trained_control_is_the_same_model() -> None:
    """Converted as a window alone, as its control is trained, or ablated: the same function."""
    teacher = tiny.llama().double()
    student = tiny.moved_student(teacher)
    plan = tuple(layer.mixer.config for layer in linearized_layers(student).values())
    control = convert_layers(teacher, window_only_plan(plan, teacher, 64))
    assert not any(".mixer." in name for name, _ in control.named_parameters())
    with without_linear_part(student):
        assert_close(logits(control), logits(student))


# --- nothing stays behind ---------------------------------------------------------------------------------------------


def standing(model: PreTrainedModel) -> list[Any]:
    """Everything that the context managers exchange, by identity or value."""
    layers = linearized_layers(model).values()
    parts = [(id(type(x)), id(x.mixer), id(x.config), x.observer, x.config._attn_implementation) for x in layers]
    return [parts, id(model.config), model.config._attn_implementation, model.training, list(model.state_dict())]


MANAGERS: dict[str, Callable[[PreTrainedModel], AbstractContextManager[Any]]] = {
    "without_linear_part": without_linear_part,
    "with sinks": lambda model: without_linear_part(model, SINKS),
    "softmax_attention": softmax_attention,
    "observed": lambda model: observed(model, softmax_output),
}


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("keep_softmax", [[], [0]], ids=["converted", "mixed"])
@pytest.mark.parametrize("manager", MANAGERS.values(), ids=MANAGERS)
def test_everything_is_put_back(
    manager: Callable[[PreTrainedModel], AbstractContextManager[Any]], keep_softmax: list[int]
) -> None:
    student = tiny.moved_student(tiny.llama(), layers__keep_softmax=keep_softmax)
    before, expected = standing(student), logits(student)
    with manager(student):
        assert not torch.equal(logits(student), expected)
    assert standing(student) == before
    with pytest.raises(Interrupted), manager(student):
        assert standing(student) != before
        raise Interrupted
    assert standing(student) == before
    assert torch.equal(logits(student), expected)


def test_a_control_that_cannot_be_made_leaves_no_layer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    student = tiny.moved_student(tiny.llama())
    before = standing(student)
    made = []

    def second_fails(*arguments: Any) -> MixerConfig:
        made.append(arguments)
        if len(made) == 2:
            raise Interrupted
        return window_only(*arguments)

    monkeypatch.setattr(controls, "window_only", second_fails)
    with pytest.raises(Interrupted), without_linear_part(student):
        pass
    assert len(made) == 2
    assert standing(student) == before


# --- plans ------------------------------------------------------------------------------------------------------------


def test_controls_have_the_mixers_own_span() -> None:
    sliding, terraced = SlidingSpan(window_size=16, sinks=1), TerracedSpan(window_size=16, blocks=3)
    assert control_span(sliding) == sliding
    assert control_span(sliding, 4) == SlidingSpan(window_size=16, sinks=4)
    assert control_span(terraced, 4) == TerracedSpan(window_size=16, blocks=3, sinks=4)
    assert control_span(NoSpan()) == SlidingSpan(window_size=64)
    assert window_only(MixerConfig(span=sliding)) == MixerConfig(span=sliding, feature_map=None, combine=WindowOnly())


def test_layers_that_stay_softmax_stay_so_in_the_control() -> None:
    mixer = MixerConfig(span=SlidingSpan(window_size=16))
    assert window_only_plan((None, mixer), tiny.llama(), 64) == (None, window_only(mixer))


@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
def test_a_window_of_equal_bytes_is_of_equal_bytes(state_dtype: str | None) -> None:
    """As their caches hold them; to half a pair of key and value per head."""
    teacher = tiny.llama(max_position_embeddings=512)
    student = tiny.moved_student(teacher, mixer__span__window_size=5, mixer__state_dtype=state_dtype)
    control = convert_layers(teacher, equal_bytes_plan(read_plan(student.config), teacher, 64))
    ids = torch.randint(90, (1, 300))
    held = []
    for model in student, control:
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        held.append(sum(layer.nbytes - layer.kept.seen.nbytes for layer in cache.layers))
    shape = TeacherShape.from_config(teacher.config.to_dict())
    pairs = 2 * shape.num_kv_heads * shape.head_dim * 4 * shape.num_layers
    assert abs(held[0] - held[1]) <= pairs / 2 and held[0] > 6 * pairs


@pytest.mark.parametrize("window, kept", [(1, (1, 0)), (3, (1, 2)), (4, (1, 3)), (16, (12, 4))])
def test_a_window_of_equal_bytes_keeps_sinks(window: int, kept: tuple[int, int]) -> None:
    mixer = MixerConfig(span=SlidingSpan(window_size=window), feature_map=None, combine=WindowOnly())
    control = {each.span for each in each_mixer(equal_bytes_plan((mixer, mixer), tiny.llama(), 64))}
    assert control == {SlidingSpan(window_size=kept[0], sinks=kept[1])}


@pytest.mark.parametrize(
    "spans, reach",
    [
        ([SlidingSpan(window_size=16), None], 16),
        ([SlidingSpan(window_size=16), SlidingSpan(window_size=32)], 32),
        ([SlidingSpan(window_size=40), TerracedSpan(window_size=16, blocks=3)], 48),
        ([NoSpan()], 64),
    ],
    ids=str,
)
def test_beyond_the_window_means_beyond_the_widest(spans: list[Any], reach: int) -> None:
    plan = tuple(None if span is None else MixerConfig(span=span) for span in spans)
    assert window_reach(plan, tiny.llama(), 64) == reach
