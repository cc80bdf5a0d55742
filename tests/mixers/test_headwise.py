"""KV heads with mixers of their own against each mixer alone, and softmax over all keys against torch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linearize.configs.mixer import HeadGroup, HeadwiseConfig, MixerConfig
from linearize.configs.mixer_parts import EvictionCache, WindowOnly
from linearize.configs.shape import LayerShape
from linearize.configs.spans import SlidingSpan, TerracedSpan
from linearize.mixers.headwise import HeadwiseMixer, SoftmaxMixer
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops import full
from linearize.ops.layout import SequenceLayout
from tests.probes import LargestTensor

SHAPE = LayerShape(num_heads=8, num_kv_heads=4, head_dim=6, hidden_size=24, max_positions=512)
SHORT = MixerConfig(span=SlidingSpan(window_size=3), feature_map=None, combine=WindowOnly())
LONG = MixerConfig(span=SlidingSpan(window_size=9), feature_map=None, combine=WindowOnly())
LINEAR = MixerConfig(span=SlidingSpan(window_size=4))
SINKS = SlidingSpan(window_size=3, sinks=2)
KINDS = [None, SHORT, LINEAR, None]


def inputs(length: int, softcap: float | None = None) -> AttnInputs:
    generator = torch.Generator().manual_seed(0)
    sizes = (8, 4, 4)
    q, k, v = (torch.randn(2, heads, length, 6, dtype=torch.float64, generator=generator) for heads in sizes)
    return AttnInputs(q, k, v, 0.7, softcap)


@pytest.mark.parametrize("kinds", [KINDS, [SHORT, SHORT, LONG, LONG], [LINEAR, None, SHORT, LONG]], ids=["a", "b", "c"])
def test_each_head_is_what_its_mixer_makes_of_it(kinds: list[MixerConfig | None]) -> None:
    config = HeadwiseConfig.of(kinds)
    assert isinstance(config, HeadwiseConfig)
    mixer, x = HeadwiseMixer(config, SHAPE).double(), inputs(30)
    found = mixer(x)
    one = LayerShape(num_heads=2, num_kv_heads=1, head_dim=6, hidden_size=24, max_positions=512)
    for head, kind in enumerate(kinds):
        alone = SoftmaxMixer(one) if kind is None else LinearMixer(kind, one).double()
        expected = alone(x.heads((head,)))
        torch.testing.assert_close(found[:, 2 * head : 2 * head + 2], expected, rtol=0, atol=1e-12)


def test_heads_alike_are_one_group_and_all_alike_are_one_mixer() -> None:
    config = HeadwiseConfig.of(KINDS)
    assert isinstance(config, HeadwiseConfig)
    assert [group.kv_heads for group in config.groups] == [(0, 3), (1,), (2,)]
    assert HeadwiseConfig.of([SHORT] * 4) == SHORT and HeadwiseConfig.of([None] * 4) is None
    assert HeadwiseConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("groups", [((0,), (0, 1)), ((0, 2),), ((1, 0),)])
def test_each_head_is_in_one_group(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="expected each KV head from 0 on in one group"):
        HeadwiseConfig(groups=tuple(HeadGroup(kv_heads=heads) for heads in groups))


def test_a_state_grows_by_its_softmax_heads_alone() -> None:
    config = HeadwiseConfig.of(KINDS)
    assert isinstance(config, HeadwiseConfig)
    mixer, x = HeadwiseMixer(config, SHAPE).double(), inputs(40)
    short, long = (mixer.step(x.tokens(0, n), None)[1].nbytes for n in (20, 40))
    assert long - short == 2 * 2 * 2 * 6 * 8 * 20  # rows, heads, keys and values, fp64


@pytest.mark.parametrize(
    "parts",
    [
        {"span": {"type": "sliding", "window_size": 4}},
        {"span": {"type": "terraced", "window_size": 4}, "feature_map": {"type": "performer"}},
        {
            "span": {"type": "none"},
            "decay": {"type": "scalar"},
            "normalizer": {"type": "rms_norm"},
            "combine": {"type": "add"},
        },
        {
            "span": {"type": "none"},
            "update": {"type": "delta"},
            "normalizer": {"type": "rms_norm"},
            "combine": {"type": "add"},
        },
    ],
    ids=["lolcats", "performer", "decay", "delta"],
)
def test_a_head_keeps_its_state_in_a_dtype_of_its_own(parts: dict[str, Any]) -> None:
    """S alone, between calls alone: the other heads are what they were, and rounding is all that differs."""
    x = inputs(40)
    x = replace(x, hidden=torch.randn(2, 40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    outputs, linear = [], []
    for dtype in None, "bfloat16":
        kind = MixerConfig.model_validate(parts | {"state_dtype": dtype})
        config = HeadwiseConfig.of([SHORT, kind, None, SHORT])
        assert isinstance(config, HeadwiseConfig)
        torch.manual_seed(0)
        mixer, state, pieces = HeadwiseMixer(config, SHAPE).double(), None, []
        for start, stop in ((0, 20), (20, 33), *((n, n + 1) for n in range(33, 40))):
            y, state = mixer.step(x.tokens(start, stop), state)
            pieces.append(y)
        assert state is not None
        assert state.parts[1].nbytes == mixer.groups[1].state_like(x.tokens(0, 1).heads((1,))).nbytes
        outputs.append(torch.cat(pieces, dim=2).unflatten(1, (4, 2)))
        linear.append(state.parts[1].linear)
    (exact, rounded), (full, half) = outputs, linear
    assert half.S.dtype == torch.bfloat16 and half.z.dtype == full.S.dtype == torch.float64
    assert torch.equal(rounded[:, [0, 2, 3]], exact[:, [0, 2, 3]]) and torch.equal(
        rounded[:, 1, :, :20], exact[:, 1, :, :20]
    )
    change = (rounded - exact)[:, 1, :, 20:].norm() / exact[:, 1, :, 20:].norm()
    assert 0 < change < 0.02


def cached(size: int, recall_size: int = 0, *, width: int = 4, blocks: int = 2, sinks: int = 1) -> MixerConfig:
    span = TerracedSpan(window_size=width, blocks=blocks, sinks=sinks)
    cache = EvictionCache(size=size, recall_size=recall_size)
    return MixerConfig(span=span, feature_map=None, combine=WindowOnly(), cache=cache)


def softmax_alone(length: int, softcap: float | None) -> tuple[HeadwiseMixer, AttnInputs]:
    """Windows, sinks, caches of one and of two parts with equal scores among them, and full attention."""
    kinds = [cached(6), cached(9, 4, width=3, blocks=1, sinks=0), None, SHORT.model_copy(update={"span": SINKS})]
    config = HeadwiseConfig.of([kinds[at] for at in (2, 0, 3, 1)])
    assert isinstance(config, HeadwiseConfig)
    mixer, x = HeadwiseMixer(config, SHAPE).double(), inputs(length, softcap)
    twice = torch.arange(length) // 2
    x = replace(x, k=x.k[:, :, twice], v=x.v[:, :, twice])
    generator = torch.Generator().manual_seed(2)
    for part in mixer.groups:
        scorer = getattr(part, "scorer", None)
        if scorer is not None:
            scorer.weight.copy_(torch.randn(scorer.weight.shape, generator=generator, dtype=torch.float64))
            scorer.recency.fill_(0.01)
    return mixer, x


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of KV heads of each call of attention with their masks."""
    calls, attend = [], full._attend_by_kv_head

    def counted(q: Tensor, k: Tensor, *others: Any) -> Tensor:
        calls.append(k.shape[1])
        return attend(q, k, *others)

    monkeypatch.setattr(full, "_attend_by_kv_head", counted)
    return calls


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 30, 64])
@pytest.mark.parametrize("at_once", [5, 256])
def test_a_prompt_by_masks_is_as_by_each_mixer(
    softcap: float | None, length: int, at_once: int, masked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "QUERIES_AT_ONCE", at_once)
    mixer, x = softmax_alone(length, softcap)
    each = list(zip(mixer.parts(), x.divided(mixer.kv_heads), strict=True))
    expected, states = zip(*(part.step(own, None) for (_, part), own in each), strict=True)
    with torch.no_grad():
        y, state = mixer.step(x, None)
    assert masked and set(masked) == {4}
    torch.testing.assert_close(y, mixer._joined(list(expected)), rtol=0, atol=1e-12)
    for found, alone in zip(state.parts, states, strict=True):
        assert found.slots.keys() == alone.slots.keys() and torch.equal(found.seen, alone.seen)
        for name, slot in found.slots.items():
            torch.testing.assert_close(slot, alone.slots[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("at_once", [7, 256])
def test_documents_by_masks_are_as_by_each_mixer(
    softcap: float | None, at_once: int, masked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding between and within them; outputs and gradients."""
    monkeypatch.setattr(full, "QUERIES_AT_ONCE", at_once)
    mixer, x = softmax_alone(64, softcap)
    rows = [[-1, -1, *range(20), -1, *range(41)], [*range(9), *range(9, 40), -1, 40, 41, *range(21)]]
    layout = SequenceLayout.from_positions(torch.tensor(rows))
    leaves = [tensor.clone().requires_grad_() for tensor in (x.q, x.k, x.v)]
    x = replace(x, q=leaves[0], k=leaves[1], v=leaves[2])
    each = zip(mixer.parts(), x.divided(mixer.kv_heads), strict=True)
    expected = mixer._joined([part(own, layout) for (_, part), own in each])
    found = mixer(x, layout)
    assert masked and set(masked) == {4}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((y * weight).sum(), leaves) for y in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("at_once", [7, 256])
def test_all_keys(softcap: float | None, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several documents with padding, behind a carried one, values and gradients."""
    monkeypatch.setattr(full, "QUERIES_AT_ONCE", at_once)
    x = inputs(32, softcap)
    position = torch.tensor([[-1, -1, *range(12), -1, *range(17)], [*range(5), *range(27)]])
    layout = SequenceLayout.from_positions(position)
    document, key = layout.key_document, layout.key_position
    seen = (document[:, :, None] == document[:, None]) & (key[:, None] <= key[:, :, None]) & (key >= 0)[:, None]
    given = [y.clone().requires_grad_() for y in (x.q, x.k, x.v)]
    k, v = (y.repeat_interleave(2, dim=1) for y in given[1:])
    scores = given[0] @ k.mT * 0.7
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0) @ v
    expected = torch.where((key >= 0)[:, None, :, None], expected, 0)
    mixer = SoftmaxMixer(SHAPE)
    found = mixer(AttnInputs(*given, 0.7, softcap), layout)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    valid = (key >= 0)[:, None, :, None]
    pairs = zip(*(torch.autograd.grad((y * weight * valid).sum(), given) for y in (found, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other.nan_to_num(0), rtol=0, atol=1e-10)


def test_all_keys_in_several_calls() -> None:
    x, mixer = inputs(32), SoftmaxMixer(SHAPE)
    k, v = (y.repeat_interleave(2, dim=1) for y in (x.k, x.v))
    whole = scaled_dot_product_attention(x.q, k, v, is_causal=True, scale=0.7)
    found, state = [], mixer.state_like(x.tokens(0, 1))
    for start, stop in ((0, 10), (10, 11), (11, 25), *((n, n + 1) for n in range(25, 32))):
        y, state = mixer.step(x.tokens(start, stop), state)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, dim=2), whole, rtol=0, atol=1e-12)
    assert state.seen.tolist() == [32, 32]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_no_matrix_of_all_keys_by_all_keys(padded: bool, backward: bool) -> None:
    """Whether read at once, behind a state, or with padding: what exists at a time is linear in the keys."""
    shape = LayerShape(num_heads=1, num_kv_heads=1, head_dim=6, hidden_size=6, max_positions=8192)
    q, k, v = (torch.rand(1, 1, 4096, 6).requires_grad_(backward) for _ in range(3))
    layout = SequenceLayout.from_valid(torch.arange(4096)[None] >= 5) if padded else None
    with LargestTensor() as largest, torch.set_grad_enabled(backward):
        y, state = SoftmaxMixer(shape).step(AttnInputs(q, k, v, 0.5), None, layout)
        more, _ = SoftmaxMixer(shape).step(AttnInputs(q[:, :, :300], k[:, :, :300], v[:, :, :300], 0.5), state)
        if backward:
            (y.sum() + more.sum()).backward()
    assert 4096 * 6 <= largest.elements < 4096 * 4096 // 8
