"""Linear time and memory, any length: softmax scores and linear scores by chunks, the linear state carried between.

A query's linear keys are those in whole chunks that lie below every lo(n) of its chunk (read through the state) and the
few chunks above, read through masked scores. For a window as long as a chunk that is one chunk of scores, the same as
for pure linear attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from linearize.ops.blockwise import blockwise
from linearize.ops.layout import Layout
from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.span import Span
from linearize.ops.state import LinearState, expand_values

CHUNK = 64
# Scores per block: large enough to fill the device, small enough on a CPU to stay in cache and off fresh pages.
BLOCK_SCORES = {"cpu": 2**21, "cuda": 2**26}
MAX_CHUNKS_PER_BLOCK = 64


class _Slots:
    """The K key slots, put in order, as whole chunks; queries take the slots of their own keys."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.length = layout.key_position.shape[1]
        self.chunk = CHUNK if self.length >= CHUNK else -(-self.length // 16) * 16
        self.padding = -self.length % self.chunk
        position, document = layout.key_position, layout.key_document
        if layout.compaction is not None:
            position, document = position.gather(1, layout.compaction), document.gather(1, layout.compaction)
            document = document.where(position >= 0, layout.last_document)
        self.position = F.pad(position, (0, self.padding), value=-1)
        self.document = F.pad(document, (0, self.padding), mode="replicate") if self.padding else document

    def spread(self, x: Float[Tensor, "B h N X"]) -> Float[Tensor, "B h P X"]:
        """Keys (N = K) or queries (N = T) on ordered slots, zeros elsewhere."""
        before = self.length - x.shape[2]
        if self.layout.compaction is None:
            return F.pad(x, (0, 0, before, self.padding)) if before or self.padding else x
        x = F.pad(x, (0, 0, before, 0)) if before else x
        x = x.gather(2, self.layout.compaction[:, None, :, None].expand_as(x))
        return F.pad(x, (0, 0, 0, self.padding))

    def collect(self, x: Float[Tensor, "B H P X"]) -> Float[Tensor, "B H T X"]:
        """Query outputs, back from ordered slots; rows of padding queries are zero already."""
        if self.layout.compaction is None:
            return x[:, :, self.length - self.layout.length : self.length]
        back = self.layout.compaction.argsort(1)[:, None, self.length - self.layout.length :, None]
        return x[:, :, : self.length].gather(2, back.expand(-1, x.shape[1], -1, x.shape[3]))

    def block_size(self, scores_per_slot: int, device: torch.device) -> int:
        """Slots per block, a whole number of chunks."""
        budget = BLOCK_SCORES.get(device.type, BLOCK_SCORES["cuda"])
        chunks = min(MAX_CHUNKS_PER_BLOCK, max(1, budget // (scores_per_slot * self.chunk)))
        return chunks * self.chunk


def _chunk_heads(x: Tensor, heads: int, n: int) -> Tensor:
    """[B, H, n C, X] -> [B, h, n, (H/h) C, X]: query heads that share a key head lie side by side."""
    x = x.unflatten(2, (n, -1)).unflatten(1, (heads, -1))
    return x.transpose(2, 3).flatten(3, 4)


def _unchunk_heads(x: Tensor, group: int) -> Tensor:
    """[B, h, n, g C, X] -> [B, h g, n C, X], the inverse of `_chunk_heads`."""
    return x.unflatten(3, (group, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _near(x: Tensor, axis: int, n: int, count: int) -> Tensor:
    """Per query chunk, the `count` chunks of keys that begin at its own index, side by side along `axis` + 1."""
    parts = [x.narrow(axis, i, n) for i in range(count)]
    return parts[0] if count == 1 else torch.cat(parts, dim=axis + 1)


def _key_chunks(x: Tensor, chunks: int, chunk: int) -> Tensor:
    """Keys as [B, h, chunks, C, X], zeros in front where the sequence has not begun."""
    missing = chunks * chunk - x.shape[2]
    return (F.pad(x, (0, 0, missing, 0)) if missing else x).unflatten(2, (chunks, chunk))


def linear_scan(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk K F"],
    v: Float[Tensor, "B G K D"],
    *,
    span: Span,
    layout: Layout,
    state: LinearState | None = None,
) -> Partial:
    """The linear part (`reference.linear_scan`) in O(T) time and memory, forward and backward."""
    dtype, heads, group = accumulation_dtype(v.dtype), phi_k.shape[1], phi_q.shape[1] // phi_k.shape[1]
    slots = _Slots(layout)
    chunk = slots.chunk
    phi_q, phi_k, v = (slots.spread(x.to(dtype)) for x in (phi_q, phi_k, expand_values(v, heads)))
    if not layout.uniform or span.sinks:
        phi_k = phi_k * (slots.position >= span.sinks)[:, None, :, None]
    # Keys of query chunk c: chunks c - first .. c - last through scores, all before through the state.
    first, last = -((1 - span.max_lag) // chunk), -((chunk - 1 - span.min_lag) // chunk)
    k_position = F.pad(slots.position, (first * chunk, 0), value=-1)
    k_document = F.pad(slots.document, (first * chunk, 0))
    # Document of the slot before each chunk: it owns the state there. The carried document, 0, before the first.
    boundary = F.pad(k_document, (1, 0))[:, ::chunk]

    def block(start: int, stop: int, carry: Sequence[Tensor], inputs: Sequence[Tensor]):
        S, z = carry
        n = (stop - start) // chunk
        q = _chunk_heads(inputs[0], heads, n)
        keys, values = (_key_chunks(x, n + first, chunk) for x in inputs[1:])
        near_k, near_v = (_near(x, 2, n, first - last + 1) for x in (keys, values))

        q_position, q_document = (x[:, start:stop].unflatten(1, (n, chunk)) for x in (slots.position, slots.document))
        k_chunks = [x[:, start : stop + first * chunk].unflatten(1, (n + first, chunk)) for x in (k_position, k_document)]
        near_position, near_document = (_near(x, 1, n, first - last + 1)[:, :, None] for x in k_chunks)
        mask = near_position < span.lo(q_position)[..., None]
        if not layout.uniform:
            mask &= (near_document == q_document[..., None]) & (q_position >= 0)[..., None]
        scores = q @ near_k.transpose(-1, -2)
        scores = (scores.unflatten(3, (group, chunk)) * mask[:, None, :, None]).flatten(3, 4)

        # The state before old chunk i, for i = 0 .. n: of the document that owns the slot before it, nothing else.
        old_k, old_v = keys[:, :, :n], values[:, :, :n]
        owner = boundary[:, start // chunk : start // chunk + n + 1]
        if not layout.uniform:
            old_k = old_k * (k_chunks[1][:, :n] == owner[:, 1:, None])[:, None, ..., None]
        folded = torch.cat([S[:, :, None], old_k.transpose(-1, -2) @ old_v], dim=2)
        folded_z = torch.cat([z[:, :, None], old_k.sum(-2)], dim=2)
        into = (owner[:, :, None] == owner[:, None, :]).tril()[:, None].to(dtype)
        states = (into @ folded.flatten(3)).unflatten(3, S.shape[2:])
        sums = into @ folded_z

        reads = q
        if not layout.uniform:
            own = (q_document == owner[:, :n, None]) & (q_position >= 0)
            reads = (q.unflatten(3, (group, chunk)) * own[:, None, :, None, :, None]).flatten(3, 4)
        num = scores @ near_v + reads @ states[:, :, :n]
        den = scores.sum(-1, keepdim=True) + reads @ sums[:, :, :n, :, None]
        return (_unchunk_heads(num, group), _unchunk_heads(den, group)), (states[:, :, n], sums[:, :, n])

    S = phi_k.new_zeros(*phi_k.shape[:2], phi_k.shape[-1], v.shape[-1]) if state is None else state.S.to(dtype)
    z = phi_k.new_zeros(*phi_k.shape[:2], phi_k.shape[-1]) if state is None else state.z.to(dtype)
    size = slots.block_size(phi_q.shape[0] * phi_q.shape[1] * (first - last + 1) * chunk, phi_q.device)
    num, den = blockwise(block, (phi_q, phi_k, v), (0, first * chunk, first * chunk), (S, z), size)
    den = slots.collect(den).squeeze(-1)
    return Partial(slots.collect(num), den, torch.zeros_like(den))


def window_softmax(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    *,
    span: Span,
    scaling: float,
    softcap: float | None = None,
    layout: Layout,
) -> Partial:
    """The softmax part (`reference.window_softmax`) in O(T w) time and O(T) memory, forward and backward."""
    dtype, heads, group = accumulation_dtype(v.dtype), k.shape[1], q.shape[1] // k.shape[1]
    slots = _Slots(layout)
    chunk = slots.chunk
    q, k, v = (slots.spread(x) for x in (q.to(dtype) * scaling, k.to(dtype), v.to(dtype)))
    first = -((1 - span.max_lag) // chunk)
    k_position = F.pad(slots.position, (first * chunk, 0), value=-1)
    k_document = F.pad(slots.document, (first * chunk, 0))
    sink_keys, sink_seen = _sink_keys(slots, span, (k, v)) if span.sinks else ((), None)

    def cap(scores: Tensor) -> Tensor:
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def block(start: int, stop: int, carry: Sequence[Tensor], inputs: Sequence[Tensor]):
        n = (stop - start) // chunk
        q = _chunk_heads(inputs[0], heads, n)
        near_k, near_v = (_near(_key_chunks(x, n + first, chunk), 2, n, first + 1) for x in inputs[1:3])
        q_position, q_document = (x[:, start:stop].unflatten(1, (n, chunk)) for x in (slots.position, slots.document))
        k_chunks = [x[:, start : stop + first * chunk].unflatten(1, (n + first, chunk)) for x in (k_position, k_document)]
        near_position, near_document = (_near(x, 1, n, first + 1)[:, :, None] for x in k_chunks)
        mask = (near_position >= span.lo(q_position).clamp_min(0)[..., None]) & (near_position <= q_position[..., None])
        if not layout.uniform:
            mask &= near_document == q_document[..., None]
        scores = cap(q @ near_k.transpose(-1, -2)).unflatten(3, (group, chunk))
        scores = scores.masked_fill(~mask[:, None, :, None], -torch.inf)
        if sink_seen is not None:
            sink_k, sink_v = (x.unflatten(2, (n, chunk))[:, :, :, None] for x in inputs[3:])
            sink_scores = cap((q.unflatten(3, (group, chunk))[..., None, :] * sink_k).sum(-1))
            seen = sink_seen[:, start:stop].unflatten(1, (n, chunk))[:, None, :, None]
            scores = torch.cat([scores, sink_scores.masked_fill(~seen, -torch.inf)], dim=-1)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0, top)
        weights = torch.exp(scores - top)
        num = weights[..., : near_k.shape[3]].flatten(3, 4) @ near_v
        if sink_seen is not None:
            num = num + (weights[..., near_k.shape[3] :, None] * sink_v).sum(-2).flatten(3, 4)
        rest = torch.stack([weights.sum(-1), top.squeeze(-1)], dim=-1).flatten(3, 4)
        return (_unchunk_heads(num, group), _unchunk_heads(rest, group)), ()

    size = slots.block_size(q.shape[0] * q.shape[1] * (first + 1) * chunk, q.device)
    reach = first * chunk
    inputs, reaches = (q, k, v, *sink_keys), (0, reach, reach, *(0 for _ in sink_keys))
    num, rest = (slots.collect(x) for x in blockwise(block, inputs, reaches, (), size))
    return Partial(num, *rest.unbind(-1))


def _sink_keys(slots: _Slots, span: Span, keys: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Per query slot the sinks of its document, [B, h, P, sinks, X], and which of them lie outside its window."""
    sink = torch.arange(span.sinks, device=slots.position.device)
    position = slots.position[:, :, None]
    slot = torch.arange(slots.position.shape[1], device=position.device)[None, :, None] - position + sink
    if slots.layout.sink_slots:
        moved = (slots.position[:, None, : span.sinks] == sink) & (slots.document == 0)[:, :, None]
        slot = torch.where(moved, sink, slot)
    seen = (position >= 0) & (sink < span.lo(position)) & (sink <= position)
    slot = torch.where(seen, slot, 0)

    def take(x: Tensor) -> Tensor:
        index = slot.flatten(1)[:, None, :, None].expand(len(x), x.shape[1], -1, x.shape[3])
        return x.gather(2, index).unflatten(2, (-1, span.sinks))

    return tuple(take(x) for x in keys), seen
