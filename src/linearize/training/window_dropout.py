"""Against bypass: while a window alone lowers the loss, nothing asks the linear part to learn (arXiv 2510.05901)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linearize.configs.training import TrainConfig
from linearize.hf.attention import linearized_layers
from linearize.mixers.combine import HasLinear
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.partial import Partial
from linearize.training.loop import Step


@contextmanager
def dropped_windows(model: nn.Module, config: TrainConfig, step: Step, micro_batch: int) -> Iterator[None]:
    """Within, every layer hides its window from the share of sequences that `config` schedules for this step.

    What is hidden is a function of seed, step, micro batch and layer, so that a resumed stage, a layer trained without
    the others, or one that is computed again on the way back, sees the same. The mixer's `combined` alone is wrapped:
    the names of parameters stay, and so do its attention weights, which are made of `combine` without it.
    """
    layers = linearized_layers(model).values() if config.window_dropout is not None else ()
    mixers = {layer.layer_idx: layer.mixer for layer in layers if isinstance(layer.mixer, LinearMixer)}
    try:
        for index, mixer in mixers.items():
            assert config.window_dropout is not None
            seed = (hash((step.seed, step.number, index)) + micro_batch) % 2**63
            mixer.combined = _hiding(mixer, config.window_dropout.rate(step.number, step.total), seed)
        yield
    finally:
        for mixer in mixers.values():
            vars(mixer).pop("combined", None)  # the method is seen again


def _hiding(mixer: LinearMixer, rate: float, seed: int) -> Callable[..., Tensor]:
    """`mixer.combined`, but of the linear part alone in this share of sequences, where queries have keys in it."""
    whole = mixer.combined

    def combined(
        inputs: AttnInputs, window: Partial | None, linear: Partial | None, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        if window is None or linear is None:
            return whole(inputs, window, linear, has_linear)
        # Of a copy: without gradients, parts are combined in place.
        alone = mixer.normalized(replace(linear, num=linear.num.clone()), inputs)
        y = whole(inputs, window, linear, has_linear)
        # Drawn on the CPU, the same on every device.
        generator = torch.Generator().manual_seed(seed)
        hidden = (torch.rand(len(y), generator=generator) < rate).to(y.device)[:, None] & has_linear()
        return torch.where(hidden[:, None, :, None], alone.to(y.dtype), y)

    return combined
