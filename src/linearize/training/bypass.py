"""Against bypass: while a window alone lowers the loss, nothing asks the linear part to learn (arXiv 2510.05901)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from linearize.hf.attention import linearized_layers
from linearize.mixers.window_dropout import WindowDropout
from linearize.training.config import TrainConfig
from linearize.training.loop import Step


@contextmanager
def dropped_windows(model: nn.Module, config: TrainConfig, step: Step) -> Iterator[None]:
    """Within, every layer hides its window from the share of sequences that `config` schedules for this step.

    What is hidden is a function of seed, step and layer, so that a resumed stage, or a layer trained without the
    others, sees the same.
    """
    layers = list(linearized_layers(model).values()) if config.window_dropout is not None else []
    try:
        for layer in layers:
            assert config.window_dropout is not None
            generator = torch.Generator().manual_seed(hash((step.seed, step.number, layer.layer_idx)) % 2**63)
            rate = config.window_dropout.rate(step.number, step.total)
            layer.mixer.window_dropout = WindowDropout(rate, generator)
        yield
    finally:
        for layer in layers:
            layer.mixer.window_dropout = None
