"""The layout of a layer's state in vLLM: one page of bytes per sequence, divided into the tensors of the mixers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.configs.mixer import HeadwiseConfig, MixerConfig
from linearize.configs.shape import LayerShape
from linearize.costs import one_token_inputs
from linearize.hf.classes import read_plan
from linearize.hf.teacher import TeacherShape
from linearize.mixers.head_shards import shard_of_heads
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer_state import STATE_DTYPES, MixerState, TokenCounts

ALIGNMENT = 64  # of pages, in bytes; a multiple of every dtype's size
KINDS = (torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.float16)  # largest first, to avoid gaps


@dataclass(frozen=True)
class PageLayout:
    """Offsets in a page of each tensor of the states of one layer's mixers.

    The number of tokens seen is not stored: vLLM knows it for every sequence.

    Attributes:
        names: per tensor, (index of the mixer, name in its `MixerState`).
        shapes, dtypes: per tensor, without the batch axis; a last one pads the page to the alignment.
        empty: per tensor, the value of all entries before the first token.
    """

    names: tuple[tuple[int, str], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    empty: tuple[float, ...]

    @classmethod
    def of(
        cls, mixer: LinearMixer | HeadwiseMixer, dtype: torch.dtype, rotary_dims: int, state_dtype: str | None
    ) -> PageLayout:
        """Return the layout for a layer with this mixer, of a model in `dtype`.

        `rotary_dims` dimensions of a head are rotated (RoPE). `state_dtype` is the dtype of S between steps.
        """
        inputs, found = one_token_inputs(mixer.shape, dtype, rotary_dims), []
        for index, (heads, part) in enumerate(stateful(mixer)):
            state = part.state_like(inputs.heads(heads))
            state = state if state_dtype is None else state.matrices_in(STATE_DTYPES[state_dtype])
            named = {name: x for name, x in state.named_tensors().items() if name != "seen"}
            found += [((index, name), tuple(x.shape[1:]), x.dtype, _empty(name)) for name, x in named.items()]
        found.sort(key=lambda tensor: KINDS.index(tensor[2]))
        size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype, _ in found)
        names, shapes, dtypes, empty = zip(*found, strict=True)
        return cls(names, (*shapes, (-size % ALIGNMENT,)), (*dtypes, torch.uint8), empty)

    @property
    def nbytes(self) -> int:
        """Return the bytes of a page."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def views(self, pages: Tensor) -> list[Tensor]:
        """Return the tensors [N, ...] of pages [N, bytes], as views."""
        views, offset = [], 0
        for shape, dtype in zip(self.shapes[:-1], self.dtypes[:-1], strict=True):
            size = math.prod(shape) * dtype.itemsize
            views.append(pages[:, offset : offset + size].view(dtype).unflatten(1, shape))
            offset += size
        return views

    def read(self, views: Sequence[Tensor], slots: Tensor, counts: TokenCounts) -> list[MixerState]:
        """Return the mixers' states of the sequences in `slots` [B]; `counts` has how many tokens they have seen.

        A sequence that has seen none gets an empty state: its slot still has another sequence's data.
        """
        named: dict[int, dict[str, Tensor]] = {}
        new = counts.seen == 0
        for (index, name), view, empty in zip(self.names, views, self.empty, strict=True):
            x = view.index_select(0, slots)
            named.setdefault(index, {})[name] = x.masked_fill_(new.view(-1, *[1] * (x.ndim - 1)), empty)
        states = (MixerState.of(tensors | {"seen": counts.seen}) for _, tensors in sorted(named.items()))
        return [state.matrices_in(None).with_counts(counts) for state in states]

    def write(self, views: Sequence[Tensor], slots: Tensor, states: Sequence[MixerState]) -> None:
        """Write the states of the sequences to their slots."""
        named = [state.named_tensors() for state in states]
        for (index, name), view in zip(self.names, views, strict=True):
            view.index_copy_(0, slots, named[index][name].to(view.dtype))


def stateful(mixer: LinearMixer | HeadwiseMixer) -> list[tuple[tuple[int, ...], LinearMixer]]:
    """Return the KV heads and mixer of each group of a layer's heads that has a state of constant size."""
    return [(heads, part) for heads, part in mixer.parts() if isinstance(part, LinearMixer)]


def teacher_shape(config: Any) -> TeacherShape:
    """Return the sizes of a model, without its sliding windows."""
    return TeacherShape.from_config(config.to_dict() | {"layer_types": None})


def heads_of_ranks(config: Any, size: int) -> list[range]:
    """Return the KV heads of each of `size` processes, as vLLM divides q, k and v over them.

    Args:
        config: of a converted model.

    Raises:
        ValueError: processes would have different numbers of KV heads, or of softmax heads in a layer.
    """
    heads = teacher_shape(config).num_kv_heads
    if heads % size:
        raise ValueError(
            f"tensor_parallel_size: expected a divisor of the {heads} KV heads, because each has a state in one "
            f"process, found {size}; serve copies of the model (data_parallel_size)"
        )
    ranks = [range(rank * heads // size, (rank + 1) * heads // size) for rank in range(size)]
    for index, layer in enumerate(read_plan(config)):
        if isinstance(layer, HeadwiseConfig):
            kept = [head for group in layer.groups if group.mixer is None for head in group.kv_heads]
            if len({sum(head in rank for head in kept) for rank in ranks}) > 1:
                raise ValueError(
                    f"tensor_parallel_size: expected as many heads that stay softmax in each of {size} processes, "
                    f"because vLLM gives all the same pages, found KV heads {kept} in layer {index}; serve copies of "
                    "the model (data_parallel_size)"
                )
    return ranks


def page_layouts(config: Any, dtype: torch.dtype, heads: range) -> list[PageLayout | None]:
    """Return the page layout of these KV heads in each layer of a converted model in `dtype`; None for softmax."""
    shape, rope = teacher_shape(config).layer, getattr(config, "rope_parameters", None) or {}
    rotary_dims = int(shape.head_dim * rope.get("partial_rotary_factor", 1))
    state_dtype = getattr(config, "state_dtype", None)
    plan: tuple[Any, ...] = read_plan(config)  # configs are frozen, so they can be cache keys
    return [
        None if mixer is None else _page_layout(mixer, shape, heads, dtype, rotary_dims, state_dtype) for mixer in plan
    ]


@functools.cache  # many layers are equal, and vLLM calls this several times
def _page_layout(
    mixer: MixerConfig | HeadwiseConfig,
    shape: LayerShape,
    heads: range,
    dtype: torch.dtype,
    rotary_dims: int,
    state_dtype: str | None,
) -> PageLayout:
    with torch.device("meta"):
        own, _ = shard_of_heads(mixer, shape, heads)
        return PageLayout.of(own, dtype, rotary_dims, state_dtype)


def page_bytes(vllm_config: Any) -> int:
    """Return the bytes of a page (one sequence in one layer): the maximum over layers and processes."""
    model, size = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    each = (page_layouts(model.hf_config, model.dtype, heads) for heads in heads_of_ranks(model.hf_config, size))
    return max(layout.nbytes for layouts in each for layout in layouts if layout)


def _empty(name: str) -> float:
    """Return the initial value of a tensor of a `MixerState`."""
    return -math.inf if name == "maximum" else -1.0 if name == "cached_position" else 0.0
