"""One more token, with a state: a short sequence of operations, the same at every position."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from linearize.mixers.cached import SCORES, Dropped, cache_of_next
from linearize.mixers.causal import CausalMixer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer import without_lost
from linearize.mixers.mixer_state import MixerState, Tokens, push_slot
from linearize.mixers.running_maximum import running_maximum
from linearize.ops import fused_outputs
from linearize.ops.dispatch import has_kernels
from linearize.ops.layout import Layout, NoSpan
from linearize.ops.linear_state import LinearState, with_keys
from linearize.ops.partial import accumulation_dtype, in_dtype
from linearize.ops.recurrent import NextToken, linear_read, linear_step, softmax_step, window_step
from linearize.ops.reference import delta_values

PAIR = "keys", "values"
EVERY_KEY = NoSpan()  # once: compilers do not make them


def one_token(mixer: CausalMixer, inputs: AttnInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    """Output and next state, as `LinearMixer.step` gives them for one token of every row."""
    span, clock = mixer.span, state.clock
    at = clock.once(span, lambda seen: NextToken(span, seen))
    new, maximum = mixer.new_tokens(inputs), None
    if mixer.config.keeps_maximum:
        assert state.maximum is not None
        top = mixer.map_keys(new, at.column).amax(-1)
        offset, log_decay, maximum = running_maximum(top, Layout.full(1, top.device), state.maximum)
        new["offset"], new["log_decay_k"] = offset[..., None], mixer.with_step(new, log_decay)
    exact, before, dropped = state.exact, state.linear, cache_of_next(mixer.config, mixer.scorer, state, at)
    if dropped is not None:
        exact, before = dropped.exact, folded(mixer, state.linear, dropped)
    how = _one_pass(mixer, inputs, new, before) if has_kernels(inputs.q.device) else None
    if how is not None:
        return _by_kernel(mixer, inputs, state, exact, before, new, at, how)
    tokens = {name: torch.cat([in_dtype(state.slots[name], x.dtype), x], dim=2) for name, x in new.items()}
    if mixer.feature_map is None and inputs.softcap is None:
        k, v, bias = _read(tokens, exact, at, inputs.q.dtype)
        y = softmax_step(inputs.q, k, v, bias=bias, scaling=inputs.scaling)
        return y, MixerState(push_slot(tokens, at), clock.next(), None, None, exact)
    window = None
    if span.max_lag:
        k, v, bias = _read(tokens, exact, at, accumulation_dtype(inputs.v.dtype))
        window = window_step(inputs.q, k, v, bias=bias, scaling=inputs.scaling, softcap=inputs.softcap)
    linear = after = None
    if mixer.feature_map is not None:
        assert before is not None
        phi_q, log_scale = mixer.query_features(inputs, at.column)
        skipped = skipped_steps(tokens, at.below if span.max_lag else None)
        if mixer.config.cache is None:
            entering = tokens["keys"].shape[2] - 1 - span.fold_lag
            one = {name: x[:, :, entering : entering + 1] for name, x in tokens.items()}
            phi_k = mixer.key_features(one, mixer.map_keys(one, at.entering), None)
            options: dict[str, Any] = {"beta": one.get("beta"), "at": at, "state": before} | skipped | mixer.how(one)
            linear, after = linear_step(phi_q, phi_k, one["values"], **options)
        else:
            linear, after = linear_read(phi_q, before, **skipped, at=at), before
        linear = mixer.in_scale(without_lost(linear, mixer.lost(linear)), log_scale, new)
    name = span, mixer.config.cache
    y = mixer.combined(inputs, window, linear, lambda: clock.once(name, lambda _: mixer.has_linear(at.column)))
    return y, MixerState(push_slot(tokens, at), clock.next(), after, maximum, exact)


def _one_pass(
    mixer: CausalMixer, inputs: AttnInputs, new: Tokens, state: LinearState | None
) -> fused_outputs.OneQuotient | None:
    """Return how `fused_outputs.one_token` makes the output; None where it does not.

    It does not where a token has more than its key, value and eviction score, or where something decays the sums.
    """
    if not new.keys() <= {*PAIR, SCORES} or mixer.kernel is not None:
        return None
    return mixer.one_quotient if fused_outputs.serves_one_token(inputs.q, inputs.k.shape[1], state) else None


def _by_kernel(
    mixer: CausalMixer,
    inputs: AttnInputs,
    state: MixerState,
    exact: Tokens | None,
    before: LinearState | None,
    new: Tokens,
    at: NextToken,
    how: fused_outputs.OneQuotient,
) -> tuple[Tensor, MixerState]:
    """`one_token` in one launch besides those of the maps; it reads `exact` and `before` of cache and state."""
    span, linear = mixer.span, None
    if mixer.feature_map is not None:
        assert before is not None
        phi_k, slots_before = None, span.sinks + span.context
        slot = slots_before - span.fold_lag
        if exact is None:
            old = {name: x[:, :, slot : slot + 1] for name, x in state.slots.items()}
            entering = new if slot == slots_before else old
            phi_k = mixer.key_features(entering, mixer.map_keys(entering, at.entering), None)
        phi_q, _ = mixer.query_features(inputs, at.column)
        begins = None if before.next_S is None else at.flushes
        linear = fused_outputs.LinearStep(phi_q, before, phi_k, at.enters, slot, begins)
    pair, slots = ((tokens["keys"], tokens["values"]) for tokens in (new, state.slots))
    bias = at.bias(1, accumulation_dtype(inputs.v.dtype)) if span.max_lag else None
    held = None if exact is None else (exact["keys"], exact["values"], exact["position"])
    given = inputs.q, pair, slots, bias, at.position, held, linear, how
    options = {"sinks": span.sinks, "scaling": inputs.scaling, "softcap": inputs.softcap}
    y, slots, after = fused_outputs.one_token(*given, **options)
    kept: Tokens = {"keys": slots[0], "values": slots[1]}
    if SCORES in new:
        scores = torch.cat([state.slots[SCORES], new[SCORES]], dim=2)
        kept |= push_slot({SCORES: scores}, at)
    return y, MixerState(kept, state.clock.next(), after, None, exact)


def _read(tokens: Tokens, exact: Tokens | None, at: NextToken, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What one softmax reads, window and cache: keys, values, and what is added to their scores, in `dtype`."""
    k, v = tokens["keys"], tokens["values"]
    if exact is None:
        return k, v, at.bias(k.shape[1], dtype)
    k, v = (torch.cat([in_dtype(exact[name], x.dtype), x], dim=2) for name, x in (("keys", k), ("values", v)))
    return k, v, at.bias_with_cache(exact["position"].shape[2], k.shape[1], dtype)


def folded(mixer: CausalMixer, state: LinearState | None, dropped: Dropped) -> LinearState | None:
    """The state with what the KV cache with eviction drops when a block begins."""
    if state is None:
        return None
    assert dropped.tokens is not None
    tokens, position = dropped.tokens, dropped.position
    layout = Layout(position, torch.zeros_like(position), 0)
    phi_k, values = mixer.key_features(tokens, mixer.map_keys(tokens, position), layout), tokens["values"]
    how: dict[str, Any] = {"span": EVERY_KEY, "layout": layout}
    if mixer.delta is not None:
        decay = tokens.get("log_decay_k")
        values = delta_values(phi_k, values, tokens["beta"], log_decay_k=decay, **how, state=state)
    return with_keys(phi_k, values, position >= 0, **mixer.how(tokens), **how, state=state)


def skipped_steps(tokens: Tokens, below: Bool[Tensor, "B S"] | None) -> dict[str, Tensor]:
    """Log decays of the steps within the window, which no key below it has been through; None: there is no window."""
    if below is None:
        return {}
    steps = {"skipped_k": tokens.get("log_decay_k"), "skipped_v": tokens.get("log_decay_v")}
    return {
        name: x.masked_fill(below[:, None, :, None], 0).sum(2, keepdim=True)
        for name, x in steps.items()
        if x is not None
    }
