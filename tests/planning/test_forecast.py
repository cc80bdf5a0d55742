"""What a step takes, forecast on pretended tensors, against what a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from linearize.data.rows import PackedRows
from linearize.evaluation.speed import peak_bytes
from linearize.hf.convert import convert_layers
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.ops.layout import SequenceLayout
from linearize.planning.footprint import Footprint
from linearize.planning.forecast import step_bytes
from linearize.planning.plan import make_plan
from linearize.recipe import Recipe
from linearize.training import losses
from linearize.training.attention_transfer import TransferObjective
from linearize.training.finetune import OutputObjective, prepared
from tests.hf.test_teacher import TINY

CPU, WITHIN = torch.device("cpu"), 0.2
SIZES = dict(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
SIZES |= dict(intermediate_size=176, max_position_embeddings=512, tie_word_embeddings=False)
ALL_WEIGHTS = {"finetune.lora": None, "finetune.all_weights": True}
AGAIN = {"finetune.activation_checkpointing": True}


def steps(
    model_type: str, length: int, dtype: torch.dtype, fields: dict[str, Any], vocabulary: int = 300
) -> Iterator[tuple[int, int, int]]:
    """Forecast bytes of transfer and of fine-tuning, and measured bytes of a step and of an evaluation."""
    sizes = {"data.sequence_length": length, "transfer.batch_size": 2, "finetune.batch_size": 2}
    recipe = Recipe.load("lolcats", sizes | fields)
    config = CONFIG_MAPPING[model_type](**SIZES | {"vocab_size": vocabulary})
    teacher = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    shape = TeacherShape.from_config(teacher.config.to_dict())
    layers = resolve(recipe, shape)
    ids = torch.randint(300, (2, length))
    rows = PackedRows(ids, torch.arange(length // 2).repeat(2).expand(2, -1).contiguous(), ids)
    assert recipe.transfer is not None and recipe.finetune is not None

    def forecast(config: Any) -> int:
        return step_bytes(MetaModel.of(shape), layers, config, dtype=dtype, length=length, device=CPU)

    student = convert_layers(teacher, layers)
    transfer = TransferObjective(student, recipe.transfer)
    peaks = peak_bytes(lambda: transfer.backward([rows])), peak_bytes(lambda: transfer.evaluate(rows))
    yield forecast(recipe.transfer), *peaks
    with prepared(student, recipe.finetune, seed=0) as (module, autocast, _):
        finetune = OutputObjective(module, recipe.finetune, teacher, autocast)
        peaks = peak_bytes(lambda: finetune.backward([rows])), peak_bytes(lambda: finetune.evaluate(rows))
        yield forecast(recipe.finetune), *peaks


@pytest.mark.parametrize(
    "model_type, length, dtype, fields",
    [
        ("llama", 128, torch.float32, {}),  # attention as one masked product
        ("llama", 288, torch.float32, AGAIN | {"finetune.loss.kl": 1.0}),  # by chunks
        ("qwen3", 128, torch.float32, ALL_WEIGHTS),
        # By autocast, which keeps copies of weights; layers of two kinds.
        pytest.param("llama", 128, torch.bfloat16, ALL_WEIGHTS | AGAIN, marks=pytest.mark.slow),
        pytest.param("llama", 128, torch.float32, {"layers.keep_softmax": [0, -1]}, marks=pytest.mark.slow),
    ],
    ids=["LoRA", "checkpointing", "all weights", "bfloat16", "kept layers"],
)
def test_a_step_takes_what_is_forecast(model_type: str, length: int, dtype: torch.dtype, fields: dict) -> None:
    for forecast, *measured in steps(model_type, length, dtype, fields):
        assert abs(forecast / max(measured) - 1) < WITHIN, f"{forecast} forecast, {measured} measured"


def test_an_evaluation_may_take_more_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bf16 model with a large vocabulary: its head and logits are in fp32, those of a step in chunks."""
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 20_000)
    *_, (forecast, step, evaluation) = steps("llama", 8, torch.bfloat16, AGAIN, vocabulary=20_000)
    assert abs(forecast / evaluation - 1) < WITHIN and evaluation > 2 * step


def test_gradients_of_the_micro_batch_before_are_there_already() -> None:
    shape = TeacherShape.from_config(CONFIG_MAPPING["llama"](**SIZES).to_dict())

    def forecast(batch: int) -> int:
        fields = ALL_WEIGHTS | {"finetune.micro_batch_size": 1, "finetune.batch_size": batch}
        recipe = Recipe.load("lolcats", fields)
        assert recipe.finetune is not None
        options: dict[str, Any] = {"dtype": torch.float32, "length": 64, "device": CPU}
        return step_bytes(MetaModel.of(shape), resolve(recipe, shape), recipe.finetune, **options)

    layers = MetaModel.of(shape)
    assert forecast(1) < forecast(2) <= forecast(1) + 4 * (layers.total + 10**5)
    assert forecast(2) == forecast(8)


def test_pretended_tensors_count_while_they_are_there() -> None:
    with Footprint() as footprint:
        a = torch.empty(1000)
        b = a + 1
        assert footprint.held == 8000
        del a
        assert (footprint.held, footprint.peak) == (4000, 8000)
        assert b[:10].sum().item() == 0, "no data"
        assert torch.arange(5).sum().item() == 10, "whole numbers are real"
        assert b[torch.arange(1000) < 7].shape == (7,)


def test_nothing_pretended_is_left_behind() -> None:
    shape = TeacherShape.from_config(CONFIG_MAPPING["llama"](**SIZES).to_dict())
    recipe = Recipe.load("lolcats", {"data.sequence_length": 64})
    assert recipe.finetune is not None
    random = torch.get_rng_state()
    step_bytes(MetaModel.of(shape), resolve(recipe, shape), recipe.finetune, dtype=torch.float32, length=64, device=CPU)
    assert torch.equal(random, torch.get_rng_state())
    layout = SequenceLayout.full(64)
    assert not layout._known


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TINY))
def test_every_architecture_is_forecast(model_type: str) -> None:
    shape = TeacherShape.from_config(TINY[model_type])
    vision = shape.bidirectional and not shape.vocab_size
    name = "hedgehog-vit" if vision else "hedgehog-bert" if shape.bidirectional else "lolcats"
    recipe = Recipe.load(name, {"data.sequence_length": 32, "layers.convert_sliding": True})
    plan = make_plan(recipe, shape, resolve(recipe, shape), dtype=torch.float32, device=CPU, training_tokens=None)
    for stage in (plan.transfer, plan.finetune):
        assert stage is not None and stage.memory_bytes is not None
        assert stage.memory_bytes > 4 * plan.teacher_parameters + 8 * stage.trainable_parameters
