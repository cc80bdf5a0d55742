"""Compute costs of mixers on torch's meta device, and the memory of generating with them.

Parameters and bytes of state are exact; FLOPs of a token are estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linearize.configs.mixer import HeadwiseConfig, LayerPlan, MixerConfig
from linearize.configs.shape import LayerShape
from linearize.hf.teacher import TeacherShape, break_even_tokens
from linearize.mixers.bidirectional import BidirectionalMixer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer

FP32 = 4


@dataclass(frozen=True)
class MixerCost:
    """The cost of one layer's mixer.

    Attributes:
        parameters: number of trainable parameters.
        state_bytes: bytes of a sequence's state, without its token count; 0 for an encoder.
        flops: FLOPs of matrix products in the forward pass of one token; for a decoder, of a step with a full window.
        grows: bytes per token of heads that keep softmax, whose FLOPs are not counted.
    """

    parameters: int
    state_bytes: int
    flops: int
    grows: int = 0


Mixers = Sequence[MixerCost | None]  # one per layer; None: the layer stays softmax


@dataclass(frozen=True)
class Memory:
    """Bytes of the state and KV cache of one sequence, of a student and of its teacher.

    `state_bytes`: constant, over the converted layers. `student_bytes_per_token`: growth in layers and heads that keep
    softmax; 0 is constant memory. Layers with sliding attention in the teacher are bounded, and their caches are
    counted for neither model.
    """

    state_bytes: int
    student_bytes_per_token: int
    teacher_bytes_per_token: int

    @property
    def break_even_tokens(self) -> int | None:
        """Return the number of tokens from which on the student needs fewer bytes; None if it never does."""
        return break_even_tokens(self.state_bytes, self.teacher_bytes_per_token, self.student_bytes_per_token)


def generation_memory(mixers: Mixers, teacher: TeacherShape, dtype: torch.dtype) -> Memory:
    """Return the memory of a sequence in student and teacher, with keys and values in `dtype`; 0 for an encoder."""
    growing = set(range(teacher.num_layers)) - set(teacher.sliding_layers)
    kept = growing & {index for index, mixer in enumerate(mixers) if mixer is None}
    cache = 0 if teacher.bidirectional else 2 * teacher.num_kv_heads * teacher.head_dim * dtype.itemsize
    converted = [mixer for mixer in mixers if mixer is not None]
    return Memory(
        state_bytes=sum(mixer.state_bytes for mixer in converted),
        student_bytes_per_token=cache * len(kept) + sum(mixer.grows for mixer in converted),
        teacher_bytes_per_token=cache * len(growing),
    )


def mixer_costs(layers: LayerPlan, teacher: TeacherShape, dtype: torch.dtype, rotary_dims: Sequence[int]) -> Mixers:
    """Return the cost of each layer's mixer; `rotary_dims` are those of `mixer_cost`, one per layer."""
    turned = list(zip(layers, rotary_dims, strict=True))
    different: dict[Any, MixerCost] = {
        (mixer, dims): mixer_cost(mixer, teacher, dtype, dims) for mixer, dims in set(turned) if mixer is not None
    }
    return [different.get(key) for key in turned]


@torch.no_grad()
def mixer_cost(
    config: MixerConfig | HeadwiseConfig, teacher: TeacherShape, dtype: torch.dtype, rotary_dims: int
) -> MixerCost:
    """Return a mixer's cost in a layer of `teacher`, in `dtype`; RoPE rotates `rotary_dims` dimensions of a head."""
    if isinstance(config, HeadwiseConfig):
        return _of_groups(config, teacher, dtype, rotary_dims)
    inputs, counter = one_token_inputs(teacher.layer, dtype, rotary_dims), FlopCounterMode(display=False)
    with torch.device("meta"):
        mixer = (BidirectionalMixer if teacher.bidirectional else LinearMixer)(config, teacher.layer)
    state_bytes = 0
    if isinstance(mixer, LinearMixer):
        state = mixer.state_like(inputs)
        with counter:
            mixer.step(inputs, state)
        state_bytes = state.nbytes - state.seen.nbytes
    else:
        with counter:
            mixer(inputs)
    parameters = sum(parameter.numel() for parameter in mixer.parameters())
    return MixerCost(parameters, state_bytes, counter.get_total_flops())


def _of_groups(config: HeadwiseConfig, teacher: TeacherShape, dtype: torch.dtype, rotary_dims: int) -> MixerCost:
    """Return the sum over groups of heads; heads that keep softmax count in `grows`."""
    costs, growing = [], 0
    per_kv_head = teacher.num_heads // teacher.num_kv_heads
    for group in config.groups:
        heads = len(group.kv_heads)
        if group.mixer is None:
            growing += heads
        else:
            part = replace(teacher, num_heads=heads * per_kv_head, num_kv_heads=heads)
            costs.append(mixer_cost(group.mixer, part, dtype, rotary_dims))
    return MixerCost(
        parameters=sum(cost.parameters for cost in costs),
        state_bytes=sum(cost.state_bytes for cost in costs),
        flops=sum(cost.flops for cost in costs),
        grows=2 * growing * teacher.head_dim * dtype.itemsize,
    )


def one_token_inputs(shape: LayerShape, dtype: torch.dtype, rotary_dims: int) -> AttnInputs:
    """Return all inputs that a layer can pass to its mixer, for one token, on the meta device."""

    def empty(*sizes: int) -> Tensor:
        return torch.empty(1, *sizes, dtype=dtype, device="meta")

    q, kv = (empty(heads, 1, shape.head_dim) for heads in (shape.num_heads, shape.num_kv_heads))
    angles = empty(1, rotary_dims)
    unrotated, rope = ((q, kv), (angles, angles)) if rotary_dims else (None, None)
    return AttnInputs(q, kv, kv, 1.0, hidden=empty(1, shape.hidden_size), unrotated=unrotated, rope=rope)


def softmax_flops(teacher: TeacherShape, keys: int) -> int:
    """Return the forward FLOPs of one query token's attention over `keys` keys in a layer: 2 x 2 x H x D x keys."""
    return 4 * teacher.num_heads * teacher.head_dim * keys
