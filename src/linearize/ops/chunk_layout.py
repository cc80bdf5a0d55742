"""The key slots of a layout, put in order, as whole chunks."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from linearize.ops.layout import Layout


class ChunkLayout:
    """The K key slots in order, padded to P, a whole number of chunks; queries take the slots of their own keys."""

    def __init__(self, layout: Layout, chunk: int) -> None:
        self.layout = layout
        self.length = layout.key_position.shape[1]
        self.chunk = chunk if self.length >= chunk else -(-self.length // 16) * 16
        self.padding = -self.length % self.chunk
        position, document = layout.key_position, layout.key_document
        if layout.compaction is not None:
            position, document = position.gather(1, layout.compaction), document.gather(1, layout.compaction)
            document = document.where(position >= 0, layout.last_document)
        self.position = F.pad(position, (0, self.padding), value=-1)
        self.document = F.pad(document, (0, self.padding), mode="replicate") if self.padding else document

    @property
    def num_chunks(self) -> int:
        return self.position.shape[1] // self.chunk

    def spread(self, x: Float[Tensor, "B h N X"]) -> Float[Tensor, "B h P X"]:
        """Keys (N = K) or queries (N = T) on ordered slots, zeros elsewhere."""
        before = self.length - x.shape[2]
        if self.layout.compaction is None:
            return F.pad(x, (0, 0, before, self.padding)) if before or self.padding else x
        x = F.pad(x, (0, 0, before, 0)) if before else x
        x = x.gather(2, self.layout.compaction[:, None, :, None].expand_as(x))
        return F.pad(x, (0, 0, 0, self.padding))

    def collect(self, x: Float[Tensor, "B H P X"], count: int) -> Float[Tensor, "B H N X"]:
        """Back from ordered slots: the last `count` ones, K for keys and T for queries (padding's are zero already)."""
        first = self.length - count
        if self.layout.compaction is None:
            return x[:, :, first : self.length]
        back = self.layout.compaction.argsort(1)[:, None, first:, None]
        return x[:, :, : self.length].gather(2, back.expand(-1, x.shape[1], -1, x.shape[3]))
