"""The state of a mixer from call to call: constant in size, except for heads that keep all of their keys."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from linearize.configs.spans import Span
from linearize.ops.inputs import LinearState
from linearize.ops.layout import SequenceLayout, Tokens, context_positions, slot_positions, slots_of

AnyState = TypeVar("AnyState", bound="State")
Found = TypeVar("Found")
MATRICES = ("linear.S", "linear.next_S")
STATE_DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GROWING = ("all_keys", "all_values")  # slots of every token seen


@dataclass(eq=False)
class TokenCounts:
    """The number of tokens that each row has seen of its document, and cached values that depend on it alone.

    Layers that have seen the same tokens can share one object and its cached values.

    Attributes:
        seen: must not be written to if the object is `shared`.
        known: cached values by name.
    """

    seen: Int[Tensor, " B"]
    shared: bool = True
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _next: Callable[[], TokenCounts | None] = field(default=lambda: None, repr=False)  # weak: keeps no later ones

    def once(self, name: Hashable, work: Callable[[Int[Tensor, " B"]], Found]) -> Found:
        """Return `work(seen)`, computed on the first call with this name (any hashable)."""
        if not self.shared or torch.compiler.is_compiling():
            return work(self.seen)
        if name not in self.known:
            self.known[name] = work(self.seen)
        return self.known[name]

    def __reduce__(self) -> tuple[type[TokenCounts], tuple[Any, ...]]:
        """Copy and pickle without cached values."""
        return TokenCounts, (self.seen, self.shared)

    def next(self) -> TokenCounts:
        """Return the counts after one more token of every row; layers that share this object share the result."""
        if not self.shared or torch.compiler.is_compiling():
            return TokenCounts(self.seen + 1, self.shared)
        found = self._next()
        if found is None:
            found = TokenCounts(self.seen + 1)
            self._next = weakref.ref(found)
        return found


class State(ABC):
    """The state of one layer's mixer: tensors by name, batch-first."""

    counts: TokenCounts

    @abstractmethod
    def with_counts(self: AnyState, counts: TokenCounts) -> AnyState:
        """Return the state with another `TokenCounts` object, which must have the same numbers."""

    @abstractmethod
    def named_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state by a name."""

    @staticmethod
    def from_named_tensors(named: dict[str, Tensor]) -> State:
        """Return the state with these tensors: of a mixer, or of a mixer for each group of heads (`0.seen`, ...)."""
        if "0.seen" in named:
            count = 1 + max(int(name.partition(".")[0]) for name in named)
            return HeadwiseState(tuple(MixerState.of(_part(named, f"{index}.")) for index in range(count)))
        return MixerState.of(named)

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the state."""
        return list(self.named_tensors().values())

    def map(self: AnyState, fn: Callable[[Tensor], Tensor]) -> AnyState:
        """Return the state with `fn` applied to every tensor."""
        return self._renamed({name: fn(x) for name, x in self.named_tensors().items()})

    def matrices_in(self: AnyState, dtype: torch.dtype | None) -> AnyState:
        """Return the state with S, its largest part, in `dtype`; None: in the dtype of z, in which S is computed.

        All other tensors are unchanged, also z, by which outputs are divided.
        """
        named = self.named_tensors()
        for name, x in named.items():
            if name.endswith(MATRICES):
                named[name] = x.to(named[name.replace("S", "z")].dtype if dtype is None else dtype)
        return self._renamed(named).with_counts(self.counts)

    def select(self: AnyState, index: Int[Tensor, " N"]) -> AnyState:
        """Return the rows `index` of the batch (beam search, dropping finished rows)."""
        return self.map(lambda x: x.index_select(0, index.to(x.device)))

    def repeat(self: AnyState, repeats: int) -> AnyState:
        """Return the state with every row repeated `repeats` times, repetitions adjacent."""
        return self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors())

    @property
    def grows(self) -> bool:
        """Return whether the state has slots for every token seen."""
        return any(name.endswith(GROWING) for name in self.named_tensors())

    def with_room(self: AnyState, slots: int) -> AnyState:
        """Return the state with every growing part padded at the front to `slots` tokens, for caches of fixed size."""
        return self._renamed(
            {
                name: pad(x, (0, 0, slots - x.shape[2], 0)) if name.endswith(GROWING) else x
                for name, x in self.named_tensors().items()
            }
        )

    def _renamed(self: AnyState, named: dict[str, Tensor]) -> AnyState:
        state = State.from_named_tensors(named)
        assert isinstance(state, type(self))
        return state


@dataclass(frozen=True)
class MixerState(State):
    """The tokens of the sinks and the window, the linear part's state, and how many tokens were seen.

    All tensors are batch-first and of fixed shape. A token's slot follows from its position (`layout.slots_of`), and
    the filled slots follow from `seen` alone, so padding does not affect the state. The window's S slots are followed
    by the C slots of a KV cache with eviction in the same tensor, so that one operation reads both.

    Attributes:
        slots: `keys` and `values` [B, G, S + C, D], and the tensors that gates and feature maps need when a token
            enters the linear state (see `LinearMixer`); or `all_keys` and `all_values`, which grow. The `scores` of
            window slots are of keys alone, those of cache slots are whole (`EvictionScorer`).
        counts: tokens of the document so far, `seen`.
        linear: S and z of the keys below the window; None: there is no linear part.
        maximum: running maximum of an exponential key map's logarithms, -inf before the first token.
        cached_position: of the pairs in the cache, each part with its oldest key first; -1 for empty slots.
    """

    slots: Tokens
    counts: TokenCounts
    linear: LinearState | None = None
    maximum: Float[Tensor, "B Hk"] | None = None
    cached_position: Int[Tensor, "B G C"] | None = None

    @property
    def seen(self) -> Int[Tensor, " B"]:
        """Return the number of tokens of each row's document so far."""
        return self.counts.seen

    def with_counts(self, counts: TokenCounts) -> MixerState:
        return replace(self, counts=counts)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state by the name of its field: `slots.keys`, `seen`, `linear.S` and so on."""
        named = {f"slots.{name}": x for name, x in self.slots.items()} | {"seen": self.seen}
        if self.linear is not None:
            named |= {f"linear.{name}": x for name, x in self.linear.named_tensors().items()}
        others = {"maximum": self.maximum, "cached_position": self.cached_position}
        return named | {name: x for name, x in others.items() if x is not None}

    @classmethod
    def of(cls, named: dict[str, Tensor]) -> MixerState:
        """Return the state with these tensors (`named_tensors`)."""
        linear = _part(named, "linear.")
        summed = LinearState(**linear) if linear else None
        counts, maximum, position = TokenCounts(named["seen"]), named.get("maximum"), named.get("cached_position")
        return cls(_part(named, "slots."), counts, summed, maximum, position)

    def in_order(self, span: Span) -> Tokens:
        """Return the tokens of the window: sinks, then the last ones in order (`layout.context_positions`)."""
        index = slots_of(context_positions(self.seen, span).clamp_min(0), span)[:, None, :, None]
        return {name: x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for name, x in self.slots.items()}

    def cached(self, span: Span) -> Tokens:
        """Return the pairs of the cache, and their `position`."""
        assert self.cached_position is not None
        first, last = span.sinks + span.context, span.sinks + span.context + self.cached_position.shape[2]
        held = {name: x[:, :, first:] for name, x in self.slots.items() if x.shape[2] == last}
        return held | {"position": self.cached_position}


@dataclass(frozen=True)
class HeadwiseState(State):
    """The states of a layer's mixers, one for each group of heads."""

    parts: tuple[MixerState, ...]

    @property
    def counts(self) -> TokenCounts:  # type: ignore[override]
        return self.parts[0].counts

    def with_counts(self, counts: TokenCounts) -> HeadwiseState:
        return HeadwiseState(tuple(part.with_counts(counts) for part in self.parts))

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of each part, prefixed by its number: `0.slots.keys`."""
        return {f"{i}.{name}": x for i, part in enumerate(self.parts) for name, x in part.named_tensors().items()}


def _part(named: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)}


def keep_slots(slots: Tokens, layout: SequenceLayout, span: Span, batch: int, cached: Tokens | None = None) -> Tokens:
    """Return each row's sinks and last tokens in their slots, zero elsewhere; the pairs in the cache follow them."""
    cached = {} if cached is None else cached
    if layout.uniform:
        rows = {name: x if len(x) == batch else x.expand(batch, -1, -1, -1) for name, x in slots.items()}
        return {name: _of_whole_rows(x, span, cached.get(name)) for name, x in rows.items()}
    wanted = slot_positions(layout.count.expand(batch), span)
    same = (layout.key_document == layout.last_document)[:, None, :] & (layout.key_position >= 0)[:, None, :]
    match = same & (layout.key_position[:, None, :] == wanted[:, :, None])
    index, found = match.to(torch.uint8).argmax(-1), match.any(-1)
    kept: Tokens = {}
    for name, x in slots.items():
        chosen = index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        x = x.expand(batch, -1, -1, -1).gather(2, chosen) * found[:, None, :, None]
        kept[name] = torch.cat([x, cached[name]], dim=2) if name in cached else x
    return kept


def _of_whole_rows(
    x: Float[Tensor, "B h T X"], span: Span, cached: Float[Tensor, "B h C X"] | None
) -> Float[Tensor, "B h S_and_C X"]:
    """Return `keep_slots` of uniform rows as a copy, which does not keep their memory alive."""
    length, sinks, context = x.shape[2], span.sinks, span.context
    if context and length >= sinks + context:
        first = length - length % context  # the token in the ring's first slot
        pieces = [x[:, :, a:b] for a, b in ((0, sinks), (first, length), (length - context, first)) if b > a]
    else:
        pieces = [_of_short_rows(x, span)]
    return torch.cat(pieces if cached is None else [*pieces, cached], dim=2)


def _of_short_rows(x: Float[Tensor, "B h T X"], span: Span) -> Float[Tensor, "B h S X"]:
    """Return all tokens in their slots; other slots are 0."""
    slots = slots_of(torch.arange(x.shape[2], device=x.device), span)
    kept = x.new_zeros(*x.shape[:2], span.sinks + span.context, x.shape[3])
    return kept.index_copy(2, slots, x) if span.context else kept
