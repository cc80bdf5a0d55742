"""Settings that fit a GPU: least costly first, never what a recipe sets, never what changes the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from linearize.base import UserError
from linearize.layer_plan import resolve
from linearize.planning import fit as fitting
from linearize.planning.fit import Fit, fit, parse_memory
from linearize.recipe import Recipe
from tests.planning.test_plan import LLAMA_3_8B

# What is forecast of Llama 3 8B, by hand here: GiB without anything, of a row, of a row with checkpointing.
BASE, ROW, AGAIN, BLOCK = 16, 8, 1, 0.5


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(config: Any, model: Any, layers: Any, mixers: Any, **_: Any) -> int:
        rows = config.micro_batch_size or config.batch_size
        eight = 0 if config.optimizer == "adamw" else 4
        base, row = BASE - eight, AGAIN if getattr(config, "activation_checkpointing", False) else ROW
        if getattr(config, "layers_per_block", None) is not None:
            base = BLOCK * config.layers_per_block
        return int((base + rows * row) * 2**30)

    monkeypatch.setattr(fitting, "stage_memory", memory)


def fitted(memory: str, *, processes: int = 1, name: str = "lolcats", **fields: Any) -> Fit:
    recipe = Recipe.load(name, {field.replace("__", "."): value for field, value in fields.items()})
    layers = resolve(recipe, LLAMA_3_8B)
    options: dict[str, Any] = {"memory": parse_memory(memory), "processes": processes}
    return fit(recipe, LLAMA_3_8B, layers, dtype=torch.bfloat16, **options)


def settings(found: Fit) -> dict[str, dict[str, Any]]:
    return {stage.stage: stage.settings for stage in found.stages}


def test_the_least_costly_settings_that_fit() -> None:
    assert settings(fitted("100GiB")) == {"transfer": {}, "finetune": {}}
    assert settings(fitted("60GiB"))["finetune"] == {"micro_batch_size": 4}
    assert settings(fitted("27GiB"))["finetune"] == {"micro_batch_size": 1}
    # 16 + 4 of 0.9 x 24; then one row at a time.
    assert settings(fitted("24GiB"))["finetune"] == {"micro_batch_size": 4, "activation_checkpointing": True}
    assert settings(fitted("19GiB"))["finetune"] == {"micro_batch_size": 1, "activation_checkpointing": True}
    assert settings(fitted("24GiB"))["transfer"] == {"micro_batch_size": 1, "layers_per_block": 16}
    assert all(stage.fits for stage in fitted("24GiB").stages)


def test_the_recipe_has_what_was_chosen_and_the_same_batch() -> None:
    found = fitted("24GiB").recipe
    assert found.finetune is not None and found.transfer is not None
    assert found.finetune.activation_checkpointing and found.finetune.micro_batch_size == 4
    assert found.finetune.batch_size == 8 and found.finetune.optimizer == "adamw"
    assert found.transfer.layers_per_block == 16


def test_what_the_recipe_sets_stays() -> None:
    fields = {"finetune__micro_batch_size": 2, "finetune__activation_checkpointing": False}
    found = fitted("24GiB", **fields, transfer__layers_per_block=None)
    assert settings(found) == {"transfer": {"micro_batch_size": 1}, "finetune": {}}
    assert not any(stage.fits for stage in found.stages)


def test_nothing_fits() -> None:
    found = fitted("16GiB", transfer=None)
    (stage,) = found.stages
    assert not stage.fits and stage.settings == {"micro_batch_size": 1, "activation_checkpointing": True}
    assert found.lines() == [
        "finetune: nothing fits; nearest is --set finetune.micro_batch_size=1 --set "
        "finetune.activation_checkpointing=true: about 17 GiB of 16 GiB; fits with "
        "--set finetune.optimizer=adamw_8bit, which changes the gradients: 13 GiB"
    ]
    assert found.recipe.finetune is not None and found.recipe.finetune.optimizer == "adamw"


def test_no_blocks_where_the_whole_model_is_measured_or_there_are_several_processes() -> None:
    assert "layers_per_block" not in settings(fitted("20GiB", processes=2))["transfer"]
    assert all("layers_per_block" not in x for x in settings(fitted("20GiB", name="recommended")).values())


def test_sizes() -> None:
    assert parse_memory("24GiB") == 24 * 2**30 and parse_memory("1.5 GB") == 1_500_000_000
    for wrong in ("24", "GiB", "-1GiB", "0GiB", "24TB"):
        with pytest.raises(UserError, match="--gpu-memory: expected a size such as 24GiB"):
            parse_memory(wrong)
