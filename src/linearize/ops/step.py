"""Compute one token at a time in constant memory and time: add the key that leaves the window to the state, then read.

The number of operations decides the time of a step, since each is short. So heads are one batch axis here, and all
layers share the tensors that depend only on the number of tokens seen (`StepContext`). A state keeps a token in the
slot of its position (`layout.slots_of`), so a new token is written to one slot and nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linearize.configs.spans import Span, TerracedSpan
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearState, Quotient
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Tokens, slot_positions, slots_of
from linearize.ops.partial import Partial, accumulation_dtype


def _kept(work: Callable[[Any], Any]) -> property:
    """Make a property whose value is computed on first use."""
    name = work.__name__

    def value(self: Any) -> Any:
        return self._once(name, lambda: work(self))

    return property(value, doc=work.__doc__)  # torch.compile cannot trace the lock of functools.cached_property


class StepContext:
    """Slots, masks and biases of a span for the token at `position`; computed on first use.

    Attributes:
        position: number of tokens before this one in each row.
        slots: number of slots that a state keeps for the span, without those of an eviction cache.
        width: tokens of a block; 0: the span has no blocks.
    """

    def __init__(self, span: Span, position: Int[Tensor, " B"]) -> None:
        self.span, self.position = span, position
        self.context, self.linear_delay = span.context, span.linear_delay
        self.slots = span.sinks + self.context
        self.width = span.window_size if isinstance(span, TerracedSpan) else 0
        self.column = position[:, None]
        self._known: dict[str, Any] = {}
        self._numbers: list[int] | None = None

    @_kept
    def slot(self) -> Int[Tensor, "B 1 1 1"]:
        """Return the slot of the new token."""
        return slots_of(self.position, self.span).view(-1, 1, 1, 1)

    @_kept
    def entering(self) -> Int[Tensor, "B 1"]:
        """Return the position of the key that enters the linear state; less than 0 if there is none yet."""
        return self.column - self.linear_delay

    @_kept
    def entering_slot(self) -> Int[Tensor, "B 1 1 1"]:
        """Return the slot that holds the entering key until the new token is written, if it is not the token itself."""
        return slots_of(self.entering.clamp_min(0), self.span).view(-1, 1, 1, 1)

    @property
    def all_enter(self) -> bool:
        """Return whether a key enters in every row; False if this is unknown without a device sync."""
        numbers = self._numbers_at_hand()
        return numbers is not None and all(number - self.linear_delay >= self.span.sinks for number in numbers)

    @_kept
    def enters(self) -> Float[Tensor, "B 1 1 1"]:
        """Return 1 where the key enters, 0 where it is a sink or does not exist."""
        return (self.entering >= self.span.sinks).float().view(-1, 1, 1, 1)

    @_kept
    def passed(self) -> Bool[Tensor, "B 1 S 1"] | None:
        """Return the slots of sinks, of tokens below the window and empty ones, after the new token is written.

        None: there are no such slots.
        """
        if not self.span.sinks and self._reads_window():
            return None
        lowest = self.span.lo(self.column).clamp_min(self.span.sinks)
        return (slot_positions(self.position + 1, self.span) < lowest)[:, None, :, None]

    @_kept
    def hidden(self) -> Bool[Tensor, "B S"]:
        """Return the slots that the query does not read by softmax, after the new token is written."""
        positions = slot_positions(self.position + 1, self.span)
        below = positions < self.span.lo(self.column)
        if not self.span.sinks:
            return below
        below[:, : self.span.sinks] = False
        return below | (positions < 0)

    def bias(self, cache_size: int, dtype: torch.dtype) -> Float[Tensor, "B 1 1 S_and_C"] | None:
        """Return the bias of the scores of these slots and of a cache's slots after them; None: no slot is hidden."""
        if self._reads_window() and (not cache_size or self._fills(cache_size)):
            return None
        return self._once(f"bias {cache_size} {dtype}", lambda: self._bias(cache_size, dtype))

    def _repeats(self, number: int, cache_size: int) -> bool:
        """Return whether no slot is empty: then the bias depends only on the token's place in its block."""
        return number >= self.slots and (not cache_size or self._left(number) >= cache_size)

    def _bias(self, cache_size: int, dtype: torch.dtype) -> Tensor:
        number = self._shared_number()
        if number is not None and self.width and self._repeats(number, cache_size):
            every = _biases_of_full_slots(self.span, cache_size, dtype, self.position.device)
            return every.narrow(0, number % self.context, 1)
        hidden = self.hidden
        if cache_size:
            last = self.slots + cache_size
            left = self._once("left", lambda: self._left(self.column))
            empty = self._slot_numbers(last)[self.slots :] + left < last  # a cache fills from its end
            hidden = torch.cat([hidden, empty], dim=1)
        zero = self._once(f"zero {dtype}", lambda: torch.zeros((), dtype=dtype, device=hidden.device))
        return no_scores(hidden, zero)

    def _left(self, position: Any) -> Any:
        """Return how many keys, without sinks, have left a window of blocks when this query reads; < 1: none."""
        assert isinstance(self.span, TerracedSpan)
        return (position // self.span.window_size - self.span.blocks + 1) * self.span.window_size - self.span.sinks

    def _reads_window(self) -> bool:
        """Return whether the query reads every slot; False if this is unknown without a device sync."""
        numbers, width = self._numbers_at_hand(), self.width or 1
        return numbers is not None and all(n + 1 >= self.slots and (n + 1) % width == 0 for n in numbers)

    def _fills(self, cache_size: int) -> bool:
        """Return whether the keys that left the window fill a cache of this size in every row."""
        return self.numbers is not None and all(self._left(number) >= cache_size for number in self.numbers)

    def _numbers_at_hand(self) -> list[int] | None:
        waits = self._numbers is None and self.position.device.type != "cpu"
        return None if waits else self.numbers

    def _shared_number(self) -> int | None:
        """Return the position that all rows share; None if they differ or it is unknown without a device sync."""
        numbers = self._numbers_at_hand()
        return numbers[0] if numbers and len(set(numbers)) == 1 else None

    @property
    def numbers(self) -> list[int] | None:
        """Return the positions of all rows; None while compiling and for meta tensors."""
        if torch.compiler.is_compiling() or self.position.is_meta:
            return None
        if self._numbers is None:
            self._numbers = self.position.tolist()
        return self._numbers

    @property
    def may_flush(self) -> bool:
        """Return whether a block begins with this token in any row; True if `numbers` is unknown."""
        return self.width > 0 and (self.numbers is None or any(number % self.width == 0 for number in self.numbers))

    @_kept
    def flushes(self) -> Bool[Tensor, "B 1 1"] | None:
        """Return whether a block begins with this token in each row; None: the span has no blocks."""
        return (self.position % self.width == 0)[:, None, None] if self.width else None

    @_kept
    def leaving(self) -> Int[Tensor, "B w"]:
        """Return the positions of the block that leaves the window, -1 for sinks and in rows where none leaves."""
        assert self.flushes is not None
        position = self._block_before()
        return torch.where((position >= self.span.sinks) & self.flushes[:, 0], position, -1)

    @_kept
    def leaving_slots(self) -> Int[Tensor, "B w"]:
        """Return the slots that hold the leaving block until tokens of the next one are written."""
        return slots_of(self._block_before().clamp_min(0), self.span)

    def pool_slots(self, cache_size: int) -> Int[Tensor, "B C_and_w"]:
        """Return the slots of a cache of this size, which follow the window's, then those of the leaving block."""
        return self._once(f"pool slots {cache_size}", lambda: self._pool_slots(cache_size))

    def _pool_slots(self, cache_size: int) -> Tensor:
        cached = self._slot_numbers(self.slots + cache_size)[self.slots :]
        return torch.cat([cached.expand(len(self.position), -1), self.leaving_slots], dim=1)

    def window_slots(self, cache_size: int) -> Int[Tensor, " S"]:
        """Return the slots of sinks and window, which precede those of a cache of this size."""
        return self._slot_numbers(self.slots + cache_size)[: self.slots]

    def _slot_numbers(self, count: int) -> Int[Tensor, " N"]:
        return self._once(f"slot numbers {count}", lambda: torch.arange(count, device=self.position.device))

    def leaving_tokens(self, slots: Float[Tensor, "B h P X"]) -> Float[Tensor, "B h w X"]:
        """Return the leaving block's numbers in these slots, until tokens of the next one are written."""
        number = self._shared_number()
        if number is not None:  # the block is contiguous
            return slots.narrow(2, self.span.sinks + number % self.context, self.width)
        places = self.leaving_slots[:, None, :, None]
        return slots.gather(2, places.expand(len(slots), slots.shape[1], -1, slots.shape[3]))

    def keeps_full(self, size: int) -> bool:
        """Return whether a block begins in every row while a cache of `size` is full and no sink leaves the window.

        False if `numbers` is unknown.
        """
        numbers = self.numbers or ()
        return bool(numbers) and all(n % self.width == 0 and self._left(n - self.width) >= size for n in numbers)

    def _block_before(self) -> Tensor:
        return self.column - self.context + torch.arange(self.width, device=self.position.device)

    def zeros(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return zeros like x, which callers share and must not write to."""
        return self._once(f"zeros {tuple(x.shape)} {x.dtype}", lambda: torch.zeros_like(x))

    def written(self, slots: Float[Tensor, "B h P X"], new: Float[Tensor, "B h 1 X"]) -> Float[Tensor, "B h P X"]:
        """Return the slots with the new token written to its slot."""
        if not self.slots:
            return slots
        index = self._once(f"written {tuple(new.shape)}", lambda: self.slot.expand_as(new))
        slots = slots if slots.dtype == new.dtype else slots.to(new.dtype)
        return slots.scatter(2, index, new)

    def entering_tokens(self, slots: Tokens, new: Tokens) -> Tokens:
        """Return the token that enters the linear state, from the slots before the new one is written."""
        if not self.linear_delay:
            return {name: x.contiguous() for name, x in new.items()}
        return {name: self._entering(slots[name], x) for name, x in new.items()}

    def _entering(self, slots: Float[Tensor, "B h P X"], new: Float[Tensor, "B h 1 X"]) -> Float[Tensor, "B h 1 X"]:
        index = self._once(f"entering {tuple(new.shape)}", lambda: self.entering_slot.expand_as(new))
        found = slots.gather(2, index)
        return found if found.dtype == new.dtype else found.to(new.dtype)

    def _once(self, name: str, work: Callable[[], Any]) -> Any:
        if name not in self._known:
            self._known[name] = work()
        return self._known[name]


@lru_cache(maxsize=256)
def _biases_of_full_slots(
    span: Span, cache_size: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "W 1 1 S_and_C"]:
    """Return the bias of a token at each place of the ring once no slot is empty; callers must not write to it."""
    with torch.inference_mode(False):
        first = (1 + -(-(span.sinks + cache_size) // span.context)) * span.context
        hidden = StepContext(span, first + torch.arange(span.context, device=device)).hidden
        hidden = torch.cat([hidden, hidden.new_zeros(len(hidden), cache_size)], dim=1)
        return no_scores(hidden, torch.zeros((), dtype=dtype, device=device))


@dataclass(frozen=True)
class LinearStep:
    """The linear part of one more token.

    Attributes:
        phi_q: features of the query, which reads the state after the key has entered.
        state: the state before the key enters.
        phi_k, v, beta, log_decay_k, log_decay_v: of the token that enters the state, at position - span.linear_delay,
            as in `LinearInputs`; phi_k None: no key enters.
        skipped_k, skipped_v: sums of the log decays of the steps lo(position) .. position.
        kernel: makes features of phi_q and phi_k.
    """

    phi_q: Float[Tensor, "B H 1 F"]
    state: LinearState
    phi_k: Float[Tensor, "B Hk 1 F"] | None = None
    v: Float[Tensor, "B G 1 D"] | None = None
    beta: Float[Tensor, "B Hk 1 1"] | None = None
    log_decay_k: Float[Tensor, "#B Hk 1 X"] | None = None
    log_decay_v: Float[Tensor, "#B Hk 1 D"] | None = None
    skipped_k: Float[Tensor, "#B Hk 1 X"] | None = None
    skipped_v: Float[Tensor, "#B Hk 1 D"] | None = None
    kernel: Kernel | None = None


@dataclass(frozen=True)
class StepInputs:
    """One more token of every row.

    Attributes:
        new_k, new_v: key and value of the token.
        k, v: slots of earlier tokens, followed by the C pairs of an eviction cache.
        at: the context of the token's position.
        softmax_alone: whether softmax over the slots is the output.
        quotient: returns the parameters of the output as one quotient of sums; None: it is no such quotient.
    """

    q: Float[Tensor, "B H 1 D"]
    new_k: Float[Tensor, "B G 1 D"]
    new_v: Float[Tensor, "B G 1 D"]
    k: Float[Tensor, "B G P D"]
    v: Float[Tensor, "B G P D"]
    at: StepContext
    scaling: float
    softcap: float | None
    linear: LinearStep | None
    softmax_alone: bool
    quotient: Callable[[], Quotient | None]


class StepOutputs(NamedTuple):
    """The output, or its parts (then y is None), and the slots and the linear state after the token."""

    y: Float[Tensor, "B H 1 D"] | None
    window: Partial | None
    linear: Partial | None
    k: Float[Tensor, "B G P D"]
    v: Float[Tensor, "B G P D"]
    state: LinearState | None


def one_token(x: StepInputs) -> StepOutputs:
    """Compute one more token by torch's operations."""
    at = x.at
    k, v = at.written(x.k, x.new_k), at.written(x.v, x.new_v)
    window = linear = state = None
    if at.slots:
        alone = x.softmax_alone and x.softcap is None
        bias = at.bias(k.shape[2] - at.slots, x.q.dtype if alone else accumulation_dtype(v.dtype))
        if alone:
            return StepOutputs(softmax_step(x.q, k, v, bias=bias, scaling=x.scaling), None, None, k, v, None)
        window = window_step(x.q, k, v, bias=bias, scaling=x.scaling, softcap=x.softcap)
    if x.linear is not None:
        state = x.linear.state
        if x.linear.phi_k is None:
            linear = linear_read(x.linear, state, at)
        else:
            linear, state = linear_step(x.linear, at)
    return StepOutputs(None, window, linear, k, v, state)


def linear_step(x: LinearStep, at: StepContext) -> tuple[Partial, LinearState]:
    """Add the entering key to the state; return the linear part of the query, and the new state."""
    assert x.phi_k is not None and x.v is not None
    dtype, heads, state = x.state.z.dtype, x.phi_k.shape[1], x.state
    v = x.v if x.v.dtype == dtype else x.v.to(dtype)
    phi_k = x.phi_k if x.kernel is None else x.kernel.features(x.phi_k)
    phi_k = phi_k if at.all_enter else phi_k * at.enters
    S, z = state.S, state.z
    readable = S, z
    if at.flushes is not None:
        assert state.next_S is not None and state.next_z is not None
        readable = torch.where(at.flushes[..., None], state.next_S, S), torch.where(at.flushes, state.next_z, z)
        S, z = state.next_S, state.next_z
    if x.log_decay_k is not None:
        step = x.log_decay_k.exp().to(dtype)
        S, z = S * step.mT, z * step.squeeze(2)
    if x.log_decay_v is not None:
        S = S * x.log_decay_v.exp().to(dtype)
    if x.beta is not None:
        v = x.beta.to(dtype) * (repeat_kv(v, heads) - phi_k @ S)
    # Heads that share a value are adjacent, and so are their features: they form one matrix.
    shared = len(v) * v.shape[1]
    one, value = phi_k.reshape(shared, -1, 1), v.reshape(shared, 1, -1)
    S = torch.baddbmm(S.view(shared, -1, v.shape[3]), one, value).view(S.shape)
    z = z + phi_k.view(z.shape)
    state = LinearState(S, z) if not at.width else LinearState(*readable, S, z)
    return linear_read(x, state, at), state


def linear_read(x: LinearStep, state: LinearState, at: StepContext) -> Partial:
    """Return the linear part of a query that reads `state`."""
    phi_q = x.phi_q if x.kernel is None else x.kernel.features(x.phi_q)
    (batch, heads, _, features), units = phi_q.shape, state.z.shape[1]
    # torch.bmm on one axis of all states: torch.matmul would launch several operations more.
    q = phi_q.reshape(batch * units, -1, features)
    if x.skipped_k is not None:
        steps = x.skipped_k.exp().to(state.z.dtype).expand(batch, -1, -1, -1)
        q = q * steps.reshape(-1, *steps.shape[2:])
    num = torch.bmm(q, state.S.view(len(q), features, -1)).view(batch, heads, 1, -1)
    den = torch.bmm(q, state.z.view(len(q), features, 1)).view(batch, heads, 1)
    if x.skipped_v is not None:
        num = num * repeat_kv(x.skipped_v.exp().to(state.z.dtype), heads)
    return Partial(num, den, at.zeros(den))


def window_step(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    *,
    bias: Float[Tensor, "#B 1 1 S"] | None,
    scaling: float,
    softcap: float | None = None,
) -> Partial:
    """Return softmax over slots with `bias` added to their scores, -inf for hidden slots; one must not be hidden."""
    dtype, (batch, groups, count, width) = accumulation_dtype(v.dtype), k.shape
    heads, rows = q.shape[1], batch * groups
    if v.dtype != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    # torch.bmm on one axis of all heads: torch.matmul would launch several operations more.
    q = q.reshape(rows, -1, width) * scaling
    scores = torch.bmm(q, k.view(rows, count, width).transpose(1, 2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = (scores.view(batch, groups, -1, count) + bias).view(scores.shape)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    num, den = torch.bmm(weights, v.view(rows, count, -1)), weights.sum(-1)
    return Partial(num.view(batch, heads, 1, -1), den.view(batch, heads, 1), top.view(batch, heads, 1))


def softmax_step(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    *,
    bias: Float[Tensor, "#B 1 1 S"] | None,
    scaling: float,
) -> Float[Tensor, "B H 1 D"]:
    """Return the output of `window_step`, num / den, by torch's own attention."""
    grouped = q.view(*k.shape[:2], -1, q.shape[3])
    return scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scaling).view(q.shape)


def no_scores(hidden: Bool[Tensor, "B S"], zero: Float[Tensor, ""]) -> Float[Tensor, "B 1 1 S"]:
    """Return a bias: -inf for hidden slots, else `zero`."""
    return zero.masked_fill(hidden, -torch.inf)[:, None, None]
