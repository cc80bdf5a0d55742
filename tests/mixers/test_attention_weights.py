"""Attention weights by blocks of queries against the loops of the oracles, and the blocks themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.mixers import attention_weights
from linearize.mixers.attention_weights import (
    Features,
    LinearPart,
    block_scores,
    query_blocks,
    softmax_weights,
)
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.layout import SequenceLayout
from tests.mixers.weights import weights_of
from tests.oracles.attention_weights import mixer_weights
from tests.oracles.attention_weights import softmax_weights as softmax_oracle
from tests.oracles.heads import Inputs

LENGTH = 12
DOCUMENTS = [[[*range(LENGTH)]], [[1, 2, 3, 5], [6, 7, 8, 9, 10, 11]]]
SLIDING = {"type": "sliding", "window_size": 3, "sinks": 1}
LEARNED = {"type": "shared_denominator", "learned_sink": True}
CASES: dict[str, dict[str, Any]] = {
    "hedgehog, shared": {"span": SLIDING},
    "taylor, mix": {"span": SLIDING, "feature_map": {"type": "taylor2"}, "combine": {"type": "mix"}},
    "regla, mix": {
        "span": SLIDING,
        "feature_map": {"type": "regla", "feature_dim": 4},
        "combine": {"type": "mix"},
        "decay": {"type": "scalar"},
    },
    "cosformer, add": {
        "span": {"type": "terraced", "window_size": 2},
        "feature_map": {"type": "cosformer"},
        "combine": {"type": "add"},
        "decay": {"type": "fixed"},
    },
    "performer, absolute scale": {
        "span": SLIDING,
        "feature_map": {"type": "performer"},
        "combine": {"type": "absolute_scale"},
        "decay": {"type": "fixed"},
    },
    "hedgehog, learned sink": {"span": SLIDING, "combine": LEARNED},
    "taylor, learned sink, no window": {
        "span": {"type": "none"},
        "feature_map": {"type": "taylor2"},
        "combine": LEARNED,
    },
    "performer, no window": {"span": {"type": "none"}, "feature_map": {"type": "performer"}},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_weights, "MIN_QUERIES", 5)
    monkeypatch.setattr(attention_weights, "BLOCK_WEIGHTS", {"cpu": 1})


def make(fields: dict[str, Any]) -> tuple[LinearMixer, AttnInputs, SequenceLayout]:
    shape = LayerShape(2, 1, 4, hidden_size=6, max_positions=32)
    mixer = LinearMixer(MixerConfig.model_validate(fields).resolved(shape), shape).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in mixer.parameters():
        parameter += 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(2, *sizes, generator=generator, dtype=torch.float64)

    inputs = AttnInputs(normal(2, LENGTH, 4), normal(1, LENGTH, 4), normal(1, LENGTH, 4), 0.5, hidden=normal(LENGTH, 6))
    position = torch.full((2, LENGTH), -1)
    for row, documents in enumerate(DOCUMENTS):
        for slots in documents:
            position[row, slots] = torch.arange(len(slots))
    return mixer, inputs, SequenceLayout.from_positions(position)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_mixer_uses(case: str) -> None:
    mixer, inputs, layout = make(CASES[case])
    part = LinearPart.of(mixer, inputs, layout)
    phi_q, phi_k, sums, log_scale = part.features()
    found, teacher = torch.zeros(2, 2, 2, LENGTH, LENGTH, dtype=torch.float64)
    covered = 0
    for block in query_blocks(mixer, layout, 2, None):
        at = None if sums is None else sums[:, :, block.keys]
        features = Features(phi_q[:, :, block.queries], phi_k[:, :, block.keys], at, log_scale[:, :, block.queries])
        scores, linear = block_scores(inputs, block), part.partial(features, block.far)
        weights = part.combined(block, scores, features, linear, dict(mixer.combine.named_parameters()))
        found[:, :, block.queries, block.keys] = weights
        teacher[:, :, block.queries, block.keys] = softmax_weights(scores, block.visible)
        covered += block.queries.stop - block.queries.start
    x = Inputs(inputs.q, inputs.k, inputs.v, inputs.scaling, inputs.softcap, inputs.hidden)
    own = weights_of(mixer)
    if mixer.config.learned_sink:  # without its value, what is missing to 1 is its weight
        own = replace(own, sink_value=torch.zeros_like(own.sink_value))
    expected = mixer_weights(mixer.config, own, x, DOCUMENTS)
    if mixer.config.learned_sink:
        for row, documents in enumerate(DOCUMENTS):
            for slots in documents:
                missing = 1 - expected[row, :, slots].sum(-1)
                assert missing.min() > 1e-4
                expected[row, :, slots, slots[0]] += missing
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(teacher, softmax_oracle(x, DOCUMENTS), rtol=0, atol=1e-10)
    assert covered == LENGTH


def test_keys_of_other_documents_are_not_looked_at() -> None:
    """Where all rows begin a document, blocks behind that do not go back over what came before."""
    mixer = make(CASES["hedgehog, shared"])[0]
    layout = SequenceLayout.from_positions(torch.tensor([[*range(5), *range(7)], [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6]]))
    blocks = [(block.queries, block.keys) for block in query_blocks(mixer, layout, 2, None)]
    assert blocks == [(slice(0, 5), slice(0, 5)), (slice(5, 10), slice(5, 10)), (slice(10, 12), slice(5, 12))]
