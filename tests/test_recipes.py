"""The recipes that come with the package: the papers' parts and settings, and that they fit every kind of teacher."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from linearize.config import Recipe, recipe_names, resolve
from linearize.costs import new_parameters
from linearize.parts import DpfpMap, FixedDecay, MixerConfig, RefinedGate, SlidingSpan
from linearize.teacher import TeacherShape

# H = 4, D = 16, hidden size 64, 512 positions; grouped: G = 2.
TEACHERS = {
    "grouped": TeacherShape("llama", 3, 4, 2, 16, 64, 128, 256, 512, False, ()),
    "llama": TeacherShape("llama", 3, 4, 4, 16, 64, 128, 256, 512, False, ()),
    "gpt2": TeacherShape("gpt2", 3, 4, 4, 16, 64, 128, 256, 512, True, ()),
}
GROUPED = TEACHERS["grouped"]

# For the grouped teacher: features per head, heads of the state, parameters of one layer.
# Gates read 64 numbers and have a bias; the norm has 4 x 16 scales, and the output gate 64 x 64 numbers.
RECIPES: dict[str, tuple[int, int, int]] = {
    "t2r": (16, 4, 2 * 4 * 16 * 17),
    "supra": (16, 4, 64 * 65 + 32 * 33),
    "hedgehog": (32, 4, 2 * 4 * 16 * 17),
    "lolcat-l": (16, 4, 2 * 4 * 16 * 16),
    "lolcat-w": (16, 4, 2 * 4 * 16 * 16 + 4),
    "lolcats": (16, 4, 2 * 4 * 16 * 8 + 4),
    "lolcats-terraced": (16, 4, 2 * 4 * 16 * 8 + 4),
    "regla": (64, 4, 2 * 4 * 16 * 64 + 2 * 4 * 16 * 65 + 64),
    "elu": (16, 2, 0),
    "relu": (16, 2, 64),
    "performer": (44, 2, 0),
    "cosformer": (32, 2, 0),
    "rfa": (32, 2, 2 + 2 * 65),
    "deltanet": (32, 2, 2 * 64),
    "gated-deltanet": (16, 2, 2 * 65 + 2 * 64 + 64 + 64 * 64),
    "fast-decay": (16, 2, 2 * (16 + 16) * 65 + 64),
    "gla": (16, 2, 16 * 64 + 2 * 16 * 17 + 64 + 64 * 64),
    "retnet": (16, 4, 0),
    "taylor": (153, 2, 0),
    "exp": (16, 2, 0),
}


def test_the_recipes() -> None:
    assert recipe_names() == sorted(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str) -> None:
    recipe, mixer = Recipe.load(name), resolve(Recipe.load(name), GROUPED)[0]
    assert mixer is not None and mixer.feature_map is not None
    features, heads, parameters = RECIPES[name]
    assert mixer.feature_map.features(GROUPED.layer) == features
    assert mixer.state_heads(GROUPED.layer) == heads
    assert new_parameters(mixer, GROUPED) == parameters
    assert (recipe.transfer is not None) == (parameters > 0), "attention transfer where there is something to learn"
    assert Recipe.parse(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize("teacher", TEACHERS.values(), ids=TEACHERS)
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_resolves(name: str, teacher: TeacherShape) -> None:
    layers = resolve(Recipe.load(name), teacher)
    assert len(layers) == 3 and len(set(layers)) == 1
    mixer = layers[0]
    assert mixer is not None and mixer.feature_map is not None
    assert None not in mixer.feature_map.model_dump().values(), "nothing is left to the teacher"
    assert mixer.resolved(teacher.layer) == mixer
    assert MixerConfig.model_validate(json.loads(mixer.model_dump_json())) == mixer, "as config.json keeps it"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_file(name: str) -> None:
    """A header that says where it is from, a line of description, and the mixer spelled out."""
    text = (resources.files("linearize") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    header = text[: text.index(f"name: {name}\n")]
    assert header.startswith("# ") and any(word in header for word in ("arXiv", "workshop"))
    description = Recipe.load(name).description
    assert description and "\n" not in description and len(description) <= 100
    for part in ("span", "feature_map", "normalizer", "combine"):
        assert f"\n  {part}: {{type: " in text
    assert max(map(len, text.splitlines())) <= 120


def test_settings_of_the_papers() -> None:
    supra, regla = Recipe.load("supra"), Recipe.load("regla")
    assert supra.finetune is not None and regla.finetune is not None
    assert supra.finetune.batch_size * supra.data.sequence_length == 2**21
    assert (supra.finetune.lr, supra.finetune.betas) == (3e-5, (0.9, 0.95))
    assert supra.mixer.decay == FixedDecay(schedule="lightning")
    assert (regla.finetune.lr, regla.finetune.weight_decay) == (2e-4, 0.01)
    assert regla.finetune.max_tokens == 50_000 * 8 * 2048
    assert regla.mixer.decay == RefinedGate(axis="value") and regla.mixer.keeps_maximum
    assert Recipe.load("lolcat-w").mixer.span == SlidingSpan(window_size=16)
    assert Recipe.load("deltanet").mixer.feature_map == DpfpMap(nu=1, rotation="none")
