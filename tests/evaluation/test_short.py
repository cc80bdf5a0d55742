from __future__ import annotations

import random
import string
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from linearize import convert_layers
from linearize.base import UserError
from linearize.data.rows import PackedRows
from linearize.evaluation import short
from linearize.evaluation.short import ShortEvaluation, measure_short, passages
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import MixerConfig
from linearize.ops.layout import SlidingSpan
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = "".join(random.Random(0).choices(string.ascii_lowercase, k=16 * 200))  # one token a letter
IDS = TOKENIZER(TEXT, add_special_tokens=False)["input_ids"]
BOS = 256


def rows() -> PackedRows:
    ids = torch.tensor(IDS).view(-1, 100)
    return PackedRows(ids, torch.arange(100).expand_as(ids), ids)


def windowed(teacher: Any, size: int = 16) -> Any:
    window = MixerConfig(span=SlidingSpan(window_size=size), feature_map=None, combine=WindowOnly())
    return convert_layers(teacher, (window,) * teacher.config.num_hidden_layers).eval()


def measured(teacher: Any, student: Any) -> ShortEvaluation:
    sizes: dict[str, int] = {"context": 120, "max_positions": 256}
    return measure_short(teacher, student, rows(), TOKENIZER, **sizes, samples=50, seed=0)


def test_passages_do_not_overlap_and_have_a_needle_each_at_depths_that_rise() -> None:
    made = passages(IDS, TOKENIZER, context=120, max_positions=256, seed=0)
    assert len(made) == 16
    depths, ends = [], [0]
    for passage in made:
        assert passage.needle is not None
        question, answer = TOKENIZER.decode(passage.needle.question), TOKENIZER.decode(passage.needle.answer)
        # 16 parts of 200 tokens: a quarter of a part follows the context.
        assert (len(passage.context), len(passage.text)) == (150, 50) and passage.context[0] == BOS
        before, after = TOKENIZER.decode(passage.context[1:]).split(f"{question}{answer}.\n")
        whole = before + after + TOKENIZER.decode(passage.text)
        begin = TEXT.index(whole)
        assert begin >= ends[-1]
        ends.append(begin + len(whole))
        depths.append(len(before) / len(before + after))
    assert depths == sorted(depths) and depths[0] < 0.1 and depths[-1] > 0.9


def test_passages_fit_positions_and_text() -> None:
    made = passages(IDS, TOKENIZER, context=1024, max_positions=64, seed=0)
    assert {len(passage.context) + len(passage.text) + short.NEW_TOKENS for passage in made} == {64}
    assert all(passage.needle is None for passage in made)  # it would be most of the context
    with pytest.raises(UserError, match="expected 16 contexts of at least 16 tokens, found 300 tokens"):
        passages(IDS[:300], TOKENIZER, context=1024, max_positions=64, seed=0)


def test_losses_are_those_of_one_forward_pass_and_full_prefill_reads_contexts_as_the_teacher() -> None:
    teacher = tiny.llama()
    student = windowed(teacher)
    found = measured(teacher, student)
    assert [(line.model, line.prefill) for line in found.readings] == [
        ("teacher", None),
        ("student", "streaming"),
        ("student", "full"),
    ]
    made = passages(IDS, TOKENIZER, context=120, max_positions=256, seed=0)
    for line, model in zip(found.readings, (teacher, student), strict=False):
        losses = []
        for passage in made:
            ids = torch.tensor([[*passage.context, *passage.text]])
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[0]
            size = len(passage.context)
            losses.append(F.cross_entropy(logits[size - 1 : -1], ids[0, size:]).item())
        assert line.loss.mean == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        assert line.loss.low < line.loss.mean < line.loss.high
    first, streaming, full = found.readings
    assert first.difference is None and streaming.difference is not None and full.difference is not None
    assert streaming.difference.mean == pytest.approx(streaming.loss.mean - first.loss.mean, abs=1e-9)
    assert full.loss.mean != pytest.approx(streaming.loss.mean, abs=1e-4)
    # Both keep the same state, which is smaller than the teacher's cache of all tokens.
    assert streaming.cache_bytes == full.cache_bytes < first.cache_bytes
    assert found.saved_prefill == "streaming" and student.config.prefill is None  # as it was


def test_a_student_that_keeps_all_keys_is_the_teacher() -> None:
    teacher = tiny.llama()
    for line in measured(teacher, windowed(teacher, 256)).readings[1:]:
        assert line.difference is not None
        assert abs(line.difference.mean) < 1e-5


def test_without_a_teacher() -> None:
    (streaming, full) = measured(None, windowed(tiny.llama())).readings
    assert streaming.difference is None and (streaming.prefill, full.prefill) == ("streaming", "full")


class Copier(torch.nn.Module):
    """Names the token that followed the last 12 tokens when they stood in its cache before."""

    def __init__(self, keeps: int = 10**6) -> None:
        super().__init__()
        self.of_device = torch.nn.Parameter(torch.zeros(()))
        self.keeps = keeps  # tokens of a call that stay in the cache

    def forward(self, input_ids: Any, use_cache: bool, past_key_values: Any = None, logits_to_keep: int = 0) -> Any:
        assert use_cache and not torch.is_grad_enabled()
        cache: Any = DynamicCache() if past_key_values is None else past_key_values
        cache.seen = getattr(cache, "seen", [])
        logits = torch.zeros(1, input_ids.shape[1], tiny.VOCABULARY)
        for index, token in enumerate(input_ids[0].tolist()):
            cache.seen.append(token)
            for place in range(len(cache.seen) - 13, -1, -1):
                if cache.seen[place : place + 12] == cache.seen[-12:]:
                    logits[0, index, cache.seen[place + 12]] = 20.0
                    break
        del cache.seen[: -self.keeps]
        return SimpleNamespace(logits=logits[:, -logits_to_keep:], past_key_values=cache)


def test_a_model_finds_the_needles_that_its_cache_still_holds() -> None:
    made = passages(IDS, TOKENIZER, context=120, max_positions=256, seed=0)
    found = [[short._read(Copier(keeps), passage, new_tokens=0).answered for passage in made] for keeps in (10**6, 60)]
    assert all(found[0])
    # Of the fact 12 tokens of the question and the answer are needed: at most 40 of 108 letters may stand behind it.
    assert found[1] == [number >= 10 for number in range(16)]
