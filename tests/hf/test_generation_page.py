"""What docs/generation.md shows runs as it stands there."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, TextStreamer

import linearize
from tests.byte_tokenizer import byte_tokenizer
from tests.fake_compiler import Compiler
from tests.hf.models import make_teacher

PAGE = (Path(__file__).parents[2] / "docs" / "generation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CALLS = re.findall(r"`((?:model\.generate|tokenizer)\(.*?\))`[ ,;|]", PAGE)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the page's first block makes, of a small model, and those that its table supposes."""
    folder = tmp_path_factory.mktemp("page")
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    teacher = make_teacher("llama", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    linearize.convert(teacher, linearize.Recipe.load("lolcats")).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    names: dict[str, Any] = {}
    exec(BLOCKS[0].replace("OUT", str(folder)), names)
    names["model"].generation_config.max_new_tokens = 4
    return names | {
        "folder": folder,
        "texts": ["Once", "Once upon a time"],
        "other": names["model"],
        "ids": names["prompt"].input_ids,
        "TextStreamer": TextStreamer,
    }


def test_calls_are_found() -> None:
    assert len(BLOCKS) == 4
    assert len(CALLS) == 12


@pytest.mark.parametrize("call", CALLS)
def test_calls(page: dict[str, Any], call: str) -> None:
    names = page | {"cache": DynamicCache(config=page["model"].config)}
    found = eval(call, names)
    if call.startswith("model"):
        assert found.shape[1] > page["ids"].shape[1]


def test_states(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(page["folder"])
    names = dict(page)
    exec(BLOCKS[1], names)
    assert names["three"].layers[0].kept.seen.shape[0] == 3
    assert (page["folder"] / "story.safetensors").is_file()
    assert names["state"].get_seq_length() == names["mask"].shape[1] + 3  # the last new token is not fed


def test_compiling_can_be_turned_off(page: dict[str, Any]) -> None:
    model = copy.deepcopy(page["model"])
    exec(BLOCKS[2], page | {"model": model})
    assert model.generation_config.disable_compile


def test_compiled_steps(page: dict[str, Any], compiler: Compiler) -> None:
    model = copy.deepcopy(page["model"])
    names = page | {"model": model}
    exec(BLOCKS[3], names)
    assert len(compiler.steps) == 1 + 4 - 1  # to see whether it can; and four new tokens, the first from the prompt
    assert torch.equal(names["out"], page["model"].generate(**page["prompt"]))
