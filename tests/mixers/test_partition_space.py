"""The property test of layers whose KV heads have softmax, windows, eviction caches and every other mixer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from linearize.configs.mixer import HeadwiseConfig, MixerConfig
from linearize.configs.mixer_parts import EvictionCache, WindowOnly
from linearize.configs.shape import LayerShape
from linearize.configs.spans import SlidingSpan, TerracedSpan
from linearize.mixers import headwise
from linearize.mixers.eviction_cache import CachedKeys
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer_state import HeadwiseState
from linearize.ops import backend, eviction_cache, full
from tests.mixers.forms import FP64, assert_near, check_draws, in_calls, small_chunks
from tests.mixers.space import Drawn, beside_a_cache, configs, make_drawn
from tests.mixers.weights import weights_of
from tests.ops.cases import STYLES, documents_of
from tests.oracles.attention import softmax_attention
from tests.oracles.heads import Inputs
from tests.oracles.mixer import mixer_layer

SINKS = st.sampled_from([0, 0, 1, 3])
WINDOWS = st.builds(
    lambda span: MixerConfig(span=span, feature_map=None, combine=WindowOnly()),
    st.builds(SlidingSpan, window_size=st.sampled_from([1, 3, 8, 20]), sinks=SINKS),
)
CACHES = st.builds(
    lambda span, cache: MixerConfig(span=span, feature_map=None, combine=WindowOnly(), cache=cache),
    st.builds(TerracedSpan, window_size=st.sampled_from([1, 2, 5]), blocks=st.integers(1, 2), sinks=SINKS),
    st.sampled_from([EvictionCache(size=size, recall_size=first) for size, first in ((1, 0), (4, 0), (9, 0), (9, 5))]),
)
KINDS = st.one_of(st.none(), WINDOWS, CACHES, beside_a_cache(), configs().map(lambda config: per_head(config)))
OTHER = MixerConfig(span=SlidingSpan(window_size=2), feature_map=None, combine=WindowOnly())


@dataclass(frozen=True)
class Partition:
    """What hypothesis chooses: a kind for each KV head, and rows of documents and padding of any style."""

    kinds: tuple[MixerConfig | None, ...]
    per_kv_head: int
    head_dim: int
    styles: list[str]
    length: int
    seed: int

    def make(self) -> tuple[Drawn, list[int]]:
        """The layer with its inputs, and where to cut them."""
        config = HeadwiseConfig.of(self.kinds)
        if not isinstance(config, HeadwiseConfig):  # all heads were drawn alike
            config = HeadwiseConfig.of([*self.kinds[1:], OTHER])
        assert isinstance(config, HeadwiseConfig)
        heads = len(self.kinds)
        shape = LayerShape(heads * self.per_kv_head, heads, self.head_dim, hidden_size=5, max_positions=256)
        rng = random.Random(self.seed)
        documents = [documents_of(style, self.length, rng) for style in self.styles]
        cuts = sorted(rng.sample(range(1, self.length), rng.randint(0, min(8, self.length - 1))))
        return make_drawn(config, shape, documents, self.length, self.seed), cuts


def per_head(config: MixerConfig) -> MixerConfig:
    """Without a map over all heads together, which single heads have not."""
    if getattr(config.feature_map, "per", None) != "model":
        return config
    assert config.feature_map is not None
    return config.model_copy(update={"feature_map": config.feature_map.model_copy(update={"per": "kv_head"})})


def partitions(max_length: int) -> st.SearchStrategy[Partition]:
    return st.builds(
        Partition,
        kinds=st.lists(KINDS, min_size=2, max_size=3).map(tuple),
        per_kv_head=st.integers(1, 2),
        head_dim=st.sampled_from([2, 4]),
        styles=st.lists(st.sampled_from(STYLES), min_size=1, max_size=2),
        length=st.integers(2, max_length),
        seed=st.integers(0, 2**20),
    )


def by_oracle(case: Drawn) -> Tensor:
    """Each group by the loops of its kind."""
    mixer, y = case.mixer, torch.zeros_like(case.inputs.q)
    assert isinstance(mixer, HeadwiseMixer)
    group = mixer.shape.num_heads // mixer.shape.num_kv_heads
    for heads, part in mixer.parts():
        x = case.inputs.heads(heads)
        places = [group * head + one for head in heads for one in range(group)]
        if not isinstance(part, LinearMixer):
            y[:, places] = softmax_attention(x.q, x.k, x.v, case.documents, scaling=x.scaling, softcap=x.softcap)
        else:
            inputs = Inputs(x.q, x.k, x.v, x.scaling, x.softcap, x.hidden, x.unrotated, x.rope)
            y[:, places] = mixer_layer(part.config, weights_of(part), inputs, case.documents)
    return y


@contextmanager
def masked_up_to(keys: int) -> Iterator[None]:
    """Read rows of more keys by each group's mixer alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "MOST_MASKED_KEYS", keys)
        yield


def check_oracle(case: Drawn, cuts: list[int]) -> None:
    expected = by_oracle(case)
    for keys in 0, 1000:
        with masked_up_to(keys):
            assert_near(case.mixer(case.inputs, case.layout), expected, FP64, f"output, {keys} keys masked")


def check_calls(case: Drawn, cuts: list[int]) -> None:
    """Several calls give the outputs of one, and keep nothing but what one keeps."""
    whole = case.mixer(case.inputs, case.layout)
    with masked_up_to(0):
        found, state = in_calls(case, cuts)
    assert_near(found, whole, FP64, "output")
    at_once, expected = in_calls(case, [])
    assert_near(at_once, whole, FP64, "output of a step")
    assert isinstance(state, HeadwiseState) and isinstance(expected, HeadwiseState)
    for (_, mixer), one, other in zip(case.mixer.parts(), state.parts, expected.parts, strict=True):
        assert torch.equal(one.seen, other.seen)
        if mixer.config is not None and mixer.config.cache is not None:
            kept = other.cached(mixer.span)
            for name, x in one.cached(mixer.span).items():
                assert_near(x, kept[name], FP64, f"{name} of the cache")


def check_token_by_token(case: Drawn, cuts: list[int]) -> None:
    check_calls(case, list(range(1, case.length)))


# By number and greatest length: draws for every run, and for `make test-slow`.
CHECKS: dict[str, tuple[Callable[[Drawn, list[int]], None], tuple[int, int], tuple[int, int]]] = {
    "oracle": (check_oracle, (40, 24), (400, 40)),
    "calls": (check_calls, (40, 40), (400, 100)),
    "token by token": (check_token_by_token, (10, 20), (150, 40)),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small_chunks(monkeypatch)
    monkeypatch.setattr(full, "QUERIES_AT_ONCE", 7)
    monkeypatch.setattr(eviction_cache, "SCORES_AT_ONCE", {"cpu": 2**8})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_name(name: str, examples: int, max_length: int) -> None:
    check_draws(lambda drawn: CHECKS[name][0](*drawn.make()), partitions(max_length), examples)


@pytest.mark.parametrize("name", CHECKS)
def test_a_few(name: str) -> None:
    check_name(name, *CHECKS[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_many(name: str) -> None:
    check_name(name, *CHECKS[name][2])


# --- test of the test -------------------------------------------------------------------------------------------------


def heads_in_another_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(headwise.HeadwiseMixer, "_joined", lambda self, outputs: torch.cat(outputs, dim=1))


def cache_forgotten_between_calls(patch: pytest.MonkeyPatch) -> None:
    last = CachedKeys.last

    def wrong(self):
        found = last(self)
        return found | {"position": torch.full_like(found["position"], -1)}

    patch.setattr(CachedKeys, "last", wrong)


def the_worst_kept(patch: pytest.MonkeyPatch) -> None:
    choose = eviction_cache.choose
    patch.setattr(
        "linearize.mixers.eviction_cache.choose", lambda scores, *given, **options: choose(-scores, *given, **options)
    )


def the_worst_kept_by_masks(patch: pytest.MonkeyPatch) -> None:
    evicted = eviction_cache.evicted
    patch.setattr("linearize.mixers.eviction_cache.evicted", lambda scores, *given: evicted(-scores, *given))


def softmax_heads_lose_a_key(patch: pytest.MonkeyPatch) -> None:
    step = headwise.SoftmaxMixer.step

    def wrong(self, inputs, state, layout=None):
        y, after = step(self, inputs, state, layout)
        slots = {name: torch.cat([x[:, :, :-1], x[:, :, -1:] * 0], dim=2) for name, x in after.slots.items()}
        return y, type(after)(slots, after.counts)

    patch.setattr(headwise.SoftmaxMixer, "step", wrong)


CACHE = MixerConfig(
    span=TerracedSpan(window_size=2, blocks=2),
    feature_map=None,
    combine=WindowOnly(),
    cache=EvictionCache(size=4),
)
DOCUMENTS = [[list(range(9)), list(range(10, 34))], [list(range(1, 34))]]


@pytest.mark.parametrize(
    "mutant, check",
    [
        (heads_in_another_order, check_oracle),
        (the_worst_kept, check_oracle),
        (the_worst_kept_by_masks, check_oracle),
        (cache_forgotten_between_calls, check_calls),
        (softmax_heads_lose_a_key, check_calls),
    ],
)
def test_broken_layers_are_caught(
    mutant: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[Drawn, list[int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = HeadwiseConfig.of([None, CACHE, None])
    assert isinstance(config, HeadwiseConfig)
    shape = LayerShape(num_heads=6, num_kv_heads=3, head_dim=4, hidden_size=5, max_positions=64)
    case = make_drawn(config, shape, DOCUMENTS, 34, seed=1)
    check(case, [20])
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(case, [20])
