"""Cut rows and slots into blocks, and blocks into chunks; and scan: compute one block after another.

Intermediate tensors exist for one block at a time, forward and backward, so memory is linear in the sequence.

The scan is a checkpointed recurrence. Forward keeps the inputs and the state before each segment of chunks. Backward
goes from the last block to the first and recomputes each one. A `Body` defines the computation within a block. There
are three: softmax in the window, the linear part with at most one decay per head (both in `chunked`), and
`chunk_recurrence` (vector decays, the delta rule), whose backward pass is autograd's. The linear part has a body with a
backward pass of its own, because most recipes use it. As a `chunk_recurrence` it would take longer by these factors
(8 heads, D = F = 64, one CPU thread, medians of 15 interleaved rounds):

    at 1,024 and 4,096 tokens      forward        forward and backward
    no decay                       1.35, 1.43     1.43, 1.59
    one decay per head             1.70, 2.17     1.94, 2.36

Without any masks and decays, autograd's backward pass still takes 1.4 to 1.6 times as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.ops.block_sizes import kind
from linearize.ops.layout import SequenceLayout

# Scores per block: large enough to fill the device, small enough on a CPU to stay in cache and off fresh pages.
BLOCK_SCORES = {"cpu": 2**18, "cuda": 2**26}
BLOCK_FEATURES = {"cpu": 2**20, "cuda": 2**26}  # numbers of features per block, if a kernel makes them in the block
MAX_CHUNKS_PER_BLOCK = 64  # carrying the state from chunk to chunk costs the square of their number


class ChunkLayout:
    """The K key slots in order, padded to P, a whole number of chunks; queries are in the slots of their own keys."""

    def __init__(self, layout: SequenceLayout, chunk: int) -> None:
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
        """Return keys (N = K) or queries (N = T) in ordered slots, zeros elsewhere."""
        before = self.length - x.shape[2]
        if self.layout.compaction is None:
            return F.pad(x, (0, 0, before, self.padding)) if before or self.padding else x
        x = F.pad(x, (0, 0, before, 0)) if before else x
        x = x.gather(2, self.layout.compaction[:, None, :, None].expand_as(x))
        return F.pad(x, (0, 0, 0, self.padding))

    def collect(self, x: Float[Tensor, "B H P X"], count: int) -> Float[Tensor, "B H N X"]:
        """Undo `spread`: return the last `count` slots, K for keys and T for queries; padding has zeros already."""
        first = self.length - count
        if self.layout.compaction is None:
            return x[:, :, first : self.length]
        back = self.layout.compaction.argsort(1)[:, None, first:, None]
        return x[:, :, : self.length].gather(2, back.expand(-1, x.shape[1], -1, x.shape[3]))


class Block(NamedTuple):
    """A unit of work: slots start..stop, which are segment number `segment`, of some batch entries and key heads."""

    segment: int
    batch: slice
    heads: slice
    start: int
    stop: int
    masks: Any  # shared by all heads of the batch entries

    @property
    def rows(self) -> tuple[slice, slice]:
        return self.batch, self.heads


class Around(NamedTuple):
    """Positions, or documents: of the queries in each chunk, of the keys near each, and of the keys in each."""

    queries: Int[Tensor, "b n C"]
    near: Int[Tensor, "b n W"]
    keys: Int[Tensor, "b m C"]


class Grid:
    """Chunks of queries, each with its near keys: its own chunk of keys and the `first` chunks before it.

    Axes within a block: b batch entries, h key heads with g query heads each, n chunks of C query slots, m = n + first
    chunks of key slots, W = (first + 1) C near keys.

    Keys may be delayed: a key then lies `delay` slots after its own slot.

    Attributes:
        query_position, query_document: of the slots.
        position, document: of the delayed keys, after `first` empty chunks, which are near keys of the first queries.
        uniform: every row is one document without padding.
        owner: [B, N + 1], document of the slot before the near keys of each chunk, and of the chunk after the last.
    """

    def __init__(
        self,
        slots: ChunkLayout,
        rows: Sequence[int],
        group: int,
        at_once: int,
        max_chunks: int,
        first: int = 0,
        delay: int = 0,
    ) -> None:
        """Take numbers of batch entries and key heads (`rows`), and the most chunks of a block, and of a row in it."""
        self.chunk, self.length, self.uniform = slots.chunk, slots.num_chunks * slots.chunk, slots.layout.uniform
        self.rows, self.group, self.first = rows, group, first
        self.delay = min(delay, self.length)  # no query reads keys after the last slot
        self.query_position, self.query_document = slots.position.int(), slots.document.int()
        self.position = self.lay_keys(self.query_position, empty=-1)
        self.document = self.lay_keys(self.query_document, empty=0)
        self.owner = F.pad(self.document, (1, 0))[:, : self.length + 1 : self.chunk]
        chunks = max(1, min(at_once, max_chunks, slots.num_chunks))
        self.size, self.max_rows = chunks * self.chunk, max(1, at_once // chunks)

    def lay_keys(self, x: Shaped[Tensor, "*rows P"], empty: int) -> Shaped[Tensor, "*rows Q"]:
        """Return the slots' numbers moved to their delayed keys, with `empty` before them."""
        front = self.first * self.chunk
        return F.pad(x, (front + self.delay, 0), value=empty)[..., : front + self.length]

    @property
    def num_segments(self) -> int:
        return -(-self.length // self.size)

    def blocks(self, masks: Callable[[slice, int, int], Any], reverse: bool = False) -> Iterator[Block]:
        """Yield all blocks in order of slots, or reversed, each with the `masks(batch, start, stop)` of its heads."""
        segments = range(self.num_segments)
        for index in reversed(segments) if reverse else segments:
            start, stop = index * self.size, min((index + 1) * self.size, self.length)
            for batch in _slices(self.rows[0], self.max_rows // self.rows[1]):
                shared = masks(batch, start, stop)
                for heads in _slices(self.rows[1], self.max_rows):
                    yield Block(index, batch, heads, start, stop, shared)

    def around(self, batch: slice, start: int, stop: int) -> tuple[Around, Around, Int[Tensor, "b N1"]]:
        """Return positions and documents of the slots start..stop, and owners of their chunks and of the next one."""
        reach, found = (self.first + 1) * self.chunk, []
        for queries, keys in ((self.query_position, self.position), (self.query_document, self.document)):
            queries, keys = pick(queries, batch)[:, start:stop], pick(keys, batch)[:, start : stop + reach - self.chunk]
            queries, near = queries.unflatten(1, (-1, self.chunk)), keys.unfold(1, reach, self.chunk)
            found.append(Around(queries, near, keys.unflatten(1, (-1, self.chunk))))
        owner = pick(self.owner, batch)[:, start // self.chunk : stop // self.chunk + 1]
        return found[0], found[1], owner

    def repeat_queries(self, x: Shaped[Tensor, "b h n C Y"]) -> Shaped[Tensor, "b h n gC Y"]:
        """Repeat x for each query head that shares a key head, in the order of `queries`."""
        return x if self.group == 1 else x[:, :, :, None].expand(-1, -1, -1, self.group, -1, -1).flatten(3, 4)

    def queries(self, x: Float[Tensor, "B H P X"], block: Block) -> Float[Tensor, "b h n gC X"]:
        """Return the queries by chunk; heads that share a key head are concatenated."""
        x = self.query_rows(x, block).unflatten(2, (-1, self.chunk)).unflatten(1, (-1, self.group))
        return x.transpose(2, 3).flatten(3, 4)

    def put_queries(self, out: Float[Tensor, "B H P X"], block: Block, x: Float[Tensor, "b h n gC X"]) -> None:
        """Write back what `queries` reads."""
        x = x.unflatten(3, (self.group, -1)).transpose(2, 3)
        self.query_rows(out, block).copy_(x.flatten(3, 4).flatten(1, 2))

    def put_product(
        self,
        out: Float[Tensor, "B H P X"],
        block: Block,
        a: Float[Tensor, "b h n gC Y"],
        b: Float[Tensor, "b h n Y X"],
        added: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write a @ b (+ the product of the pair `added`) as `put_queries`, without a copy if a block is one row."""
        if self.group > 1 or block.batch.stop - block.batch.start > 1 or block.heads.stop - block.heads.start > 1:
            y = a @ b
            self.put_queries(out, block, y if added is None else y.add_(added[0] @ added[1]))
            return
        y = self.query_rows(out, block)[0, 0].unflatten(0, (-1, self.chunk))
        torch.bmm(a[0, 0], b[0, 0], out=y)
        if added is not None:
            y.baddbmm_(added[0][0, 0], added[1][0, 0])

    def keys(self, x: Float[Tensor, "B Hk P X"], block: Block) -> Float[Tensor, "b h m C X"]:
        """Return the keys by chunk, with the `first` chunks before them: zeros before the sequence."""
        x = self._key_rows(x, block)
        missing = block.stop - block.start + self.first * self.chunk - x.shape[2]
        if missing:  # F.pad would write everything twice
            x = torch.cat([x.new_zeros(*x.shape[:2], missing, x.shape[3]), x], dim=2)
        return x.unflatten(2, (-1, self.chunk))

    def add_keys(self, out: Float[Tensor, "B Hk P X"], block: Block, x: Float[Tensor, "b h m C X"]) -> None:
        """Add x to the keys that `keys` reads."""
        rows, x = self._key_rows(out, block), x.flatten(2, 3)
        rows += x[:, :, x.shape[2] - rows.shape[2] :]

    def near(self, keys: Float[Tensor, "b h m C X"]) -> Float[Tensor, "b h n W X"]:
        """Return the near keys of each query chunk."""
        n = keys.shape[2] - self.first
        return keys.flatten(2, 3).unfold(2, (self.first + 1) * self.chunk, self.chunk)[:, :, :n].mT

    def fold(self, near: Float[Tensor, "b h n W X"]) -> Float[Tensor, "b h m C X"]:
        """Return the adjoint of `near`: for each key chunk, the sum over the query chunks that it is near to."""
        n = near.shape[2]
        out = near.new_zeros(*near.shape[:2], n + self.first, self.chunk, near.shape[4])
        for i, part in enumerate(near.split(self.chunk, dim=3)):
            out[:, :, i : i + n] += part
        return out

    def query_rows(self, x: Tensor, block: Block) -> Tensor:
        """Return the block's view of a tensor with the queries' heads and slots."""
        heads = slice(block.heads.start * self.group, block.heads.stop * self.group)
        return x[block.batch, heads, block.start : block.stop]

    def _key_rows(self, x: Tensor, block: Block) -> Tensor:
        start, stop = block.start - self.first * self.chunk - self.delay, block.stop - self.delay
        return x[block.batch, block.heads, max(0, start) : max(0, stop)]


def chunks_back(slots: ChunkLayout, distance: int) -> int:
    """Return how many chunks before its own a query needs to reach all slots less than `distance` before it."""
    return -((1 - max(1, distance)) // slots.chunk)


def make_grid(slots: ChunkLayout, q: Tensor, k: Tensor, first: int, delay: int = 0, features: int = 0) -> Grid:
    """Return a grid whose query chunks have `first` near chunks besides their own, with blocks of the device's size.

    `features`: number of features of a query if the block makes them, else 0.
    """
    device, group = kind(q.device), q.shape[1] // k.shape[1]
    at_once = BLOCK_SCORES[device] // (group * (first + 1) * slots.chunk**2)
    if features:
        at_once = min(at_once, BLOCK_FEATURES[device] // (group * slots.chunk * features))
    return Grid(slots, k.shape[:2], group, at_once, MAX_CHUNKS_PER_BLOCK, first, delay)


def pick(x: Shaped[Tensor, "#B ..."], batch: slice) -> Shaped[Tensor, "b ..."]:
    """Return some batch entries of a tensor that has one entry for all, or one each."""
    return x[batch] if len(x) > 1 else x


def _slices(length: int, step: int) -> list[slice]:
    step = max(1, step)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


# --- the scan ---------------------------------------------------------------------------------------------------------

Tensors = Sequence[Tensor]
Grads = Sequence[Tensor | None]


class BlockArgs(NamedTuple):
    """The arguments of a body for one block: the state before it, [b, h, ...] each; all inputs, [B, H or Hk, P, X]."""

    block: Block
    state: Tensors
    inputs: Tensors


class Body(ABC):
    """The computation of a scan within a block."""

    grid: Grid

    @abstractmethod
    def masks(self, batch: slice, start: int, stop: int) -> Any:
        """Return the masks that all heads of a block share."""

    @abstractmethod
    def forward(self, args: BlockArgs, outputs: Tensors) -> Tensors:
        """Write the outputs of the block's queries; return the state after the block."""

    @abstractmethod
    def backward(self, args: BlockArgs, grad_after: Tensors, grad_outputs: Tensors, grads: Grads) -> Tensors:
        """Return the gradient of the state before the block, given that of the state after it.

        `grads` are the gradients of the inputs, None if not wanted. Write that of the first input, the queries; add to
        all others.
        """


def scan(body: Body, widths: Sequence[int], state: Tensors, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return one output [B, H, P, width] for each of `widths`, with the first input's heads and slots.

    `state` is that before the first slot.
    """
    return _Scan.apply(body, widths, len(state), *state, *inputs)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: Body, widths: Sequence[int], num_states: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        state, inputs = tensors[:num_states], tensors[num_states:]
        outputs = tuple(inputs[0].new_empty(*inputs[0].shape[:3], width) for width in widths)
        # Backward needs the states before all segments; without it, only the current one is kept.
        kept = body.grid.num_segments if any(ctx.needs_input_grad) else 0
        states = tuple(x.new_empty(kept + 1, *x.shape) for x in state)
        for x, first in zip(states, state, strict=True):
            x[0] = first
        for block in body.grid.blocks(body.masks):
            before, after = (block.segment, block.segment + 1) if kept else (0, 0)
            args = BlockArgs(block, [x[before][block.rows] for x in states], inputs)
            for x, y in zip(states, body.forward(args, outputs), strict=True):
                x[after][block.rows] = y
        ctx.save_for_backward(*states, *inputs)
        ctx.body, ctx.num_states = body, num_states
        return outputs

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        body: Body = ctx.body
        saved = ctx.saved_tensors  # read once: gradient checkpointing recomputes them on each access
        states, inputs = saved[: ctx.num_states], saved[ctx.num_states :]
        wanted = ctx.needs_input_grad[3 + ctx.num_states :]
        new = (torch.empty_like, *(torch.zeros_like for _ in inputs[1:]))
        grads = [make(x) if want else None for make, x, want in zip(new, inputs, wanted, strict=True)]
        grad_state = [torch.zeros_like(x[0]) for x in states]
        for block in body.grid.blocks(body.masks, reverse=True):
            args = BlockArgs(block, [x[block.segment][block.rows] for x in states], inputs)
            found = body.backward(args, [x[block.rows] for x in grad_state], grad_outputs, grads)
            for x, g in zip(grad_state, found, strict=True):
                x[block.rows] = g
        return None, None, None, *grad_state, *grads
