"""A smoke of a few minutes on a CUDA device: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import linearize
from linearize.config import Recipe
from linearize.ops import Layout, SlidingSpan, TerracedSpan, chunked, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPANS = [SlidingSpan(64), SlidingSpan(16, sinks=4), TerracedSpan(64)]


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
    layout = Layout.full(1000, "cuda")
    for op in (reference, chunked):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, phi_q, phi_k)]
        linear = op.linear_scan(leaves[3], leaves[4], leaves[2], span=span, layout=layout)
        window = op.window_softmax(*leaves[:3], span=span, scaling=0.125, layout=layout)
        y = (window.num + linear.num) / (window.den + linear.den)[..., None]
        grads = torch.autograd.grad(y.square().sum(), leaves)
        if op is reference:
            expected, expected_grads = y, grads
            continue
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            scale = expected_grad.abs().max()
            torch.testing.assert_close(grad / scale, expected_grad / scale, rtol=1e-2, atol=1e-3)


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
