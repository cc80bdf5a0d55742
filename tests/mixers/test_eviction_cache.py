"""The KV cache with eviction against a loop over queries, values and gradients, and what it is for."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.configs.feature_maps import HedgehogMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import AbsoluteScale, Add, EvictionCache, Mix, SharedDenominator, WindowOnly
from linearize.configs.shape import LayerShape
from linearize.configs.spans import TerracedSpan
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops import eviction_cache
from linearize.ops.layout import SequenceLayout
from tests.oracles import eviction_cache as oracle

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=24, max_positions=512)


def with_random_scores(its: LinearMixer) -> LinearMixer:
    """The mixer with eviction scores that read all of a pair."""
    generator = torch.Generator().manual_seed(5)
    for x in its.scorer.buffers():
        x.copy_(torch.randn(x.shape, generator=generator) * (0.05 if x is its.scorer.recency else 1))
    return its.double()


def mixer(width: int = 4, blocks: int = 2, sinks: int = 0, size: int = 5, recall_size: int = 0) -> LinearMixer:
    config = MixerConfig(
        span=TerracedSpan(window_size=width, blocks=blocks, sinks=sinks),
        feature_map=None,
        combine=WindowOnly(),
        cache=EvictionCache(size=size, recall_size=recall_size),
    )
    return with_random_scores(LinearMixer(config, SHAPE))


def inputs(length: int, batch: int = 2, seed: int = 0) -> AttnInputs:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, heads, length, 6, dtype=torch.float64, generator=generator) * scale
        for heads, scale in ((4, 1.0), (2, 1.5), (2, 1.0))
    )
    return AttnInputs(q, k, v, 0.5)


def scores_of(its: LinearMixer, head: int, k: Tensor, v: Tensor) -> Tensor:
    linear = its.scorer.weight, its.scorer.recency
    return oracle.scores(*(x[head] for x in linear), k.detach(), v.detach())


def by_oracle(x: AttnInputs, its: LinearMixer) -> Tensor:
    span, cache = its.config.span, its.config.cache
    assert isinstance(span, TerracedSpan) and cache is not None
    y = torch.empty_like(x.q)
    for row in range(len(x.q)):
        for head in range(4):
            k, v = x.k[row, head // 2], x.v[row, head // 2]
            y[row, head], _ = oracle.attention(
                x.q[row, head],
                k,
                v,
                width=span.window_size,
                blocks=span.blocks,
                sinks=span.sinks,
                **cache.model_dump(),
                scores=scores_of(its, head // 2, k, v),
                scaling=x.scaling,
            )
    return y


@pytest.mark.parametrize(
    "sizes",
    [
        dict(),
        dict(width=1, blocks=3, size=4),
        dict(width=3, blocks=1, size=2),
        dict(sinks=2),
        dict(width=8, size=3),
        dict(size=40),
        dict(size=9, recall_size=4, sinks=1),
        dict(width=1, blocks=1, size=6, recall_size=5),
    ],
    ids=str,
)
def test_values_and_gradients_are_the_loops(sizes: dict[str, int]) -> None:
    x, its = inputs(41), mixer(**sizes)
    given = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
    weight = torch.randn(x.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = its(AttnInputs(*given, 0.5))
    expected = by_oracle(AttnInputs(*given, 0.5), its)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad((y * weight).sum(), given) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["window and cache", "of two parts", "with a linear part"])
def test_gradients_of_single_steps_are_those_of_the_whole(name: str) -> None:
    x, its = inputs(26), ROOMY[name]()
    weight = torch.randn(x.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = []
    for cuts in ([0, 26], [0, 9, *range(10, 27)]):
        leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
        rows, state, outputs = AttnInputs(*leaves, 0.5), None, []
        for start, stop in pairwise(cuts):
            y, state = its.step(rows.tokens(start, stop), state)
            outputs.append(y)
        gradients.append(torch.autograd.grad((torch.cat(outputs, dim=2) * weight).sum(), leaves))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("recall_size", [0, 4])
def test_chunks_are_single_steps(recall_size: int) -> None:
    x, its = inputs(50, seed=2), mixer(sinks=1, size=5 + recall_size, recall_size=recall_size)
    whole, state = its(x), None
    found = []
    for start, stop in ((0, 17), (17, 18), (18, 31), *((n, n + 1) for n in range(31, 50))):
        y, state = its.step(x.tokens(start, stop), state)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, dim=2), whole, rtol=0, atol=1e-10)


ROOMY = {
    "window and cache": lambda: mixer(),
    "wider": lambda: mixer(size=13, sinks=2),
    "of one block": lambda: mixer(width=3, blocks=1, size=6),
    "with a linear part": lambda: hybrid("absolute_scale", size=6),
    "of two parts": lambda: mixer(size=11, recall_size=4, sinks=1),
    "of two parts with a linear part": lambda: hybrid("absolute_scale", size=7, recall_size=3),
}


@pytest.mark.parametrize("name", ROOMY)
def test_prompts_that_fit_and_that_do_not_are_single_steps(name: str) -> None:
    """Where no gradient is wanted, softmax over all keys is taken while window and cache have room for them."""
    x, its = inputs(34), ROOMY[name]()
    whole, state = its(x), None
    with torch.no_grad():
        for length in range(1, 35):
            y, prompt = its.step(x.tokens(0, length), None)
            torch.testing.assert_close(y, whole[:, :, :length], rtol=0, atol=1e-10)
            _, state = its.step(x.tokens(length - 1, length), state)
            found, expected = (
                {**s.slots, "position": s.cached_position, "S": s.linear and s.linear.S} for s in (prompt, state)
            )
            for key, tensor in expected.items():
                torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")
            if length < 34:
                after, _ = its.step(x.tokens(length, length + 1), prompt)
                torch.testing.assert_close(after, whole[:, :, length : length + 1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("sinks", [0, 1])
def test_single_steps_fill_the_caches_of_rows_that_are_not_alike(sinks: int) -> None:
    x, its, padding = inputs(30), mixer(size=9, sinks=sinks), (7, 0)
    position = torch.stack([torch.arange(10) - skipped for skipped in padding]).clamp_min(-1)
    _, state = its.step(x.tokens(0, 10), None, SequenceLayout.from_positions(position))
    found = []
    for n in range(10, 30):
        y, state = its.step(x.tokens(n, n + 1), state)
        found.append(y)
    for row, skipped in enumerate(padding):
        alone = its(x.map(lambda tensor, row=row: tensor[row : row + 1]).tokens(skipped, 30))
        torch.testing.assert_close(
            torch.cat(found, dim=2)[row : row + 1], alone[:, :, 10 - skipped :], rtol=0, atol=1e-10
        )


def test_documents_in_one_row_have_caches_of_their_own() -> None:
    x, its = inputs(60, batch=1), mixer()
    lengths = (23, 3, 34)
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    found = its(x, SequenceLayout.from_positions(position))
    start = 0
    for length in lengths:
        alone = its(x.tokens(start, start + length))
        torch.testing.assert_close(found[:, :, start : start + length], alone, rtol=0, atol=1e-10)
        start += length


@pytest.mark.parametrize("sizes", [dict(), dict(size=11, recall_size=4, sinks=1)], ids=str)
def test_a_state_without_outputs_is_that_of_outputs(sizes: dict[str, int]) -> None:
    """In one row documents end and begin, in the other the carried one goes on; with and without a state."""
    x, its = inputs(90), mixer(**sizes)
    ends = torch.tensor([*range(30), *range(5), *range(25)]), torch.arange(60)
    first, layout = x.tokens(0, 30), SequenceLayout.from_positions(torch.stack(ends))
    _, carried = its.step(first, None)
    new = torch.cat([torch.zeros(20, dtype=torch.int64), torch.ones(40, dtype=torch.int64)])
    positions = torch.cat([torch.arange(20), torch.arange(40)])
    goes_on = SequenceLayout(
        torch.stack([positions, torch.arange(60)]), torch.stack([new, torch.zeros(60, dtype=torch.int64)]), 60
    )
    for state, own in ((None, layout), (carried, goes_on), (carried, None)):
        tokens = x.tokens(30, 90)
        _, expected = its.step(tokens, state, own)
        found = its.absorb(tokens, state, own)
        for name, y in expected.named_tensors().items():
            torch.testing.assert_close(found.named_tensors()[name], y, rtol=0, atol=1e-12, msg=lambda m, n=name: n + m)


def test_a_prompt_takes_few_rounds_of_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round waits for the one before; with one choice per block, 8,192 tokens would take 1,024."""
    rounds: list[int] = []
    least = eviction_cache._least
    monkeypatch.setattr(eviction_cache, "_least", lambda ranks, size: rounds.append(1) or least(ranks, size))
    scores = torch.randn(1, 1, 8192)
    leaves = torch.arange(8192).view(1, -1, 8)
    held = eviction_cache.choose(scores, leaves, 200)
    assert sorted(held[0, 0, -1].tolist()) == sorted(scores[0, 0].topk(200).indices.tolist())
    assert len(rounds) <= 6


def test_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, its = inputs(41), mixer()
    whole = its(x)
    monkeypatch.setattr(eviction_cache, "SCORES_AT_ONCE", {"cpu": 1})
    torch.testing.assert_close(its(x), whole, rtol=0, atol=1e-12)


def test_a_state_is_of_one_size_and_the_cache_of_the_asked_one() -> None:
    x, its = inputs(60), mixer(size=5)
    sizes = {its.step(x.tokens(0, n), None)[1].nbytes for n in (1, 9, 30, 60)}
    assert sizes == {its.state_like(x.tokens(0, 1)).nbytes}
    held = its.step(x, None)[1].cached(its.span)
    assert held["keys"].shape == (2, 2, 5, 6) and bool((held["position"] >= 0).all())
    assert bool((held["position"].diff(dim=2) > 0).all())  # oldest first


def test_the_highest_scores_stay_and_nothing_else() -> None:
    """What is held is a function of the scores alone: the top C of all keys that left the window."""
    x, its = inputs(400, batch=1), mixer(size=3)
    _, state = its.step(x, None)
    scores = its.scorer(x, torch.arange(400)[None])[..., 0]
    left = scores[:, :, : 400 - 8]  # the window of two blocks of four holds the others
    expected = left.topk(3, dim=2).indices.sort(dim=2).values
    held = state.cached(its.span)
    assert torch.equal(held["position"], expected)
    torch.testing.assert_close(held["scores"][..., 0], scores.gather(2, expected))


@pytest.mark.parametrize("recall_size", [0, 3])
def test_the_older_of_equals_stays_in_every_form(recall_size: int) -> None:
    """Keys and values of one token are alike in a first layer, so equal scores are common."""
    x, its = inputs(60, batch=1), mixer(size=6, recall_size=recall_size)
    its.scorer.recency.zero_()
    x = replace(x, k=x.k[:, :, :4].repeat(1, 1, 15, 1), v=x.v[:, :, :4].repeat(1, 1, 15, 1))
    whole, state, found = its(x), None, []
    for n in range(60):
        y, state = its.step(x.tokens(n, n + 1), state)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, dim=2), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(whole, by_oracle(x, its), rtol=0, atol=1e-10)
    assert state is not None and int(state.cached_position.max()) < 24


def test_each_part_has_the_highest_of_its_scores() -> None:
    """The first of all keys that left the window, the second of those that the first does not hold."""
    x, its = inputs(200, batch=1), mixer(size=7, recall_size=4)
    _, state = its.step(x, None)
    scores = its.scorer(x, torch.arange(200)[None])[:, :, : 200 - 8]
    recall = scores[..., 0].topk(4, dim=2).indices.sort(dim=2).values
    text = scores[..., 1].scatter(2, recall, -torch.inf).topk(3, dim=2).indices.sort(dim=2).values
    assert torch.equal(state.cached_position, torch.cat([text, recall], dim=2))


def test_scores_depend_on_the_position_through_recency_alone() -> None:
    """They read keys before RoPE: the order of pairs is the same wherever they stand."""
    x, its = inputs(10), mixer()
    rotated = replace(x, k=x.k.flip(-1), unrotated=(x.q, x.k))
    position = torch.arange(10)[None]
    torch.testing.assert_close(its.scorer(rotated, position), its.scorer(x, position))
    assert (its.scorer(replace(x, k=x.k.flip(-1)), position) - its.scorer(x, position)).abs().max() > 0.1
    faded = its.scorer(x, position + 100) - its.scorer(x, position)
    torch.testing.assert_close(faded, (100 * its.scorer.recency)[None, :, None].expand_as(faded))


# --- beside a linear part ---------------------------------------------------------------------------------------------

FACTOR, OFFSET = 0.3, 0.4


def _shared(logits: Tensor, near: Tensor, weights: Tensor, far: Tensor) -> Tensor:
    exact = FACTOR * (logits - logits.max()).exp()
    return (exact @ near + weights @ far) / (exact.sum() + weights.sum())


def _absolute(logits: Tensor, near: Tensor, weights: Tensor, far: Tensor) -> Tensor:
    exact, weights = logits.exp(), weights * math.exp(OFFSET)
    return (exact @ near + weights @ far) / (exact.sum() + weights.sum())


def _mixed(logits: Tensor, near: Tensor, weights: Tensor, far: Tensor) -> Tensor:
    exact = logits.softmax(0) @ near
    return exact if not len(far) else FACTOR * exact + (1 - FACTOR) * (weights @ far / weights.sum())


def _added(logits: Tensor, near: Tensor, weights: Tensor, far: Tensor) -> Tensor:
    exact = logits.softmax(0) @ near
    return exact if not len(far) else exact + weights @ far / weights.sum()


def hedgehog(x: Tensor, weight: Tensor) -> Tensor:
    z = x @ weight
    return torch.cat([z.softmax(0), (-z).softmax(0)])


def hedgehog_exp(x: Tensor, weight: Tensor) -> Tensor:
    z = x @ weight
    return torch.cat([z, -z]).exp()


COMBINATIONS: dict[str, tuple[Any, str, float | None, oracle.Combined]] = {
    "shared_denominator": (SharedDenominator(), "softmax_halves", FACTOR, _shared),
    "absolute_scale": (AbsoluteScale(), "exp", OFFSET, _absolute),
    "mix": (Mix(), "softmax_halves", FACTOR, _mixed),
    "mix of exponentials": (Mix(), "exp", FACTOR, _mixed),
    "add": (Add(), "exp", None, _added),
}


def hybrid(name: str, blocks: int = 2, sinks: int = 0, size: int = 5, recall_size: int = 0) -> LinearMixer:
    """With parameters that are no powers of anything."""
    combine, activation, number, _ = COMBINATIONS[name]
    config = MixerConfig(
        span=TerracedSpan(window_size=4, blocks=blocks, sinks=sinks),
        feature_map=HedgehogMap(activation=activation, per="kv_head", feature_dim=6),
        combine=combine,
        cache=EvictionCache(size=size, recall_size=recall_size),
    )
    its = with_random_scores(LinearMixer(config, SHAPE))
    generator = torch.Generator().manual_seed(4)
    for x in its.feature_map.parameters():
        x.data.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64))
    for x in its.combine.parameters():
        x.data.fill_(number if name == "absolute_scale" else math.log(number / (1 - number)))
    return its


def hybrid_by_oracle(name: str, x: AttnInputs, its: LinearMixer, weights: list[Tensor]) -> Tensor:
    span, cache, (_, activation, _, combined) = its.config.span, its.config.cache, COMBINATIONS[name]
    feature = {"exp": hedgehog_exp, "softmax_halves": hedgehog}[activation]
    y = []
    for row in range(len(x.q)):
        for head in range(4):
            q, k, v = x.q[row, head], x.k[row, head // 2], x.v[row, head // 2]
            phi_q = [feature(one, weights[0][head]) for one in q]
            phi_k = [feature(one, weights[1][head // 2]) for one in k]
            sizes = {"width": span.window_size, "blocks": span.blocks, "sinks": span.sinks} | cache.model_dump()
            found, memory = oracle.attention_with_dropped(
                q,
                k,
                v,
                weight=lambda n, j, phi_q=phi_q, phi_k=phi_k: phi_q[n] @ phi_k[j],
                combined=combined,
                **sizes,
                scores=scores_of(its, head // 2, k, v),
                scaling=x.scaling,
            )
            assert memory.dropped[-1] and any(place != key for key, place in memory.place.items())
            y.append(found)
    return torch.stack(y).unflatten(0, (len(x.q), 4))


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize(
    "sizes",
    [dict(), dict(blocks=1, sinks=2, size=3), dict(size=6, recall_size=4), dict(size=6, recall_size=2)],
    ids=str,
)
def test_what_is_dropped_is_in_the_linear_state(name: str, sizes: dict[str, int]) -> None:
    """Every key is read once, exactly or through its features: values and gradients of a loop over single keys."""
    x, its = inputs(33, batch=1), hybrid(name, **sizes)
    given = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
    found = its(AttnInputs(*given, 0.5))
    parameters = [its.feature_map.query_weight, its.feature_map.key_weight]
    expected = hybrid_by_oracle(name, AttnInputs(*given, 0.5), its, parameters)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weight = torch.randn(x.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((y * weight).sum(), given + parameters) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * max(1.0, float(other.abs().max())))


def test_a_key_that_no_cache_has_room_for_is_read_to_the_end() -> None:
    """What the linear part is for: in every head it still knows something of it."""
    x, its = inputs(60, batch=1), hybrid("absolute_scale", size=2)
    for part in its.scorer.buffers():
        part.zero_()  # all scores are equal: the oldest stay
    v = torch.zeros_like(x.v)
    v[:, :, 5] = 1.0  # what is read of this key, and of no other
    read = its(AttnInputs(x.q, x.k, v, 0.5))[..., -1, :]
    _, state = its.step(AttnInputs(x.q, x.k, v, 0.5), None)
    assert not bool((state.cached_position == 5).any())
    assert bool((read > 0).all())


def test_a_cache_with_room_for_all_is_softmax() -> None:
    """Then no query has linear keys, and none is read through the linear part."""
    x = inputs(41)
    for name in COMBINATIONS:
        its = hybrid(name, size=40)
        assert not its.has_linear(torch.arange(41)[None]).any()
        expected = torch.nn.functional.scaled_dot_product_attention(
            x.q, x.k, x.v, scale=0.5, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(its(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(span=dict(type="sliding", window_size=8)), "choose span `terraced`"),
        (dict(feature_map=dict(type="hedgehog", per="model"), combine=dict(type="add")), "and no `cosformer`"),
        (dict(feature_map=dict(type="cosformer"), combine=dict(type="add")), "and no `cosformer`"),
    ],
)
def test_what_a_cache_needs(fields: dict[str, object], reason: str) -> None:
    whole: dict[str, object] = dict(
        span=dict(type="terraced", window_size=4),
        feature_map=None,
        combine=dict(type="window_only"),
        cache=dict(size=4),
    )
    MixerConfig.model_validate(whole)
    with pytest.raises(ValueError, match=reason):
        MixerConfig.model_validate(whole | fields)
