"""Test of the test: each way of breaking a mixer makes the property test's checks fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from linearize.configs.feature_maps import ExpMap, HedgehogMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import Add, DeltaUpdate, EvictionCache, RmsNormalizer, ScalarDecay
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan, SlidingSpan, TerracedSpan
from linearize.mixers import eviction_cache, linear
from linearize.mixers.running_maximum import running_maximum
from linearize.ops.backend import Backend
from linearize.ops.inputs import LinearInputs, Parts
from tests.mixers.forms import check_calls, check_oracle
from tests.mixers.space import Drawn, make_drawn

SHAPE = LayerShape(num_heads=2, num_kv_heads=1, head_dim=4, hidden_size=5, max_positions=64)
DOCUMENTS = [[list(range(9)), list(range(10, 34))], [list(range(1, 34))]]
WINDOW = SlidingSpan(window_size=5, sinks=2)
TERRACES = TerracedSpan(window_size=4, sinks=1)
NORM = {"normalizer": RmsNormalizer(), "combine": Add()}
GATED = {"decay": ScalarDecay(bias_init=1.0), **NORM}
CACHE = {"cache": EvictionCache(size=5)}
DELTA = {"update": DeltaUpdate(), **NORM}

Check = Callable[[Drawn], None]


def oracle(case: Drawn) -> None:
    check_oracle(case)


def in_two_calls(case: Drawn) -> None:
    check_calls(case, [20])


def token_by_token(case: Drawn) -> None:
    check_calls(case, range(1, case.length))


def after_a_prompt(case: Drawn) -> None:
    check_calls(case, range(19, case.length))


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    for span in (SlidingSpan, TerracedSpan):
        lo = span.lo
        patch.setattr(span, "lo", lambda self, position, lo=lo: (lo(self, position) + 1).clamp_min(0))


def of_scans(patch: pytest.MonkeyPatch, change: Callable[[LinearInputs], LinearInputs]) -> None:
    """`change` is made to what the linear part of many tokens is given."""
    prefill = linear.prefill
    patch.setattr(linear, "prefill", lambda window, keys, **how: prefill(window, keys and change(keys), **how))


def state_dropped(patch: pytest.MonkeyPatch) -> None:
    of_scans(patch, lambda keys: replace(keys, state=None))


def decays_to_the_wrong_power(patch: pytest.MonkeyPatch) -> None:
    """As if the step that writes a key decayed it too."""

    of_scans(patch, lambda keys: replace(keys, phi_k=keys.phi_k * keys.log_decay_k.exp()))


def carry_lost(patch: pytest.MonkeyPatch) -> None:
    """The running maximum starts afresh with every call."""
    patch.setattr(linear, "running_maximum", lambda top, layout, before: running_maximum(top, layout, None))


def sinks_counted_twice(patch: pytest.MonkeyPatch) -> None:
    of_scans(patch, lambda keys: replace(keys, span=keys.span.model_copy(update={"sinks": 0})))


def window_decays_lost(patch: pytest.MonkeyPatch) -> None:
    """One token at a time, what is read through the window has not decayed there."""
    patch.setattr(linear, "_skipped_steps", lambda slots, at: {})


def terrace_lost(patch: pytest.MonkeyPatch) -> None:
    """The state that waits for the next terrace is lost between calls."""
    prefill = linear.prefill

    def wrong(*args: Any, **how: Any) -> Parts:
        parts = prefill(*args, **how)
        state = parts.state
        return parts if state is None else parts._replace(state=replace(state, next_S=state.S, next_z=state.z))

    patch.setattr(linear, "prefill", wrong)


def erasures_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The delta rule adds where it should replace."""
    patch.setattr(Backend, "delta_values", lambda self, keys: keys.beta * keys.v)


def input_scale_forgotten(patch: pytest.MonkeyPatch) -> None:
    tokens = linear.LinearMixer.new_tokens

    def wrong(self, inputs):
        return {name: x for name, x in tokens(self, inputs).items() if name != "input_scale"}

    patch.setattr(linear.LinearMixer, "new_tokens", wrong)


def thrown_out_and_lost(patch: pytest.MonkeyPatch) -> None:
    """Only what leaves the window is written to the state, and not what the cache throws out for it."""
    found = eviction_cache.written

    def wrong(before, after, leaves):
        places = found(before, after, leaves)
        return torch.where(places == leaves, places, -1)

    patch.setattr(eviction_cache, "written", wrong)


def kept_and_written(patch: pytest.MonkeyPatch) -> None:
    """What the cache takes is in the state as well."""
    patch.setattr(eviction_cache, "written", lambda before, after, leaves: leaves)


def dropped_by_steps_and_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear.LinearMixer, "_folded", lambda mixer, state, dropped, position: state)


EXP = {"feature_map": ExpMap()}
GUARDS = [
    (window_off_by_one, oracle, {"span": WINDOW}),
    (window_off_by_one, oracle, {"span": TERRACES}),
    (window_off_by_one, oracle, {"span": WINDOW} | GATED),
    (state_dropped, in_two_calls, {"span": WINDOW}),
    (state_dropped, in_two_calls, {"span": NoSpan()} | GATED),
    (state_dropped, in_two_calls, {"span": TERRACES} | DELTA),
    (decays_to_the_wrong_power, oracle, {"span": NoSpan()} | GATED),
    (decays_to_the_wrong_power, oracle, {"span": WINDOW} | GATED),
    (carry_lost, in_two_calls, {"span": NoSpan()} | EXP | NORM),
    (carry_lost, token_by_token, {"span": WINDOW} | EXP),
    (sinks_counted_twice, oracle, {"span": WINDOW}),
    (sinks_counted_twice, oracle, {"span": TERRACES} | GATED),
    (window_decays_lost, token_by_token, {"span": WINDOW} | GATED),
    (window_decays_lost, token_by_token, {"span": TERRACES} | EXP),
    (terrace_lost, after_a_prompt, {"span": TERRACES}),
    (erasures_forgotten, oracle, {"span": WINDOW} | DELTA),
    (thrown_out_and_lost, oracle, {"span": TERRACES} | CACHE),
    (thrown_out_and_lost, oracle, {"span": TERRACES} | CACHE | GATED),
    (kept_and_written, oracle, {"span": TERRACES} | CACHE | EXP),
    (dropped_by_steps_and_lost, token_by_token, {"span": TERRACES} | CACHE),
    (dropped_by_steps_and_lost, after_a_prompt, {"span": TERRACES} | CACHE | DELTA),
    (carry_lost, token_by_token, {"span": TERRACES} | CACHE | EXP),
    (input_scale_forgotten, oracle, {"span": NoSpan()} | GATED),
]


@pytest.mark.parametrize(
    "mutant, check, fields",
    [pytest.param(*guard, id=f"{guard[0].__name__}-{index}") for index, guard in enumerate(GUARDS)],
)
def test_broken_mixers_are_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], check: Check, fields: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MixerConfig(**{"feature_map": HedgehogMap(feature_dim=4)} | fields)
    case = make_drawn(config, SHAPE, DOCUMENTS, 34, seed=1)
    check(case)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(case)
