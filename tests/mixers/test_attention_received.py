"""Caches that keep what received attention: against a loop over queries, in all forms, and what they are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.mixers import cached
from linearize.mixers.exact_cache import ATTENTION
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.mixers.mixer_state import State
from linearize.ops.attention_received import Attention
from linearize.ops.layout import Layout, TerracedSpan, context_positions
from tests.mixers.test_exact_cache import inputs, mixer
from tests.oracles import attention_received as oracle

SIZES = [
    dict(),
    dict(width=1, blocks=3, size=4),
    dict(width=3, blocks=1, size=2),
    dict(sinks=2),
    dict(width=2, blocks=1, size=3, sinks=5),
    dict(width=8, size=3),
    dict(size=40),
]
EVERY = pytest.mark.parametrize("score", sorted(ATTENTION))


def by_oracle(x: AttnInputs, its: LinearMixer) -> Tensor:
    span, cache, y = its.config.span, its.config.cache, torch.empty_like(x.q)
    assert isinstance(span, TerracedSpan) and cache is not None and cache.keeps is not None
    for row in range(len(x.q)):
        for head in range(2):
            how = {"width": span.window_size, "blocks": span.blocks, "sinks": span.sinks, "size": cache.size}
            how |= {"keeps": cache.keeps, "scaling": x.scaling, "softcap": x.softcap}
            own = slice(2 * head, 2 * head + 2)
            y[row, own], _ = oracle.attention(x.q[row, own], x.k[row, head], x.v[row, head], **how)
    return y


def padded(x: AttnInputs, valid: Tensor) -> AttnInputs:
    """The tokens at the valid slots of each row, numbers that are very large elsewhere."""

    def spread(t: Tensor) -> Tensor:
        wide = torch.full((*t.shape[:2], valid.shape[1], t.shape[3]), 50.0, dtype=t.dtype)
        for row, its in enumerate(valid):
            wide[row, :, its] = t[row, :, : int(its.sum())]
        return wide

    return AttnInputs(spread(x.q), spread(x.k), spread(x.v), x.scaling)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@EVERY
def test_values_and_gradients_are_the_loops(sizes: dict[str, int], score: str) -> None:
    x, its = inputs(41), mixer(**sizes, score=score)
    given = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
    weight = torch.randn(x.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, expected = its(AttnInputs(*given, 0.5, 3.0)), by_oracle(AttnInputs(*given, 0.5, 3.0), its)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad((y * weight).sum(), given) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@EVERY
def test_any_pieces_are_the_whole(sizes: dict[str, int], score: str) -> None:
    x, its = inputs(60, seed=2), mixer(**sizes, score=score)
    whole, at_once = its.step(x, None)
    for cuts in (range(1, 60), (17, 18, 31, *range(32, 60)), (8, 16, 40), (1, 7, 33)):
        found, state, start = [], None, 0
        for stop in (*cuts, 60):
            y, state = its.step(x.tokens(start, stop), state)
            found.append(y)
            start = stop
        torch.testing.assert_close(torch.cat(found, dim=2), whole, rtol=0, atol=1e-10)
        assert state is not None and state.exact is not None and at_once.exact is not None
        for name, expected in at_once.exact.items():
            torch.testing.assert_close(state.exact[name], expected, rtol=0, atol=1e-10)
        # A slot below every later query's window may hold anything.
        position, span = context_positions(state.seen, its.span), its.span
        needed = (position >= span.lo(state.seen[:, None] - 1)) | (position < span.sinks)
        sums, expected = (one.slots["received"] * needed[:, None, :, None] for one in (state, at_once))
        torch.testing.assert_close(sums, expected, rtol=0, atol=1e-10)


@EVERY
def test_documents_in_one_row_have_sums_of_their_own(score: str) -> None:
    x, its = inputs(60, batch=1), mixer(score=score, sinks=2)
    lengths = (23, 3, 34)
    found = its(x, Layout.from_positions(torch.cat([torch.arange(n) for n in lengths])[None]))
    start = 0
    for length in lengths:
        alone = its(x.tokens(start, start + length))
        torch.testing.assert_close(found[:, :, start : start + length], alone, rtol=0, atol=1e-10)
        start += length


@EVERY
def test_padding_changes_nothing(score: str) -> None:
    """Before, between and behind the tokens, in a prompt and in a second one."""
    x, its = inputs(50), mixer(score=score, sinks=1)
    generator, wide = torch.Generator().manual_seed(4), 70
    valid = torch.zeros(2, wide, dtype=torch.bool)
    for row in valid:
        row[torch.randperm(wide, generator=generator)[:50]] = True
    whole, spread = its(x), padded(x, valid)
    found = its(spread, Layout.from_valid(valid))
    pieces, state = [], None
    for start, stop in ((0, 21), (21, 22), (22, 70)):
        y, state = its.step(spread.tokens(start, stop), state, Layout.from_valid(valid[:, start:stop]))
        pieces.append(y)
    for y in (found, torch.cat(pieces, dim=2)):
        for row in range(2):
            torch.testing.assert_close(y[row, :, valid[row]], whole[row], rtol=0, atol=1e-10)


@EVERY
def test_a_fork_and_a_stored_state_go_on_alike(score: str) -> None:
    x, its = inputs(50), mixer(score=score)
    whole, (_, state) = its(x), its.step(x.tokens(0, 30), None)
    named = {name: t.clone() for name, t in state.named_tensors().items()}
    assert {"exact.received", "slots.received"} <= set(named)
    restored = State.from_named_tensors(named)
    swapped = state.select(torch.tensor([1, 0]))
    for before, order in ((restored, [0, 1]), (swapped, [1, 0]), (state, [0, 1])):
        rest = x.tokens(30, 50).map(lambda t, order=order: t[order])
        for start in range(20):
            y, before = its.step(rest.tokens(start, start + 1), before)
            expected = whole[order, :, 30 + start : 31 + start]
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)


def test_the_sums_count_as_bytes() -> None:
    x = inputs(60)
    with_sums, without = (mixer(score=score).step(x, None)[1].nbytes for score in ("attention_received", "redundancy"))
    assert with_sums - without == 2 * 2 * (5 + 8) * 8  # rows, KV heads, slots of cache and window, bytes
    assert mixer(score="attention_received").state_like(x.tokens(0, 1)).nbytes == with_sums


def test_what_all_queries_read_stays_and_what_none_reads_goes() -> None:
    """All queries and one key alike: H2O keeps it. Of a key read early and no more, SnapKV's last block says so."""
    x = inputs(60, batch=1)
    q, k = 0.1 * x.q, x.k.clone()
    direction = torch.nn.functional.normalize(torch.ones(6, dtype=torch.float64), dim=0)
    k[:, :, 10] = 40 * direction
    q[:, :, :30] += direction
    for score, stays in (("attention_received", True), ("attention_recent", False)):
        _, state = mixer(size=3, score=score).step(AttnInputs(q, k, x.v, 0.5), None)
        assert state.exact is not None
        assert bool((state.exact["position"] == 10).any(-1).all()) == stays


def _without_sums(exact: dict[str, Tensor]) -> dict[str, Tensor]:
    return exact | {"received": torch.zeros_like(exact["received"])}


@pytest.mark.parametrize("broken", ["sums forgotten between calls", "a head left out", "no decay"])
def test_broken_sums_are_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    score = "attention_recent" if broken == "no decay" else "attention_received"
    x, its = inputs(60, seed=2), mixer(score=score)
    expected = by_oracle(x, its)
    if broken == "sums forgotten between calls":
        last = cached.CachedKeys.last
        monkeypatch.setattr(cached.CachedKeys, "last", lambda self: _without_sums(last(self)))
    elif broken == "a head left out":
        init = Attention.__init__

        def one_head(self: Attention, q: Tensor, *rest: object, **options: object) -> None:
            init(self, torch.cat([q[:, ::2], q[:, ::2]], dim=1)[:, [0, 2, 1, 3]], *rest, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Attention, "__init__", one_head)
    else:
        monkeypatch.setitem(ATTENTION, "attention_recent", 1.0)
    first, state = its.step(x.tokens(0, 31), None)
    found = torch.cat([first, its.step(x.tokens(31, 60), state)[0]], dim=2)
    assert (found - expected).abs().max() > 1e-3
