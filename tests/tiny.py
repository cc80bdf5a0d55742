"""A tiny random Llama and all that a run needs beside it: a tokenizer of bytes, text, rows, and a recipe of few steps.

The fixtures are for modules that say ``pytest_plugins = ["tests.tiny"]``; the folders are written once per session.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from linearize.config import Recipe
from linearize.training.data import PackedRows
from tests.training.byte_tokenizer import byte_tokenizer

VOCABULARY = 259  # bytes, and three special tokens
_TOKENS = dict(vocab_size=VOCABULARY, bos_token_id=256, eos_token_id=258, pad_token_id=None, initializer_range=0.2)

# A whole run in seconds: 6 steps of attention transfer and 4 of fine-tuning, each with a checkpoint every second one.
RECIPE: dict[str, Any] = {
    "mixer.span.window_size": 8,
    "transfer.batch_size": 4,
    "transfer.max_tokens": 6 * 4 * 64,
    "transfer.eval_every": 2,
    "finetune.batch_size": 4,
    "finetune.micro_batch_size": 2,
    "finetune.max_tokens": 4 * 4 * 64,
    "finetune.lr": 1e-2,
    "finetune.eval_every": 2,
    "data.sequence_length": 64,
    "data.validation_fraction": 0.2,
    "data.validation_rows": 6,
    "evaluation.bootstrap_samples": 40,
    "evaluation.copy_rows": 4,
}


def llama(*, layers: int = 2, **fields: Any) -> LlamaForCausalLM:
    """A new teacher in eval mode, the same weights every time."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**(_TOKENS | sizes | dict(num_hidden_layers=layers, max_position_embeddings=256) | fields))
    return _seeded(LlamaForCausalLM, config)


def gpt2(**fields: Any) -> GPT2LMHeadModel:
    """The same with learned positions, and with q, k and v in one `Conv1D`."""
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)
    return _seeded(GPT2LMHeadModel, GPT2Config(**(_TOKENS | sizes | fields)))


def _seeded(model_class: Any, config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).eval()


def recipe(**overrides: Any) -> Recipe:
    """The recipe of few steps; two underscores in a name stand for a dot."""
    return Recipe.load("lolcats", RECIPE | {name.replace("__", "."): value for name, value in overrides.items()})


def packed(documents: list[list[int]], *, seed: int = 0, vocabulary: int = VOCABULARY) -> PackedRows:
    """One row of random tokens per list of document lengths; no loss on the first token of a document.

    From a small `vocabulary` there is something to learn: that the other tokens do not occur.
    """
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    tokens = torch.randint(vocabulary, positions.shape, generator=torch.Generator().manual_seed(seed))
    return PackedRows(tokens, positions, tokens.masked_fill(positions == 0, -100))


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of every parameter and buffer, by name."""
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def write_text(path: Path, *, documents: int = 40, seed: int = 0) -> Path:
    """JSON lines of a few made-up words each, as text."""
    source = random.Random(seed)
    words = ["".join(source.choices("abcdefgh", k=source.randint(2, 6))) for _ in range(30)]
    lines = [json.dumps({"text": " ".join(source.choices(words, k=30))}) for _ in range(documents)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Llama and its tokenizer as an ordinary model folder."""
    folder = tmp_path_factory.mktemp("tiny") / "teacher"
    llama().save_pretrained(folder)
    byte_tokenizer(eos="<|im_end|>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("tiny") / "text.jsonl"))
