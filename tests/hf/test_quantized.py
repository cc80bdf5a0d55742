"""Teachers with quantized weights: they are converted, their mixers and adapters trained, and saved, as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TorchAoConfig,
)

import linearize
from linearize.base import UserError
from linearize.hf.convert import convert_layers
from tests.tiny import packed

pytest.importorskip("torchao", reason="torchao is not installed; `make test-quantized` installs it and runs this")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; `make test-quantized` installs it, too")

from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup

VOCABULARY = 60
CONFIGS: dict[str, Callable[[], Any]] = {
    "torchao-int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao-int8-activations": lambda: TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "torchao-int4": lambda: TorchAoConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32))),
    "bitsandbytes-int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes-int4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
}
every = pytest.mark.parametrize("name", CONFIGS)
RECIPE: dict[str, Any] = {
    "mixer.span.window_size": 4,
    "transfer.batch_size": 4,
    "transfer.epochs": 8,
    "finetune.batch_size": 4,
    "finetune.epochs": 8,
    "finetune.lr": 1e-2,
}
# By how many nats rounding to these weights may undo what adapters learned.
MERGING = {"torchao-int8": 0.02, "torchao-int8-activations": 0.05, "torchao-int4": 0.3, "bitsandbytes-int8": 0.05}
MERGING["bitsandbytes-int4"] = 0.3
ROWS = packed([[16, 16]] * 8, vocabulary=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in full precision, its sizes multiples of the blocks that are quantized together."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        path = tmp_path_factory.mktemp("teacher")
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def quantized(folder: Path, name: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CONFIGS[name](), dtype=torch.float32)
    assert not any(type(m.weight) is nn.Parameter for m in projections(model))
    return model.eval()


def projections(model: PreTrainedModel) -> list[Any]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj")
    return [module for path, module in model.named_modules() if path.endswith(names)]


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(ROWS.input_ids, position_ids=ROWS.position_ids, use_cache=False).logits


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (found - expected).norm() < tolerance * expected.norm()


@every
def test_softmax_layers_are_the_teacher(folder: Path, name: str) -> None:
    teacher = quantized(folder, name)
    student = convert_layers(teacher, (None, None))
    assert torch.equal(logits(student), logits(teacher))
    converted = linearize.convert(teacher, linearize.Recipe.load("lolcats", RECIPE))
    assert torch.equal(logits(linearize.to_softmax(converted)), logits(teacher))
    stored = {id(parameter) for parameter in teacher.parameters()}
    quant = [p for p in student.parameters() if type(p) is not nn.Parameter]
    assert quant
    assert all(id(parameter) in stored for parameter in quant)  # no second copy


@every
@pytest.mark.filterwarnings("ignore:Merge lora module to .-bit linear:UserWarning")
def test_trained_saved_and_loaded(folder: Path, name: str, tmp_path: Path) -> None:
    """Mixers learn attention, adapters the text; they are merged into weights that stay quantized."""
    teacher, recipe = quantized(folder, name), linearize.Recipe.load("lolcats", RECIPE)
    student = linearize.convert(teacher, recipe).eval()
    before = logits(teacher)
    result = linearize.attention_transfer(student, ROWS, ROWS, recipe.transfer, output_dir=tmp_path / "transfer")
    assert sum(result.best_loss.values()) < 0.9 * sum(result.initial_loss.values())
    result = linearize.finetune(student, ROWS, ROWS, recipe.finetune, output_dir=tmp_path / "finetune")
    assert result.best_loss["model"] < 0.8 * result.initial_loss["model"]
    merged = nn.functional.cross_entropy(logits(student)[:, :-1].flatten(0, 1), ROWS.labels[:, 1:].flatten())
    assert abs(merged.item() - result.best_loss["model"]) < MERGING[name]
    assert not any(type(m.weight) is nn.Parameter for m in projections(student))
    assert_near(logits(teacher), before, 1e-3)

    found = logits(student)
    for again in ("model", "copy"):
        student.save_pretrained(tmp_path / again)
        student = AutoModelForCausalLM.from_pretrained(tmp_path / again).eval()
    assert_near(logits(student), found, 1e-2)
    prompt = dict(inputs=ROWS.input_ids[:1, :20], max_new_tokens=6, do_sample=False)
    assert torch.equal(student.generate(**prompt), student.generate(**prompt, use_cache=False))


def test_all_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    recipe = linearize.Recipe.load("supra")
    student = linearize.convert(quantized(folder, "torchao-int8"), recipe)
    with pytest.raises(UserError, match=r"finetune.all_weights: expected a model that is not quantized"):
        linearize.finetune(student, ROWS, ROWS, recipe.finetune, output_dir=tmp_path)


def test_weights_packed_for_a_cpu_are_refused(folder: Path) -> None:
    teacher = quantized(folder, "bitsandbytes-int4")
    projections(teacher)[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UserError, match="convert it before that"):
        linearize.convert(teacher, linearize.Recipe.load("lolcats"))
