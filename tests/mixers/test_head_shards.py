"""The mixers of some KV heads each, side by side, are the mixer of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from linearize.base import UserError
from linearize.configs.feature_maps import HedgehogMap
from linearize.configs.mixer import HeadwiseConfig, MixerConfig
from linearize.configs.mixer_parts import FixedDecay
from linearize.configs.shape import LayerShape
from linearize.configs.spans import SlidingSpan
from linearize.mixers.gates import FixedGate
from linearize.mixers.head_shards import WeightShard, shard_of_heads
from tests.mixers.forms import FP64, assert_near, check_draws
from tests.mixers.space import Drawn, configs, make_drawn
from tests.mixers.test_partition_space import KINDS, per_head

LENGTH = 24
FOUR = LayerShape(num_heads=8, num_kv_heads=4, head_dim=4, hidden_size=5, max_positions=64)
FIXED = MixerConfig(span=SlidingSpan(window_size=2), decay=FixedDecay(), feature_map=HedgehogMap(per="kv_head"))


def check(case: Drawn) -> None:
    """Wherever the heads are cut in two."""
    mixer, heads = case.mixer, case.mixer.shape.num_kv_heads
    assert mixer.config is not None
    whole = mixer(case.inputs, case.layout)
    for cut in range(1, heads):
        outputs = []
        for mine in (range(cut), range(cut, heads)):
            own, shards = shard_of_heads(mixer.config, mixer.shape, mine)
            state = mixer.state_dict()
            assert shards.keys() == state.keys()
            assert all(shard.shape == state[name].shape for name, shard in shards.items())
            own.double().load_state_dict({x.name: x(state[name]) for name, x in shards.items() if x.name is not None})
            outputs.append(own(case.inputs.heads(tuple(mine)), case.layout))
        assert_near(torch.cat(outputs, dim=1), whole, FP64, f"heads cut at {cut}")


@dataclass(frozen=True)
class Draw:
    """What hypothesis chooses: one kind for all heads, or one for each, and how many query heads read each."""

    kinds: MixerConfig | tuple[MixerConfig | None, ...]
    per_kv_head: int
    seed: int

    def make(self) -> Drawn:
        heads = 3 if isinstance(self.kinds, MixerConfig) else len(self.kinds)
        shape = LayerShape(heads * self.per_kv_head, heads, head_dim=4, hidden_size=5, max_positions=64)
        config = self.kinds if isinstance(self.kinds, MixerConfig) else HeadwiseConfig.of(self.kinds)
        config = FIXED if config is None else config
        config = config.resolved(shape) if isinstance(config, MixerConfig) else config
        return make_drawn(config, shape, [[list(range(LENGTH))]], LENGTH, self.seed)


DRAWS = st.builds(
    Draw,
    kinds=st.one_of(configs().map(per_head), st.lists(KINDS, min_size=2, max_size=4).map(tuple)),
    per_kv_head=st.integers(1, 2),
    seed=st.integers(0, 2**20),
)


@pytest.mark.parametrize("examples", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_parts_side_by_side(examples: int) -> None:
    check_draws(lambda draw: check(draw.make()), DRAWS, examples)


def fixed() -> Drawn:
    config = HeadwiseConfig.of([FIXED, None, FIXED, FIXED])
    assert isinstance(config, HeadwiseConfig)
    return make_drawn(config, FOUR, [[list(range(LENGTH))]], LENGTH, seed=1)


def test_constants_are_those_of_the_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    check(fixed())
    monkeypatch.setattr(FixedGate, "choose", lambda self, heads, mine: None)
    with pytest.raises(AssertionError):
        check(fixed())


def test_weights_of_other_heads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call = WeightShard.__call__
    monkeypatch.setattr(
        WeightShard, "__call__", lambda self, x: call(self, x if self.axis is None else x.flip(self.axis))
    )
    with pytest.raises(AssertionError):
        check(fixed())


def test_a_map_over_all_heads_is_refused() -> None:
    shape = LayerShape(num_heads=4, num_kv_heads=4, head_dim=4, hidden_size=5, max_positions=64)
    config = MixerConfig(feature_map=HedgehogMap(per="model")).resolved(shape)
    with pytest.raises(UserError, match=r"query_weight: expected weights of single heads, found \(1, 16, .*per: model"):
        shard_of_heads(config, shape, [0, 1])
