"""A few layers of a model as a model of their own: what it computes, what is read for it, what it is called."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.hf import partial_model
from linearize.hf.architectures import ARCHITECTURES as KNOWN
from linearize.hf.attention import linearized_layers
from linearize.hf.checkpoint import load_model
from linearize.hf.convert import convert_layers
from linearize.hf.partial_model import load_block
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.plan import check_run
from tests import tiny
from tests.hf.decoders import ARCHITECTURES as OTHERS
from tests.hf.models import ARCHITECTURES, make_teacher

CPU = torch.device("cpu")
LAYERS = 5
ROWS = tiny.packed([[40], [13, 27], [1, 9, 30]], vocabulary=60)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
# Fields of the config that make layers differ, or buffers that no checkpoint holds.
TEACHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3 rope": ("llama", dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=16))),
    "mistral": ("mistral", {}),
    "mistral, sliding": ("mistral", dict(sliding_window=7)),
    "qwen3": ("qwen3", {}),
    "qwen3, two layers slide": ("qwen3", dict(use_sliding_window=True, sliding_window=7, max_window_layers=3)),
    "gpt2": ("gpt2", {}),
    "gpt2, scaled by layer": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)),
}
EXPERTS = ("mixtral", "qwen3_moe")


@functools.cache
def teacher(name: str) -> PreTrainedModel:
    architecture, changes = TEACHERS[name]
    prefix, fields = ARCHITECTURES[architecture]
    depth = "n_layer" if architecture == "gpt2" else "num_hidden_layers"
    config = getattr(transformers, f"{prefix}Config")(**(fields | changes | {depth: LAYERS, "initializer_range": 0.2}))
    model_class = getattr(transformers, f"{prefix}ForCausalLM", None) or getattr(transformers, f"{prefix}LMHeadModel")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval()
        for parameter in model.parameters():  # norms and biases, too, are not what they begin as
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def streams(model: Any) -> list[Tensor]:
    """What enters each layer of the whole model, and what leaves the last one, before the final norm."""
    found: list[Tensor] = []
    parts = KNOWN[model.config.model_type].parts
    assert parts is not None
    layers = model.base_model.get_submodule(parts.layers)
    handles = [layer.register_forward_pre_hook(lambda _, args: found.append(args[0])) for layer in layers]
    handles.append(layers[-1].register_forward_hook(lambda _, args, out: found.append(out)))
    model.base_model(input_ids=ROWS.input_ids, position_ids=ROWS.position_ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@functools.cache
def hidden_states(name: str) -> list[Tensor]:
    return streams(teacher(name))


@pytest.fixture(params=["one file", "several files"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[PreTrainedModel], str]:
    def save(model: PreTrainedModel) -> str:
        size = "1GB" if request.param == "one file" else "20KB"
        model.save_pretrained(tmp_path / "model", max_shard_size=size)
        assert (tmp_path / "model" / "model.safetensors").is_file() == (request.param == "one file")
        return str(tmp_path / "model")

    return save


@torch.no_grad()
def run(block: PreTrainedModel, **inputs: Tensor) -> Tensor:
    return block.base_model(**inputs, position_ids=ROWS.position_ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_blocks_one_after_the_other_are_the_model(name: str, size: int, tmp_path: Path) -> None:
    teacher(name).save_pretrained(tmp_path, max_shard_size="20KB")
    inputs = {"input_ids": ROWS.input_ids}
    for start in range(0, LAYERS, size):
        layers = range(start, min(start + size, LAYERS))
        stream = run(load_block(str(tmp_path), layers, dtype=torch.float32, device=CPU), **inputs)
        torch.testing.assert_close(stream, hidden_states(name)[layers.stop], rtol=0, atol=1e-6)
        inputs = {"inputs_embeds": stream}


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in EXPERTS])
def test_blocks_of_other_architectures(name: str, tmp_path: Path) -> None:
    """What stands before the first layer and behind the last one is there once, whatever it is."""
    model, inputs = make_teacher(name), {"input_ids": ROWS.input_ids}
    model.save_pretrained(tmp_path)
    expected = streams(model)
    for layers in (range(0, 1), range(1, model.config.num_hidden_layers)):
        block = load_block(str(tmp_path), layers, dtype=torch.float64, device=CPU)
        block.set_attn_implementation(model.config._attn_implementation)
        stream = run(block, **inputs)
        torch.testing.assert_close(stream, expected[layers.stop], rtol=0, atol=1e-10)
        inputs = {"inputs_embeds": stream}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_lie_otherwise_in_files(name: str) -> None:
    shape = TeacherShape.from_config(make_teacher(name).config.to_dict())
    recipe = tiny.recipe(transfer__layers_per_block=1)
    with pytest.raises(UserError, match=f"found '{name}', whose experts are not; set transfer.layers_per_block=null"):
        check_run(recipe, shape, resolve(recipe, shape))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("layers", [range(0, 2), range(2, 4), range(4, 5)], ids=str)
def test_nothing_else_is_read(
    name: str, layers: range, saved: Callable[[PreTrainedModel], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(teacher(name))
    read: dict[str, int] = {}
    opened: set[str] = set()
    safe_open = partial_model.safe_open

    class Counting:
        def __init__(self, path: str, **options: Any) -> None:
            self.file, self.path = safe_open(path, **options), path

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_tensor(self, key: str) -> Tensor:
            tensor = self.file.get_tensor(key)
            opened.add(Path(self.path).name)
            read[key] = tensor.nbytes
            return tensor

    monkeypatch.setattr(partial_model, "safe_open", Counting)
    block = load_block(folder, layers, dtype=torch.float32, device=CPU)

    def belongs(key: str) -> bool:
        number = re.search(r"\.(\d+)\.", key)
        embeddings = re.search(r"embed_tokens|wte|wpe", key)
        return int(number[1]) in layers if number else bool(embeddings) and layers.start == 0

    weights = dict(teacher(name).named_parameters())
    expected = {key for key in weights if belongs(key)}
    assert set(read) == expected
    assert sum(read.values()) == sum(weights[key].nbytes for key in expected)
    # Under their own names, and nothing beside them; all there, no meta tensor left.
    assert {key for key, _ in block.named_parameters()} == expected
    assert all(torch.equal(parameter, weights[key]) for key, parameter in block.named_parameters())
    assert not any(buffer.is_meta for buffer in block.buffers())
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
        assert opened == {files[key] for key in expected} and len(opened) < len(set(files.values()))


def test_of_a_hub_model_only_the_files_of_the_block_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    fetched: list[str] = []

    def cached_file(model: str, filename: str, **_: Any) -> str | None:
        assert model == "someone/llama"
        fetched.append(filename)
        return str(tmp_path / filename) if (tmp_path / filename).is_file() else None

    monkeypatch.setattr(partial_model, "cached_file", cached_file)
    monkeypatch.setattr(partial_model, "hub_options", lambda _: {})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    monkeypatch.setattr(partial_model.AutoConfig, "from_pretrained", lambda _, **options: config)
    load_block("someone/llama", range(3, 4), dtype=torch.float32, device=CPU)
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    own = {file for key, file in files.items() if "layers.3." in key}
    assert set(fetched) == own | {"model.safetensors", "model.safetensors.index.json"}
    assert len(own) < len(set(files.values()))


def test_a_base_model_s_checkpoint(tmp_path: Path) -> None:
    """As the hub's gpt2: names without the prefix of the base model."""
    teacher("gpt2").base_model.save_pretrained(tmp_path)
    for layers, inputs in ((range(0, 1), {"input_ids": ROWS.input_ids}), (range(1, 3), {})):
        block = load_block(str(tmp_path), layers, dtype=torch.float32, device=CPU)
        stream = run(block, **(inputs or {"inputs_embeds": hidden_states("gpt2")[layers.start]}))
        torch.testing.assert_close(stream, hidden_states("gpt2")[layers.stop], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_and_stream_have_the_dtype_and_the_attention_of_an_ordinary_load(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    teacher("llama").save_pretrained(tmp_path)
    whole, block = (
        load_model(str(tmp_path), dtype=dtype, device=CPU),
        load_block(str(tmp_path), range(1, 3), dtype=dtype, device=CPU),
    )
    assert {p.dtype for p in block.parameters()} == {dtype}
    assert block.config._attn_implementation == whole.config._attn_implementation
    assert not block.training
    theirs = dict(whole.named_buffers())
    assert all(torch.equal(b, theirs[key]) and b.dtype == theirs[key].dtype for key, b in block.named_buffers())
    entering = hidden_states("llama")[1].to(dtype)
    assert run(block, inputs_embeds=entering).dtype == dtype


# --- what is random ---------------------------------------------------------------------------------------------------

RANDOM: dict[str, dict[str, Any]] = {
    "performer": dict(mixer__feature_map=dict(type="performer", rotation="none")),
    "rfa": dict(mixer__feature_map=dict(type="rfa", rotation="none"), mixer__combine=dict(type="mix")),
    "kaiming": dict(mixer__feature_map=dict(type="hedgehog", init="kaiming")),
}


@pytest.mark.parametrize("mixer", RANDOM.values(), ids=RANDOM)
@pytest.mark.parametrize("kept", [[], [0, 2]], ids=["every layer", "some layers"])
def test_a_block_draws_the_mixers_of_the_whole_model(mixer: dict[str, Any], kept: list[int], tmp_path: Path) -> None:
    model = teacher("llama")
    model.save_pretrained(tmp_path)
    recipe = tiny.recipe(**mixer, layers__keep_softmax=kept, seed=3)
    shape = TeacherShape.from_config(model.config.to_dict())
    expected = tiny.snapshot(linearize.convert(model, recipe.override({"layers.keep_softmax": []})))
    plan, drawn = resolve(recipe, shape), []
    for layers in (range(0, 2), range(2, 5)):
        block = load_block(str(tmp_path), layers, dtype=torch.float32, device=CPU)
        student = convert_layers(block, plan[layers.start : layers.stop], seed=3)
        found = {key: tensor for key, tensor in tiny.snapshot(student).items() if ".mixer." in key}
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
        assert len(set(found) & set(expected)) == len(found) > 0
        drawn += [(name, layer.layer_idx) for name, layer in linearized_layers(student).items()]
    assert drawn == [(f"model.layers.{index}.self_attn", index) for index in range(LAYERS) if index not in kept]


def test_layers_and_seeds_differ() -> None:
    recipe = tiny.recipe(**RANDOM["performer"])
    students = [linearize.convert(teacher("llama"), recipe.override({"seed": seed})) for seed in (0, 1)]
    weights = [
        next(layer.mixer.buffers()).flatten() for student in students for layer in linearized_layers(student).values()
    ]
    assert len({tuple(weight.tolist()) for weight in weights}) == 2 * LAYERS


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_block(str(folder), range(1, 2), dtype=torch.float32, device=CPU)
    assert "\n" not in str(error.value)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_a_tensor(folder: Path) -> None:
    tensors = load((folder / "model.safetensors").read_bytes())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def of_another_size(folder: Path) -> None:
    tensors = load((folder / "model.safetensors").read_bytes())
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (without_weights, "expected model.safetensors or model.safetensors.index.json, found neither"),
    "a tensor missing": (without_a_tensor, "expected a tensor model.layers.1.mlp.up_proj.weight, found none"),
    "another size": (of_another_size, "expected readable weights"),
    "cut short": (cut_short, "expected readable weights"),
    "quantised": (quantised, "expected weights that are not quantized"),
}


@pytest.mark.parametrize("change, message", BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_read_is_refused(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    teacher("llama").save_pretrained(tmp_path)
    change(tmp_path)
    refused(tmp_path, message)


def test_a_linearized_model_is_refused(tmp_path: Path) -> None:
    linearize.convert(tiny.llama(), tiny.recipe()).save_pretrained(tmp_path)
    refused(tmp_path, "expected a softmax model .*, found 'linearized_llama'")
