"""Weights read off a mixer are those of the definition, whatever it is made of; so are the teacher's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

import linearize
from linearize.configs.mixer import HeadwiseConfig, MixerConfig
from linearize.configs.mixer_parts import EvictionCache, WindowOnly
from linearize.configs.spans import TerracedSpan
from linearize.data.rows import PackedRows
from linearize.evaluation.fidelity import Visit, visit_layers
from linearize.hf.convert import convert_layers
from linearize.recipe import Recipe
from tests import tiny
from tests.experiments.test_grids import load
from tests.hf.models import randomize_mixers
from tests.mixers.weights import weights_of
from tests.oracles import eviction_cache
from tests.oracles.attention import Documents
from tests.oracles.attention_weights import mixer_weights, softmax_weights, unnormalized, window_alone
from tests.oracles.heads import Inputs
from tests.oracles.mixer import mixer_layer, span_of
from tests.oracles.spans import span_keys

attention_weights = load("attention_weights")
weight_blocks = attention_weights.weight_blocks

LENGTH = 15
TOLERANCE = 1e-10
ROWS = tiny.packed([[LENGTH], [6, 1, 8]])

SLIDING = {"type": "sliding", "window_size": 5}
GROUP_NORM, ADD = {"type": "group_norm"}, {"type": "add"}
SMALL_CACHE = {
    "mixer.span": {"type": "terraced", "window_size": 2},
    "mixer.cache": {"size": 3},
}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "lolcats": ("lolcats", {"mixer.span.window_size": 5}),
    "sinks": ("lolcats", {"mixer.span.window_size": 5, "mixer.span.sinks": 2}),
    "terraced": ("lolcats-terraced", {"mixer.span.window_size": 4}),
    "learned sink": ("lolcats", {"mixer.span.window_size": 5, "mixer.combine.learned_sink": True}),
    "lolcat-w": ("lolcat-w", {"mixer.span.window_size": 3}),
    "added": ("lolcats", {"mixer.span.window_size": 5, "mixer.combine": ADD}),
    "hedgehog": ("hedgehog", {}),
    "supra": ("supra", {}),
    "supra with a window": ("supra", {"mixer.span": SLIDING}),
    "gla": ("gla", {}),
    "deltanet": ("deltanet", {}),
    "cached": ("lolcats", SMALL_CACHE | {"mixer.feature_map.per": "kv_head"}),
    "cached, normed": ("lolcats", SMALL_CACHE | {"mixer.normalizer": GROUP_NORM, "mixer.combine": ADD}),
    "gated-deltanet": ("gated-deltanet", {}),
}


def make_student(teacher: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """A student with random mixers."""
    student = linearize.convert(teacher, recipe).eval().requires_grad_(False)
    randomize_mixers(student)
    return student


def recipe_student(name: str, teacher: PreTrainedModel) -> PreTrainedModel:
    recipe, overrides = RECIPES[name]
    return make_student(teacher, Recipe.load(recipe, overrides))


def small_teacher() -> PreTrainedModel:
    """One layer, four query heads on two KV heads, D = 8."""
    return tiny.llama(layers=1).double()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end neither with a document nor with a probe's keys."""
    monkeypatch.setattr(attention_weights, "QUERIES", 5)


def documents_of(rows: PackedRows) -> Documents:
    found: Documents = []
    for positions in rows.position_ids.tolist():
        found.append([])
        for slot, position in enumerate(positions):
            if position == 0:
                found[-1].append([])
            found[-1][-1].append(slot)
    return found


def visits(student: PreTrainedModel, rows: PackedRows = ROWS, batch_size: int = 8) -> list[Visit]:
    found: list[Visit] = []
    visit_layers(student, rows, found.append, batch_size=batch_size, title="test")
    return found


def whole(blocks: Iterator[Any], rows: int, heads: int, length: int = LENGTH) -> dict[str, Tensor]:
    """The blocks' matrices put together: [B,H,T,T], or [B,T,T]."""
    found = {name: torch.zeros(rows, heads, length, length).double() for name in ("teacher", "student", "scores")}
    found |= {"seen": torch.zeros(rows, length, length, dtype=torch.bool)}
    found |= {"linear": torch.zeros(rows, heads, length, length, dtype=torch.bool)}
    for block in blocks:
        for name in ("teacher", "student", "scores", "linear"):
            found[name][block.row, :, block.queries, block.keys] = getattr(block, name)
        found["seen"][block.row, block.queries, block.keys] = block.seen
    return found


def oracle_inputs(visit: Visit) -> Inputs:
    x = visit.inputs
    return Inputs(x.q, x.k, x.v, x.scaling, x.softcap, x.hidden, x.unrotated, x.rope)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * max(1.0, float(expected.abs().max())))


# --- the student's ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_probed_weights_are_those_of_the_definition(name: str) -> None:
    (visit,) = visits(recipe_student(name, small_teacher()))
    mixer, inputs, documents = visit.module.mixer, oracle_inputs(visit), documents_of(ROWS)
    if mixer.scorer is not None:  # of keys alone: the definition is read with other values
        mixer.scorer.weight[..., 8:].zero_()
    found = whole(weight_blocks(visit), len(ROWS), 4)
    config, own = mixer.config, weights_of(mixer)
    if own.sink_value is not None:  # it is no key's
        own = replace(own, sink_value=torch.zeros_like(own.sink_value))
    linear = config.normalizer.type in ("sum", "none")
    expected = mixer_weights(config if linear else unnormalized(config), own, inputs, documents)
    if not linear:
        # What the norm makes of each token's output, by the outputs on the real values.
        outputs = [mixer_layer(x, own, inputs, documents) for x in (config, unnormalized(config))]
        if config.span.type != "none":
            window = mixer_layer(window_alone(config), own, inputs, documents)
            outputs = [y - window for y in outputs]
        after, before = (y.norm(dim=-1, keepdim=True) for y in outputs)
        stretch = torch.where(before > 0, after / before.clamp_min(1e-300), 0)
        expected = torch.where(found["linear"], expected * stretch, expected)
        assert (stretch[stretch > 0] - 1).abs().max() > 0.5  # or nothing would be tested
    assert_close(found["student"], expected)


@pytest.mark.parametrize("name", ["lolcats", "sinks", "terraced", "lolcat-w", "hedgehog", "deltanet"])
def test_the_linear_part_is_where_the_span_says(name: str) -> None:
    (visit,) = visits(recipe_student(name, small_teacher()))
    found = whole(weight_blocks(visit), len(ROWS), 4)
    expected = {name: torch.zeros(len(ROWS), LENGTH, LENGTH, dtype=torch.bool) for name in ("seen", "linear")}
    spec = span_of(visit.module.mixer.config)
    for row, row_documents in enumerate(documents_of(ROWS)):
        for slots in row_documents:
            for n, slot in enumerate(slots):
                expected["seen"][row, slot, slots[: n + 1]] = True
                expected["linear"][row, slot, [slots[j] for j in span_keys(spec, n)[1]]] = True
    assert torch.equal(found["seen"], expected["seen"])
    assert torch.equal(found["linear"], expected["linear"][:, None].expand(-1, 4, -1, -1))
    assert not found["student"].masked_select(~expected["seen"][:, None]).any()


@pytest.mark.parametrize("name", ["lolcats", "terraced", "lolcat-w", "added"])
def test_the_split_is_that_of_the_mixers_own_parts(name: str) -> None:
    """Linear weights times values are what the linear partial gives to the output."""
    (visit,) = visits(recipe_student(name, small_teacher()))
    mixer, found = visit.module.mixer, whole(weight_blocks(visit), len(ROWS), 4)
    window, linear = mixer.partials(visit.inputs, visit.layout)
    shares = {
        "shared_denominator": lambda: (
            linear.num / (window.den * mixer.combine.window_factor.sigmoid()[:, None] + linear.den)[..., None]
        ),
        "mix": lambda: (
            (1 - mixer.combine.window_weight.sigmoid()[:, None, None])
            * linear.num
            / linear.den.clamp_min(1e-6)[..., None]
        ),
        "add": lambda: linear.num / linear.den.clamp_min(1e-6)[..., None],
    }
    v = visit.inputs.v.repeat_interleave(2, dim=1)
    with torch.no_grad():
        assert_close((found["student"] * found["linear"]) @ v, shares[mixer.config.combine.type]())
        assert_close(found["student"] @ v, mixer(visit.inputs, visit.layout))


def test_what_a_cache_holds_is_not_the_linear_parts() -> None:
    """Each key below the window is one or the other's, by head; those of the cache are as large as the window's."""
    (visit,) = visits(recipe_student("cached", small_teacher()))
    found, mixer = whole(weight_blocks(visit), len(ROWS), 4), visit.module.mixer
    x, shape = visit.inputs, (len(ROWS), 4, LENGTH, LENGTH)
    expected = torch.zeros(shape, dtype=torch.bool)
    for row, row_documents in enumerate(documents_of(ROWS)):
        for head in range(4):
            for slots in row_documents:
                k, v = x.unrotated[1][row, head // 2, slots], x.v[row, head // 2, slots]
                linear = mixer.scorer.weight, mixer.scorer.recency
                scores = eviction_cache.scores(*(x[head // 2] for x in linear), k, v)
                memory = eviction_cache.remember(len(slots), width=2, blocks=2, sinks=0, size=3, scores=scores)
                for slot, dropped in zip(slots, memory.dropped, strict=True):
                    expected[row, head, slot, [slots[j] for j in dropped]] = True
    assert expected.any() and torch.equal(found["linear"], expected)
    with torch.no_grad():
        window, linear = mixer.partials(x, visit.layout)
        share = linear.num / (window.den * mixer.combine.window_factor.sigmoid()[:, None] + linear.den)[..., None]
    assert_close((found["student"] * found["linear"]) @ x.v.repeat_interleave(2, dim=1), share)


def test_every_value_takes_part_where_a_decay_weighs_them_differently() -> None:
    """The weight of key t is that of its value t mod D."""
    student = make_student(small_teacher(), Recipe.load("fast-decay"))
    (visit,) = visits(student)
    found = whole(weight_blocks(visit), len(ROWS), 4)["student"]
    one = torch.zeros_like(visit.inputs.v)
    one[:, :, 11, 11 % 8] = 1
    linear = visit.module.mixer.partials(replace(visit.inputs, v=one), visit.layout)[1]
    before, after = visit.module.mixer.partials(visit.inputs, visit.layout)[1], visit.module.mixer
    y = after.normalizer(before, visit.inputs, 0.0)
    stretch = y.norm(dim=-1) / before.num.norm(dim=-1)
    assert_close(found[..., 11], linear.num[..., 11 % 8] * stretch)


def headwise_student(*kinds: MixerConfig | None) -> PreTrainedModel:
    """A layer whose four KV heads have these mixers."""
    teacher = tiny.llama(layers=1, num_key_value_heads=4).double()
    student = convert_layers(teacher, (HeadwiseConfig.of(kinds),)).eval().requires_grad_(False)
    randomize_mixers(student)
    return student


def test_weights_of_heads_with_mixers_of_their_own() -> None:
    """Of a KV cache with eviction too: what it dropped has no weight, and the rest are a softmax over what is held."""
    linear = Recipe.load("lolcats", {"mixer.span.window_size": 5}).mixer
    (visit,) = visits(headwise_student(linear, small_cache(), None, linear))
    found = whole(weight_blocks(visit), len(ROWS), 4)
    with torch.no_grad():
        assert_close(found["student"] @ visit.inputs.v, visit.module.mixer(visit.inputs, visit.layout))
    assert_close(found["student"][:, 2], found["teacher"][:, 2])
    assert found["linear"].any(0).any(-1).any(-1).tolist() == [True, False, False, True]
    held = found["student"][:, 1] > 0
    assert int((found["seen"] & ~held).sum()) > 0, "some were dropped"
    among = found["scores"][:, 1].masked_fill(~held, -torch.inf).softmax(-1)
    assert_close(found["student"][:, 1], among.masked_fill(~held, 0))
    assert int(held.sum(-1).max()) <= 3 + 2 * 2


def test_scores_that_read_values_read_the_tokens_own() -> None:
    """And not by those that its weights are probed with, which lie beside them; beside a linear part too."""
    (visit,) = visits(headwise_student(small_cache(), None, None, beside_a_linear_part()))
    found = whole(weight_blocks(visit), len(ROWS), 4)
    with torch.no_grad():
        assert_close(found["student"] @ visit.inputs.v, visit.module.mixer(visit.inputs, visit.layout))


def small_cache() -> MixerConfig:
    """Three pairs beside two blocks of two."""
    span, cache = TerracedSpan(window_size=2, blocks=2), EvictionCache(size=3)
    return MixerConfig(span=span, feature_map=None, combine=WindowOnly(), cache=cache)


def beside_a_linear_part() -> MixerConfig:
    """The same, and what it drops is written to a linear state."""
    exponential = {"feature_map": {"type": "hedgehog", "activation": "exp"}, "combine": {"type": "absolute_scale"}}
    return MixerConfig.model_validate(small_cache().model_dump() | exponential)


# --- the teacher's ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_teacher_weights_are_softmax(softcap: float | None) -> None:
    (visit,) = visits(recipe_student("lolcats", small_teacher()))
    visit = replace(visit, inputs=replace(visit.inputs, softcap=softcap))
    found = whole(weight_blocks(visit), len(ROWS), 4)["teacher"]
    assert_close(found, softmax_weights(oracle_inputs(visit), documents_of(ROWS)))
    if softcap is None:
        assert_close(found @ visit.inputs.v.repeat_interleave(2, dim=1), visit.target)


def test_a_teacher_that_slides_sees_no_further() -> None:
    fields = dict(vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config = MistralConfig(**fields, num_key_value_heads=2, sliding_window=6, initializer_range=0.2)
    teacher = MistralForCausalLM(config).double().eval()
    recipe = Recipe.load("lolcats", {"mixer.span.window_size": 4, "layers.convert_sliding": True})
    (visit,) = visits(make_student(teacher, recipe))
    found = whole(weight_blocks(visit), len(ROWS), 4)["teacher"]
    assert_close(found @ visit.inputs.v.repeat_interleave(2, dim=1), visit.target)
    assert not found[0].tril(-6).any() and found[0].tril(-5).any()


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_batches_do_not_matter() -> None:
    student = make_student(tiny.llama(layers=3).double(), tiny.recipe(layers__keep_softmax=[1]))
    at_once = visits(student)
    assert [visit.index for visit in at_once] == [0, 2]
    in_parts = visits(student, batch_size=1)
    assert [(visit.index, visit.first_row) for visit in in_parts] == [(0, 0), (2, 0), (0, 1), (2, 1)]
    expected = whole(weight_blocks(at_once[1]), 2, 4)["student"]
    found = sum(whole(weight_blocks(visit), 2, 4)["student"] for visit in (in_parts[1], in_parts[3]))
    assert_close(found, expected)


def test_blocks_cover_every_query_once_and_hold_no_more_keys_than_a_document_needs() -> None:
    rows = tiny.packed([[40, 8, 7]])
    (visit,) = visits(recipe_student("lolcats", small_teacher()), rows)
    blocks = list(weight_blocks(visit))
    assert [slot for block in blocks for slot in range(block.queries.start, block.queries.stop)] == list(range(55))
    assert [block.following for block in blocks] == list(range(10, -1, -1))
    for block in blocks:
        shape = 4, block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        assert block.student.shape == block.teacher.shape == block.scores.shape == shape
        assert block.keys.stop == block.queries.stop
    # D = 8 keys at a time. Block 9 begins with slot 45, in the document of slots 40 .. 47.
    assert [block.keys.start for block in blocks] == [0] * 8 + [40, 40, 48]
