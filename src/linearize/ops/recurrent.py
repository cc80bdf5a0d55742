"""One token at a time in constant memory and time: fold the key that leaves the window, then read.

A step is short: what it costs is the number of its operations. So heads are one batch axis here, and what follows from
the number of tokens seen alone (`NextToken`) is worked out by the caller, once for all layers.
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

from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearState, Quotient
from linearize.ops.kernel import Kernel
from linearize.ops.layout import Span, TerracedSpan, context_positions
from linearize.ops.partial import Partial, accumulation_dtype, in_dtype

NARROW = 4  # numbers of a slot up to which a gather on a CPU is faster than `index_select`, whatever the batch


class NextToken:
    """What a span makes of the token at `position`, the number of those before; worked out when it is asked for.

    Attributes:
        span, position: as they were given.
    """

    # No functools.cached_property: its lock is nothing that a compiler knows.
    def __init__(self, span: Span, position: Int[Tensor, " B"]) -> None:
        self.span, self.position = span, position
        self._known: dict[str, Tensor] = {}
        self._numbers: list[int] | None = None

    @property
    def hidden(self) -> Bool[Tensor, "B S"]:
        """Which slots its query does not read by softmax: of the state's context; the last, its own, it does."""
        return self._once("hidden", self._hidden)

    def _hidden(self) -> Tensor:
        if not self.span.sinks:
            return self.below
        hidden = self.below & (self._places >= self.span.sinks)
        return hidden if self._is_full else (self._places < 0) | hidden

    @property
    def reads(self) -> Bool[Tensor, "B S"]:
        """Which it does."""
        return ~self.hidden

    def bias(self, heads: int, dtype: torch.dtype) -> Float[Tensor, "N 1 S"]:
        """What softmax adds to the scores of each of so many heads, row by row."""
        return self._once(f"bias {heads} {dtype}", lambda: no_scores(self.hidden[:, None], heads, dtype))

    def bias_with_cache(self, size: int, heads: int, dtype: torch.dtype) -> Float[Tensor, "N 1 C_and_S"]:
        """Return the same, with a KV cache of `size` slots before the others, which fills from its end."""
        return self._once(f"bias {size} {heads} {dtype}", lambda: self._bias_with_cache(size, heads, dtype))

    def _bias_with_cache(self, size: int, heads: int, dtype: torch.dtype) -> Tensor:
        if self.least is not None and self._left(self.least) >= size:
            bias = self.bias(heads, dtype)
            return torch.cat([_no_bias(len(bias), size, dtype, bias.device), bias], dim=2)
        left = self._left(self.position).clamp_min(0)
        empty = torch.arange(size, device=self.position.device) < size - left[:, None]
        return no_scores(torch.cat([empty, self.hidden], dim=1)[:, None], heads, dtype)

    def _left(self, position: Any) -> Any:
        """How many keys, sinks not among them, have left a window of blocks when this query reads; no less than 0."""
        assert isinstance(self.span, TerracedSpan)
        return (position // self.span.window_size - self.span.blocks + 1) * self.span.window_size - self.span.sinks

    @property
    def numbers(self) -> list[int] | None:
        """The positions of all rows; None where tensors cannot be looked at."""
        if torch.compiler.is_compiling() or self.position.is_meta:
            return None
        if self._numbers is None:
            self._numbers = self.position.tolist()
        return self._numbers

    @property
    def least(self) -> int | None:
        """The least position of all rows; None where tensors cannot be looked at."""
        return None if self.numbers is None else min(self.numbers)

    @property
    def below(self) -> Bool[Tensor, "B S"]:
        """Slots below its window, empty ones among them."""
        return self._once("below", lambda: self._places < self.span.lo(self.column))

    @property
    def passed(self) -> Bool[Tensor, "B 1 S 1"]:
        """Slots before its own that are below its window."""
        return self._once("passed", lambda: self.below[:, None, :-1, None])

    @property
    def column(self) -> Int[Tensor, "B 1"]:
        """Its position, for its row's only query."""
        return self._once("column", lambda: self.position[:, None])

    @property
    def entering(self) -> Int[Tensor, "B 1"]:
        """Where the key stands that leaves the window."""
        return self._once("entering", lambda: self.column - self.span.fold_lag)

    @property
    def enters(self) -> Float[Tensor, "B 1 1 1"]:
        """1 where it goes into the linear state, else 0."""
        return self._once("enters", lambda: (self.entering >= self.span.sinks).float().view(-1, 1, 1, 1))

    @property
    def flushes(self) -> Bool[Tensor, "B 1 1"] | None:
        """Whether a block begins with it, where there are blocks."""
        width = self.span.window_size if isinstance(self.span, TerracedSpan) else None
        return None if width is None else self._once("flushes", lambda: (self.position % width == 0)[:, None, None])

    @property
    def may_flush(self) -> bool:
        """Whether one begins in any row, or may, where tensors cannot be looked at."""
        if not isinstance(self.span, TerracedSpan):
            return False
        return self.numbers is None or any(number % self.span.window_size == 0 for number in self.numbers)

    def keeps_full(self, size: int) -> bool:
        """Return whether a block begins in every row that finds a cache of `size` full, and no sink leaves the window.

        False where tensors cannot be looked at.
        """
        if self.numbers is None or not isinstance(self.span, TerracedSpan):
            return False
        width = self.span.window_size
        return all(number % width == 0 and self._left(number - width) >= size for number in self.numbers)

    @property
    def _is_full(self) -> bool:
        """Whether each row's sinks and recent slots all have a key; False where a GPU would have to be waited for."""
        waits = self.position.device.type != "cpu" and self._numbers is None
        return not waits and self.least is not None and self.least >= self.span.context + self.span.sinks

    def pushed(self, slots: Float[Tensor, "B h S_and_one X"]) -> Float[Tensor, "B h S X"] | None:
        """Return the slots, its own the last, that the state keeps, where they are the same for every row.

        None: a sink leaves the recent slots for its own in some row, or may.
        """
        if not self._is_full:
            return None
        kept = _behind_sinks(self.span.sinks, self.span.context, slots.device)
        batch, heads, _, width = slots.shape
        return slots.index_select(2, kept) if width > NARROW else slots.gather(2, _for_each(kept, batch, heads, width))

    @property
    def fills(self) -> Bool[Tensor, "B 1 N 1"]:
        """Return which sinks' slots get the key that leaves the recent ones."""
        return self._once("fills", self._fills)

    def _fills(self) -> Tensor:
        sinks = torch.arange(self.span.sinks, device=self.position.device)
        return (sinks == self.column - self.span.context)[:, None, :, None]

    @property
    def leaving(self) -> Int[Tensor, "B w"]:
        """Return the positions of the block that leaves the window, -1 where none does, and for sinks."""
        return self._once("leaving", self._leaving)

    def _leaving(self) -> Tensor:
        assert isinstance(self.span, TerracedSpan) and self.flushes is not None
        block = torch.arange(self.span.window_size, device=self.position.device)
        position = self.column - self.span.context + block
        return torch.where((position >= self.span.sinks) & self.flushes[:, 0], position, -1)

    def zeros(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Zeros like x, not to be written to."""
        return self._once(f"zeros {tuple(x.shape)} {x.dtype}", lambda: torch.zeros_like(x))

    @property
    def _places(self) -> Int[Tensor, "B S"]:
        return self._once("places", self._positions)

    def _positions(self) -> Tensor:
        span, position = self.span, self.column
        if not span.sinks:
            return position + torch.arange(-span.context, 1, device=position.device)
        return torch.cat([context_positions(self.position, span), position], dim=1)

    def _once(self, name: str, work: Callable[[], Tensor]) -> Tensor:
        if name not in self._known:
            self._known[name] = work()
        return self._known[name]


Tokens = dict[str, Tensor]  # what later steps need of a token, by name: [B, heads, slots, width]


@dataclass(frozen=True)
class LinearStep:
    """The linear part of one more token.

    Attributes:
        phi_q, state: what is read, after what enters.
        phi_k, v, beta, log_decay_k, log_decay_v: of the token that enters the state, at position - span.fold_lag, as in
            `LinearInputs`; phi_k None: nothing enters.
        skipped_k, skipped_v: log decays of the steps lo(position) .. position, summed.
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
        new, slots: what is kept of the token and of those before, `keys` and `values` among it.
        at: what its span makes of its position.
        cached: `keys`, `values` and `position` of a KV cache with eviction, -1 being the position of nothing.
        quotient: returns how the output is one quotient of sums, None where it is not; not every backend asks.
    """

    q: Float[Tensor, "B H 1 D"]
    new: Tokens
    slots: Tokens
    at: NextToken
    scaling: float
    softcap: float | None = None
    cached: Tokens | None = None
    linear: LinearStep | None = None
    quotient: Callable[[], Quotient | None] = lambda: None


class StepOutputs(NamedTuple):
    """The output, or the parts that it is made of; and the slots and the linear state behind the token."""

    y: Float[Tensor, "B H 1 D"] | None
    window: Partial | None
    linear: Partial | None
    slots: Tokens
    state: LinearState | None


def one_token(x: StepInputs) -> StepOutputs:
    """One more token by torch's operations."""
    span, at = x.at.span, x.at
    tokens = {name: torch.cat([in_dtype(x.slots[name], new.dtype), new], dim=2) for name, new in x.new.items()}
    slots = pushed(tokens, at)
    if x.linear is None and x.softcap is None and x.quotient() is not None:
        k, v, bias = _read(tokens, x.cached, at, x.q.dtype)
        return StepOutputs(softmax_step(x.q, k, v, bias=bias, scaling=x.scaling), None, None, slots, None)
    window = linear = state = None
    if span.max_lag:
        k, v, bias = _read(tokens, x.cached, at, accumulation_dtype(tokens["values"].dtype))
        window = window_step(x.q, k, v, bias=bias, scaling=x.scaling, softcap=x.softcap)
    if x.linear is not None:
        state = x.linear.state
        if x.linear.phi_k is None:
            linear = linear_read(x.linear, state, at)
        else:
            linear, state = linear_step(x.linear, at)
    return StepOutputs(None, window, linear, slots, state)


def _read(tokens: Tokens, cached: Tokens | None, at: NextToken, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values of window and cache, and the bias of their scores, in `dtype`."""
    k, v = tokens["keys"], tokens["values"]
    if cached is None:
        return k, v, at.bias(k.shape[1], dtype)
    k, v = (torch.cat([in_dtype(cached[name], x.dtype), x], dim=2) for name, x in (("keys", k), ("values", v)))
    return k, v, at.bias_with_cache(cached["position"].shape[2], k.shape[1], dtype)


def pushed(slots: Tokens, at: NextToken) -> Tokens:
    """Return slots that had one more token at the end, moved up; the one that leaves them can fill a sink's slot."""
    sinks = at.span.sinks
    if not sinks:
        return {name: x[:, :, 1:] for name, x in slots.items()}
    moved: Tokens = {}
    for name, x in slots.items():
        found = at.pushed(x)
        if found is None:
            filled = torch.where(at.fills, x[:, :, sinks : sinks + 1], x[:, :, :sinks])
            found = torch.cat([filled, x[:, :, sinks + 1 :]], dim=2)
        moved[name] = found
    return moved


@lru_cache(maxsize=16)
def _behind_sinks(sinks: int, context: int, device: torch.device) -> Int[Tensor, " S"]:
    """All slots but the one behind the sinks."""
    with torch.inference_mode(False):
        every = range(sinks + context + 1)
        return torch.tensor([*every[:sinks], *every[sinks + 1 :]], device=device)


@lru_cache(maxsize=64)
def _for_each(index: Int[Tensor, " S"], batch: int, heads: int, width: int) -> Int[Tensor, "B h S X"]:
    """Return the index of a gather of the same slots of every head: a view."""
    with torch.inference_mode(False):
        return index[:, None].expand(batch, heads, -1, width)


@lru_cache(maxsize=64)
def _no_bias(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "N 1 C"]:
    """Return zeros, not to be written to: the bias of a full cache."""
    with torch.inference_mode(False):
        return torch.zeros(rows, 1, size, dtype=dtype, device=device)


def linear_step(x: LinearStep, at: NextToken) -> tuple[Partial, LinearState]:
    """Read the linear part for the query of the next token, after what enters the state; and the state behind it."""
    assert x.phi_k is not None and x.v is not None
    dtype, heads, state = x.state.z.dtype, x.phi_k.shape[1], x.state
    v, phi_k = in_dtype(x.v, dtype), x.phi_k if x.kernel is None else x.kernel.features(x.phi_k)
    phi_k = phi_k * at.enters
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
    # Heads that share a value lie side by side, and so do their features: one matrix of them all.
    shared = len(v) * v.shape[1]
    one, value = phi_k.view(shared, -1, 1), v.view(shared, 1, -1)
    S = torch.baddbmm(S.view(shared, -1, v.shape[3]), one, value).view(S.shape)
    z = z + phi_k.view(z.shape)
    state = LinearState(S, z) if at.flushes is None else LinearState(*readable, S, z)
    return linear_read(x, state, at), state


def linear_read(x: LinearStep, state: LinearState, at: NextToken) -> Partial:
    """Read a state by a query."""
    phi_q = x.phi_q if x.kernel is None else x.kernel.features(x.phi_q)
    dtype, (batch, heads), features = state.z.dtype, phi_q.shape[:2], phi_q.shape[3]
    q = phi_q.contiguous().view(batch * state.z.shape[1], -1, features)
    if x.skipped_k is not None:
        steps = x.skipped_k.exp().to(dtype).expand(batch, -1, -1, -1)
        q = q * steps.reshape(-1, *steps.shape[2:])
    num = torch.bmm(q, state.S.view(len(q), features, -1)).view(batch, heads, 1, -1)
    den = torch.bmm(q, state.z.view(len(q), features, 1)).view(batch, heads, 1)
    if x.skipped_v is not None:
        num = num * repeat_kv(x.skipped_v.exp().to(dtype), heads)
    return Partial(num, den, at.zeros(den))


def window_step(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    *,
    bias: Float[Tensor, "N 1 S"],
    scaling: float,
    softcap: float | None = None,
) -> Partial:
    """Softmax over slots to whose scores `bias` is added, -inf where the query does not read; it reads one at least."""
    (batch, heads, _, head_dim), alike = q.shape, len(bias)
    q, k, v = (in_dtype(x, bias.dtype) for x in (q, k, v))
    q, k, v = q.reshape(alike, -1, head_dim), k.view(alike, -1, head_dim).transpose(1, 2), v.view(alike, -1, v.shape[3])
    if softcap is None:
        scores = torch.baddbmm(bias, q, k, alpha=scaling)
    else:
        scores = softcap * torch.tanh(torch.bmm(q, k) * (scaling / softcap)) + bias
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    num, den = torch.bmm(weights, v), weights.sum(-1)
    return Partial(num.view(batch, heads, 1, -1), den.view(batch, heads, 1), top.view(batch, heads, 1))


def softmax_step(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    *,
    bias: Float[Tensor, "N 1 S"],
    scaling: float,
) -> Float[Tensor, "B H 1 D"]:
    """The output of `window_step` by torch's own attention."""
    grouped, bias = q.view(*k.shape[:2], -1, q.shape[3]), bias.view(*k.shape[:2], 1, -1)
    return scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scaling).reshape(q.shape)


def no_scores(hidden: Bool[Tensor, "B g S"], heads: int, dtype: torch.dtype) -> Float[Tensor, "N 1 S"]:
    """-inf for what is hidden from a head, else 0; g is the number of heads, or 1 where it is the same for all."""
    if heads > 1 or hidden.shape[1] > 1:
        hidden = hidden.expand(-1, heads, -1).flatten(0, 1)[:, None]
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
