"""Definition, chunked form and one-step form of both primitives against the oracles and against each other."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linearize.ops import chunked, dense, grid, reference
from linearize.ops.layout import SequenceLayout
from tests.ops.cases import HEADS, RULES, SIDE_BY_SIDE, SINK_SPANS, SPANS, STYLES, WITH_GAPS, Case, make_case
from tests.ops.parity import (
    FP32,
    FP32_DECAYED,
    FP64,
    assert_partials_near,
    both_parts,
    carried_state,
    check_chunked,
    check_oracle,
    check_softmax_limit,
    check_split,
    check_steps,
    part_of,
)
from tests.oracles.spans import SpanSpec

each_implementation = pytest.mark.parametrize("ops", [reference, chunked, dense], ids=["reference", "chunked", "dense"])


def among_the_slow(value: int) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two chunks per block, so that short sequences cross block boundaries too."""
    monkeypatch.setattr(grid, "MAX_CHUNKS_PER_BLOCK", 2)


@st.composite
def spans(draw: st.DrawFn) -> SpanSpec:
    sinks = draw(st.sampled_from([0, 0, 1, 2, 9]))
    kind = draw(st.sampled_from(["none", "sliding", "terraced"]))
    window_size = draw(st.sampled_from([1, 2, 3, 7, 15, 16, 17, 33, 64, 65]))
    if kind == "none":
        return SpanSpec("none")
    if kind == "sliding":
        return SpanSpec("sliding", window_size, sinks=sinks)
    return SpanSpec("terraced", window_size, draw(st.integers(1, 3)), sinks)


def cases(max_length: int, *, rules: bool = False) -> st.SearchStrategy[Case]:
    return st.builds(
        make_case,
        spans(),
        st.lists(st.sampled_from(STYLES), min_size=1, max_size=3).map(tuple),
        st.integers(1, max_length),
        heads=st.sampled_from(HEADS),
        seed=st.integers(0, 2**20),
        softcap=st.sampled_from([None, 2.0]),
        rule=st.sampled_from(["none", *RULES]) if rules else st.just("none"),
    )


def modest(examples: int) -> settings:
    """A few examples, the same on every run; block sizes are patched once per test, which is what is wanted."""
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=health)


# --- the oracles ------------------------------------------------------------------------------------------------------


@each_implementation
@pytest.mark.parametrize("span", SPANS + SINK_SPANS, ids=str)
def test_oracle(ops: ModuleType, span: SpanSpec) -> None:
    check_oracle(ops, make_case(span, ("full", "packed", "mixed"), 35, heads=(2, 1, 1), seed=1))


@each_implementation
@modest(10)
@given(case=cases(max_length=40))
def test_oracle_on_random_cases(ops: ModuleType, case: Case) -> None:
    check_oracle(ops, case)


@each_implementation
@pytest.mark.slow
@modest(60)
@given(case=cases(max_length=100))
def test_oracle_on_many_random_cases(ops: ModuleType, case: Case, small_blocks: None) -> None:
    check_oracle(ops, case)


@each_implementation
@pytest.mark.parametrize("length", [1, 64, 130])
@pytest.mark.parametrize("styles", [SIDE_BY_SIDE, WITH_GAPS], ids=["side by side", "with gaps"])
def test_softmax_attention_where_the_span_holds_every_key(
    ops: ModuleType, length: int, styles: tuple[str, ...]
) -> None:
    spans = [SpanSpec("sliding", length), SpanSpec("terraced", length, 1), SpanSpec("sliding", length + 5, sinks=2)]
    spans += [SpanSpec("terraced", -(-length // 3), 3), SpanSpec("sliding", 1, sinks=length)]
    for span in spans:
        check_softmax_limit(ops, make_case(span, styles, length, heads=(4, 2, 4), seed=length))


# --- chunked against the definition -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, among_the_slow(2), among_the_slow(63), 64, 65, 130])
@pytest.mark.parametrize("span", SPANS + SINK_SPANS, ids=str)
def test_chunked_outputs_and_gradients(span: SpanSpec, length: int, small_blocks: None) -> None:
    for styles in (SIDE_BY_SIDE, WITH_GAPS):
        case = make_case(span, styles, length, seed=length)
        check_chunked(case, FP64)
        check_chunked(case.to(torch.float32), FP32)
    case = make_case(span, ("full", "full"), length, seed=length)
    check_chunked(case, FP64, layout=SequenceLayout.full(length))


@pytest.mark.slow
@pytest.mark.parametrize("span", SPANS + SINK_SPANS, ids=str)
def test_chunked_at_length_1000(span: SpanSpec, small_blocks: None) -> None:
    check_chunked(make_case(span, ("packed", "left"), 1000, seed=3), FP64)
    check_chunked(make_case(span, ("mixed",), 1000, seed=4).to(torch.float32), FP32)
    check_chunked(make_case(span, ("full",), 1000, seed=5).to(torch.float32), FP32, layout=SequenceLayout.full(1000))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("span", [SpanSpec("sliding", 16), SpanSpec("terraced", 16, 2, 3)], ids=str)
def test_chunked_grouped_queries(span: SpanSpec, heads: tuple[int, int, int]) -> None:
    check_chunked(make_case(span, ("packed", "interior"), 130, heads=heads, softcap=1.5), FP64)
    check_chunked(make_case(span, ("full",), 130, heads=heads), FP64, layout=SequenceLayout.full(130))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("span", [SpanSpec("sliding", 16), SpanSpec("sliding", 7, sinks=9), SpanSpec("terraced", 7, 2)])
def test_gradients_where_keys_share_the_largest_score(span: SpanSpec, softcap: float | None) -> None:
    """Equal keys, and keys of equal scores: each has its share in the gradient of log_scale, as autograd gives it."""
    for keys in (2, 3):
        check_chunked(make_case(span, ("packed", "interior"), 70, seed=keys, softcap=softcap).tied(keys), FP64)
    alike = make_case(span, ("full", "mixed"), 70, softcap=softcap)
    check_chunked(alike.tied(70), FP64)


@modest(25)
@given(case=cases(max_length=200, rules=True))
def test_chunked_on_random_cases(case: Case, small_blocks: None) -> None:
    check_chunked(case, FP64)


@pytest.mark.slow
@modest(400)
@given(case=cases(max_length=400, rules=True))
def test_chunked_on_many_random_cases(case: Case, small_blocks: None) -> None:
    check_chunked(case, FP64)
    check_chunked(case.to(torch.float32), FP32_DECAYED)


@modest(25)
@given(case=cases(max_length=150, rules=True), data=st.data())
def test_chunked_with_context_and_a_carried_state(case: Case, data: st.DataObject, small_blocks: None) -> None:
    """More keys than queries, and gradients of the state too."""
    if case.length == 1:
        return
    part, layout = part_of(case, data.draw(st.integers(1, case.length - 1)), case.length)
    check_chunked(part, FP64, layout=layout, state=carried_state(part))


@pytest.mark.parametrize("span", [SpanSpec("sliding", 3, sinks=1), SpanSpec("terraced", 2, 2)], ids=str)
def test_gradients_of_the_definition_against_finite_differences(span: SpanSpec) -> None:
    """The maximum c_n carries gradient: eq. 7 depends on it."""
    case = make_case(span, ("mixed",), 9, heads=(2, 1, 2), seed=58, softcap=3.0)
    leaves = [x.requires_grad_() for x in (case.q, case.k, case.v, case.phi_q, case.phi_k)]

    def fields(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        linear, window = both_parts(reference, Case(*tensors, case.documents, span, case.softcap))
        return linear.num, linear.den, window.num, window.den, window.log_scale

    assert torch.autograd.gradcheck(fields, leaves)


# --- numbers ----------------------------------------------------------------------------------------------------------


@each_implementation
def test_half_precision_inputs_are_only_rounded_once(ops: ModuleType) -> None:
    """Scores, sums and denominators are fp32: the same as for these inputs in fp32, whatever the scaling."""
    for styles in (("full",), ("mixed", "packed")):
        case = make_case(SpanSpec("sliding", 16, sinks=2), styles, 130).to(torch.bfloat16)
        found = both_parts(ops, case)
        assert all(x.dtype == torch.float32 for part in found for x in (part.num, part.den, part.log_scale))
        assert_partials_near(found, both_parts(reference, case.to(torch.float32)), FP32)


@each_implementation
def test_what_lies_in_padding_does_not_matter(ops: ModuleType) -> None:
    for span in (SpanSpec("none"), SpanSpec("sliding", 7, sinks=2), SpanSpec("terraced", 7, 2)):
        case = make_case(span, ("mixed", "left", "interior"), 90)
        assert_partials_near(both_parts(ops, case.grown(1e6)), both_parts(ops, case), FP64)


@each_implementation
def test_large_scores_do_not_overflow(ops: ModuleType) -> None:
    case = make_case(SpanSpec("sliding", 7), ("full",), 70)
    case = Case(1e4 * case.q, case.k, case.v, case.phi_q, case.phi_k, case.documents, case.span).to(torch.float32)
    _, window = both_parts(ops, case)
    assert window.num.isfinite().all()
    assert window.den.min() >= 1


# --- calls that carry a state -----------------------------------------------------------------------------------------


@each_implementation
@pytest.mark.parametrize("span", SPANS + SINK_SPANS, ids=str)
def test_a_sequence_in_several_calls(ops: ModuleType, span: SpanSpec) -> None:
    check_split(ops, make_case(span, ("full", "packed", "right"), 150, heads=(2, 1, 1)), [1, 2, 16, 49, 50, 113])
    check_split(ops, make_case(span, ("interior", "mixed", "left"), 150, heads=(2, 1, 2)), [3, 40, 41, 100])


@each_implementation
@pytest.mark.parametrize("span", [*SINK_SPANS, SpanSpec("terraced", 13, 1, 12), SpanSpec("sliding", 9, 5)], ids=str)
def test_a_sequence_cut_at_every_place(ops: ModuleType, span: SpanSpec) -> None:
    """Sinks move from the recent slots to their own, one by one, and documents end."""
    case = make_case(span, ("full", "packed", "interior"), 33, heads=(1, 1, 1), seed=2)
    everywhere = range(1, case.length)
    check_split(ops, case, *([cut] for cut in everywhere), everywhere)


@each_implementation
@modest(15)
@given(case=cases(max_length=100, rules=True), data=st.data())
def test_a_sequence_in_random_calls(ops: ModuleType, case: Case, data: st.DataObject) -> None:
    points = st.sets(st.integers(1, max(1, case.length - 1)), max_size=6)
    check_split(ops, case, [cut for cut in data.draw(points) if cut < case.length])


@each_implementation
@pytest.mark.slow
@modest(300)
@given(case=cases(max_length=250, rules=True), data=st.data())
def test_a_sequence_in_many_random_calls(ops: ModuleType, case: Case, data: st.DataObject, small_blocks: None) -> None:
    points = st.sets(st.integers(1, max(1, case.length - 1)), max_size=12)
    check_split(ops, case, [cut for cut in data.draw(points) if cut < case.length])


@pytest.mark.parametrize("start", [1, among_the_slow(8), 41])
@pytest.mark.parametrize("span", SPANS + SINK_SPANS, ids=str)
def test_token_by_token(span: SpanSpec, start: int) -> None:
    check_steps(make_case(span, ("full", "full"), start + 40, heads=(4, 2, 2), seed=start, softcap=2.0), start)


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("span", SPANS[::2] + SINK_SPANS[::2], ids=str)
def test_token_by_token_with_decays_and_the_delta_rule(span: SpanSpec, rule: str) -> None:
    check_steps(make_case(span, ("full", "full"), 61, heads=(4, 2, 2), seed=3, rule=rule), 21)


@each_implementation
@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("span", SPANS[::3] + SINK_SPANS[::3], ids=str)
def test_several_calls_with_decays_and_the_delta_rule(ops: ModuleType, span: SpanSpec, rule: str) -> None:
    check_split(ops, make_case(span, ("packed", "mixed", "left"), 90, heads=(2, 1, 1), rule=rule), [3, 40, 41, 70])
