"""One mechanism for every architecture: vLLM's own class of the base, with what is behind q, k and v exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from vllm.engine.arg_utils import EngineArgs

from linearize import Recipe
from linearize.configs.mixer import LayerPlan
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.serving.vllm import BASES
from tests.hf.decoders import DECODERS
from tests.serving.vllm.served import (
    by_transformers,
    by_vllm,
    differences,
    engine,
    plans,
    prompts,
    saved,
    student,
    teacher,
)
from tests.tiny import VOCABULARY

pytestmark = pytest.mark.vllm
CLOSE = 1e-4
SIZES = dict(hidden_size=128, head_dim=32, vocab_size=VOCABULARY, initializer_range=0.2)
SERVED = ["mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "granite", "phi3"]
PLAIN = dict(DECODERS["phi3"][1], partial_rotary_factor=1.0)


def make(name: str) -> PreTrainedModel:
    """A random teacher whose heads have sizes that vLLM's attention knows."""
    # vLLM's Qwen2 has no layers that slide beside others that do not.
    model_type, fields = (name, PLAIN) if name == "qwen2" else DECODERS.get(name, (name, PLAIN))
    config = CONFIG_MAPPING[model_type](**(fields | SIZES))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def plan_of(model: PreTrainedModel, recipe: str, **fields: Any) -> LayerPlan:
    return resolve(Recipe.load(recipe, fields), TeacherShape.from_config(model.config.to_dict()))


def assert_same(made: PreTrainedModel, name: str) -> None:
    texts = prompts(12, lengths=(1, 9, 33))
    expected = by_transformers(made, texts)
    with engine(saved(made, name)) as llm:
        wrong, far = differences(by_vllm(llm, texts), expected)
    assert wrong == 0
    assert far < CLOSE


@pytest.mark.parametrize("name", SERVED)
def test_window_and_linear(name: str):
    base = make(name)
    assert_same(student(plan_of(base, "lolcats", **{"mixer.span.window_size": 8}), base), f"lolcats-{name}")


@pytest.mark.parametrize("name", ["phi3", "qwen3", "gemma2"])
def test_hidden_states_and_unrotated_keys(name: str):
    """SUPRA's features are rotated by the layer's own angles, of as many dimensions as it has."""
    base = make(name)
    assert_same(student(plan_of(base, "gla"), base), f"gla-{name}")
    assert_same(student(plan_of(base, "supra"), base), f"supra-{name}")


@pytest.mark.parametrize("name", ["gpt_neox", "olmo2", "phi", "smollm3"])
def test_other_architectures_are_refused_by_name(name: str):
    base = make(name)
    assert type(base).__name__ not in BASES
    made = student(plan_of(base, "lolcats"), base)
    with pytest.raises(ValueError, match=rf"architectures: expected .*found {type(made).__name__}. `linearize serve`"):
        EngineArgs(model=saved(made, f"other-{name}")).create_engine_config()


@pytest.mark.parametrize(
    "options, field",
    [
        (dict(enable_lora=True), "enable_lora"),
        (dict(pipeline_parallel_size=2), "pipeline_parallel_size"),
        (dict(kv_cache_dtype="fp8"), "kv_cache_dtype"),
        (dict(speculative_config=dict(method="ngram", num_speculative_tokens=2)), "speculative_config"),
        (dict(kv_offloading_size=1.0), "kv_transfer_config"),
        (dict(runner="pooling"), "runner"),
    ],
)
def test_what_is_not_possible_is_refused_at_start(options: dict[str, Any], field: str):
    made = saved(student(plans()["lolcats"], teacher()), "lolcats")
    with pytest.raises(ValueError, match=f"{field}.*: expected") as refused:
        EngineArgs(model=made, dtype="float32", **options).create_engine_config()
    assert "Traceback" not in str(refused.value)


def test_weights_of_mixers_must_be_there(tmp_path: Any):
    from safetensors.torch import load_file, save_file

    made = student(plans()["lolcats"], teacher())
    made.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    some = next(name for name in sorted(weights) if ".mixer." in name)
    save_file({k: v for k, v in weights.items() if k != some}, tmp_path / "model.safetensors", {"format": "pt"})
    with (
        pytest.raises(Exception, match=f"{some}: expected the mixer's weights"),
        engine(str(tmp_path), skip_tokenizer_init=True),
    ):
        pass
    save_file(weights | {some: weights[some][..., :1]}, tmp_path / "model.safetensors", {"format": "pt"})
    with (
        pytest.raises(Exception, match=f"{some}: expected .* convert the model again"),
        engine(str(tmp_path), skip_tokenizer_init=True),
    ):
        pass
