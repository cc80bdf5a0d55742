"""Recipes: reading, overriding, and one line for whatever is wrong; resolving them against a teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from linearize.base import UserError
from linearize.configs.feature_maps import HedgehogMap, IdentityMap
from linearize.configs.mixer_parts import Add, DeltaUpdate, FeatureDecay, RmsNormalizer, SharedDenominator, WindowOnly
from linearize.configs.spans import NoSpan, SlidingSpan, TerracedSpan
from linearize.configs.training import Plateau
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import KeepListed, Recipe, parse_overrides, recipe_names
from tests.shapes import make_shape

FOUR_LAYERS = make_shape("llama", 4, 4, 2, 16, 64, 128, 256, 512, False)
TWO_SLIDING = TeacherShape(**{**vars(FOUR_LAYERS), "sliding_layers": (0, 2)})


def load(*assignments: str) -> Recipe:
    return Recipe.load("lolcats", parse_overrides(list(assignments)))


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert message and "\n" not in message
    return message


# --- reading ----------------------------------------------------------------------------------------------------------


def test_lolcats_has_the_papers_values() -> None:
    recipe = Recipe.load("lolcats")
    assert recipe.mixer.span == SlidingSpan(window_size=64, sinks=0)
    assert recipe.mixer.feature_map == HedgehogMap(feature_dim=None, init="identity", per="query_head")
    assert recipe.mixer.combine == SharedDenominator(window_factor_init=0.1)
    plateau = Plateau(factor=0.1, patience=10, min_lr=1e-5)
    transfer, finetune = recipe.transfer, recipe.finetune
    assert transfer is not None and finetune is not None
    assert (transfer.lr, transfer.weight_decay, transfer.output_mse) == (1e-2, 0.0, 1000.0)
    assert (finetune.lr, finetune.lora.rank, finetune.lora.alpha, finetune.lora.dropout) == (1e-4, 8, 16.0, 0.0)
    assert finetune.lora.targets == ("q", "k", "v", "o")
    for stage in (transfer, finetune):
        assert (stage.epochs, stage.batch_size, stage.clip_norm, stage.schedule) == (2, 8, 1.0, plateau)
    assert recipe.data.sequence_length == 1024


@pytest.mark.parametrize("name", recipe_names())
def test_yaml_round_trip(name: str, tmp_path: Path) -> None:
    recipe = Recipe.load(name)
    assert recipe.name == name
    written = tmp_path / "recipe.yaml"
    written.write_text(recipe.to_yaml(), encoding="utf-8")
    assert Recipe.load(str(written)) == recipe


def test_every_field_is_written_out() -> None:
    written = yaml.safe_load(Recipe.load("lolcats").to_yaml())
    assert written["mixer"]["span"] == {"type": "sliding", "window_size": 64, "sinks": 0}
    assert written["transfer"]["betas"] == [0.9, 0.999]
    assert set(written) == set(Recipe.model_fields)


def test_a_type_may_come_behind_the_fields_of_its_part() -> None:
    given = ["mixer.span.window_size=32", "mixer.span.type=terraced", "finetune.schedule.warmup_steps=7"]
    given += ["finetune.schedule.type=constant"]
    for assignments in (given, given[::-1]):
        recipe = Recipe.load("lolcats", parse_overrides(assignments))
        assert recipe.mixer.span == TerracedSpan(window_size=32)
        assert recipe.finetune is not None and recipe.finetune.schedule.warmup_steps == 7


def test_overrides_are_read_as_yaml() -> None:
    recipe = load(
        "mixer.span={type: terraced, window_size: 32, blocks: 1, sinks: 4}",
        "finetune.lora.targets=[q, v]",
        "transfer=null",
        "data.dataset=text=1.txt",
        "layers.keep_softmax=[0, -1]",
    )
    assert recipe.mixer.span == TerracedSpan(window_size=32, blocks=1, sinks=4)
    assert recipe.finetune is not None and recipe.finetune.lora.targets == ("q", "v")
    assert recipe.finetune.lora.rank == 8, "what is not named stays"
    assert recipe.transfer is None
    assert recipe.data.dataset == "text=1.txt"
    assert recipe.layers.keep_softmax == KeepListed(layers=(0, -1))


def test_every_part_of_a_mixer_can_be_chosen() -> None:
    mixer = load(
        "mixer.feature_map={type: identity, rotation: none}",
        "mixer.decay={type: feature, rank: 4}",
        "mixer.update.type=delta",
        "mixer.scale=head_dim",
        "mixer.normalizer={type: rms_norm, output_gate: true}",
        "mixer.combine.type=add",
    ).mixer
    assert mixer.feature_map == IdentityMap(rotation="none")
    assert (mixer.decay, mixer.update) == (FeatureDecay(rank=4), DeltaUpdate(key_norm="l2"))
    assert (mixer.normalizer, mixer.combine) == (RmsNormalizer(output_gate=True), Add())
    assert mixer.span == SlidingSpan(window_size=64), "what is not named stays"


def test_a_recipe_cannot_change() -> None:
    recipe = Recipe.load("lolcats")
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 1  # type: ignore[misc]


# --- what the user can get wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lolcat", "lolcats/", "", "missing.yaml"])
def test_unknown_recipe(name: str) -> None:
    with pytest.raises(UserError, match="expected") as error:
        Recipe.load(name)
    assert repr(name) in one_line(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [lolcats", "not valid YAML"),
        ("- name", "found list"),
        ("", "found NoneType"),
        ("seed: 1", "name: missing"),
        ("name: 3", "name: .* found 3"),
        (f"name: a\nseed: 1{'0' * 5000}", "not valid YAML: .*limit"),
        ("name: a\nseed: 2026-02-30", "not valid YAML: .*day is out of range"),
        ("name: a\nseed: !!int ''", "not valid YAML"),
        ("name: a\nseed: !!bool maybe", "not valid YAML"),
    ],
)
def test_bad_file(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=expected) as error:
        Recipe.load(str(file))
    one_line(error)


@pytest.mark.parametrize(
    ("assignment", "field", "expected"),
    [
        ("mixer.spam=1", "mixer.spam", "unknown field"),
        ("spam=1", "spam", "unknown field"),
        ("finetune.lora.rank=eight", "finetune.lora.rank", "found 'eight'"),
        ("mixer.span.window_size=0", "window_size", "found 0"),
        ("mixer.span.sinks=-1", "sinks", "found -1"),
        ("mixer.span.type=ring", "mixer.span", "'none', 'sliding', 'terraced'"),
        ("mixer.feature_map.feature_dim=15", "mixer.feature_map", "even"),
        ("mixer.feature_map={type: rfa, feature_dim: 15}", "mixer.feature_map", "even"),
        ("mixer.feature_map.type=fourier", "mixer.feature_map", "'cosformer', 'taylor2', 'rfa', 'dpfp'"),
        ("mixer.feature_map={type: cosformer, rotation: before}", "mixer.feature_map.rotation", "'none'"),
        ("mixer.feature_map={type: hedgehog, rotation: after}", "mixer.feature_map.rotation", "'before' or 'none'"),
        ("mixer.feature_map={type: t2r, init: zero}", "mixer.feature_map.init", "found 'zero'"),
        ("mixer.decay={type: fixed, rank: 3}", "mixer.decay.rank", "unknown field"),
        ("mixer.decay.temperature=2", "mixer.decay", "discriminator"),
        ("mixer.update={type: delta, key_norm: max}", "mixer.update.key_norm", "'sum' or 'l2'"),
        ("mixer.scale=2", "mixer.scale", "'none', 'head_dim' or 'regla'"),
        ("mixer.feature_map={type: identity}", "mixer", "normalizer `sum` needs weights"),
        ("mixer.combine.window_factor_init=1", "window_factor_init", "found 1"),
        ("mixer.feature_map=null", "mixer", "go together"),
        ("mixer.combine={type: window_only}", "mixer", "go together"),
        ("mixer={span: {type: none}, feature_map: null, combine: {type: window_only}}", "mixer", "need a window"),
        ("evaluation={tasks: [piqa], examine: false}", "evaluation", "tasks are a part of the examination"),
        ("transfer.micro_batch_size=3", "transfer", "multiple of micro_batch_size"),
        ("finetune.lora=null", "finetune", "no weights train; set lora, mixers or all_weights"),
        ("finetune.all_weights=true", "finetune", "set lora=null and mixers=false"),
        ("finetune.loss={labels: 0}", "finetune.loss", "every weight is 0"),
        ("finetune.loss={top_k: 5}", "finetune.loss", "top_k applies to kl"),
        ("finetune.lora.targets=[]", "finetune.lora.targets", "at least 1 item"),
        ("finetune.lora.targets=[x]", "finetune.lora.targets", "found 'x'"),
        ("data.validation_fraction=1", "data.validation_fraction", "found 1"),
        ("layers.keep_softmax=3", "layers.keep_softmax", "found 3"),
        ("seed=-1", "seed", "found -1"),
        (f"mixer.span.window_size={2**63}", "mixer.span.window_size", f"at most {2**63 - 1}, found a larger one"),
        (f"memory={{fraction: 0.1, reference_length: 1{'0' * 309}}}", "memory.reference_length", "found a larger one"),
        (f"finetune.lr=1{'0' * 309}", "finetune.lr", "valid number"),
    ],
)
def test_bad_field(assignment: str, field: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        load(assignment)
    message = one_line(error)
    assert message.startswith("recipe field ") and field in message.partition(": ")[0]
    assert expected in message


@pytest.mark.parametrize(
    "assignment, example",
    [
        ("memory.fraction=7", "recommended"),
        ("memory={bytes: 20000, fraction: 0.1}", "recommended"),
        ("memory={fraction: 0.1}", "recommended"),  # with a transfer: of the recipe as a whole
        ("data.task={type: text_embedding}", "lolcats"),
        ("seed=-1", "lolcats"),
    ],
)
def test_the_example_has_the_field(assignment: str, example: str) -> None:
    with pytest.raises(UserError, match=f"`linearize recipes {example}` shows a valid one"):
        load(assignment)


def test_further_faults_are_counted() -> None:
    with pytest.raises(UserError, match=r"seed: .*\(and 1 more\)"):
        load("seed=-1", "spam=1")


@pytest.mark.parametrize("assignment", ["seed", "=1", "seed=[1", "name.part=1"])
def test_bad_assignment(assignment: str) -> None:
    with pytest.raises(UserError, match="--set") as error:
        load(assignment)
    one_line(error)


# --- recipe x teacher -------------------------------------------------------------------------------------------------


def test_resolve_fills_in_the_feature_dimension() -> None:
    layers = resolve(Recipe.load("lolcats"), FOUR_LAYERS)
    assert len(layers) == 4 and len(set(map(repr, layers))) == 1
    mixer = layers[0]
    assert mixer is not None and mixer.feature_map == HedgehogMap(feature_dim=16)
    assert mixer.span == SlidingSpan(window_size=64) and mixer.combine == SharedDenominator()


def test_resolve_leaves_a_given_feature_dimension() -> None:
    layers = resolve(load("mixer.feature_map.feature_dim=8", "mixer.span={type: none}"), FOUR_LAYERS)
    mixer = layers[-1]
    assert mixer is not None and mixer.feature_map == HedgehogMap(feature_dim=8) and mixer.span == NoSpan()


def test_resolve_window_only() -> None:
    recipe = load("mixer={feature_map: null, combine: {type: window_only}}")
    mixer = resolve(recipe, FOUR_LAYERS)[0]
    assert mixer is not None and mixer.feature_map is None and mixer.combine == WindowOnly()


@pytest.mark.parametrize(
    ("kept", "converted"), [("[]", [0, 1, 2, 3]), ("[0, -1]", [1, 2]), ("[3, -1]", [0, 1, 2]), ("[-4]", [1, 2, 3])]
)
def test_keep_softmax(kept: str, converted: list[int]) -> None:
    layers = resolve(load(f"layers.keep_softmax={kept}"), FOUR_LAYERS)
    assert [index for index, mixer in enumerate(layers) if mixer is not None] == converted


def test_sliding_layers_are_left_alone_unless_asked() -> None:
    assert [mixer is None for mixer in resolve(load(), TWO_SLIDING)] == [True, False, True, False]
    assert None not in resolve(load("layers.convert_sliding=true"), TWO_SLIDING)


@pytest.mark.parametrize("index", [4, -5])
def test_keep_softmax_out_of_range(index: int) -> None:
    with pytest.raises(
        UserError, match=rf"layers\.keep_softmax: expected indices from -4 to 3, found {index}"
    ) as error:
        resolve(load(f"layers.keep_softmax=[{index}]"), FOUR_LAYERS)
    one_line(error)


@pytest.mark.parametrize(("kept", "teacher"), [("[0, 1, 2, 3]", FOUR_LAYERS), ("[1, 3]", TWO_SLIDING)])
def test_nothing_to_convert(kept: str, teacher: TeacherShape) -> None:
    with pytest.raises(UserError, match="nothing to convert") as error:
        resolve(load(f"layers.keep_softmax={kept}"), teacher)
    one_line(error)
