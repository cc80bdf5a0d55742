"""Compute one more token from a state: a short sequence of operations, the same at every position."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from linearize.configs.spans import NoSpan
from linearize.mixers.cached import next_block
from linearize.mixers.causal import CausalMixer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer import without_lost
from linearize.mixers.mixer_state import MixerState
from linearize.mixers.running_maximum import running_maximum
from linearize.ops.backend import backend_for
from linearize.ops.inputs import LinearInputs, LinearState
from linearize.ops.layout import Layout, Tokens
from linearize.ops.linear_state import with_keys
from linearize.ops.reference import delta_values
from linearize.ops.step import LinearStep, StepContext, StepInputs

EVERY_KEY = NoSpan()  # once: compilers do not make them


def one_token(mixer: CausalMixer, inputs: AttnInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    """Return output and next state, as `LinearMixer.step` gives them for one token of every row."""
    config, span, clock = mixer.config, mixer.span, state.clock
    at = clock.once(span, lambda seen: StepContext(span, seen))
    slots, position, before = state.slots, state.cached_position, state.linear
    new, maximum = mixer.new_tokens(inputs), None
    if mixer.keeps_maximum:
        assert state.maximum is not None
        top = mixer.map_keys(new, at.column).amax(-1)
        offset, log_decay, maximum = running_maximum(top, Layout.full(1, top.device), state.maximum)
        new["offset"], new["log_decay_k"] = offset[..., None], mixer.with_step(new, log_decay)

    # When a block begins, its eviction cache is chosen, and what this drops enters the linear state.
    if config.cache is not None and at.may_flush:
        assert mixer.scorer is not None
        slots, position, dropped = next_block(config, mixer.scorer, state, at)
        if before is not None and dropped is not None:
            before = _folded(mixer, before, dropped, at.leaving)

    # One key enters the linear state as it leaves the window, or is the new one.
    # Names in the order of every other state of this mixer: static caches rely on it.
    after = new | {name: at.written(slots[name], x) for name, x in new.items() if name not in ("keys", "values")}
    linear = log_scale = None
    if before is not None:
        phi_q, log_scale = mixer.query_features(inputs, at.column)
        phi_k: Tensor | None = None
        one: Tokens = {}
        if config.cache is None:
            one = at.entering_tokens(slots, new)
            phi_k = mixer.key_features(one, mixer.map_keys(one, at.entering), None)
        decays: dict[str, Any] = _skipped_steps(after, at) if mixer.keeps_maximum or mixer.gate is not None else {}
        linear = LinearStep(phi_q, before, phi_k, one.get("values"), **mixer.rules(one), **decays)

    pairs = new["keys"], new["values"], slots["keys"], slots["values"]
    found = backend_for(inputs.q.device).step(
        StepInputs(inputs.q, *pairs, at, inputs.scaling, inputs.softcap, linear, mixer.softmax_alone, mixer.quotient)
    )
    after |= {"keys": found.k, "values": found.v}
    next_state = MixerState(after, clock.next(), found.state, maximum, position)
    if found.y is not None:
        return found.y, next_state
    sums = found.linear
    if sums is not None and mixer.exponential:
        sums = mixer.in_scale(without_lost(sums, mixer.lost(sums)), log_scale, new)
    name = span, config.cache
    y = mixer.combined(inputs, found.window, sums, lambda: clock.once(name, lambda _: mixer.has_linear(at.column)))
    return y, next_state


def _folded(mixer: CausalMixer, state: LinearState, dropped: Tokens, position: Int[Tensor, "B w"]) -> LinearState:
    """Return the state with the pairs that the KV cache with eviction drops when the block at `position` leaves."""
    layout = Layout(position, torch.zeros_like(position), 0)
    phi_k = mixer.key_features(dropped, mixer.map_keys(dropped, position), layout)
    keys = LinearInputs(None, phi_k, dropped["values"], EVERY_KEY, layout, state=state, **mixer.rules(dropped))
    if mixer.delta is not None:
        keys = keys.with_values(delta_values(keys))
    return with_keys(keys, position >= 0)


def _skipped_steps(slots: Tokens, at: StepContext) -> dict[str, Any]:
    """Return summed log decays of the steps within the window, by which no key below it has decayed yet."""
    found: dict[str, Tensor] = {}
    for axis in ("k", "v"):
        steps = slots.get(f"log_decay_{axis}")
        if steps is not None and at.slots:
            steps = steps if at.passed is None else steps.masked_fill(at.passed, 0)
            found[f"skipped_{axis}"] = steps.sum(2, keepdim=True)
    return found
