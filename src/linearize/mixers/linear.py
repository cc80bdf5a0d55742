"""The causal mixer: softmax over a span and linear attention below it, combined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.mixers.cached import (
    CachedKeys,
    Dropped,
    block_begins,
    cache_of_next,
    cached_keys,
    empty_cache,
    new_sums,
    with_received,
)
from linearize.mixers.combine import COMBINES
from linearize.mixers.config import MixerConfig
from linearize.mixers.feature_maps.base import exponentials
from linearize.mixers.gates import DECAYS
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer import LinearFeatures, Mixer, learnable, without_lost
from linearize.mixers.mixer_state import STATE_DTYPES, MixerState, Tokens, keep_slots, push_slot
from linearize.mixers.normalizers import NORMALIZERS
from linearize.mixers.rope import rotated
from linearize.mixers.running_maximum import running_maximum
from linearize.mixers.shape import LayerShape
from linearize.mixers.update import DeltaRule, DeltaUpdate
from linearize.ops.dispatch import delta_values, linear_scan, window_softmax
from linearize.ops.exact_cache import cached_softmax, merged
from linearize.ops.heads import repeat_kv
from linearize.ops.layout import Layout, NoSpan, TerracedSpan, context_positions
from linearize.ops.linear_state import LinearState, linear_state, with_keys
from linearize.ops.partial import Partial, accumulation_dtype
from linearize.ops.recurrent import linear_read, linear_step, window_step
from linearize.ops.reference import delta_values as delta_values_of_few

SEGMENT_NUMBERS = {"cpu": 2**25, "cuda": 2**28}  # of the features of one segment's tokens
EVERY_KEY = NoSpan()  # once: compilers do not make them


class Prepared(NamedTuple):
    """All tokens behind their context, as window and linear part read them.

    Attributes:
        tokens: as they are. written: as the linear state gets them; another set only beside an exact cache.
        phi_k: features of what is written.
        maximum: the running one, after them.
        cached: what the exact cache holds.
    """

    tokens: Tokens
    written: Tokens
    phi_k: Float[Tensor, "B Hs K F"] | None
    maximum: Float[Tensor, "B Hk"] | None
    cached: CachedKeys | None


class LinearMixer(Mixer):
    """Window + linear attention, or either alone, with any of the parts that its config names.

    With a window of at least T tokens the output equals softmax attention exactly.

    A token is a set of slots by name: `keys` and `values`; where its parts ask for them, `map_keys` (keys before RoPE),
    `cos` and `sin`, `log_decay_k` and `log_decay_v` of its step, `input_scale`, `beta` (delta rule), `offset` (the
    running maximum of an exponential key map), and `received` (attention, of a cache that keeps what got the most).
    """

    causal = True

    def __init__(self, config: MixerConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        if self.feature_map is not None:
            if config.decay is not None:
                features = self.feature_map.feature_dim
                self.gate = DECAYS[type(config.decay)](config.decay, shape, self.state_heads, features)
            if isinstance(config.update, DeltaUpdate):
                self.delta = DeltaRule(config.update, shape, self.state_heads)
            if config.in_closed_form:
                self.kernel = self.feature_map.kernel
        self.worth = None if config.cache is None else config.cache.worth(shape)
        self.normalizer = NORMALIZERS[type(config.normalizer)](config.normalizer, shape)
        self.combine = COMBINES[type(config.combine)](config.combine, shape)

    def forward(self, inputs: AttnInputs, layout: Layout | None = None) -> Float[Tensor, "B H T D"]:
        """Outputs for whole documents, without a state. `layout` None: one full document per row."""
        if layout is None and self._segment(inputs) < inputs.q.shape[2]:
            return self.step(inputs, None)[0]
        layout = Layout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        with torch.autocast(inputs.autocast_device, enabled=False):
            dtype, inputs = inputs.v.dtype, inputs.accumulated()
            window, linear = self.partials(inputs, layout)
            y = self.combined(inputs, window, linear, self.has_linear(layout.query_position))
        return y.to(dtype)

    def step(
        self, inputs: AttnInputs, state: MixerState | None, layout: Layout | None = None
    ) -> tuple[Float[Tensor, "B H T D"], MixerState]:
        """Outputs and the next state. Any number of tokens; a single one costs the same at every position.

        `layout` None: every row's tokens are valid and go on in its document. Between calls S is in the config's
        `state_dtype`; where that is less than it is computed in, the calls' lengths make a difference of its rounding.
        """
        kept = STATE_DTYPES[self.config.state_dtype]
        if kept is None:
            return self._step(inputs, state, layout)
        y, after = self._step(inputs, None if state is None else state.matrices_in(None), layout)
        return y, after.matrices_in(kept)

    def _step(self, inputs: AttnInputs, state: MixerState | None, layout: Layout | None) -> tuple[Tensor, MixerState]:
        length, segment = inputs.q.shape[2], self._segment(inputs)
        with torch.autocast(inputs.autocast_device, enabled=False):
            if layout is not None or segment >= length:
                if state is not None and layout is None and length == 1:
                    return self._one_token(inputs, state)
                return self._prefill(inputs, state, layout)
            y = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
            for start in range(0, length, segment):
                piece = inputs.tokens(start, min(start + segment, length))
                y[:, :, start : start + segment], state = self._prefill(piece, state, None)
            assert state is not None
            return y, state

    def _segment(self, inputs: AttnInputs) -> int:
        """How many tokens to work on at a time: all, if gradients are wanted.

        Without them, a prompt of any length takes no more memory beyond its inputs and output than one segment.
        """
        length = inputs.q.shape[2]
        if torch.is_grad_enabled() or self.feature_map is None:
            return length
        numbers = SEGMENT_NUMBERS["cpu" if inputs.q.device.type == "cpu" else "cuda"]
        features = 0 if self.kernel is not None else self.feature_map.feature_dim  # of all tokens at once
        width = len(inputs.q) * self.shape.num_heads * max(self.shape.head_dim, features)
        return max(numbers // width // 64 * 64, 1024, 4 * self.span.context)

    # --- features and gates of tokens ---------------------------------------------------------------------------------

    def _new_tokens(self, inputs: AttnInputs) -> Tokens:
        """What the inputs say of their tokens."""
        slots = {"keys": inputs.k, "values": inputs.v} | new_sums(self.config.cache, inputs.v)
        if self.config.feature_map is None:
            return slots
        if self.wants_unrotated and inputs.unrotated is not None:
            slots["map_keys"] = inputs.unrotated[1]
            if self.config.feature_map.rotation == "after":
                assert inputs.rope is not None
                slots |= {"cos": inputs.rope[0][:, None], "sin": inputs.rope[1][:, None]}
        if self.gate is not None:
            gates = self.gate(inputs)
            found = {"log_decay_k": gates.log_decay_k, "log_decay_v": gates.log_decay_v}
            found["input_scale"] = gates.input_scale
            slots |= {name: x for name, x in found.items() if x is not None}
        if self.delta is not None:
            slots["beta"] = self.delta(inputs)
        return {name: x.expand(len(inputs.k), -1, -1, -1) for name, x in slots.items()}

    def tokens(self, inputs: AttnInputs, own: Layout, layout: Layout, state: MixerState | None) -> Prepared:
        """`own` is the layout of the inputs alone, `layout` that with the context of `state`."""
        slots, maximum = self._new_tokens(inputs), None
        mapped = None if self.feature_map is None else self._map_keys(slots, layout.query_position)
        if self.config.keeps_maximum:
            assert mapped is not None
            before = None if state is None else state.maximum
            offset, log_decay, maximum = running_maximum(mapped.amax(-1), own, before)
            slots["offset"] = offset[..., None]
            slots["log_decay_k"] = self._with_step(slots, log_decay)
        if state is not None:
            slots = {name: torch.cat([state.slots[name].to(x.dtype), x], dim=2) for name, x in slots.items()}
            if mapped is not None:
                context = layout.key_position[:, : layout.key_position.shape[1] - own.length]
                mapped = torch.cat([self._map_keys(state.slots, context), mapped], dim=2)
        cached, written = cached_keys(self.config, self.worth, inputs, slots, layout, state), slots
        if mapped is None:
            return Prepared(slots, slots, None, None, cached)
        if cached is not None:
            written = cached.as_written(slots)
            mapped = self._map_keys(written, layout.key_position)
        return Prepared(slots, written, self._key_features(written, mapped, layout), maximum, cached)

    def _with_step(self, slots: Tokens, log_decay: Float[Tensor, "B Hk T"]) -> Float[Tensor, "B Hs T X"]:
        """The gate's log decay and that of the running maximum in one."""
        step = repeat_kv(log_decay[..., None], self.state_heads).to(accumulation_dtype(slots["values"].dtype))
        return step + slots["log_decay_k"] if "log_decay_k" in slots else step

    def _map_keys(self, slots: Tokens, position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """The key map's features, or for an exponential map their logarithms; or what `kernel` makes them of."""
        assert self.feature_map is not None
        keys = slots.get("map_keys", slots["keys"])
        return self.feature_map.k(keys, position) if self.kernel is None else self.feature_map.kernel_input(keys)

    def _key_features(self, slots: Tokens, phi_k: Tensor, layout: Layout | None) -> Float[Tensor, "B Hs K F"]:
        """phi_k as it is written to the state, from what the map gave."""
        assert self.feature_map is not None
        dtype = accumulation_dtype(slots["values"].dtype)
        if self.feature_map.exponential:
            phi_k = phi_k - (slots["offset"] if self.config.keeps_maximum else phi_k.amax(-1, keepdim=True))
            if layout is not None and not layout.uniform:
                # Padding takes no part in the maximum and could be anything.
                phi_k = phi_k.masked_fill((layout.key_position < 0)[:, None, :, None], -torch.inf)
            phi_k = exponentials(phi_k.to(dtype))
        if self.delta is not None:
            phi_k = self.delta.normalize(phi_k)
        if "cos" in slots:
            cos, sin = (x if len(x[0]) == 1 else repeat_kv(x, phi_k.shape[1]) for x in (slots["cos"], slots["sin"]))
            phi_k = rotated(phi_k, cos, sin)
        phi_k = repeat_kv(phi_k, self.state_heads)
        return phi_k * repeat_kv(slots["input_scale"], self.state_heads) if "input_scale" in slots else phi_k

    def linear_features(self, inputs: AttnInputs, layout: Layout) -> LinearFeatures:
        _, tokens, keys, _, _ = self.tokens(inputs, layout, layout, None)
        assert keys is not None
        phi_k, how, nothing = keys, self._how(tokens), tokens["values"][..., :0]

        def sums(phi_q: Tensor) -> Tensor:
            return linear_scan(phi_q, keys, nothing, **how, span=self.span, layout=layout).den

        phi_q, log_scale = self.scaled_queries(inputs, layout.query_position, sums)
        if self.kernel is not None:
            phi_q, phi_k = self.kernel.features(phi_q), self.kernel.features(phi_k)
        zero = phi_q.new_zeros(phi_q.shape[:3])
        log_scale = self.in_scale(Partial(phi_q[..., :0], zero, zero), log_scale, tokens).log_scale
        return LinearFeatures(tokens, phi_q, phi_k, log_scale)

    def in_scale(self, linear: Partial, log_scale: Tensor | None, own: Tokens) -> Partial:
        """The linear part with the logarithm it is relative to: the query's, and the keys' running maximum."""
        if not self.config.absolute:
            return linear
        assert log_scale is not None
        offset = repeat_kv(own["offset"], self.shape.num_heads)[..., 0]
        return replace(linear, log_scale=(log_scale + offset).to(linear.den.dtype))

    # --- many tokens --------------------------------------------------------------------------------------------------

    def written(
        self, tokens: Tokens, phi_k: Tensor | None, layout: Layout, state: LinearState | None
    ) -> Float[Tensor, "B h K D"]:
        """What is written to the state with each key: its value, or what the delta rule makes of it."""
        if phi_k is None or self.delta is None:
            return tokens["values"]
        decay = tokens.get("log_decay_k")
        options = {"span": self.span, "layout": layout, "state": state}
        return delta_values(phi_k, tokens["values"], tokens["beta"], log_decay_k=decay, **options)

    def partials(self, inputs: AttnInputs, layout: Layout) -> tuple[Partial | None, Partial | None]:
        with torch.autocast(inputs.autocast_device, enabled=False):
            inputs = inputs.accumulated()
            found = self.tokens(inputs, layout, layout, None)
            return self._partials(inputs, found, self.written(found.written, found.phi_k, layout, None), layout, None)

    def _partials(
        self,
        inputs: AttnInputs,
        found: Prepared,
        written: Tensor,
        layout: Layout,
        state: MixerState | None,
    ) -> tuple[Partial | None, Partial | None]:
        window = linear = None
        tokens, phi_k, cached = found.tokens, found.phi_k, found.cached
        if self.span.max_lag:
            softmax: dict[str, Any] = {"scaling": inputs.scaling, "softcap": inputs.softcap, "layout": layout}
            window = window_softmax(inputs.q, tokens["keys"], tokens["values"], span=self.span, **softmax)
            if cached is not None:
                k, v = cached.pool["keys"], cached.pool["values"]
                window = merged(window, cached_softmax(inputs.q, k, v, cached.blocks, cached.held, **softmax))
        if phi_k is not None:
            before = None if state is None else state.linear
            how: dict[str, Any] = self._how(tokens) | {"span": self.span, "layout": layout, "state": before}
            phi_q, log_scale = self.query_features(inputs, layout.query_position)
            linear = linear_scan(phi_q, phi_k, written, **how)
            lost = self.lost(linear)
            if self.too_small(linear.den, layout.query_position):
                phi_q, log_scale = self.query_features(inputs, layout.query_position, linear.den.detach())
                linear = learnable(linear_scan(phi_q, phi_k, written, **how))
            own = {name: x[:, :, x.shape[2] - layout.length :] for name, x in tokens.items()}
            linear = self.in_scale(without_lost(linear, lost), log_scale, own)
        return window, linear

    def combined(
        self, inputs: AttnInputs, window: Partial | None, linear: Partial | None, has_linear: Bool[Tensor, "#B T"]
    ) -> Float[Tensor, "B H T D"]:
        """The output, in the inputs' dtype, from the parts, which may be overwritten where no gradient is wanted."""
        return self.combine(window, linear, lambda sums: self.normalized(sums, inputs), has_linear).to(inputs.v.dtype)

    def _prefill(self, inputs: AttnInputs, state: MixerState | None, own: Layout | None) -> tuple[Tensor, MixerState]:
        batch, length = len(inputs.q), inputs.q.shape[2]
        own = Layout.full(length, inputs.q.device) if own is None else own
        layout = own if state is None else own.with_context(state.seen, self.span)
        found = self.tokens(inputs, own, layout, state)
        phi_k, cached, before = found.phi_k, found.cached, None if state is None else state.linear
        written = self.written(found.written, phi_k, layout, before)
        linear = None
        if phi_k is not None:
            how = self._how(found.tokens)
            linear = linear_state(phi_k, written, **how, span=self.span, layout=layout, state=before)
            if cached is not None:  # what the next block's state is made of is chosen only when it begins
                linear = LinearState(linear.S, linear.z)
        y = self.combined(
            inputs,
            *self._partials(inputs, found, written, layout, state),
            self.has_linear(layout.query_position),
        )
        slots = keep_slots(found.tokens | ({} if cached is None else cached.sums()), layout, self.span, batch)
        exact = None if cached is None else cached.last()
        return y, MixerState(slots, layout.count.expand(batch).clone(), linear, found.maximum, exact)

    def _how(self, tokens: Tokens) -> dict[str, Any]:
        """Decays of the tokens and the kernel, as the ops take them."""
        return {name: tokens.get(name) for name in ("log_decay_k", "log_decay_v")} | {"kernel": self.kernel}

    # --- one token ----------------------------------------------------------------------------------------------------

    def _one_token(self, inputs: AttnInputs, state: MixerState) -> tuple[Tensor, MixerState]:
        span, position = self.span, state.seen
        new, maximum = self._new_tokens(inputs), None
        if self.config.keeps_maximum:
            assert state.maximum is not None
            top = self._map_keys(new, position[:, None]).amax(-1)
            offset, log_decay, maximum = running_maximum(top, Layout.full(1, top.device), state.maximum)
            new["offset"], new["log_decay_k"] = offset[..., None], self._with_step(new, log_decay)
        tokens = {name: torch.cat([state.slots[name].to(x.dtype), x], dim=2) for name, x in new.items()}
        places = torch.cat([context_positions(position, span), position[:, None]], dim=1)
        below = places < span.lo(position)[:, None]
        window, exact, before, dropped = None, state.exact, state.linear, cache_of_next(self.config, self.worth, state)
        if dropped is not None:
            exact, before = dropped.exact, self._folded(state.linear, dropped)
        if span.max_lag:
            seen = (places >= 0) & (~below | (places < span.sinks))
            softmax = {"scaling": inputs.scaling, "softcap": inputs.softcap}
            window = window_step(inputs.q, tokens["keys"], tokens["values"], seen=seen[:, None], **softmax)
            if exact is not None:
                held = window_step(inputs.q, exact["keys"], exact["values"], seen=exact["position"] >= 0, **softmax)
                window = merged(window, held)
                begins = block_begins(self.config, state)
                exact, tokens = with_received(self.config, inputs, exact, tokens, seen[:, None], begins)
        linear = after = None
        if self.feature_map is not None:
            assert before is not None
            phi_q, log_scale = self.query_features(inputs, position[:, None])
            skipped = _skipped(tokens, below if span.max_lag else None)
            if self.config.cache is None:
                entering = places.shape[1] - 1 - span.fold_lag
                one = {name: x[:, :, entering : entering + 1] for name, x in tokens.items()}
                phi_k = self._key_features(one, self._map_keys(one, position[:, None] - span.fold_lag), None)
                options: dict[str, Any] = {"beta": one.get("beta"), "span": span, "position": position}
                options |= {"state": before} | self._how(one) | skipped
                linear, after = linear_step(phi_q, phi_k, one["values"], **options)
            else:
                linear, after = linear_read(phi_q, before, **skipped), before
            linear = self.in_scale(without_lost(linear, self.lost(linear)), log_scale, new)
        slots = push_slot(tokens, span, position - span.context)
        y = self.combined(inputs, window, linear, self.has_linear(position[:, None]))
        return y, MixerState(slots, position + 1, after, maximum, exact)

    def _folded(self, state: LinearState | None, dropped: Dropped) -> LinearState | None:
        """The state with what the exact cache drops when a block begins."""
        if state is None:
            return None
        tokens, position = dropped.tokens, dropped.position
        layout = Layout(position, torch.zeros_like(position), 0)
        phi_k, values = self._key_features(tokens, self._map_keys(tokens, position), layout), tokens["values"]
        how: dict[str, Any] = {"span": EVERY_KEY, "layout": layout}
        if self.delta is not None:
            decay = tokens.get("log_decay_k")
            values = delta_values_of_few(phi_k, values, tokens["beta"], log_decay_k=decay, **how, state=state)
        return with_keys(phi_k, values, position >= 0, **self._how(tokens), **how, state=state)

    def state_like(self, inputs: AttnInputs) -> MixerState:
        """The empty state for inputs of this shape: what stands before the first token."""
        batch, _, _, head_dim = inputs.k.shape
        dtype, device = accumulation_dtype(inputs.v.dtype), inputs.k.device
        new, maximum = self._new_tokens(inputs), None
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        linear = None
        if self.config.keeps_maximum:
            logs = self._map_keys(new, seen[:, None].expand(-1, inputs.k.shape[2]))
            maximum = logs.new_full(logs.shape[:2], -torch.inf)
            new["offset"] = logs[..., :1]
            new["log_decay_k"] = self._with_step(new, logs[..., 0])
        if self.feature_map is not None:
            S = torch.zeros(batch, self.state_heads, self.feature_map.feature_dim, head_dim, dtype=dtype, device=device)
            early = isinstance(self.span, TerracedSpan) and self.config.cache is None
            following = (S, S[..., 0]) if early else (None, None)
            linear = LinearState(S, S[..., 0], *following)
        size = self.span.sinks + self.span.context
        slots = {name: x.new_zeros(batch, x.shape[1], size, x.shape[3]) for name, x in new.items()}
        size = None if self.config.cache is None else self.config.cache.size
        exact = None if size is None else empty_cache(new, size)
        state = MixerState(slots, seen, linear, maximum, exact)
        kept = STATE_DTYPES[self.config.state_dtype]
        return state if kept is None else state.matrices_in(kept)


def _skipped(tokens: Tokens, below: Bool[Tensor, "B S"] | None) -> dict[str, Tensor]:
    """Log decays of the steps within the window, which no key below it has been through; None: there is no window."""
    if below is None:
        return {}
    steps = {"skipped_k": tokens.get("log_decay_k"), "skipped_v": tokens.get("log_decay_v")}
    return {
        name: x.masked_fill(below[:, None, :, None], 0).sum(2, keepdim=True)
        for name, x in steps.items()
        if x is not None
    }
