"""The recipes that come with the package: the papers' parts and settings, and that they fit every kind of teacher."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch

from linearize.configs.mixer import MixerConfig
from linearize.costs import mixer_cost
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import Recipe, recipe_names
from tests.shapes import make_shape

# H = 4, D = 16, hidden size 64, 512 positions; grouped: G = 2.
TEACHERS = {
    "grouped": make_shape("llama", 3, 4, 2, 16, 64, 128, 256, 512, False),
    "llama": make_shape("llama", 3, 4, 4, 16, 64, 128, 256, 512, False),
    "gpt2": make_shape("gpt2", 3, 4, 4, 16, 64, 128, 256, 512, True),
}
GROUPED = TEACHERS["grouped"]

# For the grouped teacher: features per head, heads of the state, parameters of one converted layer.
# Gates read 64 numbers and have a bias; the norm has 4 x 16 scales, and the output gate 64 x 64 numbers.
SIZES: dict[str, tuple[int, int, int]] = {
    "t2r": (16, 4, 2 * 4 * 16 * 17),
    "supra": (16, 4, 64 * 65 + 32 * 33),
    "hedgehog": (32, 4, 2 * 4 * 16 * 17),
    **dict.fromkeys(
        ("hedgehog-bert", "hedgehog-vit", "hedgehog-gpt2", "hedgehog-llama", "hedgehog-scratch"),
        (32, 4, 2 * 4 * 16 * 17),
    ),
    "lolcat-l": (16, 4, 2 * 4 * 16 * 16),
    "lolcat-w": (16, 4, 2 * 4 * 16 * 16 + 4),
    "lolcats": (16, 4, 2 * 4 * 16 * 8 + 4),
    "lolcats-terraced": (16, 4, 2 * 4 * 16 * 8 + 4),
    "lolcats-no-transfer": (16, 4, 2 * 4 * 16 * 8 + 4),
    "lolcats-70b": (16, 4, 2 * 4 * 16 * 8 + 4),
    "lolcats-405b": (16, 4, 2 * 4 * 16 * 8 + 4),
    "regla": (64, 4, 2 * 4 * 16 * 64 + 2 * 4 * 16 * 65 + 64),
    "regla-hybrid": (64, 4, 2 * 4 * 16 * 64 + 2 * 4 * 16 * 65 + 64),
    "elu": (16, 2, 0),
    "relu": (16, 2, 64),
    "performer": (44, 2, 0),
    "cosformer": (32, 2, 0),
    "rfa": (32, 2, 2 + 2 * 65),
    "deltanet": (32, 2, 2 * 64),
    "gated-deltanet": (16, 2, 2 * 65 + 2 * 64 + 64 + 64 * 64),
    "gated-deltanet-native": (16, 2, 2 * 65 + 2 * 64 + 64 + 64 * 64),
    "fast-decay": (16, 2, 2 * (16 + 16) * 65 + 64),
    "gla": (16, 2, 16 * 64 + 2 * 16 * 17 + 64 + 64 * 64),
    "retnet": (16, 4, 0),
    "taylor": (153, 2, 0),
    "exp": (16, 2, 0),
    "absolute-scale": (32, 4, 2 * 4 * 16 * 16 + 4),
    "absolute-scale-hybrid": (32, 4, 2 * 4 * 16 * 16 + 4),
    "local-global": (0, 0, 36),
    "recommended": (0, 0, 0),
}


each_recipe = pytest.mark.parametrize("name", recipe_names())


def mixer_of(name: str, teacher: TeacherShape = GROUPED) -> MixerConfig:
    """That of the converted layers, which all have the same."""
    (mixer,) = {mixer for mixer in resolve(Recipe.load(name), teacher) if mixer is not None}
    return mixer


def new_parameters(mixer: MixerConfig, teacher: TeacherShape) -> int:
    return mixer_cost(mixer, teacher, torch.float32, teacher.head_dim).parameters


@each_recipe
def test_sizes(name: str) -> None:
    assert name in SIZES, f"a new recipe: add the sizes of {name!r} to SIZES in {__file__}"
    mixer = mixer_of(name)
    features, heads, parameters = SIZES[name]
    assert (mixer.feature_map.features(GROUPED.layer) if mixer.feature_map is not None else 0) == features
    assert mixer.state_heads(GROUPED.layer) == heads
    assert new_parameters(mixer, GROUPED) == parameters


def test_no_recipe_is_lost() -> None:
    assert SIZES.keys() | HYPERPARAMETERS.keys() <= set(recipe_names())


@each_recipe
def test_stages_have_something_to_learn(name: str) -> None:
    recipe = Recipe.load(name)
    assert Recipe.parse(recipe.model_dump(mode="json")) == recipe
    stages = [stage for stage in (recipe.adapt, recipe.finetune) if stage is not None]
    if recipe.transfer is not None or any(stage.mixers for stage in stages):
        assert new_parameters(mixer_of(name), GROUPED) > 0


@pytest.mark.parametrize("teacher", TEACHERS.values(), ids=TEACHERS)
@each_recipe
def test_recipe_resolves(name: str, teacher: TeacherShape) -> None:
    assert len(resolve(Recipe.load(name), teacher)) == 3
    mixer = mixer_of(name, teacher)
    phi = mixer.feature_map
    assert phi is None or None not in phi.model_dump().values(), "nothing is left to the teacher"
    assert mixer.resolved(teacher.layer) == mixer
    assert MixerConfig.model_validate(json.loads(mixer.model_dump_json())) == mixer, "as config.json keeps it"


@each_recipe
def test_recipe_file(name: str) -> None:
    """A header, a line of description, and the mixer and all stages spelled out."""
    text = (resources.files("linearize") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    header = text[: text.index(f"name: {name}\n")]
    assert header.startswith("# ")
    description = Recipe.load(name).description
    assert description and "\n" not in description and len(description) <= 100
    without_linear = Recipe.load(name).mixer.feature_map is None
    for part in ("span", "combine") if without_linear else ("span", "feature_map", "normalizer", "combine"):
        assert f"\n  {part}: {{type: " in text
    for stage in ("transfer", "finetune"):
        assert f"\n{stage}:" in text
    assert max(map(len, text.splitlines())) <= 120
    if name in HYPERPARAMETERS:
        assert any(word in header for word in ("arXiv", "workshop"))
        assert "Not as in the paper" in header or "Open in the paper" in header


# --- what the papers state --------------------------------------------------------------------------------------------
# By the recipe's fields, with the place in the paper; "code": the paper leaves it open, and the authors' code does not.

NEXT_TOKEN = {"labels": 1.0, "kl": 0.0, "output_mse": 0.0, "top_k": None}
# What trains, where there is no attention transfer.
ALL_WEIGHTS: dict[str, Any] = {
    "transfer": None,
    "adapt": None,
    "finetune.all_weights": True,
    "finetune.lora": None,
    "finetune.mixers": False,
    "finetune.loss": NEXT_TOKEN,
    "finetune.early_stopping": None,
}
# What trains in the two stages of Hedgehog (app. B.5), LOLCAT (sec. 3) and LoLCATs (sec. 3.1): mixers, then LoRA alone.
TWO_STAGES: dict[str, Any] = {
    "adapt": None,
    "transfer.early_stopping": None,
    "finetune.all_weights": False,
    "finetune.mixers": False,
    "finetune.loss": NEXT_TOKEN,
    "finetune.early_stopping": None,
}
PLATEAU = {"type": "plateau", "factor": 0.1, "patience": 10, "min_lr": 1e-5}  # LoLCATs Table 8; numbers: code
NO_WINDOW = {"type": "none"}
TERRACED = {"type": "terraced", "window_size": 64, "blocks": 2, "sinks": 0}

HEDGEHOG = TWO_STAGES | {
    "mixer.span": NO_WINDOW,
    "mixer.feature_map.type": "hedgehog",
    "mixer.feature_map.expansion": 2,  # eq. 6: [exp(Wx + b), exp(-Wx - b)]
    "mixer.feature_map.activation": "softmax_halves",  # eq. 5, over one half's outputs
    "mixer.feature_map.init": "identity",  # sec. 5.2
    "mixer.feature_map.bias": True,  # eq. 6
    "mixer.normalizer.type": "sum",  # eq. 2
    "transfer.output_mse": 0.0,
    "transfer.weight_cross_entropy": 1.0,  # eq. 4
    "transfer.layers_per_block": None,  # sec. 4.2: all layers jointly
    "transfer.lr": 1e-2,  # app. B.5, Llama-2, also all below
    "transfer.weight_decay": 0.0,
    "transfer.betas": [0.9, 0.999],  # AdamW
    "transfer.epochs": 2,
    "transfer.max_tokens": None,
    "transfer.batch_size": 8,
    "finetune.lr": 1e-4,
    "finetune.weight_decay": 0.0,
    "finetune.betas": [0.9, 0.999],
    "finetune.batch_size": 8,
    "finetune.lora": {"rank": 8, "alpha": 16.0, "dropout": 0.0, "targets": ["q", "k", "v", "o"]},
    "data.sequence_length": 1024,
}

LOLCAT_LORA = {
    "finetune.lr": 1e-4,  # sec. 4.2
    "finetune.epochs": 2,  # sec. 4.2
    "finetune.batch_size": 8,  # sec. 4.2
    "finetune.betas": [0.9, 0.999],  # sec. 4.2: AdamW
    "finetune.lora.rank": 8,  # sec. 3
    "finetune.lora.targets": ["q", "k", "v", "o"],  # sec. 3
}
LOLCAT = (
    TWO_STAGES
    | LOLCAT_LORA
    | {
        "mixer.feature_map.type": "lolcat",  # eq. 6: f(xW + x)
        "mixer.feature_map.activation": "exp",  # sec. 4.2
        "mixer.feature_map.init": "zero",  # code
        "mixer.normalizer.type": "sum",  # eq. 3
        "transfer.output_mse": 0.0,
        "transfer.weight_cross_entropy": 1.0,  # eq. 7
        "transfer.lr": 1e-2,  # sec. 4.2, also all below
        "transfer.epochs": 2,
        "transfer.batch_size": 8,
        "transfer.betas": [0.9, 0.999],
    }
)

LOLCATS_MIXER = {
    "mixer.feature_map.type": "hedgehog",  # Table 8
    "mixer.feature_map.expansion": 1,  # Table 8: "64 (effectively 128)" for a head dimension of 128
    "mixer.feature_map.feature_dim": None,
    "mixer.feature_map.activation": "softmax_halves",  # Table 8: softmax across the feature dimension
    "mixer.feature_map.per": "query_head",  # sec. 3.1: 32 layers x 32 heads x 2 maps
    "mixer.feature_map.tied": False,  # sec. 3.1
    "mixer.feature_map.bias": False,  # sec. 3.1: 128 x 64 weights
    "mixer.feature_map.init": "identity",  # code
    "mixer.feature_map.rotation": "before",  # sec. 3.2: maps after RoPE
    "mixer.normalizer.type": "sum",  # eq. 7
    "mixer.combine.type": "shared_denominator",  # eq. 7
    "mixer.combine.window_factor_init": 0.1,  # code
    "data.sequence_length": 1024,  # Table 8
}
LOLCATS_LORA = {
    "finetune.lr": 1e-4,  # Table 8, also all below
    "finetune.weight_decay": 0.0,  # code
    "finetune.betas": [0.9, 0.999],
    "finetune.epochs": 2,
    "finetune.max_tokens": None,
    "finetune.batch_size": 8,
    "finetune.clip_norm": 1.0,
    "finetune.schedule": PLATEAU,
    "finetune.eval_every": 100,  # code
    "finetune.lora": {"rank": 8, "alpha": 16.0, "dropout": 0.0, "targets": ["q", "k", "v", "o"]},
}
LOLCATS = (
    TWO_STAGES
    | LOLCATS_MIXER
    | LOLCATS_LORA
    | {
        "mixer.span": {"type": "sliding", "window_size": 64, "sinks": 0},  # eq. 7; Table 8
        "transfer.output_mse": 1000.0,  # eq. 6; the factor: code
        "transfer.weight_cross_entropy": 0.0,
        "transfer.layers_per_block": None,  # app. A.1: in parallel
        "transfer.lr": 1e-2,  # Table 8, also all below
        "transfer.weight_decay": 0.0,  # code
        "transfer.betas": [0.9, 0.999],
        "transfer.epochs": 2,
        "transfer.max_tokens": None,
        "transfer.batch_size": 8,
        "transfer.clip_norm": 1.0,
        "transfer.schedule": PLATEAU,
        "transfer.eval_every": 100,  # code
    }
)
# Table 9: one epoch of 20M tokens a stage, 8 rows one at a time.
LOLCATS_70B = LOLCATS | {
    "mixer.span": TERRACED,
    "transfer.epochs": 1,
    "transfer.max_tokens": 20_000_000,
    "transfer.micro_batch_size": 1,
    "finetune.epochs": 1,
    "finetune.max_tokens": 20_000_000,
    "finetune.micro_batch_size": 1,
}

REGLA_TRAINING = ALL_WEIGHTS | {
    "finetune.lr": 2e-4,  # sec. 4.1, app. B
    "finetune.weight_decay": 0.01,  # sec. 4.1, app. B
    "finetune.betas": [0.9, 0.999],  # AdamW, sec. 4.1
    "finetune.max_tokens": 50_000 * 8 * 2048,  # 50k steps, sec. 4.1
    "finetune.batch_size": 8,  # sec. 4.1, app. B
    "finetune.schedule": {"type": "constant", "warmup_steps": 0},  # none stated
    "data.sequence_length": 2048,  # sec. 4.1
}
REGLA = REGLA_TRAINING | {
    "mixer.span": NO_WINDOW,
    "mixer.feature_map.type": "regla",  # eqs. 11-12
    "mixer.feature_map.feature_dim": 64,  # app. B
    "mixer.decay": {"type": "refined", "axis": "value", "bias_init": 0.0},  # eqs. 15-18
    "mixer.scale": "regla",  # Theorem 3.1
    "mixer.normalizer.type": "rms_norm",  # sec. 3.2: stable normalization, no sum
}

# Hedgehog's language models of 125M: from scratch (app. B.3), and T2R-GPT-2 (app. B.5).
HEDGEHOG_125M = ALL_WEIGHTS | {
    "finetune.lr": 6e-4,
    "finetune.weight_decay": 0.01,
    "finetune.betas": [0.9, 0.999],  # AdamW
    "finetune.batch_size": 8,  # of its distillation
    "data.sequence_length": 1024,
}

HEDGEHOG_DISTILLED = {field: value for field, value in HEDGEHOG.items() if field.split(".")[0] in ("mixer", "transfer")}
HEDGEHOG_ALL_WEIGHTS = {field: value for field, value in ALL_WEIGHTS.items() if field != "transfer"}

SUPRA_TRAINING = ALL_WEIGHTS | {
    "finetune.lr": 3e-5,  # sec. 7, 7B, also all below
    "finetune.schedule": {"type": "cosine", "warmup_steps": 1000, "min_lr": 1e-5},
    "finetune.betas": [0.9, 0.95],
    "finetune.batch_size": 2**21 // 2048,  # 2M tokens
    "data.sequence_length": 2048,
    "finetune.max_tokens": 20_000_000_000,  # Table 1
    "finetune.epochs": 1,  # of RefinedWeb, which is longer
    "finetune.weight_decay": 0.2,  # code
    "finetune.clip_norm": 1.0,  # code
}

_TRAINED = ("finetune.lr", "finetune.weight_decay", "finetune.betas", "finetune.batch_size", "data.sequence_length")

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "t2r": HEDGEHOG_125M
    | {
        "mixer.span": NO_WINDOW,
        "mixer.feature_map.type": "t2r",  # LoLCATs Table 2: relu(xW + b), W 128 x 128
        "mixer.feature_map.activation": "relu",
        "mixer.feature_map.feature_dim": None,
        "mixer.feature_map.per": "query_head",
        "mixer.feature_map.bias": True,
        "mixer.feature_map.tied": False,
        "mixer.feature_map.init": "kaiming",  # code
        "mixer.feature_map.rotation": "before",  # LoLCATs sec. 3.2
        "mixer.normalizer.type": "sum",
    },
    "supra": SUPRA_TRAINING
    | {
        "mixer.span": NO_WINDOW,
        "mixer.feature_map.type": "t2r",  # sec. 2.3
        "mixer.feature_map.activation": "relu",  # sec. 2.3
        "mixer.feature_map.rotation": "after",  # eq. 9
        "mixer.feature_map.bias": True,  # sec. 7
        "mixer.feature_map.feature_dim": None,  # sec. 7: square matrices
        "mixer.feature_map.per": "model",  # code
        "mixer.decay": {"type": "fixed", "schedule": "lightning"},  # sec. 3, decay factors
        "mixer.scale": "head_dim",  # code
        "mixer.normalizer": {"type": "group_norm", "eps": 1e-5},  # eq. 10; eps: code
    },
    "hedgehog": HEDGEHOG,
    "hedgehog-llama": HEDGEHOG
    | {
        "data.task.type": "summarisation",
        "data.task.new_tokens": 100,  # app. B.5
        "data.format": "samsum",  # listing 4
    },
    "hedgehog-gpt2": HEDGEHOG_DISTILLED | HEDGEHOG_ALL_WEIGHTS | {k: HEDGEHOG_125M[k] for k in _TRAINED},  # app. B.5
    "hedgehog-bert": HEDGEHOG_DISTILLED
    | HEDGEHOG_ALL_WEIGHTS
    | {
        "transfer.epochs": 5,  # app. B.4, also all below
        "transfer.early_stopping": 10,  # "early stopping based on validation loss"
        "finetune.lr": 1e-5,
        "finetune.weight_decay": 0.0,
        "finetune.betas": [0.9, 0.999],
        "finetune.batch_size": 8,
        "finetune.epochs": 5,
        "finetune.schedule": {"type": "cosine", "warmup_steps": 0, "min_lr": 0.0},
        "data.task.type": "text_classification",
    },
    "hedgehog-vit": HEDGEHOG_DISTILLED
    | HEDGEHOG_ALL_WEIGHTS
    | {
        "transfer.batch_size": 32,  # app. B.4, also all below
        "finetune.lr": 1e-3,
        "finetune.weight_decay": 0.0,
        "finetune.betas": [0.9, 0.999],
        "finetune.epochs": 10,
        "finetune.early_stopping": 5,  # "with early stopping"
        "data.task.type": "image_classification",
    },
    "hedgehog-scratch": {k: v for k, v in HEDGEHOG.items() if k.startswith("mixer.")}
    | HEDGEHOG_125M
    | {"weights": "random"},  # app. B.3
    "lolcat-l": LOLCAT | {"mixer.span": NO_WINDOW, "mixer.combine.type": "add"},
    "lolcat-w": LOLCAT
    | {
        "mixer.span": {"type": "sliding", "window_size": 16, "sinks": 0},  # sec. 4.2
        "mixer.combine.type": "mix",  # eq. 8
    },
    "lolcats": LOLCATS,
    "lolcats-terraced": LOLCATS | {"mixer.span": TERRACED},  # Table 8
    "lolcats-no-transfer": LOLCATS_MIXER
    | LOLCATS_LORA
    | {
        "mixer.span": {"type": "sliding", "window_size": 64, "sinks": 0},
        "transfer": None,
        "adapt": None,
        "finetune.mixers": True,  # app. A.2, baseline: maps, mixing term and LoRA
        "finetune.all_weights": False,
        "finetune.epochs": 4,  # sec. 3.2: four epochs with either stage alone
        "finetune.loss": NEXT_TOKEN,
    },
    "lolcats-70b": LOLCATS_70B,
    "lolcats-405b": LOLCATS_70B
    | {
        "transfer.layers_per_block": 9,  # app. A.3; of 126 layers, 14 blocks
        "transfer.output_mse": 1000.0,  # Table 10
        "transfer.weight_cross_entropy": 1.0,  # Table 10
        "finetune.lora": {"rank": 4, "alpha": 8.0, "dropout": 0.05, "targets": ["q", "k", "v", "o"]},  # Table 10
    },
    "regla": REGLA | {"layers.keep_softmax": {"type": "listed", "layers": []}},
    "regla-hybrid": REGLA | {"layers.keep_softmax": {"type": "ratio", "ratio": 0.5}},  # sec. 4.1: 6 of 12
    # Baselines, trained as the paper trains them that compares with them, or as the closest one.
    "elu": LOLCAT_LORA | {"transfer": None, "finetune.all_weights": False, "finetune.mixers": False},  # LOLCAT Table 1
    "relu": REGLA_TRAINING | {"mixer.feature_map.type": "relu", "mixer.normalizer.type": "rms_norm"},  # Tables 4, 5
    "fast-decay": REGLA_TRAINING
    | {
        "mixer.feature_map.type": "identity",  # ReGLA Table 3
        "mixer.decay.type": "outer",  # ReGLA eq. 10
        "mixer.normalizer.type": "rms_norm",  # ReGLA Table 3: no sum, but stable norm
    },
    "rfa": REGLA_TRAINING
    | {
        "mixer.decay.type": "scalar",  # ReGLA eqs. 6-7; Table 5
        "mixer.decay.input_scale": True,
        "mixer.normalizer.type": "sum",  # ReGLA Table 3
    },
    "gla": REGLA_TRAINING | {"mixer.decay.rank": 16, "mixer.decay.temperature": 16.0},  # ReGLA Table 2; GLA sec. 4
    "deltanet": REGLA_TRAINING
    | {"mixer.feature_map": {"type": "dpfp", "nu": 1, "rotation": "none"}, "mixer.normalizer.type": "none"},
    "gated-deltanet": REGLA_TRAINING | {"mixer.update.type": "delta", "mixer.decay.type": "scalar"},
    "gated-deltanet-native": REGLA_TRAINING
    | {
        "layers.keep_softmax": {"type": "every", "n": 4},  # Qwen3-Next: three linear layers to one
        "mixer.feature_map.type": "silu",  # Gated DeltaNet sec. 3
        "mixer.update.type": "delta",
        "mixer.decay.type": "scalar",
    },
    "performer": HEDGEHOG_125M | {"mixer.feature_map.type": "performer"},  # Hedgehog Table 7
    "cosformer": HEDGEHOG_125M | {"mixer.feature_map.type": "cosformer"},
    "exp": HEDGEHOG_125M | {"mixer.feature_map.temperature": 2.0},  # Hedgehog sec. 3.2
    "taylor": HEDGEHOG_125M | {"mixer.feature_map.type": "taylor2"},  # Hedgehog sec. 4.1: second degree
    "retnet": SUPRA_TRAINING | {"mixer.decay": {"type": "fixed", "schedule": "retnet"}},
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters(name: str) -> None:
    recipe = Recipe.load(name).model_dump(mode="json")
    expected = HYPERPARAMETERS[name]
    assert {field: value_of(recipe, field) for field in expected} == expected


def value_of(data: Any, field: str) -> Any:
    """None where a part on the way is null."""
    for part in field.split("."):
        data = None if data is None else data[part]
    return data


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_the_description_tells_what_trains(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.finetune is not None
    assert ("all weights" in recipe.description) == recipe.finetune.all_weights
    assert ("LoRA" in recipe.description or "LoLCATs" in recipe.description) == (recipe.finetune.lora is not None)


def test_what_the_papers_count() -> None:
    """LoLCATs sec. 3.1 and app. A.3, SUPRA sec. 7, ReGLA sec. 4.1."""
    llama = make_shape("llama", 32, 32, 8, 128, 4096, 14336, 128256, 8192, False)
    for name in ("lolcats", "lolcats-terraced"):
        maps = new_parameters(mixer_of(name, llama), llama) - 32  # the mixing terms
        assert 32 * maps == 16_777_216, "16.8M trainable weights"
    transfer = Recipe.load("lolcats-405b").transfer
    assert transfer is not None and transfer.layers_per_block is not None
    assert 126 / transfer.layers_per_block == 14, "blocks, each on a GPU"
    supra = Recipe.load("supra")
    assert supra.finetune is not None and supra.finetune.batch_size * supra.data.sequence_length == 2**21
    pythia = make_shape("gpt_neox", 12, 12, 12, 64, 768, 3072, 50304, 2048, False)
    kept = [index for index, mixer in enumerate(resolve(Recipe.load("regla-hybrid"), pythia)) if mixer is None]
    assert kept == [1, 3, 5, 7, 9, 11], "6 of 12, every second"
