"""A smoke of a few minutes on a CUDA device: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import linearize
from linearize.configs.shape import LayerShape
from linearize.configs.spans import SlidingSpan, TerracedSpan
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops import chunked, reference
from linearize.ops.dispatch import ENVIRONMENT
from linearize.ops.inputs import LinearInputs, SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.recipe import Recipe, recipe_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPANS = [SlidingSpan(), SlidingSpan(window_size=16, sinks=4), TerracedSpan()]


def _student(dtype: torch.dtype, **overrides: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    teacher = LlamaForCausalLM(config).to("cuda", dtype).eval()
    return linearize.convert(teacher, Recipe.load("lolcats", dict(overrides)))


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_chunked_equals_the_definition(span: SlidingSpan | TerracedSpan) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, h, 1000, 64, device="cuda", generator=generator) for h in (8, 2, 2))
    phi_q, phi_k = q.softmax(-1), k.softmax(-1)
    layout = SequenceLayout.full(1000, "cuda")
    for op in (reference, chunked):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, phi_q, phi_k)]
        linear = op.linear_scan(LinearInputs(leaves[3], leaves[4], leaves[2], span, layout))
        window = op.window_softmax(SoftmaxInputs(*leaves[:3], span, layout, 0.125))
        y = (window.num + linear.num) / (window.den + linear.den)[..., None]
        grads = torch.autograd.grad(y.square().sum(), leaves)
        if op is reference:
            expected, expected_grads = y, grads
            continue
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            scale = expected_grad.abs().max()
            torch.testing.assert_close(grad / scale, expected_grad / scale, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", recipe_names())
def test_every_mixer_in_every_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Definition = chunked form, outputs and gradients of the inputs; one call = a prompt and single tokens."""
    torch.manual_seed(0)
    shape = LayerShape(num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=64, max_positions=512)
    length, prompt = 200, 190

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, length, 32, device="cuda")

    angle = torch.randn(1, length, 32, device="cuda")
    inputs = AttnInputs(
        q=normal(4),
        k=normal(2),
        v=normal(2),
        scaling=0.2,
        hidden=torch.randn(2, length, 64, device="cuda"),
        unrotated=(normal(4), normal(2)),
        rope=(angle.cos(), angle.sin()),
    )
    mixer = LinearMixer(Recipe.load(name).mixer.resolved(shape), shape).cuda()
    # Of squares, a normalizer's outputs have next to no gradient: they sum to the same whatever the inputs.
    results, weights = {}, normal(4)
    for implementation in ("reference", "chunked"):
        monkeypatch.setenv(ENVIRONMENT, implementation)
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.hidden)]
        y = mixer(replace(inputs, **dict(zip(("q", "k", "v", "hidden"), leaves, strict=True))))
        results[implementation] = y, torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True)
    (y, gradients), (expected, expected_gradients) = results["chunked"], results["reference"]
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    for found, gradient in zip(gradients, expected_gradients, strict=True):
        assert (found is None) == (gradient is None)
        if found is not None and gradient is not None:
            scale = gradient.abs().max().clamp_min(1e-6)
            torch.testing.assert_close(found / scale, gradient / scale, rtol=2e-2, atol=2e-2)
    monkeypatch.delenv(ENVIRONMENT)
    with torch.no_grad():
        torch.testing.assert_close(mixer(inputs), expected, rtol=1e-2, atol=1e-2)
        state, pieces = None, []
        for start, stop in [(0, prompt), *((n, n + 1) for n in range(prompt, length))]:
            q, k, v, q0, k0 = (x[:, :, start:stop] for x in (inputs.q, inputs.k, inputs.v, *(inputs.unrotated or ())))
            rope = tuple(x[:, start:stop] for x in (inputs.rope or ()))
            hidden = inputs.hidden[:, start:stop]
            piece, state = mixer.step(AttnInputs(q, k, v, 0.2, None, hidden, (q0, k0), rope), state)
            pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, dim=2), y.detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.25)], ids=str)
def test_cached_equals_uncached(dtype: torch.dtype, tolerance: float) -> None:
    student = _student(dtype)
    tokens = torch.randint(128, (2, 300), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with torch.no_grad():
        whole = student(tokens, use_cache=False).logits
        cache, parts = DynamicCache(config=student.config), []
        for start, stop in [(0, 200), (200, 201), (201, 202), (202, 300)]:
            parts.append(student(tokens[:, start:stop], past_key_values=cache, use_cache=True).logits)
    error = (torch.cat(parts, 1) - whole).float().abs().max() / whole.float().abs().max()
    assert error < tolerance
    assert student.generate(tokens[:, :50], max_new_tokens=20, do_sample=False).shape == (2, 70)


CACHE = {"mixer.span": {"type": "terraced", "window_size": 16, "blocks": 2}, "mixer.feature_map": None}
CACHE |= {"mixer.combine": {"type": "window_only"}, "mixer.cache": {"size": 48}, "transfer": None}


@pytest.mark.parametrize(
    "overrides", [{}, {"mixer.span": {"type": "terraced"}}, CACHE], ids=["window", "terraces", "cache"]
)
@pytest.mark.parametrize("padding", [0, 37])
def test_prompts_by_kernels_are_those_of_the_chunked_form(
    overrides: dict[str, object], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, and those of a token behind the prompt: of rows with padding on the left too."""
    student = _student(torch.float32, **overrides)
    tokens = torch.randint(128, (2, 301), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    found = []
    for implementation in ("triton", "chunked"):
        monkeypatch.setenv(ENVIRONMENT, implementation)
        with torch.no_grad():
            cache = DynamicCache(config=student.config)
            prompt = student(tokens[:, :300], attention_mask=mask[:, :300], past_key_values=cache, use_cache=True)
            step = student(tokens[:, 300:], attention_mask=mask, past_key_values=cache, use_cache=True)
        found.append(torch.cat([prompt.logits, step.logits], 1)[mask.bool()])
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)


def test_training_memory_is_linear() -> None:
    student = _student(torch.bfloat16)
    peaks = []
    for length in (2048, 4096):
        tokens = torch.randint(128, (1, length), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        student(tokens, labels=tokens, use_cache=False).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.5 * peaks[0]
