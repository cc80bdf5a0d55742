"""Tests of the tests: each way of breaking the ops must make the check that guards against it fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from linearize.configs.spans import SlidingSpan, TerracedSpan
from linearize.ops import chunked, dense, grid, reference
from linearize.ops.grid import Grid
from linearize.ops.inputs import LinearInputs, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import Partial
from linearize.ops.step import LinearStep, StepContext
from tests.ops import parity
from tests.ops.cases import SIDE_BY_SIDE, WITH_GAPS, Case, make_case
from tests.oracles.spans import SpanSpec

Check = Callable[[ModuleType], None]
SLIDING, TERRACED = SpanSpec("sliding", 7), SpanSpec("terraced", 7, 2)


def against_oracle(span: SpanSpec, styles: tuple[str, ...], **options) -> Check:
    return lambda ops: parity.check_oracle(ops, make_case(span, styles, 30, **options))


def in_two_calls(span: SpanSpec) -> Check:
    return lambda ops: parity.check_split(ops, make_case(span, ("full", "interior"), 40), [21])


def gradients(ops: ModuleType) -> None:
    """The definition is not checked against itself: only the chunked form has gradients of its own making."""
    assert ops is chunked
    parity.check_chunked(make_case(SLIDING, SIDE_BY_SIDE, 200), parity.FP64)


def ties(ops: ModuleType) -> None:
    """Without equal scores at the maximum, `gradients` does not see how they are counted."""
    assert ops is chunked
    parity.check_chunked(make_case(SLIDING, ("full",), 40).tied(2), parity.FP64)


def token_by_token(ops: ModuleType) -> None:
    parity.check_steps(make_case(TERRACED, ("full",), 40), 9)


# --- mutants: each takes (monkeypatch, ops) and breaks something ------------------------------------------------------


def later_window(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    _shift_lo(patch, 1)


def earlier_window(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    _shift_lo(patch, -1)


def _shift_lo(patch: pytest.MonkeyPatch, by: int) -> None:
    for span in (SlidingSpan, TerracedSpan):
        lo = span.lo
        patch.setattr(span, "lo", lambda self, position, lo=lo: (lo(self, position) + by).clamp_min(0))


def state_dropped(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    scan = ops.linear_scan
    patch.setattr(ops, "linear_scan", lambda x: scan(replace(x, state=None)))


def carried_state_forgotten(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    fold = parity.linear_state
    patch.setattr(parity, "linear_state", lambda x: fold(replace(x, state=None)))


def context_dropped(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    with_context = SequenceLayout.with_context

    def blank(self: SequenceLayout, *args) -> SequenceLayout:
        layout = with_context(self, *args)
        position = layout.key_position.clone()
        position[:, : position.shape[1] - layout.length] = -1
        return replace(layout, key_position=position)

    patch.setattr(SequenceLayout, "with_context", blank)


def documents_ignored(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    def one_document(position: torch.Tensor) -> SequenceLayout:
        return SequenceLayout(position, torch.zeros_like(position), position.shape[1])

    patch.setattr(SequenceLayout, "from_positions", one_document)


def padding_read(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """Positions are right, but padding slots are read as if they held the token before them."""
    from_positions = SequenceLayout.from_positions

    def filled(position: torch.Tensor) -> SequenceLayout:
        layout = from_positions(position)
        return replace(layout, key_position=position.where(position >= 0, position.cummax(1).values))

    patch.setattr(SequenceLayout, "from_positions", filled)


def padding_counted(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """Padding inside a document moves the positions of the tokens after it."""
    from_positions = SequenceLayout.from_positions

    def slots(position: torch.Tensor) -> SequenceLayout:
        starts = torch.arange(position.shape[1]).where(position == 0, 0).cummax(1).values
        return from_positions((torch.arange(position.shape[1]) - starts).where(position >= 0, -1))

    patch.setattr(SequenceLayout, "from_positions", slots)


def heads_interleaved(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """Query head h reads KV head h % G."""
    scan = ops.linear_scan

    def wrong(x: LinearInputs) -> Partial:
        heads = x.queries().shape[1]
        tiles = heads // x.v.shape[1]
        phi_k = x.phi_k if x.phi_k.shape[1] == heads else x.phi_k.tile(1, tiles, 1, 1)
        return scan(replace(x, phi_k=phi_k, v=x.v.tile(1, tiles, 1, 1)))

    patch.setattr(ops, "linear_scan", wrong)


def sinks_ignored(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    for name in ("linear_scan", "window_softmax"):
        op = getattr(ops, name)

        def without(x, op=op):
            return op(replace(x, span=x.span.model_copy(update={"sinks": 0})))

        patch.setattr(ops, name, without)


def softcap_ignored(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    softmax = ops.window_softmax
    patch.setattr(ops, "window_softmax", lambda x: softmax(replace(x, softcap=None)))


def maximum_detached(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """log_scale without its gradient, which eq. 7 needs."""
    softmax = ops.window_softmax

    def wrong(x: SoftmaxInputs) -> Partial:
        part = softmax(x)
        return replace(part, log_scale=part.log_scale.detach())

    patch.setattr(ops, "window_softmax", wrong)


def maximum_counted_for_each(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """Each of two equal scores has the whole gradient of log_scale."""
    largest = chunked._largest
    patch.setattr(chunked, "_largest", lambda x: (largest(x)[0], torch.ones_like(x[..., :1])))


def maximum_counted_for_the_first(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """The first of two equal scores has it alone."""

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        is_top = x == 0
        return (is_top & (is_top.cumsum(-1) == 1)).to(x.dtype), torch.ones_like(x[..., :1])

    patch.setattr(chunked, "_largest", wrong)


def maximum_counted_for_none(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """Only a maximum without an equal has a gradient."""
    largest = chunked._largest

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        is_top, equals = largest(x)
        return is_top * (equals == 1), equals

    patch.setattr(chunked, "_largest", wrong)


def blocks_detached(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """The backward pass goes through the blocks from the first to the last, so no gradient reaches the one before."""
    patch.setattr(grid, "MAX_CHUNKS_PER_BLOCK", 1)
    blocks = Grid.blocks
    patch.setattr(Grid, "blocks", lambda self, masks, reverse=False: blocks(self, masks))


def pending_lost(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """The block that is being folded never reaches the state."""
    step = parity.linear_step

    def wrong(x: LinearStep, at: StepContext):
        assert x.state.next_S is not None and x.state.next_z is not None
        nothing = torch.zeros_like
        empty = replace(x.state, next_S=nothing(x.state.next_S), next_z=nothing(x.state.next_z))
        return step(replace(x, state=empty), at)

    patch.setattr(parity, "linear_step", wrong)


def small_error(patch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """One output element off by a millionth."""
    scan = ops.linear_scan

    def wrong(x: LinearInputs) -> Partial:
        part = scan(x)
        num = part.num.clone()
        num[0, 0, -1, 0] += 1e-6
        return replace(part, num=num)

    patch.setattr(ops, "linear_scan", wrong)


@dataclass(frozen=True)
class Guard:
    """`mutant` must make `check` fail, for each of the implementations `ops`."""

    mutant: Callable[[pytest.MonkeyPatch, ModuleType], None]
    check: Check
    ops: tuple[ModuleType, ...] = (reference, chunked, dense)


GUARDS = [
    Guard(later_window, against_oracle(SLIDING, ("full",))),
    Guard(later_window, against_oracle(TERRACED, ("full",))),
    Guard(earlier_window, against_oracle(SLIDING, ("full",))),
    Guard(earlier_window, against_oracle(TERRACED, ("full",))),
    Guard(state_dropped, in_two_calls(SLIDING)),
    Guard(state_dropped, in_two_calls(SpanSpec("none"))),
    Guard(carried_state_forgotten, in_two_calls(TERRACED)),
    Guard(context_dropped, in_two_calls(SLIDING)),
    Guard(context_dropped, in_two_calls(TERRACED)),
    Guard(documents_ignored, against_oracle(SLIDING, ("packed", "packed"), seed=6)),
    Guard(padding_read, against_oracle(SLIDING, WITH_GAPS, seed=1)),
    Guard(padding_read, against_oracle(SLIDING, ("right",), seed=1)),
    Guard(padding_counted, against_oracle(SLIDING, ("interior",), seed=1)),
    Guard(heads_interleaved, against_oracle(SLIDING, ("full",), heads=(4, 2, 2))),
    Guard(heads_interleaved, against_oracle(SLIDING, ("full",), heads=(4, 2, 4))),
    Guard(sinks_ignored, against_oracle(SpanSpec("sliding", 7, sinks=2), ("full",))),
    Guard(softcap_ignored, against_oracle(SLIDING, ("full",), softcap=2.0)),
    Guard(small_error, against_oracle(SLIDING, ("full",))),
    Guard(maximum_detached, gradients, ops=(chunked,)),
    Guard(maximum_counted_for_each, ties, ops=(chunked,)),
    Guard(maximum_counted_for_the_first, ties, ops=(chunked,)),
    Guard(maximum_counted_for_none, ties, ops=(chunked,)),
    Guard(blocks_detached, gradients, ops=(chunked,)),
    Guard(pending_lost, token_by_token, ops=(reference,)),
]


@pytest.mark.parametrize(
    ("guard", "ops"),
    [
        pytest.param(guard, ops, id=f"{guard.mutant.__name__}-{index}-{ops.__name__.rpartition('.')[2]}")
        for index, guard in enumerate(GUARDS)
        for ops in guard.ops
    ],
)
def test_broken_ops_are_caught(guard: Guard, ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    guard.check(ops)
    guard.mutant(monkeypatch, ops)
    with pytest.raises(AssertionError):
        guard.check(ops)


def test_case_styles_hold_what_they_say() -> None:
    """The generator itself: padding inside documents, several documents, and documents of length 1 all occur."""
    case: Case = make_case(SLIDING, ("full", "left", "right", "interior", "packed", "mixed"), 130, seed=1)
    full, left, right, interior, packed, mixed = case.documents
    assert full == [list(range(130))]
    assert left[0][-1] == 129
    assert left[0][0] > 0
    assert right[0][0] == 0
    assert right[0][-1] < 129
    assert len(interior) == 1
    assert len(interior[0]) < interior[0][-1] - interior[0][0] + 1
    assert [slot for slots in packed for slot in slots] == list(range(130))
    assert any(len(slots) == 1 for slots in packed)
    assert len(mixed) > 1
    assert sum(len(slots) for slots in mixed) < 130
