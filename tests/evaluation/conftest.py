"""A tiny random Llama."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linearize.evaluation import agreement, answers, intervals, measure, perplexity, retrieval


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents make an interval: for tests whose few numbers are known by hand, and are not about intervals."""
    for module in (agreement, answers, intervals, perplexity, retrieval, measure):
        monkeypatch.setattr(module, "ENOUGH", 2)
