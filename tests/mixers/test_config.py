"""Mixers as data: which combinations have a meaning, and what parts say of their sizes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from linearize.base import UserError
from linearize.configs.feature_maps import LearnedMap
from linearize.configs.mixer import _REFUSED, MixerConfig
from linearize.configs.mixer_parts import (
    AbsoluteScale,
    Add,
    AdditiveUpdate,
    DeltaUpdate,
    EvictionCache,
    FeatureDecay,
    FixedDecay,
    GroupNormalizer,
    Mix,
    NoNormalizer,
    OuterDecay,
    RefinedDecay,
    RmsNormalizer,
    ScalarDecay,
    SharedDenominator,
    SumNormalizer,
    WindowOnly,
)
from linearize.configs.spans import NoSpan, SlidingSpan, TerracedSpan
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.mixers import feature_maps as maps
from linearize.recipe import Recipe
from tests.shapes import make_shape

# H = 4, G = 2, D = 16, hidden size 64, 512 positions; and without GQA.
GROUPED = make_shape("llama", 3, 4, 2, 16, 64, 128, 256, 512, False)
EVERY_HEAD = make_shape("llama", 3, 4, 4, 16, 64, 128, 256, 512, False)


def with_head_dim(head_dim: int) -> TeacherShape:
    return TeacherShape(**{**vars(GROUPED), "head_dim": head_dim})


# --- combinations -----------------------------------------------------------------------------------------------------

WINDOW_ONLY = dict(feature_map=None, combine=WindowOnly())
DELTA = dict(update=DeltaUpdate(), normalizer=GroupNormalizer(), combine=Add())
# For each row of the table of refusals, in its order: fields that this row alone refuses, and a change that mends them.
REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(feature_map=None), WINDOW_ONLY),
    (WINDOW_ONLY | dict(normalizer=GroupNormalizer()), dict(normalizer=SumNormalizer())),
    (dict(span=NoSpan(), combine=Mix()), dict(span=TerracedSpan())),
    (WINDOW_ONLY | dict(cache=EvictionCache(size=4)), dict(span=TerracedSpan())),
    (
        dict(span=TerracedSpan(), cache=EvictionCache(size=4), feature_map=maps.CosformerMap()),
        dict(feature_map=maps.HedgehogMap()),
    ),
    (WINDOW_ONLY | dict(state_dtype="bfloat16"), dict(state_dtype=None)),
    (dict(normalizer=GroupNormalizer()), dict(combine=Add())),
    (dict(feature_map=maps.RfaMap()), dict(combine=Mix())),
    (dict(combine=AbsoluteScale()), dict(feature_map=maps.HedgehogMap(activation="exp"))),
    (dict(feature_map=maps.IdentityMap()), dict(normalizer=RmsNormalizer(), combine=Add())),
    (dict(decay=OuterDecay()), dict(decay=FeatureDecay())),
    (dict(update=DeltaUpdate()), dict(normalizer=NoNormalizer(), combine=Mix())),
    (DELTA | dict(decay=RefinedDecay()), dict(decay=RefinedDecay(axis="feature"))),
    (DELTA | dict(decay=ScalarDecay()), dict(decay=ScalarDecay(input_scale=False))),
    (
        DELTA | dict(feature_map=maps.T2RMap(activation="none"), update=DeltaUpdate(key_norm="sum")),
        dict(feature_map=maps.T2RMap(rotation="after")),
    ),
]
REASONS = [reason for _, reason in _REFUSED]


@pytest.mark.parametrize(("row", "fields", "mend"), [(row, *case) for row, case in enumerate(REFUSED)])
def test_refused(row: int, fields: dict[str, Any], mend: dict[str, Any]) -> None:
    unchecked = MixerConfig.model_construct(**fields)
    assert [reason for without_meaning, reason in _REFUSED if without_meaning(unchecked)] == [REASONS[row]]
    with pytest.raises(ValidationError):
        MixerConfig(**fields)
    MixerConfig(**(fields | mend))
    with pytest.raises(UserError) as error:
        Recipe.load("lolcats", {"mixer": unchecked.model_dump(mode="json")})
    message = str(error.value)
    assert message.startswith(f"recipe field mixer: {REASONS[row]}") and "\n" not in message


def test_every_row_of_the_table_is_tested() -> None:
    assert len(REFUSED) == len(REASONS) == len(set(REASONS))


MORE_WITHOUT_MEANING: list[dict[str, Any]] = [
    dict(combine=WindowOnly()),
    WINDOW_ONLY | dict(span=NoSpan()),
    WINDOW_ONLY | dict(decay=FixedDecay()),
    WINDOW_ONLY | dict(update=DeltaUpdate()),
    WINDOW_ONLY | dict(scale="head_dim"),
    dict(feature_map=maps.Elu1Map(rotation="after")),
    dict(feature_map=maps.T2RMap(activation="none")),
    dict(feature_map=maps.T2RMap(rotation="after")),
    dict(decay=RefinedDecay(axis="value")),
    DELTA | dict(feature_map=maps.TaylorMap(), update=DeltaUpdate(key_norm="sum")),
    DELTA | dict(feature_map=maps.RfaMap(), update=DeltaUpdate(key_norm="sum")),
    DELTA | dict(feature_map=maps.IdentityMap(rotation="after"), update=DeltaUpdate(key_norm="sum")),
]


@pytest.mark.parametrize("fields", MORE_WITHOUT_MEANING)
def test_more_that_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MixerConfig(**fields)


WITH_A_MEANING: list[dict[str, Any]] = [
    dict(feature_map=maps.TaylorMap()),  # single features are negative, the kernel never
    dict(feature_map=maps.RfaMap(), combine=Add()),  # as its paper does
    dict(span=NoSpan(), feature_map=maps.LolcatMap()),
    dict(feature_map=maps.ExpMap(), decay=RefinedDecay(axis="feature"), combine=Mix()),
    DELTA | dict(feature_map=maps.PerformerMap(), update=DeltaUpdate(key_norm="sum"), decay=FixedDecay()),
    DELTA | dict(feature_map=maps.Elu1Map(rotation="after"), update=DeltaUpdate(key_norm="sum")),
]


@pytest.mark.parametrize("fields", WITH_A_MEANING)
def test_not_refused(fields: dict[str, Any]) -> None:
    mixer = MixerConfig(**fields)
    assert MixerConfig.model_validate(json.loads(mixer.model_dump_json())) == mixer


# Every type, and what of its fields decides whether it goes with others.
PRODUCT: dict[str, list[Any]] = {
    "span": [NoSpan(), SlidingSpan(sinks=1), TerracedSpan()],
    "feature_map": [
        *(None, maps.IdentityMap(), maps.Elu1Map(), maps.Elu1Map(rotation="after"), maps.ReluMap(), maps.ExpMap()),
        maps.SiluMap(),
        *(maps.T2RMap(), maps.T2RMap(activation="none"), maps.T2RMap(rotation="after")),
        *(maps.HedgehogMap(), maps.HedgehogMap(activation="exp"), maps.LolcatMap(), maps.ReglaMap()),
        *(maps.PerformerMap(), maps.CosformerMap(), maps.TaylorMap(), maps.RfaMap(), maps.DpfpMap()),
    ],
    "decay": [
        *(None, FixedDecay(), ScalarDecay(), ScalarDecay(input_scale=False), FeatureDecay(), OuterDecay()),
        *(RefinedDecay(), RefinedDecay(axis="feature")),
    ],
    "update": [AdditiveUpdate(), DeltaUpdate(), DeltaUpdate(key_norm="sum")],
    "normalizer": [SumNormalizer(), NoNormalizer(), GroupNormalizer(), RmsNormalizer()],
    "combine": [SharedDenominator(), SharedDenominator(learned_sink=True), AbsoluteScale(), Mix(), Add(), WindowOnly()],
}


@pytest.fixture(scope="module")
def product() -> tuple[list[MixerConfig], Counter[str]]:
    """All that is accepted, and how much is refused for which reason (the first, where there are more)."""
    accepted: list[MixerConfig] = []
    refused: Counter[str] = Counter()
    for values in itertools.product(*PRODUCT.values()):
        try:
            accepted.append(MixerConfig(**dict(zip(PRODUCT, values, strict=True))))
        except ValidationError as error:
            (found,) = error.errors()
            assert found["type"] == "value_error"
            refused[found["msg"].removeprefix("Value error, ")] += 1
    return accepted, refused


def test_every_combination_is_accepted_or_refused_with_a_reason(product: tuple[list[MixerConfig], Counter]) -> None:
    accepted, refused = product
    assert len(accepted) + refused.total() == 3 * 19 * 8 * 3 * 4 * 6 == 32_832
    of_products = {reason for reason in REASONS if not reason.startswith(("cache:", "state_dtype"))}
    assert set(refused) == of_products, "each of the reasons, and no other"
    # By hand. Of spans and combinations there are 3 with `add`, 2 with `mix`, 3 with `shared_denominator`, and 3 with a
    # learned sink beside it.
    # The delta rule: 3 normalizers, 5 decays; 18 maps with l2, and 13 with `sum`, without the 5 of mixed signs.
    delta = (3 + 2) * 3 * 5 * (18 + 13)
    # The absolute scale: 2 spans, 6 decays, and the 5 maps of exponentials.
    absolute = 2 * 6 * 5
    # Other normalizers than `sum`: 8 decays. `sum`: 6 decays and the 13 maps that are not signed; rfa cannot share.
    additive = (3 + 2) * 3 * 8 * 18 + 6 * (12 * (3 + 2 + 3 + 3) + (3 + 2))
    assert len(accepted) == delta + additive + absolute + 2 == 5369, "and the window alone, with either span"


def test_what_is_accepted_has_every_part(product: tuple[list[MixerConfig], Counter]) -> None:
    for name, values in PRODUCT.items():
        found = {repr(getattr(mixer, name)) for mixer in product[0]}
        assert found == set(map(repr, values)), name


def test_a_sum_needs_weights_that_are_never_negative(product: tuple[list[MixerConfig], Counter]) -> None:
    for mixer in product[0]:
        if mixer.sums and mixer.feature_map is not None:
            assert isinstance(mixer.update, AdditiveUpdate)
            assert not isinstance(mixer.decay, OuterDecay) and mixer.decay != RefinedDecay()
            assert mixer.feature_map.rotation != "after" and mixer.feature_map.type != "identity"
            assert mixer.feature_map != maps.T2RMap(activation="none")


def test_the_unions_have_every_part() -> None:
    """A part of the product that no recipe can name, or one that a recipe can name and the product lacks."""
    for name, values in PRODUCT.items():
        schema = MixerConfig.model_json_schema()
        choices = schema["properties"][name]
        tagged = next(choice for choice in [choices, *choices.get("anyOf", [])] if "discriminator" in choice)
        assert set(tagged["discriminator"]["mapping"]) == {part.type for part in values if part is not None}


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "projections"),
    [
        (dict(per="query_head"), [(4, 16, 8), (4, 16, 8)]),
        (dict(per="kv_head"), [(4, 16, 8), (2, 16, 8)]),
        (dict(per="model"), [(1, 64, 32), (1, 32, 16)]),
        (dict(per="query_head", tied=True), [(4, 16, 8)]),
        (dict(per="kv_head", tied=True), [(2, 16, 8)]),
    ],
)
def test_projections(fields: dict[str, Any], projections: list[tuple[int, int, int]]) -> None:
    feature_map = maps.T2RMap(feature_dim=8, **fields)
    assert list(feature_map.projections(GROUPED.layer)) == projections
    assert feature_map.key_heads(GROUPED.layer) == (4 if fields["per"] == "query_head" else 2)


def resolved(feature_map: Any, teacher: TeacherShape = GROUPED) -> Any:
    normalizer = dict(normalizer=GroupNormalizer(), combine=Add())
    mixer = MixerConfig(feature_map=feature_map, **normalizer)
    (found,) = set(resolve(Recipe(name="mine", mixer=mixer), teacher))
    assert found is not None and MixerConfig.model_validate(json.loads(found.model_dump_json())) == found
    return found.feature_map


@pytest.mark.parametrize(
    ("feature_map", "filled"),
    [
        (maps.T2RMap(), dict(feature_dim=16)),
        (maps.T2RMap(rotation="after", per="model"), dict(feature_dim=16)),
        (maps.HedgehogMap(), dict(feature_dim=16)),
        (maps.HedgehogMap(expansion=2), dict(feature_dim=32)),
        (maps.HedgehogMap(expansion=2, feature_dim=6), dict(feature_dim=6)),
        (maps.PerformerMap(), dict(feature_dim=44)),  # 16 ln 16 = 44.4
        (maps.PerformerMap(feature_dim=5), dict(feature_dim=5)),
        (maps.RfaMap(), dict(feature_dim=32)),
        (maps.CosformerMap(), dict(max_length=512)),
        (maps.CosformerMap(max_length=100), dict(max_length=100)),
        (maps.LolcatMap(), {}),
        (maps.ReglaMap(), dict(feature_dim=64)),
        (maps.DpfpMap(nu=31), dict(nu=31)),
    ],
)
def test_resolve_fills_in_what_is_left_to_the_teacher(feature_map: Any, filled: dict[str, int]) -> None:
    before, after = feature_map, resolved(feature_map)
    assert after.model_dump() == before.model_dump() | filled
    assert after.features(GROUPED.layer) == before.features(GROUPED.layer)


@pytest.mark.parametrize(
    ("feature_map", "teacher", "expected"),
    [
        (maps.HedgehogMap(), with_head_dim(15), "feature_dim: expected an even number; .* 15, is odd"),
        (maps.T2RMap(rotation="after", feature_dim=8), GROUPED, "feature_dim: expected .* 16, .* found 8"),
        (maps.PerformerMap(), with_head_dim(1), "feature_dim: expected a number"),
        (maps.T2RMap(per="model", tied=True), GROUPED, "tied: one projection over all 4 query heads .* 2 KV heads"),
        (maps.DpfpMap(nu=32), GROUPED, "nu: expected less than .* 32, .* found 32"),
    ],
)
def test_sizes_that_make_no_sense(feature_map: Any, teacher: TeacherShape, expected: str) -> None:
    with pytest.raises(UserError, match=rf"^mixer\.feature_map\.{expected}") as error:
        resolved(feature_map, teacher)
    assert "\n" not in str(error.value)


def test_sizes_that_do() -> None:
    assert resolved(maps.HedgehogMap(expansion=2), with_head_dim(15)).feature_dim == 30
    assert resolved(maps.PerformerMap(), with_head_dim(2)).feature_dim == 1
    tied = resolved(maps.T2RMap(per="model", tied=True), EVERY_HEAD)
    assert tied.projections(EVERY_HEAD.layer) == ((1, 64, 64),)


# --- the running maximum ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "keeps"),
    [
        (dict(feature_map=maps.ExpMap()), True),
        (dict(feature_map=maps.HedgehogMap(activation="exp")), True),
        (dict(feature_map=maps.HedgehogMap()), False),
        (dict(feature_map=maps.LolcatMap(activation="relu")), False),
        (DELTA | dict(feature_map=maps.ExpMap()), False),
        (WINDOW_ONLY, False),
    ],
)
def test_keeps_maximum(fields: dict[str, Any], keeps: bool) -> None:
    assert MixerConfig(**fields).keeps_maximum == keeps


def test_every_learned_map_can_be_tied() -> None:
    for feature_map in PRODUCT["feature_map"]:
        if isinstance(feature_map, LearnedMap):
            (one,) = feature_map.model_copy(update={"tied": True}).projections(GROUPED.layer)
            assert one in feature_map.projections(GROUPED.layer)
