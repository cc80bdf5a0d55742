"""Window dropout: hide windows in training, which else lower the loss without the linear part (arXiv 2510.05901)."""

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
    """Hide every layer's window, in the `with` block, from the share of sequences scheduled for this step.

    The hidden sequences depend on seed, step, micro batch and layer alone. So they are equal in a resumed stage, in a
    layer trained alone, and in recomputation by checkpointing. Only the mixer's `combined` is wrapped: names of
    parameters are unchanged, and so are attention weights, which use `combine` directly.
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
            vars(mixer).pop("combined", None)  # restores the method


def _hiding(mixer: LinearMixer, rate: float, seed: int) -> Callable[..., Tensor]:
    """Return `mixer.combined`, but with the linear part alone for queries with far keys in a share of sequences."""
    whole = mixer.combined

    def combined(
        inputs: AttnInputs, window: Partial | None, linear: Partial | None, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        if window is None or linear is None:
            return whole(inputs, window, linear, has_linear)
        # A copy, since parts are combined in place without gradients.
        alone = mixer.normalized(replace(linear, num=linear.num.clone()), inputs)
        y = whole(inputs, window, linear, has_linear)
        # Drawn on the CPU, so that all devices hide the same sequences.
        generator = torch.Generator().manual_seed(seed)
        hidden = (torch.rand(len(y), generator=generator) < rate).to(y.device)[:, None] & has_linear()
        return torch.where(hidden[:, None, :, None], alone.to(y.dtype), y)

    return combined
