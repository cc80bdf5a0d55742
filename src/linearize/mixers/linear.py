"""The causal mixer: softmax over a span combined with linear attention below it, for many tokens and for one more."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import DeltaUpdate
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan, TerracedSpan
from linearize.mixers.combine import COMBINES, HasLinear, SharedDenominatorCombine, WindowOnlyCombine
from linearize.mixers.eviction_cache import (
    SCORES,
    STEPS,
    CachedKeys,
    EvictionScorer,
    cache_after,
    cached_keys,
    last_queries,
    next_block,
    room,
)
from linearize.mixers.feature_maps.base import HEADROOM, MIN_DENOMINATOR, exponentials
from linearize.mixers.gates import DECAYS, DeltaRule
from linearize.mixers.inputs import AttnInputs, rotated
from linearize.mixers.mixer import LinearFeatures, Mixer
from linearize.mixers.mixer_state import STATE_DTYPES, MixerState, TokenCounts, keep_slots
from linearize.mixers.normalizers import NORMALIZERS
from linearize.mixers.running_maximum import running_maximum
from linearize.ops.backend import backend_for, linear_scan, prefill, state_after
from linearize.ops.block_sizes import kind
from linearize.ops.full import full_softmax
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs, LinearState, Quotient, SoftmaxInputs
from linearize.ops.layout import SequenceLayout, Tokens
from linearize.ops.linear_state import with_keys
from linearize.ops.partial import Partial, accumulation_dtype, in_dtype
from linearize.ops.reference import delta_values
from linearize.ops.step import LinearStep, StepContext, StepInputs

SEGMENT_NUMBERS = {"cpu": 2**25, "cuda": 2**28}  # numbers in the features of one segment's tokens
LEAST_LEARNED = 1e-3
LARGEST_VALUE = 256.0  # a bound of means of values, which are some tens at most
EVERY_KEY = NoSpan()  # made here because torch.compile cannot construct it


class Prepared(NamedTuple):
    """The tokens of the context and the inputs, as window and linear part read them.

    Attributes:
        tokens: the slots of each token.
        written: the slots as they enter the linear state; a KV cache with eviction makes them differ from `tokens`.
        phi_k: features of `written`.
        maximum: the running maximum after the last token.
        cached: the keys that the KV cache with eviction holds.
    """

    tokens: Tokens
    written: Tokens
    phi_k: Float[Tensor, "B Hs K F"] | None
    maximum: Float[Tensor, "B Hk"] | None
    cached: CachedKeys | None


class LinearMixer(Mixer):
    """Window + linear attention, or either alone, with the parts that its config names.

    With a window of at least T tokens the output equals softmax attention exactly.

    A token has slots by name: `keys` and `values`; if its parts read them also `map_keys` (keys before RoPE), `cos` and
    `sin`, `log_decay_k` and `log_decay_v` of its step, `input_scale`, `beta` (delta rule), `offset` (the running
    maximum of an exponential key map), and `scores` (of a KV cache with eviction, `EvictionScorer.of_keys`).

    Attributes:
        keeps_maximum, maps_unrotated: as in the config.
        softmax_alone: whether softmax over window and cache is the output.
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
            if config.uses_kernel:
                self.kernel = self.feature_map.kernel
        self.scorer = None if config.cache is None else EvictionScorer(config.cache, shape)
        self.keeps_maximum, self.maps_unrotated = config.keeps_maximum, config.maps_unrotated
        self.normalizer = NORMALIZERS[type(config.normalizer)](config.normalizer, shape)
        self.combine = COMBINES[type(config.combine)](config.combine, shape)
        self.softmax_alone = isinstance(self.combine, WindowOnlyCombine) and not config.learned_sink

    def forward(self, inputs: AttnInputs, layout: SequenceLayout | None = None) -> Float[Tensor, "B H T D"]:
        """Return outputs for whole documents, without a state. `layout` None: one full document per row."""
        if layout is None and self._segment(inputs) < inputs.q.shape[2]:
            return self.step(inputs, None)[0]
        layout = SequenceLayout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        with inputs.outside_autocast():
            dtype, inputs = inputs.v.dtype, inputs.accumulated() if torch.is_grad_enabled() else inputs
            window, linear = self._of_documents(inputs, layout)
            y = self.combined(inputs, window, linear, lambda: self.has_linear(layout.query_position))
        return y.to(dtype)

    def step(
        self, inputs: AttnInputs, state: MixerState | None, layout: SequenceLayout | None = None
    ) -> tuple[Float[Tensor, "B H T D"], MixerState]:
        """Return outputs and the next state, for any number of tokens; one token costs the same at every position.

        `layout` None: every row's tokens are valid and continue its document. Between calls S is in the config's
        `state_dtype`. If this rounds S, outputs depend slightly on how tokens are divided into calls.
        """
        state_dtype = STATE_DTYPES[self.config.state_dtype]
        if state_dtype is not None and state is not None:
            state = state.matrices_in(None)
        with inputs.outside_autocast():
            if state is not None and layout is None and inputs.q.shape[2] == 1:
                y, after = self._one_token(inputs, state)
            else:
                y, after = self._many(inputs, state, layout)
        return y, after if state_dtype is None else after.matrices_in(state_dtype)

    # --- the slots and features of tokens -----------------------------------------------------------------------------

    def new_tokens(self, inputs: AttnInputs) -> Tokens:
        """Return the slots of the inputs' tokens."""
        slots = {"keys": inputs.k, "values": inputs.v}
        if self.scorer is not None:
            slots[SCORES] = self.scorer.of_keys(inputs)
        if self.feature_map is None:
            return slots
        batch, groups = inputs.k.shape[:2]
        if self.maps_unrotated and inputs.unrotated is not None:
            slots["map_keys"] = inputs.unrotated[1]
            if self.feature_map.config.rotation == "after":
                assert inputs.rope is not None
                heads = 1 if self.scorer is None else groups  # caches of KV heads hold different tokens
                cos, sin = (x[:, None].expand(batch, heads, -1, -1) for x in inputs.rope)
                slots |= {"cos": cos, "sin": sin}
        if self.gate is not None:
            gates = self.gate(inputs)
            gated = {"log_decay_k": gates.log_decay_k, "log_decay_v": gates.log_decay_v}
            gated["input_scale"] = gates.input_scale
            slots |= {name: x.expand(batch, -1, -1, -1) for name, x in gated.items() if x is not None}
        if self.delta is not None:
            slots["beta"] = self.delta(inputs)
        return slots

    def with_step(self, slots: Tokens, log_decay: Float[Tensor, "B Hk T"]) -> Float[Tensor, "B Hs T X"]:
        """Return the sum of the gate's log decay and that of the running maximum."""
        step = repeat_kv(log_decay[..., None], self.state_heads).to(accumulation_dtype(slots["values"].dtype))
        return step + slots["log_decay_k"] if "log_decay_k" in slots else step

    def map_keys(self, slots: Tokens, position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """Return the key map's features (logarithms, if the map is exponential); with a kernel, the kernel's inputs."""
        assert self.feature_map is not None
        keys = slots.get("map_keys", slots["keys"])
        return self.feature_map.k(keys, position) if self.kernel is None else self.feature_map.kernel_input(keys)

    def key_features(self, slots: Tokens, phi_k: Tensor, layout: SequenceLayout | None) -> Float[Tensor, "B Hs K F"]:
        """Return phi_k as it is written to the state, from the result of `map_keys`."""
        assert self.feature_map is not None
        if self.feature_map.exponential:
            phi_k = phi_k - (slots["offset"] if self.keeps_maximum else phi_k.amax(-1, keepdim=True))
            if layout is not None and not layout.uniform:
                # Padding is not in the maximum and is arbitrary.
                phi_k = phi_k.masked_fill((layout.key_position < 0)[:, None, :, None], -torch.inf)
            phi_k = exponentials(phi_k.to(accumulation_dtype(slots["values"].dtype)))
        if self.delta is not None:
            phi_k = self.delta.normalize(phi_k)
        if "cos" in slots:
            cos, sin = (x if len(x[0]) == 1 else repeat_kv(x, phi_k.shape[1]) for x in (slots["cos"], slots["sin"]))
            phi_k = rotated(phi_k, cos, sin)
        if phi_k.shape[1] != self.state_heads:
            phi_k = repeat_kv(phi_k, self.state_heads)
        return phi_k * repeat_kv(slots["input_scale"], self.state_heads) if "input_scale" in slots else phi_k

    def rules(self, tokens: Tokens) -> dict[str, Any]:
        """Return beta, log decays and the kernel of the tokens, as the ops take them."""
        return {name: tokens.get(name) for name in ("beta", "log_decay_k", "log_decay_v")} | {"kernel": self.kernel}

    # --- many tokens --------------------------------------------------------------------------------------------------

    def _many(
        self, inputs: AttnInputs, state: MixerState | None, layout: SequenceLayout | None
    ) -> tuple[Tensor, MixerState]:
        """Compute `step` for many tokens, one segment at a time."""
        length = inputs.q.shape[2]
        # Until a cache is full, the output is softmax over all keys.
        only_pairs = state is None and self._pairs_alone() and backend_for(inputs.q.device).splits_prompts
        first, segment = room(self.config) if only_pairs else 0, self._segment(inputs)
        first = first if 0 < first < length else segment
        if layout is not None or first >= length:
            return self._prefill(inputs, state, layout)
        y = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
        for start, stop in pairwise([0, *range(first, length, segment), length]):
            y[:, :, start:stop], state = self._prefill(inputs.tokens(start, stop), state, None)
        assert state is not None
        return y, state

    def _segment(self, inputs: AttnInputs) -> int:
        """Return how many tokens are processed at a time: all, if gradients are wanted.

        Without gradients, a prompt needs memory for its inputs, its output and one segment.
        """
        length = inputs.q.shape[2]
        if torch.is_grad_enabled() or self.feature_map is None:
            return length
        numbers = SEGMENT_NUMBERS[kind(inputs.q.device)]
        features = 0 if self.kernel is not None else self.feature_map.feature_dim  # a kernel makes features in blocks
        width = len(inputs.q) * self.shape.num_heads * max(self.shape.head_dim, features)
        return max(numbers // width // 64 * 64, 1024, 4 * self.span.context)

    def _prefill(
        self, inputs: AttnInputs, state: MixerState | None, new_layout: SequenceLayout | None
    ) -> tuple[Tensor, MixerState]:
        batch, length = len(inputs.q), inputs.q.shape[2]
        new_layout = SequenceLayout.full(length, inputs.q.device) if new_layout is None else new_layout
        if state is None and self._all_exact(new_layout):
            return self._all_by_softmax(inputs, new_layout)
        layout = new_layout if state is None else new_layout.with_context(state.seen, self.span)
        prepared = self.tokens(inputs, new_layout, layout, state)
        window, linear, after = self._partials(inputs, prepared, layout, state)
        y = self.combined(inputs, window, linear, lambda: self.has_linear(layout.query_position))
        return y, self._state(prepared, layout, after, batch)

    def tokens(
        self, inputs: AttnInputs, new_layout: SequenceLayout, layout: SequenceLayout, state: MixerState | None
    ) -> Prepared:
        """Return the tokens of `state` followed by those of the inputs, with features.

        Args:
            new_layout: of the inputs alone.
            layout: of the inputs after the context of `state`.
        """
        slots, maximum = self.new_tokens(inputs), None
        mapped = None if self.feature_map is None else self.map_keys(slots, layout.query_position)
        if self.keeps_maximum:
            assert mapped is not None
            before = None if state is None else state.maximum
            offset, log_decay, maximum = running_maximum(mapped.amax(-1), new_layout, before)
            slots["offset"] = offset[..., None]
            slots["log_decay_k"] = self.with_step(slots, log_decay)
        if state is not None:
            before = state.in_order(self.span)
            if mapped is not None:
                context = layout.key_position[:, : layout.key_position.shape[1] - new_layout.length]
                mapped = torch.cat([self.map_keys(before, context), mapped], dim=2)
            slots = concatenated(before, slots)
        cached, written = cached_keys(self.config, self.scorer, slots, layout, state), slots
        if mapped is None:
            return Prepared(slots, slots, None, None, cached)
        if cached is not None:
            written = cached.as_written(slots)
            mapped = self.map_keys(written, layout.key_position)
        return Prepared(slots, written, self.key_features(written, mapped, layout), maximum, cached)

    def partials(self, inputs: AttnInputs, layout: SequenceLayout) -> tuple[Partial | None, Partial | None]:
        with inputs.outside_autocast():
            return self._of_documents(inputs.accumulated(), layout)

    def _of_documents(self, inputs: AttnInputs, layout: SequenceLayout) -> tuple[Partial | None, Partial | None]:
        """Return `partials` of inputs in their own dtype; call it outside autocast."""
        prepared = self.tokens(inputs, layout, layout, None)
        return self._partials(inputs, prepared, layout, None, keeps_state=False)[:2]

    def _partials(
        self,
        inputs: AttnInputs,
        prepared: Prepared,
        layout: SequenceLayout,
        state: MixerState | None,
        *,
        keeps_state: bool = True,
    ) -> tuple[Partial | None, Partial | None, LinearState | None]:
        """Return the parts, and the linear state after the last token, if it is kept."""
        tokens, softmax = prepared.tokens, None
        if self.span.max_softmax_keys:
            pairs = inputs.q, tokens["keys"], tokens["values"]
            cached = None if prepared.cached is None else prepared.cached.pairs
            softmax = SoftmaxInputs(*pairs, self.span, layout, inputs.scaling, inputs.softcap, cached)
        if prepared.phi_k is None:
            return prefill(softmax, None)
        phi_q, log_scale = self.query_features(inputs, layout.query_position)
        keys = replace(self._keys(prepared, layout, state), phi_q=phi_q)
        window, linear, after = prefill(softmax, keys, keeps_state=keeps_state)
        assert linear is not None
        lost = self.lost(linear)
        if self.too_small(linear.den, layout.query_position):
            phi_q, log_scale = self.query_features(inputs, layout.query_position, linear.den.detach())
            _, linear, _ = prefill(None, replace(keys, phi_q=phi_q))
            assert linear is not None
            linear = learnable(linear)
        new = {name: x[:, :, x.shape[2] - layout.length :] for name, x in tokens.items()}
        return window, self.in_scale(without_lost(linear, lost), log_scale, new), after

    def _keys(self, prepared: Prepared, layout: SequenceLayout, state: MixerState | None) -> LinearInputs:
        """Return the keys and values that enter the linear state."""
        assert prepared.phi_k is not None
        before = None if state is None else state.linear
        written, rules = prepared.written, self.rules(prepared.written)
        return LinearInputs(None, prepared.phi_k, written["values"], self.span, layout, state=before, **rules)

    def linear_features(self, inputs: AttnInputs, layout: SequenceLayout) -> LinearFeatures:
        _, tokens, keys, _, _ = self.tokens(inputs, layout, layout, None)
        assert keys is not None
        phi_k, nothing = keys, tokens["values"][..., :0]
        rules = self.rules(tokens) | {"beta": None}

        def sums(phi_q: Tensor) -> Tensor:
            return linear_scan(LinearInputs(phi_q, keys, nothing, self.span, layout, **rules)).den

        phi_q, log_scale = self.scaled_queries(inputs, layout.query_position, sums)
        if self.kernel is not None:
            phi_q, phi_k = self.kernel.features(phi_q), self.kernel.features(phi_k)
        zero = phi_q.new_zeros(phi_q.shape[:3])
        log_scale = self.in_scale(Partial(phi_q[..., :0], zero, zero), log_scale, tokens).log_scale
        return LinearFeatures(tokens, phi_q, phi_k, log_scale)

    def absorb(self, inputs: AttnInputs, state: MixerState | None, layout: SequenceLayout | None = None) -> MixerState:
        """Return the state of `step` after these tokens, without their outputs."""
        state_dtype, length = STATE_DTYPES[self.config.state_dtype], inputs.q.shape[2]
        state = state if state is None or state_dtype is None else state.matrices_in(None)
        with inputs.outside_autocast():
            segment = length if layout is not None else self._segment(inputs)
            for start in range(0, length, segment):
                state = self._absorb(inputs.tokens(start, min(start + segment, length)), state, layout)
        assert state is not None
        return state if state_dtype is None else state.matrices_in(state_dtype)

    def _absorb(self, inputs: AttnInputs, state: MixerState | None, new_layout: SequenceLayout | None) -> MixerState:
        new_layout = SequenceLayout.full(inputs.q.shape[2], inputs.q.device) if new_layout is None else new_layout
        layout = new_layout if state is None else new_layout.with_context(state.seen, self.span)
        if self.feature_map is None:
            tokens = self.new_tokens(inputs)
            tokens = tokens if state is None else concatenated(state.in_order(self.span), tokens)
            return self._exact_state(tokens, layout, state, len(inputs.q))
        prepared = self.tokens(inputs, new_layout, layout, state)
        return self._state(prepared, layout, state_after(self._keys(prepared, layout, state)), len(inputs.q))

    def last_queries(self, inputs: AttnInputs, layout: SequenceLayout) -> Int[Tensor, "#B G K"]:
        """Return the position of the last query that reads each key of whole rows; only if `softmax_alone`."""
        assert self.softmax_alone
        with torch.no_grad():
            return last_queries(self.config, self.scorer, self.new_tokens(inputs), layout)

    def _all_exact(self, layout: SequenceLayout) -> bool:
        """Return whether window and cache hold every key of these rows, so that the output is softmax over all keys."""
        holds = max(self.span.linear_delay, room(self.config))
        return layout.uniform and layout.length <= holds and self._pairs_alone()

    def _pairs_alone(self) -> bool:
        """Return whether softmax is the output until a key leaves window and cache, and no gradient is wanted."""
        return not (self.keeps_maximum or self.config.learned_sink or torch.is_grad_enabled())

    def _all_by_softmax(self, inputs: AttnInputs, layout: SequenceLayout) -> tuple[Tensor, MixerState]:
        """Return softmax over all keys, and the next state, whose linear state is still empty."""
        y = full_softmax(inputs.q, inputs.k, inputs.v, scaling=inputs.scaling, softcap=inputs.softcap, layout=layout)
        nothing = self.state_like(inputs.tokens(0, 1))
        state = self._exact_state(self.new_tokens(inputs), layout, None, len(inputs.q))
        return y, replace(state, linear=nothing.linear, maximum=nothing.maximum)

    # --- one token ----------------------------------------------------------------------------------------------------

    def _one_token(self, inputs: AttnInputs, state: MixerState) -> tuple[Tensor, MixerState]:
        """Compute `step` for one token of every row, by the same few operations at every position."""
        config, span, counts = self.config, self.span, state.counts
        context = counts.once(span, lambda seen: StepContext(span, seen))
        slots, position, before = state.slots, state.cached_position, state.linear
        new, maximum = self.new_tokens(inputs), None
        if self.keeps_maximum:
            assert state.maximum is not None
            top = self.map_keys(new, context.column).amax(-1)
            offset, log_decay, maximum = running_maximum(top, SequenceLayout.full(1, top.device), state.maximum)
            new["offset"], new["log_decay_k"] = offset[..., None], self.with_step(new, log_decay)

        # When a block begins, the cache's keys are chosen, and evicted keys enter the linear state.
        if config.cache is not None and context.may_flush:
            assert self.scorer is not None
            slots, position, dropped = next_block(config, self.scorer, state, context)
            if before is not None and dropped is not None:
                before = self._folded(before, dropped, context.leaving)

        # One key enters the linear state: the one that leaves the window, or without a window the new one.
        # Static caches rely on the order of names, which is that of every other state of this mixer.
        after = new | {
            name: context.written(slots[name], x) for name, x in new.items() if name not in ("keys", "values")
        }
        linear = log_scale = None
        if before is not None:
            phi_q, log_scale = self.query_features(inputs, context.column)
            phi_k: Tensor | None = None
            entering: Tokens = {}
            if config.cache is None:
                entering = context.entering_tokens(slots, new)
                phi_k = self.key_features(entering, self.map_keys(entering, context.entering), None)
            decays: dict[str, Any] = {}
            if self.keeps_maximum or self.gate is not None:
                decays = _skipped_steps(after, context)
            linear = LinearStep(phi_q, before, phi_k, entering.get("values"), **self.rules(entering), **decays)

        pairs = new["keys"], new["values"], slots["keys"], slots["values"]
        outputs = backend_for(inputs.q.device).step(
            StepInputs(
                inputs.q, *pairs, context, inputs.scaling, inputs.softcap, linear, self.softmax_alone, self.quotient
            )
        )
        after |= {"keys": outputs.k, "values": outputs.v}
        next_state = MixerState(after, counts.next(), outputs.state, maximum, position)
        if outputs.y is not None:
            return outputs.y, next_state
        sums = outputs.linear
        if sums is not None and self.exponential:
            sums = self.in_scale(without_lost(sums, self.lost(sums)), log_scale, new)
        name = span, config.cache

        def has_linear() -> Tensor:
            return counts.once(name, lambda _: self.has_linear(context.column))

        return self.combined(inputs, outputs.window, sums, has_linear), next_state

    def _folded(self, state: LinearState, dropped: Tokens, position: Int[Tensor, "B w"]) -> LinearState:
        """Return the state with the pairs that are evicted when the block at `position` leaves the window."""
        layout = SequenceLayout(position, torch.zeros_like(position), 0)
        phi_k = self.key_features(dropped, self.map_keys(dropped, position), layout)
        keys = LinearInputs(None, phi_k, dropped["values"], EVERY_KEY, layout, state=state, **self.rules(dropped))
        if self.delta is not None:
            keys = keys.with_values(delta_values(keys))
        return with_keys(keys, position >= 0)

    # --- outputs ------------------------------------------------------------------------------------------------------

    def lost(self, linear: Partial) -> Bool[Tensor, "B H T"] | None:
        """Return which sums over `query_features` have underflowed and count as 0; None: features have a scale.

        Numbers that underflow in z may not underflow in S. If a query reads only such keys, num / den is no mean of
        values, but larger than all of them.
        """
        if not self.in_any_scale:
            return None
        num, den = linear.num.detach(), linear.den.detach()
        least = math.exp(HEADROOM[den.dtype]) * torch.finfo(den.dtype).tiny
        return (den < least) & (num.abs().amax(-1) > LARGEST_VALUE * den)

    def in_scale(self, linear: Partial, log_scale: Tensor | None, new: Tokens) -> Partial:
        """Return the linear part with its log_scale: that of the query's features plus the running maximum."""
        if not self.config.absolute:
            return linear
        assert log_scale is not None
        offset = repeat_kv(new["offset"], self.shape.num_heads)[..., 0]
        return replace(linear, log_scale=(log_scale + offset).to(linear.den.dtype))

    def combined(
        self, inputs: AttnInputs, window: Partial | None, linear: Partial | None, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        """Return the output in the inputs' dtype. The parts may be overwritten unless they require gradients."""
        dtype = inputs.v.dtype
        y = backend_for(inputs.q.device).output(window, linear, self.quotient, dtype)
        if y is not None:
            return y
        y = self.combine(window, linear, partial(self.normalized, inputs=inputs), has_linear)
        # In the copy the heads of a token are adjacent, as the output projection reads them.
        if y.dtype == dtype:
            return y
        return y.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).transpose(1, 2)

    def quotient(self) -> Quotient | None:
        """Return the parameters of the output as one quotient of sums; None: it is no such quotient."""
        combine = self.combine
        if self.config.learned_sink:
            return None
        if isinstance(combine, WindowOnlyCombine):
            return Quotient(None, MIN_DENOMINATOR)
        assert self.feature_map is not None
        least = self.feature_map.min_denominator(torch.float32)
        if not self.config.sums:
            return None
        if not self.span.max_softmax_keys:
            return Quotient(None, least)
        return Quotient(combine.window_factor, least) if isinstance(combine, SharedDenominatorCombine) else None

    # --- states -------------------------------------------------------------------------------------------------------

    def _state(self, prepared: Prepared, layout: SequenceLayout, linear: LinearState | None, batch: int) -> MixerState:
        """Return the state after the last token; `linear` is the linear part's state."""
        if linear is not None and prepared.cached is not None:  # keys of the next state are chosen when a block begins
            linear = LinearState(linear.S, linear.z)
        cached = None if prepared.cached is None else prepared.cached.last()
        return self._after(prepared.tokens, layout, batch, cached, linear, prepared.maximum)

    def _after(
        self,
        tokens: Tokens,
        layout: SequenceLayout,
        batch: int,
        cached: Tokens | None,
        linear: LinearState | None = None,
        maximum: Tensor | None = None,
    ) -> MixerState:
        """Return the state of these tokens and of the cached pairs."""
        slots = keep_slots(tokens, layout, self.span, batch, cached)
        position = None if cached is None else cached["position"]
        return MixerState(slots, TokenCounts(layout.count.expand(batch).clone()), linear, maximum, position)

    def _exact_state(self, tokens: Tokens, layout: SequenceLayout, state: MixerState | None, batch: int) -> MixerState:
        """Return the state after `tokens`, which begin with those of `state`, without a linear state."""
        cached = None
        if self.config.cache is not None:
            cached = cache_after(self.config, self.scorer, tokens, layout, state)
        return self._after(tokens, layout, batch, cached)

    def state_like(self, inputs: AttnInputs) -> MixerState:
        """Return the empty state for inputs of this shape: the state before the first token."""
        batch, _, _, head_dim = inputs.k.shape
        dtype, device = accumulation_dtype(inputs.v.dtype), inputs.k.device
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        new, maximum = self.new_tokens(inputs), None
        linear = None
        if self.keeps_maximum:
            logs = self.map_keys(new, seen[:, None].expand(-1, inputs.k.shape[2]))
            maximum = logs.new_full(logs.shape[:2], -torch.inf)
            new["offset"] = logs[..., :1]
            new["log_decay_k"] = self.with_step(new, logs[..., 0])
        if self.feature_map is not None:
            S = torch.zeros(batch, self.state_heads, self.feature_map.feature_dim, head_dim, dtype=dtype, device=device)
            early = isinstance(self.span, TerracedSpan) and self.config.cache is None
            following = (S, S[..., 0]) if early else (None, None)
            linear = LinearState(S, S[..., 0], *following)
        window = self.span.sinks + self.span.context
        size = 0 if self.config.cache is None else self.config.cache.size
        slots = {
            name: x.new_zeros(batch, x.shape[1], window if name in STEPS else window + size, x.shape[3])
            for name, x in new.items()
        }
        position = seen.new_full((batch, inputs.k.shape[1], size), -1) if size else None
        state = MixerState(slots, TokenCounts(seen), linear, maximum, position)
        state_dtype = STATE_DTYPES[self.config.state_dtype]
        return state if state_dtype is None else state.matrices_in(state_dtype)


def _skipped_steps(slots: Tokens, context: StepContext) -> dict[str, Any]:
    """Return summed log decays of the window's steps, which the linear state does not include yet."""
    skipped: dict[str, Tensor] = {}
    for axis in ("k", "v"):
        steps = slots.get(f"log_decay_{axis}")
        if steps is not None and context.slots:
            steps = steps if context.passed is None else steps.masked_fill(context.passed, 0)
            skipped[f"skipped_{axis}"] = steps.sum(2, keepdim=True)
    return skipped


def concatenated(before: Tokens, tokens: Tokens) -> Tokens:
    """Return the tokens `before` followed by `tokens`."""
    return {name: torch.cat([in_dtype(before[name], x.dtype), x], dim=2) for name, x in tokens.items()}


def without_lost(linear: Partial, lost: Bool[Tensor, "B H T"] | None) -> Partial:
    """Return the sums with 0 for `lost` ones, which underflowed. Overwrites them unless they require gradients."""
    if lost is None:
        return linear
    num, den = linear.num, linear.den
    if num.requires_grad or den.requires_grad:
        num, den = num.masked_fill(lost[..., None], 0), den.masked_fill(lost, 0)
    else:
        num, den = num.masked_fill_(lost[..., None], 0), den.masked_fill_(lost, 0)
    return replace(linear, num=num, den=den)


def learnable(linear: Partial) -> Partial:
    """Return the sums without gradients where den, which should be about 1 in this scale, is small.

    Key features that almost underflow have gradients that almost overflow, or do.
    """
    none = linear.den.detach() < LEAST_LEARNED
    num = torch.where(none[..., None], linear.num.detach(), linear.num)
    return replace(linear, num=num, den=torch.where(none, linear.den.detach(), linear.den))
