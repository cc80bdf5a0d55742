"""Models whose weights are divided among processes: who holds what, and what is written of them."""

from __future__ import annotations

import json
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from linearize.base import UserError
from linearize.distributed import init_distributed
from linearize.hf.sharded_checkpoint import as_stored, load_sharded
from tests import tiny
from tests.hf.models import make_teacher
from tests.training.test_distributed import finish, torchrun


@pytest.mark.slow
def test_no_process_holds_the_whole_model(tmp_path: Path) -> None:
    """Two read half of the weights each, which a student shares; what they write is what one writes, in any files."""
    sizes = dict(hidden_size=512, intermediate_size=2048, vocab_size=2048, num_attention_heads=8)
    models = {"llama": tiny.llama(layers=6, **sizes)}
    for architecture in ("gpt2", "mixtral"):  # tied embeddings, experts
        models[architecture] = make_teacher(architecture).float()
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    finish(torchrun(2, "tests.hf.sharded", *(tmp_path / name for name in models)))
    for name, model in models.items():
        everything, folder = sum(p.nbytes for p in model.parameters()), tmp_path / name
        for rank in range(2):
            found = json.loads((folder / f"found-{rank}.json").read_text())
            assert found["equal"] and found["shared"] and found["held"] <= 0.51 * everything
            assert name != "llama" or found["grown"] < 0.75 * everything  # at the most, while reading
        assert (folder / "one file" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        for file in ("config.json", "generation_config.json"):
            assert (folder / "one file" / file).read_text() == (folder / file).read_text()
        again = AutoModelForCausalLM.from_pretrained(folder / "files")
        assert all(torch.equal(weight, model.get_parameter(key)) for key, weight in again.named_parameters())
    assert len(list((tmp_path / "llama" / "files").glob("*.safetensors"))) > 2


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as one that torchrun has started, alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **address}.items():
        monkeypatch.setenv(name, value)
    with init_distributed(torch.device("cpu")):
        group = weakref.ref(torch.distributed.group.WORLD)
        yield
    assert group() is None, "threads of the process group go on after `init_distributed`"


def _changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NORM = "model.norm.weight"
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(NORM), f"found none for {NORM}"),
    "left": (lambda tensors: tensors.update(extra=torch.ones(2)), "found extra, which it has not"),
    "shape": (lambda tensors: tensors.update({NORM: torch.ones(3)}), rf"found {NORM} of shape \[3\] for \[32\]"),
    "integers": (lambda tensors: tensors.update({NORM: torch.ones(32).char()}), f"found {NORM} as torch.int8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_are_all_there_and_no_others(fault: str, group: None, tmp_path: Path) -> None:
    change, words = FAULTS[fault]
    tiny.llama().save_pretrained(tmp_path)
    _changed(tmp_path, change)
    with pytest.raises(UserError, match=words):
        load_sharded(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes"}, "expected weights that are not quantized"),
        ("model_type", "bert", "expected a decoder, found 'bert'"),
    ],
)
def test_what_cannot_be_divided(field: str, value: Any, words: str, group: None, tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_sharded(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_names_and_experts_are_those_of_a_checkpoint(architecture: str, tmp_path: Path) -> None:
    model = make_teacher(architecture)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = {key: x for name, p in model.named_parameters() for key, x in as_stored(model, name, p.detach()).items()}
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
