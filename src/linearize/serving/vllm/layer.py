"""The layer that replaces paged softmax attention in vLLM's attention modules.

vLLM allocates a page per sequence for each such layer (`MambaSpec`). A step reads the states from the pages, runs the
layer's mixer from them, and writes them back. Sequences with one new token are batched; each part of a prompt is
processed separately, and can continue from a state.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from linearize.mixers.head_shards import WeightShard
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer_state import TokenCounts
from linearize.serving.vllm.operator import linearize_mixer
from linearize.serving.vllm.pages import PageLayout, stateful


class Extras(NamedTuple):
    """Inputs of a mixer besides q, k and v: the layer's input [N, E], positions [N], and q and k before RoPE."""

    hidden: Tensor | None = None
    positions: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None


@dataclass
class Step:
    """The work of a step, described once for all layers that use the same pages.

    Attributes:
        decodes: number of sequences with one new token, which come first.
        decode_slots, decode_counts: pages of these sequences, and how many tokens they have seen.
        pieces: parts of prompts: first token, end, page [1], and token counts, None if the sequence begins here.
    """

    decodes: int
    decode_slots: Tensor
    decode_counts: TokenCounts
    pieces: list[tuple[int, int, Tensor, TokenCounts | None]]


@dataclass
class LinearizeMetadata(LinearAttentionMetadata):
    """vLLM's metadata of linear attention, and the step."""

    step: Step | None = None


class LinearizeMetadataBuilder(LinearAttentionMetadataBuilder):
    """Builds the metadata with its `Step`."""

    # No CUDA graphs: the KV cache with eviction branches on data, and the number of pieces varies.
    _cudagraph_support = AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LinearizeMetadata:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        slots, decodes = found.state_indices_tensor.long(), found.num_decodes
        seen = common_attn_metadata.compute_num_computed_tokens().long()
        pieces = []
        if found.num_prefills:
            starts = common_attn_metadata.query_start_loc_cpu.tolist()
            begins = (seen == 0).tolist()
            for i in range(decodes, decodes + found.num_prefills):
                counts = None if begins[i] else TokenCounts(seen[i : i + 1])
                pieces.append((starts[i], starts[i + 1], slots[i : i + 1], counts))
        step = Step(decodes, slots[:decodes], TokenCounts(seen[:decodes]), pieces)
        return LinearizeMetadata(**vars(found), step=step)


class LinearizeBackend(LinearAttentionBackend):
    """vLLM's backend of linear attention, with our metadata."""

    @staticmethod
    def get_name() -> str:
        return "LINEARIZE"

    @staticmethod
    def get_builder_cls() -> type[LinearizeMetadataBuilder]:
        return LinearizeMetadataBuilder


class StateLayer(nn.Module, MambaBase):
    """Replacement of a layer's `Attention`, called with q, k and v after RoPE, [N, heads x D] each.

    Attributes:
        shards: by name, the part of each tensor of the whole layer's mixer that this process holds.
        kept: vLLM's own attention for KV heads that stay softmax; None if there are none.
        extras: further inputs, which the surrounding attention module sets before the call.
    """

    def __init__(
        self,
        mixer: LinearMixer | HeadwiseMixer,
        shards: dict[str, WeightShard],
        layout: PageLayout,
        *,
        scaling: float,
        softcap: float | None,
        page_bytes: int,
        kept: nn.Module | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.mixer, self.shards, self.layout, self.kept, self.page_bytes = mixer, shards, layout, kept, page_bytes
        self.scaling, self.softcap, self.layer_name = scaling, softcap, prefix
        self.extras = Extras()
        self.rope: nn.Module | None = None
        self.kv_cache = (torch.tensor([]),)
        self.views: list[Tensor] = []
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self
        self.shape, self.parts = mixer.shape, stateful(mixer)
        groups = self.shape.num_heads // self.shape.num_kv_heads
        self.query_heads = [[g * groups + i for g in heads for i in range(groups)] for heads, _ in self.parts]
        mine = {head for heads, _ in self.parts for head in heads}
        self.kept_heads = [head for head in range(self.shape.num_kv_heads) if head not in mine]
        self.kept_query_heads = [g * groups + i for g in self.kept_heads for i in range(groups)]

    # --- vLLM's interface --------------------------------------------------------------------------------------------

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.page_bytes,),)  # one size for all layers and processes; their layouts differ

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[LinearizeBackend]:
        return LinearizeBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Set the pages of all sequences, int8 [N, 1, 1, bytes]; vLLM copies whole pages."""
        pages = kv_cache.squeeze(dim=(1, 2))[:, : self.layout.nbytes]
        self.kv_cache, self.views = (pages,), self.layout.views(pages)

    # --- one step ----------------------------------------------------------------------------------------------------

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.zeros_like(query)
        linearize_mixer(query, key, value, *self.extras, output, self.layer_name)
        if self.kept is None:
            return output
        dim = self.shape.head_dim
        q, k, v = (x.unflatten(-1, (-1, dim)) for x in (query, key, value))
        q, k, v = q[:, self.kept_query_heads], k[:, self.kept_heads], v[:, self.kept_heads]
        y = self.kept(q.flatten(1), k.flatten(1), v.flatten(1))
        output.unflatten(-1, (-1, dim))[:, self.kept_query_heads] = y.unflatten(-1, (-1, dim))
        return output

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...], output: Tensor, metadata: Any
    ) -> None:
        """Fill the output [N, H x D] of the step's tokens, and update their pages."""
        step, extras = metadata.step, Extras(*extras)
        assert step is not None
        y = output.unflatten(-1, (-1, self.shape.head_dim))
        if n := step.decodes:
            inputs = self._inputs(q, k, v, extras, slice(0, n), one_each=True)
            states = self.layout.read(self.views, step.decode_slots, step.decode_counts)
            self._go_on(inputs, list(states), step.decode_slots, y[:n, :, None])
        for start, stop, slot, counts in step.pieces:
            inputs = self._inputs(q, k, v, extras, slice(start, stop), one_each=False)
            states = [None] * len(self.parts) if counts is None else self.layout.read(self.views, slot, counts)
            self._go_on(inputs, list(states), slot, y[start:stop].transpose(0, 1)[None])

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, some: slice, *, one_each: bool) -> AttnInputs:
        """Return the inputs of `some` tokens, of one sequence or (`one_each`) of one sequence each."""

        def rows(x: Tensor) -> Tensor:  # [n, X] -> [n, 1, X] or [1, n, X]
            return x[some][:, None] if one_each else x[some][None]

        def heads(x: Tensor) -> Tensor:  # [n, h x D] -> [n, h, 1, D] or [1, h, n, D]
            x = x[some].unflatten(-1, (-1, self.shape.head_dim))
            return x[:, :, None] if one_each else x.transpose(0, 1)[None]

        hidden = None if extras.hidden is None else rows(extras.hidden)
        unrotated = rope = None
        if extras.q is not None and extras.k is not None and extras.positions is not None:
            assert self.rope is not None
            cos, sin = self.rope.cos_sin_cache[extras.positions].to(q.dtype).chunk(2, dim=-1)  # type: ignore[index]
            unrotated = heads(extras.q), heads(extras.k)
            rope = rows(torch.cat([cos, cos], dim=-1)), rows(torch.cat([sin, sin], dim=-1))
        return AttnInputs(heads(q), heads(k), heads(v), self.scaling, self.softcap, hidden, unrotated, rope)

    def _go_on(self, inputs: AttnInputs, states: list[Any], slots: Tensor, output: Tensor) -> None:
        after = []
        for (heads, mixer), queries, state in zip(self.parts, self.query_heads, states, strict=True):
            every = len(heads) == self.shape.num_kv_heads
            y, found = mixer.step(inputs if every else inputs.heads(heads), state)
            if every:
                output.copy_(y)
            else:
                output[:, queries] = y
            after.append(found)
        self.layout.write(self.views, slots, after)
