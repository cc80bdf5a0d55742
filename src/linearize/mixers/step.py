"""Compute one more token from a state: a short sequence of operations, the same at every position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linearize.mixers.cached import Dropped, cache_of_next
from linearize.mixers.causal import CausalMixer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer import without_lost
from linearize.mixers.mixer_state import MixerState, Tokens
from linearize.mixers.running_maximum import running_maximum
from linearize.ops.dispatch import backend_for
from linearize.ops.inputs import LinearInputs, LinearState
from linearize.ops.layout import Layout, NoSpan
from linearize.ops.linear_state import with_keys
from linearize.ops.partial import in_dtype
from linearize.ops.recurrent import LinearStep, NextToken, StepInputs
from linearize.ops.reference import delta_values

EVERY_KEY = NoSpan()  # once: compilers do not make them


def one_token(mixer: CausalMixer, inputs: AttnInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    """Return output and next state, as `LinearMixer.step` gives them for one token of every row."""
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
    linear = log_scale = None
    if mixer.feature_map is not None:
        assert before is not None
        phi_q, log_scale = mixer.query_features(inputs, at.column)
        linear = LinearStep(phi_q, before, kernel=mixer.kernel, **skipped_steps(new, state.slots, at))
        if mixer.config.cache is None:
            linear = _with_entering(mixer, linear, new, state.slots, at)
    given = inputs.q, new, state.slots, at, inputs.scaling, inputs.softcap, exact, linear, mixer.quotient
    found = backend_for(inputs.q.device).step(StepInputs(*given))
    after = MixerState(found.slots, clock.next(), found.state, maximum, exact)
    if found.y is not None:
        return found.y, after
    sums = found.linear
    if sums is not None:
        sums = mixer.in_scale(without_lost(sums, mixer.lost(sums)), log_scale, new)
    name = span, mixer.config.cache
    y = mixer.combined(inputs, found.window, sums, lambda: clock.once(name, lambda _: mixer.has_linear(at.column)))
    return y, after


def _with_entering(mixer: CausalMixer, linear: LinearStep, new: Tokens, slots: Tokens, at: NextToken) -> LinearStep:
    """Add the token that enters the state now: it leaves the window, or is the new one."""
    slot = mixer.span.sinks + mixer.span.context - mixer.span.fold_lag
    if slot == slots["keys"].shape[2]:
        one = {name: x.contiguous() for name, x in new.items()}
    else:
        one = {name: in_dtype(slots[name][:, :, slot : slot + 1], x.dtype) for name, x in new.items()}
    phi_k = mixer.key_features(one, mixer.map_keys(one, at.entering), None)
    return replace(linear, phi_k=phi_k, v=one["values"], **mixer.rules(one))


def folded(mixer: CausalMixer, state: LinearState | None, dropped: Dropped) -> LinearState | None:
    """Return the state with the pairs that the KV cache with eviction drops when a block begins."""
    if state is None:
        return None
    assert dropped.tokens is not None
    tokens, position = dropped.tokens, dropped.position
    layout = Layout(position, torch.zeros_like(position), 0)
    phi_k = mixer.key_features(tokens, mixer.map_keys(tokens, position), layout)
    keys = LinearInputs(None, phi_k, tokens["values"], EVERY_KEY, layout, state=state, **mixer.rules(tokens))
    if mixer.delta is not None:
        keys = keys.with_values(delta_values(keys))
    return with_keys(keys, position >= 0)


def skipped_steps(new: Tokens, slots: Tokens, at: NextToken) -> dict[str, Any]:
    """Return summed log decays of the steps within the window, by which no key below it has decayed yet."""
    if not at.span.max_lag:
        return {}
    found: dict[str, Any] = {}
    for axis in ("k", "v"):
        name = f"log_decay_{axis}"
        if name in new:
            steps = slots[name].masked_fill(at.passed, 0).sum(2, keepdim=True)
            found[f"skipped_{axis}"] = steps + new[name]
    return found
