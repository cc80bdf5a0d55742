"""The kernels of `triton_backend`, held to the definition, and those of eviction caches to their own.

On a CUDA device, or on a CPU by Triton's interpreter (`make test-kernels`), which `TRITON_INTERPRET=1` turns on before
triton is imported: so these tests have a process of their own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import linearize
from linearize.configs.feature_maps import HedgehogMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.configs.spans import TerracedSpan
from linearize.mixers.feature_maps.learned import Hedgehog
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops import chunked, dense, dispatch, eviction_cache, reference, triton_backend, triton_launch
from linearize.ops.backend import TORCH, Backend
from linearize.ops.inputs import Blocks, CachedPairs, LinearState, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.linear_state import linear_state
from linearize.ops.partial import Partial
from linearize.recipe import Recipe
from tests.ops.cases import Case, make_case
from tests.ops.parity import FP32_DECAYED, assert_near, assert_partials_near, part_of
from tests.oracles.spans import SpanSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = 1e-5
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip(
        "there is no CUDA device; `make test-kernels` runs this by Triton's interpreter", allow_module_level=True
    )
pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` installs it")

KERNELS = triton_backend.TritonBackend("triton")
DEFINITION = Backend("reference", reference)

SPANS = [SpanSpec("none"), SpanSpec("sliding", 1), SpanSpec("sliding", 7), SpanSpec("sliding", 100)]
SPANS += [SpanSpec("terraced", 64, 1), SpanSpec("terraced", 16, 2), SpanSpec("terraced", 7, 3)]
# Few sinks, more than the window has keys, and more than the kernel reads at a time.
SPANS += [SpanSpec("sliding", 7, sinks=2), SpanSpec("sliding", 4, sinks=9), SpanSpec("sliding", 33, sinks=40)]
SPANS += [SpanSpec("terraced", 16, 2, sinks=3), SpanSpec("terraced", 5, 1, sinks=8)]
each_span = pytest.mark.parametrize("span", SPANS, ids=str)


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Nothing else serves a call, but where the test is of that."""
    if "others" in request.keywords:
        return

    def other(*args: Any, **options: Any) -> None:
        pytest.fail("not served by a kernel")

    for module, names in ((chunked, ("linear_scan", "window_softmax")), (dense, ("linear_scan", "window_softmax"))):
        for name in names:
            monkeypatch.setattr(module, name, other)


def by(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    """From here on this backend serves all devices."""
    monkeypatch.setattr(dispatch, "choose", lambda device, forced: backend.name)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched from here on."""
    launch, names = triton_launch.launch, list[str]()

    def with_note(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(triton_launch, "launch", with_note)
    return names


def check(
    case: Case,
    layout: SequenceLayout | None = None,
    state: LinearState | None = None,
    part: str = "both",
    tolerance: float = TOLERANCE,
) -> None:
    """Both parts, or one of them, are those of the definition."""
    layout, span = (case.layout if layout is None else layout).to(DEVICE), case.package_span
    case = replace(case, **{name: x.float().to(DEVICE) for name, x in case.tensors.items()})
    state = None if state is None else LinearState(state.S.float().to(DEVICE), state.z.float().to(DEVICE))
    keys, found = case.linear(layout, state), []
    for ops in (KERNELS, DEFINITION):
        own = []
        if part != "window":
            own.append(ops.linear_scan(keys))
        if part != "linear" and span.max_softmax_keys:
            own.append(ops.window_softmax(case.softmax(layout)))
        found.append(own)
    assert_partials_near(*found, tolerance)
    if part != "window":  # the state behind them comes with the outputs
        own, after = KERNELS.scan_with_state(keys)
        assert_partials_near([own], found[1][:1], tolerance)
        expected = linear_state(keys).named_tensors()
        for name, x in after.named_tensors().items():
            assert_near(x, expected.pop(name), tolerance, f"state {name}")
        assert not expected


@pytest.mark.parametrize("activation", ["softmax_halves", "softmax", "exp"])
@pytest.mark.parametrize("tied, per", [(False, "query_head"), (False, "kv_head"), (True, "kv_head")])
@pytest.mark.parametrize("tokens, dtype", [(70, torch.float32), (1, torch.bfloat16)], ids=str)
def test_hedgehogs_maps(
    activation: str, tied: bool, per: str, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of queries and keys of heads that are no power of 2 wide: those of torch's operations."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": activation, "tied": tied, "per": per, "bias": True, "init": "kaiming"}
    map_ = Hedgehog(HedgehogMap(**options), LayerShape(4, 2, 72, 64, 128)).to(DEVICE).requires_grad_(False)
    for bias in (map_.query_bias, map_.key_bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    x = 20 * torch.randn(2, tokens, 4, 72, device=DEVICE, dtype=dtype).transpose(1, 2)
    k, position = x[:, ::2], torch.arange(tokens, device=DEVICE)[None]
    expected = map_.q(x, position), map_.k(k, position)
    by(monkeypatch, KERNELS)
    monkeypatch.setattr(Hedgehog, "_project", lambda *args: pytest.fail("not served by a kernel"))
    for found, right in zip((map_.q(x, position), map_.k(k, position)), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=2e-5 if activation == "exp" else 0)


@each_span
@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 4)], ids=str)
def test_one_document_padded_on_a_side_or_not(span: SpanSpec, heads: tuple[int, int, int]) -> None:
    for length in (5, 150):
        check(make_case(span, ("full", "left", "right"), length, heads=heads, seed=length))
    check(make_case(span, ("full", "left"), 150, heads=heads))  # all end in the last slot


@each_span
def test_rows_that_are_known_to_be_full(span: SpanSpec) -> None:
    check(make_case(span, ("full", "full"), 130, heads=(2, 1, 2)), SequenceLayout.full(130))


@each_span
@pytest.mark.parametrize("start", [4, 9, 36, 90])
def test_a_carried_document_goes_on(span: SpanSpec, start: int) -> None:
    """From the state that the first tokens leave, before and after window and sinks are full."""
    case = make_case(span, ("full", "full"), 170, heads=(4, 2, 4), seed=start)
    first, layout = part_of(case, 0, start)
    state = linear_state(first.linear(layout))
    check(*part_of(case, start, 170), LinearState(state.S, state.z))


each_window = pytest.mark.parametrize("span", [span for span in SPANS if span.kind != "none"], ids=str)


@each_window
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_windows_of_packed_documents(span: SpanSpec, softcap: float | None) -> None:
    case = make_case(span, ("packed", "packed", "left"), 150, heads=(4, 2, 2), seed=3, softcap=softcap)
    check(case, part="window")


@each_window
@pytest.mark.parametrize("start", [20, 75])
def test_windows_of_documents_behind_a_carried_one(span: SpanSpec, start: int) -> None:
    """One document of the first tokens ends in this call, at once or later, and others follow it."""
    case = make_case(span, ("full", "full"), 200, heads=(4, 2, 2), seed=start)
    ends = [[0, start + 90, 170, 200], [0, start, start + 3, 200]]
    documents = [[list(range(*pair)) for pair in pairwise(row)] for row in ends]
    check(*part_of(replace(case, documents=documents), start, 200), part="window")


@each_window
def test_windows_in_half_precision(span: SpanSpec) -> None:
    """As the definition has them of the same rounded inputs, within what half precision rounds off of values."""
    case = make_case(span, ("packed", "full"), 150, heads=(4, 2, 2), seed=4)
    q, k, v = (x.half().to(DEVICE) for x in (case.q, case.k, case.v))
    inputs = SoftmaxInputs(q, k, v, case.package_span, case.layout.to(DEVICE), 0.4)
    with torch.no_grad():
        found, right = KERNELS.window_softmax(inputs), reference.window_softmax(inputs)
    assert_partials_near([found], [right], 2e-3)


def test_linear_parts_beside_sinks() -> None:
    check(make_case(SpanSpec("sliding", 7, sinks=9), ("full", "left"), 150, heads=(2, 1, 2)), part="linear")


@pytest.mark.parametrize(
    "span, styles, rule, part",
    [
        (SpanSpec("sliding", 7), ("packed",), "none", "linear"),
        (SpanSpec("sliding", 7), ("mixed",), "none", "both"),
        (SpanSpec("sliding", 7), ("full",), "scalar", "linear"),
        (SpanSpec("sliding", 7), ("full",), "values", "linear"),
    ],
    ids=["documents", "padding", "decays", "decays of values"],
)
@pytest.mark.others
def test_the_rest_is_the_dense_and_chunked_forms(span: SpanSpec, styles: tuple[str, ...], rule: str, part: str) -> None:
    tolerance = TOLERANCE if rule == "none" else FP32_DECAYED
    check(make_case(span, styles, 300, heads=(4, 2, 2), rule=rule), part=part, tolerance=tolerance)


# --- eviction caches --------------------------------------------------------------------------------------------------


class Pool:
    """Keys and values behind what a cache holds of an earlier call, in rows of several documents."""

    def __init__(self, style: str, length: int, size: int, span: TerracedSpan, seed: int = 0) -> None:
        case = make_case(
            SpanSpec("terraced", span.window_size, span.blocks), (style, style), length, heads=(4, 2, 2), seed=seed
        )
        self.span = span
        self.layout = SequenceLayout.full(length) if style == "full" else case.layout
        self.q, k, v = (x.float().to(DEVICE) for x in (case.q, case.k, case.v))
        self.k, self.v = (torch.nn.functional.pad(x, (0, 0, size, 0)) for x in (k, v))
        self.blocks = eviction_cache.cut(self.layout, span)
        self.leaves = eviction_cache.leaving(self.blocks, span, self.layout, size)

    def chosen(self, size: int) -> torch.Tensor:
        """What the cache holds, by scores drawn at random."""
        scores = torch.randn(self.k.shape[:3], generator=torch.Generator().manual_seed(0))
        carried = torch.full((2, 2, size), -1)
        return eviction_cache.choose(scores, self.leaves, size, fresh=self.blocks.fresh, carried=carried)


@pytest.mark.parametrize("style", ["full", "packed", "left"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_queries_read_of_a_cache(style: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 40
    pool = Pool(style, 300, size, TerracedSpan(window_size=16, blocks=2), seed=1)
    held = pool.chosen(size)
    layout, blocks = pool.layout.to(DEVICE), Blocks(*(x.to(DEVICE) for x in vars(pool.blocks).values()))
    k, v = (x[:, :, size:] for x in (pool.k, pool.v))
    cached = CachedPairs(pool.k, pool.v, blocks, held.to(DEVICE))
    inputs = SoftmaxInputs(pool.q, k, v, pool.span, layout, 0.4, softcap, cached)
    expected = DEFINITION.softmax(inputs)
    monkeypatch.setattr(eviction_cache, "cached_softmax", None)
    assert_partials_near([KERNELS.softmax(inputs)], [expected], TOLERANCE)


# --- outputs from sums ------------------------------------------------------------------------------------------------

ALONE = {"feature_map": None, "combine": {"type": "window_only"}}


@pytest.mark.parametrize("name", ["both", "a window", "a linear part"])
@pytest.mark.parametrize("dtype, tokens, head_dim", [(torch.float32, 70, 24), (torch.float16, 3, 64)], ids=str)
def test_what_sums_make_together(
    name: str, dtype: torch.dtype, tokens: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's operations do, 0 where a query sees no key."""
    span, alone = {"type": "sliding" if name != "a linear part" else "none"}, ALONE if name == "a window" else {}
    mixer = LinearMixer(MixerConfig.model_validate(alone | {"span": span}), LayerShape(4, 2, head_dim, 64, 128))
    for weight in mixer.requires_grad_(False).to(DEVICE).parameters():
        weight.normal_()
    inputs = AttnInputs(*torch.zeros(3, 2, 4, tokens, head_dim, device=DEVICE, dtype=dtype), 1.0)
    found, launched = [], noted(monkeypatch)
    for by_kernel in (False, True):
        by(monkeypatch, KERNELS if by_kernel else TORCH)
        torch.manual_seed(0)
        num, den = torch.randn(2, 2, 4, tokens, head_dim, device=DEVICE), torch.rand(2, 2, 4, tokens, device=DEVICE)
        num[..., 0, :], den[..., 0] = 0, 0
        window, linear = (Partial(x, total, torch.zeros_like(total)) for x, total in zip(num, den, strict=True))
        given = None if name == "a linear part" else window, None if name == "a window" else linear
        found.append(mixer.combined(inputs, *given, lambda: pytest.fail("nobody asks")))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
    assert launched == ["quotient"] and not found[1][:, :, 0].any()


# --- one more token ---------------------------------------------------------------------------------------------------

CACHE = {"span": {"type": "terraced", "window_size": 8, "blocks": 2}, "cache": {"size": 40}}
T2R = {"type": "t2r", "feature_dim": 20, "bias": True, "init": "kaiming"}
STEPS: dict[str, dict[str, Any]] = {
    "a window and a linear part": {"span": {"type": "sliding", "window_size": 7}},
    "a state per KV head": {"span": {"type": "sliding", "window_size": 70}, "feature_map": T2R | {"per": "kv_head"}},
    "a linear part": {"span": {"type": "none"}, "feature_map": T2R, "scale": "head_dim"},
    "a linear part below blocks": {"span": {"type": "terraced", "window_size": 8, "blocks": 2}},
    "a linear part below the own block": {"span": {"type": "terraced", "window_size": 8, "blocks": 1}},
    "a window": ALONE | {"span": {"type": "sliding", "window_size": 33}},
    "sinks beside a window": ALONE | {"span": {"type": "sliding", "window_size": 89, "sinks": 4}},
    "sinks beside few keys": ALONE | {"span": {"type": "sliding", "window_size": 3, "sinks": 40}},
    "sinks and a linear part": {"span": {"type": "sliding", "window_size": 7, "sinks": 3}},
    "sinks and a linear part below the own block": {
        "span": {"type": "terraced", "window_size": 8, "blocks": 1, "sinks": 3}
    },
    "a window of blocks": ALONE | {"span": {"type": "terraced", "window_size": 8, "blocks": 3}},
    "unrotated features": {"feature_map": {"type": "hedgehog", "rotation": "none"}},
    "an eviction cache": ALONE | CACHE,
    "a KV cache with eviction and sinks": ALONE | CACHE | {"span": CACHE["span"] | {"sinks": 3}},
    "an eviction cache and a linear part": CACHE | {"state_dtype": "bfloat16"},
}


# No bfloat16: Triton's interpreter does not know its products.
NUMBERS = [(torch.float32, None, 72), (torch.float32, 3.0, 16), (torch.float16, None, 64)]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype, softcap, head_dim", NUMBERS, ids=str)
@pytest.mark.others
def test_one_more_token_by_one_kernel(
    name: str, dtype: torch.dtype, softcap: float | None, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and state, of rows that have seen none, few and many tokens: those of torch's operations."""
    torch.manual_seed(0)
    mixer = LinearMixer(MixerConfig.model_validate(STEPS[name]), LayerShape(6, 2, head_dim, 64, 128)).to(DEVICE)
    for weight in mixer.requires_grad_(False).parameters():
        weight.normal_()
    q, k, v = (torch.randn(3, 97, heads, head_dim, device=DEVICE, dtype=dtype).transpose(1, 2) for heads in (6, 2, 2))
    inputs = AttnInputs(q, k, v, head_dim**-0.5, softcap, unrotated=(q.flip(1), k.flip(1)))
    valid = torch.ones(3, 87, dtype=torch.bool)
    valid[1, :80], valid[2] = False, False
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-3, "atol": 3e-3}
    launched = noted(monkeypatch)
    with torch.no_grad():
        _, expected = mixer.step(inputs.tokens(0, 87), None, SequenceLayout.from_valid(valid).to(DEVICE))
        found = expected
        for at in range(87, 97):
            steps = []
            for by_kernel, state in ((False, expected), (True, found)):
                by(monkeypatch, KERNELS if by_kernel else TORCH)
                steps.append(mixer.step(inputs.tokens(at, at + 1), state))
            (right, expected), (y, found) = steps
            torch.testing.assert_close(y, right, **near)
            for part, x in expected.named_tensors().items():
                torch.testing.assert_close(found.named_tensors()[part], x, **near)
    assert launched.count("one_token") == 10


OTHER = {"span": {"type": "none"}, "normalizer": {"type": "group_norm"}, "combine": {"type": "add"}}
TORCHS: dict[str, dict[str, Any]] = {
    "exponential features": {"feature_map": {"type": "hedgehog", "activation": "exp"}},
    "a decay": {"decay": {"type": "fixed"}},
    "the delta rule": OTHER | {"update": {"type": "delta"}},
    "a kernel in closed form": {"feature_map": {"type": "taylor2"}},
    "another norm": OTHER,
    "another combination": {"combine": {"type": "mix"}},
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.others
def test_one_more_token_of_what_the_kernel_does_not_define(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = LinearMixer(MixerConfig.model_validate(TORCHS[name]), LayerShape(6, 2, 8, 64, 128)).to(DEVICE)
    q, k, v, hidden = (torch.randn(2, 20, *size, device=DEVICE) for size in ((6, 8), (2, 8), (2, 8), (64,)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    inputs = AttnInputs(q, k, v, 0.25, hidden=hidden, unrotated=(k.repeat_interleave(3, 1), q[:, ::3]))
    launched = noted(monkeypatch)
    with torch.no_grad():
        state = mixer.step(inputs.tokens(0, 19), None)[1]
        by(monkeypatch, KERNELS)
        found = mixer.step(inputs.tokens(19, 20), state)[0]
    torch.testing.assert_close(found, mixer(inputs)[:, :, 19:].detach(), rtol=1e-4, atol=1e-4)
    assert "one_token" not in launched


def test_parts_by_themselves_are_of_inputs_that_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no gradient is wanted: they are compared with sums over other keys."""
    by(monkeypatch, KERNELS)
    mixer = LinearMixer(MixerConfig(), LayerShape(2, 2, 16, 64, 128)).to(DEVICE)
    inputs, layout = (
        AttnInputs(*torch.randn(3, 1, 2, 90, 16, device=DEVICE).half(), 0.25),
        SequenceLayout.full(90, DEVICE),
    )
    with torch.no_grad():
        found, expected = (mixer.partials(x, layout) for x in (inputs, inputs.accumulated()))
    assert_partials_near(found, expected, 0.0)


def test_a_compiled_step_is_not_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """But by the compiler's."""
    mixer = LinearMixer(MixerConfig(), LayerShape(2, 2, 16, 64, 128)).to(DEVICE)
    inputs = AttnInputs(*torch.randn(3, 1, 2, 1, 16, device=DEVICE), 0.25)
    launched = noted(monkeypatch)
    by(monkeypatch, KERNELS)
    with torch.no_grad():
        state = mixer.state_like(inputs)
        expected = mixer.step(inputs, state)[0]
        assert launched == ["hedgehog", "hedgehog", "one_token"]
        launched.clear()
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        found = mixer.step(inputs, state)[0]
    assert not launched
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- models -----------------------------------------------------------------------------------------------------------

WINDOWS = {"mixer.feature_map": None, "mixer.combine": {"type": "window_only"}, "transfer": None}
BLOCKS = {"mixer.span": {"type": "terraced", "window_size": 16, "blocks": 2}}
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a window and a linear part": (
        {"mixer.span.window_size": 16},
        {"hedgehog", "window", "linear_states", "linear_outputs", "quotient", "one_token"},
    ),
    "a window": (WINDOWS | {"mixer.span.window_size": 16}, {"window", "quotient", "one_token"}),
    "a window and sinks": (
        WINDOWS | {"mixer.span.window_size": 16, "mixer.span.sinks": 4},
        {"window", "quotient", "one_token"},
    ),
    "an eviction cache": (
        WINDOWS | BLOCKS | {"mixer.cache": {"size": 32}},
        {"window", "cached", "quotient", "one_token"},
    ),
    "a KV cache with eviction and sinks": (
        WINDOWS | {"mixer.span": BLOCKS["mixer.span"] | {"sinks": 4}, "mixer.cache": {"size": 32}},
        {"window", "cached", "quotient", "one_token"},
    ),
}


def teacher() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE).eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", [0, 21])
@pytest.mark.others
def test_a_model_reads_its_prompt_by_kernels(name: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the prompt and of a token behind it, with rows padded on the left too, are those of other forms."""
    overrides, kernels = MODELS[name]
    student = linearize.convert(teacher(), Recipe.load("lolcats", overrides))
    tokens = torch.randint(50, (2, 131), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    launched, found = noted(monkeypatch), []
    for backend in (TORCH, KERNELS):
        assert not launched
        by(monkeypatch, backend)
        with torch.no_grad():
            cache = DynamicCache(config=student.config)
            prompt = student(tokens[:, :130], attention_mask=mask[:, :130], past_key_values=cache, use_cache=True)
            step = student(tokens[:, 130:], attention_mask=mask, past_key_values=cache, use_cache=True)
        found.append(torch.cat([prompt.logits, step.logits], 1)[mask.bool()])
    assert set(launched) == kernels
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


class Operations(TorchDispatchMode):
    """How many of torch's there were, views among them, and kernels of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.launching = 0, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.launching
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name, prompt, step",
    [("a window and a linear part", 1.35, 1.25), ("a window", 1.15, 1.1), ("an eviction cache", 1.85, 1.2)],
)
@pytest.mark.others
def test_by_kernels_it_is_few_operations(
    name: str, prompt: float, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are what a short prompt and a step cost a GPU: no more than so many times the teacher's."""
    softmax = teacher()
    by(monkeypatch, KERNELS)
    launch, found = triton_launch.launch, []

    def counted(*args: Any, **options: Any) -> None:
        operations.count, operations.launching = operations.count + 1, True
        launch(*args, **options)
        operations.launching = False

    monkeypatch.setattr(triton_launch, "launch", counted)
    for model in (softmax, linearize.convert(softmax, Recipe.load("lolcats", MODELS[name][0]))):
        for _ in range(2):  # what layers share is worked out once
            cache, counts = DynamicCache(config=model.config), []
            for tokens in (130, 1, 1):  # the layers share their counts from the second on
                with torch.no_grad(), Operations() as operations:
                    model(torch.randint(50, (1, tokens), device=DEVICE), past_key_values=cache, use_cache=True)
                counts.append(operations.count)
        found.append(counts)
    assert found[1][0] < prompt * found[0][0] and found[1][2] < step * found[0][2], found


@pytest.mark.others
def test_more_rows_than_a_grids_other_axes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's grids have 65,535 programs on all axes but the first."""
    grids = dict[str, tuple[int, ...]]()

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        grids[kernel.fn.__name__] = grid

    monkeypatch.setattr(triton_launch, "launch", launch)
    by(monkeypatch, KERNELS)
    short = MixerConfig.model_validate({"span": {"type": "sliding", "window_size": 1}})
    mixer = LinearMixer(short, LayerShape(1, 1, 8, 8, 16)).to(DEVICE)
    inputs = AttnInputs(*torch.zeros(3, 65_536, 1, 3, 8, device=DEVICE), 1.0)
    with torch.no_grad():
        _, state = mixer.step(inputs.tokens(0, 2), None)
        mixer.step(inputs.tokens(2, 3), state)
    assert grids.keys() == {"hedgehog", "window", "linear_states", "linear_outputs", "quotient", "one_token"}
    assert all(grid[0] == 65_536 and max(grid[1:]) < 65_536 for grid in grids.values()), grids
