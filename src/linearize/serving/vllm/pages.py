"""A layer's state as vLLM keeps it: one page of bytes per sequence, cut into the tensors that its mixers name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.mixers.config import HeadwiseConfig, MixerConfig
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer_state import STATE_DTYPES, Clock, MixerState
from linearize.mixers.shape import LayerShape

ALIGNMENT = 64  # of pages, in bytes: any dtype can begin there
KINDS = (torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.float16)  # largest first: no gaps between


@dataclass(frozen=True)
class PageLayout:
    """Where each tensor of the states of one layer's mixers lies in a page.

    How many tokens were seen is not in it: vLLM says that of every sequence.

    Attributes:
        names: of each tensor, as (which of the mixers, name in its `MixerState`).
        shapes, dtypes: of each, without the batch axis; a last one fills the page up to the alignment.
        empty: what each holds before the first token, everywhere.
    """

    names: tuple[tuple[int, str], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    empty: tuple[float, ...]

    @classmethod
    def of(
        cls,
        config: MixerConfig | HeadwiseConfig,
        shape: LayerShape,
        dtype: torch.dtype,
        rotary_dims: int,
        state_dtype: str | None,
    ) -> PageLayout:
        """The layout for a layer with these mixers, of a model in `dtype` that rotates `rotary_dims` dimensions of a
        head (RoPE). `state_dtype` is the model's: in what S is kept between steps.
        """
        with torch.device("meta"):
            mixer = (HeadwiseMixer if isinstance(config, HeadwiseConfig) else LinearMixer)(config, shape)  # type: ignore
        inputs, found = _one_token(shape, dtype, rotary_dims), []
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
        """Bytes of a page."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def views(self, pages: Tensor) -> list[Tensor]:
        """The tensors [N, ...] that lie in pages [N, bytes]."""
        views, offset = [], 0
        for shape, dtype in zip(self.shapes[:-1], self.dtypes[:-1], strict=True):
            size = math.prod(shape) * dtype.itemsize
            views.append(pages[:, offset : offset + size].view(dtype).unflatten(1, shape))
            offset += size
        return views

    def read(self, views: Sequence[Tensor], slots: Tensor, clock: Clock) -> list[MixerState]:
        """The states of the sequences in `slots` [B], as mixers read them; the clock says how many tokens they saw.

        One that saw none has an empty state, whatever lies in its slot: that was another sequence's.
        """
        named: dict[int, dict[str, Tensor]] = {}
        new = clock.seen == 0
        for (index, name), view, empty in zip(self.names, views, self.empty, strict=True):
            x = view.index_select(0, slots)
            named.setdefault(index, {})[name] = x.masked_fill_(new.view(-1, *[1] * (x.ndim - 1)), empty)
        states = (MixerState.of(tensors | {"seen": clock.seen}) for _, tensors in sorted(named.items()))
        return [state.matrices_in(None).on_clock(clock) for state in states]

    def write(self, views: Sequence[Tensor], slots: Tensor, states: Sequence[MixerState]) -> None:
        """Put the states of the sequences into their slots."""
        named = [state.named_tensors() for state in states]
        for (index, name), view in zip(self.names, views, strict=True):
            view.index_copy_(0, slots, named[index][name].to(view.dtype))


def stateful(mixer: LinearMixer | HeadwiseMixer) -> list[tuple[tuple[int, ...], LinearMixer]]:
    """KV heads and mixer of each group of a layer's heads that has a state of constant size."""
    return [(heads, part) for heads, part in mixer.parts() if isinstance(part, LinearMixer)]


def _one_token(shape: LayerShape, dtype: torch.dtype, rotary_dims: int) -> AttnInputs:
    """All that a layer can hand its mixer."""

    def empty(*sizes: int) -> Tensor:
        return torch.empty(1, *sizes, dtype=dtype, device="meta")

    q, kv = (empty(heads, 1, shape.head_dim) for heads in (shape.num_heads, shape.num_kv_heads))
    angles = empty(1, rotary_dims)
    return AttnInputs(q, kv, kv, 1.0, None, empty(1, shape.hidden_size), (q, kv), (angles, angles))


def _empty(name: str) -> float:
    """What a tensor of a `MixerState` holds before the first token."""
    return -math.inf if name == "maximum" else -1.0 if name == "exact.position" else 0.0
