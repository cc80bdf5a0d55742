"""Eviction scores: what a repetition shows of a teacher's pairs, the fit, and the sizes of caches that follow."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from linearize.base import UserError
from linearize.configs.mixer import HeadwiseConfig
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.convert import convert_layers
from linearize.mixers.eviction_cache import features
from linearize.training import allocation, eviction_scores
from linearize.training.allocation import cache_sizes
from linearize.training.eviction_scores import (
    EvictionScores,
    add,
    contexts,
    fitted,
    largest_attention,
    measure_attention,
)
from linearize.training.memory import head_mixer
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.hf.models import make_teacher, random_tokens
from tests.training.test_allocation import rows


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_largest_attention_is_that_of_softmax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest weight of each block of queries, in any query head of the KV head, for each key of the context."""
    monkeypatch.setattr(eviction_scores, "QUERIES_AT_ONCE", 8)
    monkeypatch.setattr(eviction_scores, "BLOCK", 4)
    teacher, found = make_teacher(name), []
    student = convert_layers(teacher, tuple(head_mixer(4, 0, 0) for _ in range(teacher.config.num_hidden_layers)))

    def observe(layer, inputs, layout):
        q, k = inputs.q[0] * inputs.scaling, inputs.k[0].repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 0)
        logits = q @ k.mT
        if inputs.softcap is not None:
            logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
        weights = logits.masked_fill(torch.ones(22, 22, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)[..., :10]
        blocks = [weights[:, start : start + 4].amax(1) for start in range(0, 22, 4)]
        expected = torch.stack(blocks, 1).unflatten(0, (inputs.k.shape[1], -1)).amax(1)
        found.append((largest_attention(inputs, 10), expected.float()))
        return softmax_output(layer, inputs, layout)

    with observed(student, observe), torch.no_grad():
        student(random_tokens(1, 22), use_cache=False)
    assert found
    for one, other in found:
        torch.testing.assert_close(one.exp(), other.clamp_min(eviction_scores.LEAST), rtol=1e-4, atol=1e-6)


def test_a_linear_function_is_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5000, 6, generator=generator, dtype=torch.float64) * torch.arange(1, 7) + 3
    weight, bias = torch.randn(2, 6, generator=generator, dtype=torch.float64), torch.tensor([1.0, -2.0])
    y = (x @ weight[..., None]).squeeze(-1) + bias[:, None]
    moments: dict[int, torch.Tensor] = {}
    for some in (slice(0, 1000), slice(1000, 5000)):
        add(moments, 0, x[:, some], y[:, some].float())
    torch.testing.assert_close(fitted(moments[0]).double(), weight, rtol=0.02, atol=0.02)


def test_scores_reach_the_heads_they_were_fitted_to() -> None:
    student = convert_layers(
        tiny.llama(layers=2),
        (HeadwiseConfig.of((head_mixer(16, 0, 1), head_mixer(16, 8, 1))), head_mixer(16, 4, 1, recall=6)),
    )
    width = 2 * 8 + 2
    rows = torch.arange(2.0)[:, None].expand(2, width)
    scores = EvictionScores({i: rows + 10 * i for i in range(2)}, {i: rows - 10 * i for i in range(2)})
    scores = EvictionScores.from_named_tensors(scores.named_tensors())
    first, second = (layer.mixer for layer in linearized_layers(student).values())
    ((_, plain), (heads, cached)) = first.parts()
    assert plain.scorer is None and heads == (1,)

    scores.apply(student)
    fade = eviction_scores.FADE
    found = [(x.scorer.weight[..., 3].tolist(), x.scorer.recency.tolist()) for x in (cached, second)]
    assert found[0][0] == [[1.0]] and found[1][0] == [[10.0, -10.0], [11.0, -9.0]]
    assert found[0][1] == [[pytest.approx(fade / math.sqrt(8))]]
    assert found[1][1] == [[0, pytest.approx(fade / 2)]] * 2


@pytest.mark.parametrize("pairs", [0, 4, 7, 12, 100])
def test_sizes_are_at_most_the_pairs_and_evict_what_is_needed_least(
    pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other sizes with as many pairs leave out less attention."""
    monkeypatch.setattr(allocation, "NEEDED", 1e-9)
    generator = torch.Generator().manual_seed(1)
    needs = [torch.randn(2, 6, generator=generator).sort(dim=1).values - 5 for _ in range(2)]
    found = cache_sizes(needs, 6, pairs, multiple=1, least=1)
    flat = [size for sizes in found for size in sizes]
    assert sum(flat) == min(pairs, 24)
    heads = torch.cat(needs).exp()

    def evicted(sizes: tuple[int, ...]) -> float:
        return sum(float(head[: 6 - size].sum()) for head, size in zip(heads, sizes, strict=True))

    best = min(evicted(sizes) for sizes in itertools.product(range(7), repeat=4) if sum(sizes) == sum(flat))
    assert evicted(tuple(flat)) == pytest.approx(best)


def test_what_recall_hardly_needs_is_not_kept() -> None:
    needs = [torch.tensor([[0.9, 0.5, 0.41, 0.39], [0.3, 0.2, 0.1, 0.1]]).log()]
    assert cache_sizes(needs, 4, 100, multiple=1, least=1) == [[3, 0]]


def test_pairs_with_the_same_need_are_divided_among_their_heads() -> None:
    """Where attention is almost one-hot, all pairs of a head for recall have the log attention 0."""
    needs = [torch.tensor([[0.0] * 60 + [-9.0] * 40, [0.0] * 30 + [-9.0] * 70, [-9.0] * 100])]
    ((large, small, none),) = cache_sizes(needs, 100, 45, multiple=1, least=1)
    assert (large, small, none) == (30, 15, 0)
    assert cache_sizes(needs, 100, 90, multiple=1, least=1) == [[60, 30, 0]]


def test_sizes_are_multiples_and_none_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "NEEDED", 1e-9)
    needs = [torch.linspace(-8, -4, 100)[None] + shift for shift in (-3.0, 0.0, 1.0)]
    found = [size for (size,) in cache_sizes(needs, 100, 150, multiple=8, least=24)]
    assert found[0] == 0 < found[1] < found[2] and sum(found) <= 150 and not any(size % 8 for size in found)
    assert min(found[1:]) >= 24


def test_contexts_are_of_the_text_and_each_has_a_fact() -> None:
    tokenizer, data = byte_tokenizer(), tiny.packed([[64]] * 40)
    found = list(contexts(data, tokenizer, longest=200, seed=0, count=6))
    assert all(120 <= len(context) <= 200 for context in found)
    assert found == list(contexts(data, tokenizer, longest=200, seed=0, count=6))
    assert found != list(contexts(data, tokenizer, longest=200, seed=1, count=6))
    text = data.input_ids.flatten().tolist()
    pairs = set(itertools.pairwise(text))
    for context in found:
        foreign = [place for place, pair in enumerate(itertools.pairwise(context)) if pair not in pairs]
        assert foreign and foreign[-1] - foreign[0] < 60, "one sentence that the text does not have"
    with pytest.raises(UserError, match="expected more than 3000 training tokens"):
        next(contexts(data, tokenizer, longest=3000, seed=0, count=1))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_measured_without_a_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers again, of every KV head; the teacher is as it was."""
    monkeypatch.setattr(eviction_scores, "CONTEXTS", 3)
    teacher = tiny.llama(max_position_embeddings=256) if name == "llama" else tiny.gpt2()
    before = {key: x.clone() for key, x in teacher.state_dict().items()}
    (needs, scores), (again, same), (other, _) = (
        measure_attention(teacher, rows(8, 64), byte_tokenizer(), seed=seed) for seed in (0, 0, 1)
    )
    assert all(torch.equal(x, before[key]) for key, x in teacher.state_dict().items())
    heads = teacher.config.num_key_value_heads if name == "llama" else 4
    assert sorted(needs) == sorted(scores.recall) == sorted(scores.text) == [0, 1]
    for layer, found in needs.items():
        assert found.shape == (heads, eviction_scores.QUANTILES)
        assert bool((found <= 0).all()) and bool((found.diff(dim=1) >= 0).all())
        assert torch.equal(found, again[layer]) and not torch.equal(found, other[layer])
        for weights, repeated in ((scores.recall, same.recall), (scores.text, same.text)):
            assert weights[layer].shape == (heads, 2 * 8 + 2) and bool(weights[layer].isfinite().all())
            assert torch.equal(weights[layer], repeated[layer]) and bool(weights[layer].any())
        assert not torch.equal(scores.recall[layer], scores.text[layer])


def test_needs_are_those_of_the_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition: the largest weight that the repetition gives to a pair; not to the first ones."""
    monkeypatch.setattr(eviction_scores, "CONTEXTS", 1)
    teacher, tokenizer, data = tiny.llama(layers=1), byte_tokenizer(), rows(8, 64)
    needs, _ = measure_attention(teacher, data, tokenizer, seed=0)
    request = tokenizer(eviction_scores.REQUEST, add_special_tokens=False).input_ids
    longest = (256 - len(request)) // 2
    (context,) = contexts(data, tokenizer, longest=longest, seed=0, count=1)
    teacher.set_attn_implementation("eager")
    ids = torch.tensor([context + request + context])
    (weights,) = teacher(ids, output_attentions=True).attentions
    start = -(-(len(context) + len(request)) // 16) * 16  # from the first block of the repetition alone
    expected = (
        weights[0, :, start:, eviction_scores.FIRST : len(context)]
        .amax(1)
        .unflatten(0, (2, 2))
        .amax(1)
        .clamp_min(1e-6)
        .log()
    )
    middles = (torch.arange(eviction_scores.QUANTILES) + 0.5) / eviction_scores.QUANTILES
    torch.testing.assert_close(needs[0], expected.quantile(middles, dim=1).T, rtol=1e-4, atol=1e-4)


def test_too_few_positions_are_refused() -> None:
    with pytest.raises(UserError, match=r"expected a teacher with at least .* positions to repeat"):
        measure_attention(tiny.llama(max_position_embeddings=64), rows(8, 64), byte_tokenizer(), seed=0)


def test_features_read_keys_before_rope() -> None:
    teacher = tiny.llama()
    student, seen = convert_layers(teacher, (head_mixer(16, 4, 0), None)), []
    with observed(student, lambda m, x, at: seen.append(features(x)) or softmax_output(m, x, at)), torch.no_grad():
        for position in (0, 50):
            student(torch.full((1, 1), 7), position_ids=torch.tensor([[position]]), use_cache=False)
    torch.testing.assert_close(*seen)
