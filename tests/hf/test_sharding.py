"""Models whose weights are divided among processes: who holds what, and what is written of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from linearize.hf.sharded_checkpoint import as_stored
from tests import tiny
from tests.hf.models import make_teacher
from tests.training.test_distributed import finish, torchrun


def test_no_process_holds_the_whole_model(tmp_path: Path) -> None:
    """Two read half of the weights each; what they write together is what one writes, in one file or several."""
    sizes = dict(hidden_size=512, intermediate_size=2048, vocab_size=2048, num_attention_heads=8)
    model = tiny.llama(layers=6, **sizes)
    model.save_pretrained(tmp_path)
    everything = sum(p.nbytes for p in model.parameters())
    finish(torchrun(2, "tests.hf.sharded", tmp_path))
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found["equal"]
        assert found["held"] == everything / 2
        assert found["grown"] < 0.75 * everything  # at the most, while reading
    assert (tmp_path / "one file" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "one file" / name).read_text() == (tmp_path / name).read_text()
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "files")
    for name, weight in again.named_parameters():
        assert torch.equal(weight, model.get_parameter(name))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_names_and_experts_are_those_of_a_checkpoint(architecture: str, tmp_path: Path) -> None:
    model = make_teacher(architecture)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = {key: x for name, p in model.named_parameters() for key, x in as_stored(model, name, p.detach()).items()}
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
