"""Attention weights as whole T x T matrices: what the output of a layer is, if the values say which key they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attention import Documents, softmax_attention
from tests.oracles.heads import Inputs, Weights
from tests.oracles.mixer import mixer_layer


def mixer_weights(config: Any, weights: Weights, inputs: Inputs, documents: Documents) -> Tensor:
    """[B,H,T,T]: by what each value is multiplied. The linear part's normalizer must be `sum` or `none`."""
    return _weights(inputs, lambda given: mixer_layer(config, weights, given, documents))


def softmax_weights(inputs: Inputs, documents: Documents) -> Tensor:
    """[B,H,T,T] of causal softmax."""
    options = {"scaling": inputs.scaling, "softcap": inputs.softcap}
    return _weights(inputs, lambda given: softmax_attention(given.q, given.k, given.v, documents, **options))


def _weights(inputs: Inputs, layer: Callable[[Inputs], Tensor]) -> Tensor:
    length, width = inputs.v.shape[2:]
    columns = []
    for start in range(0, length, width):
        v = torch.zeros_like(inputs.v)
        for key in range(start, min(start + width, length)):
            v[:, :, key, key - start] = 1
        columns.append(layer(replace(inputs, v=v)))
    return torch.cat(columns, dim=-1)[..., :length]


def unnormalized(config: Any) -> Any:
    """`config` with its linear part's numerator as it is."""
    return _changed(config, normalizer=SimpleNamespace(type="none"))


def window_alone(config: Any) -> Any:
    """`config` without its linear part."""
    return _changed(config, feature_map=None, combine=SimpleNamespace(type="window_only"))


def _changed(config: Any, **parts: Any) -> Any:
    names = ("span", "feature_map", "decay", "update", "scale", "normalizer", "cache", "combine")
    return SimpleNamespace(**{name: getattr(config, name) for name in names} | parts)
