from __future__ import annotations

import itertools
import random
import string
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from linearize.base import UserError
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import SlidingSpan
from linearize.data.rows import PackedRows
from linearize.evaluation import short
from linearize.evaluation.intervals import wilson
from linearize.evaluation.results import ShortEvaluation
from linearize.evaluation.short import Passage, measure_short, passages
from linearize.evaluation.timings import Spread
from linearize.hf.convert import convert_layers
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
        # 16 parts of 200 tokens: the context has as many as asked for, and the others follow.
        assert (len(passage.context), len(passage.text)) == (120, 80) and passage.context[0] == BOS
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
    assert {len(passage.text) for passage in made} == {14}  # a quarter of the 56 tokens that are left
    assert all(passage.needle is None for passage in made)  # it would be most of the context
    with pytest.raises(UserError, match="expected 16 contexts of at least 16 tokens, found 300 tokens"):
        passages(IDS[:300], TOKENIZER, context=1024, max_positions=64, seed=0)


def test_losses_are_those_of_one_forward_pass() -> None:
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


def greedy(model: Any, passage: Passage) -> list[int]:
    """The likeliest token at each place of the answer, given the passage's own answer, computed without a cache."""
    assert passage.needle is not None
    needle, size = passage.needle, len(passage.needle.answer)
    ids = torch.tensor([[*passage.context, *needle.question, *needle.answer]])
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0, -size - 1 : -1].argmax(dim=-1).tolist()


def test_needles_are_those_of_one_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = tiny.llama()
    student = windowed(teacher)
    # Random weights answer nothing right. So teach the answers: of every four contexts, two have the teacher's answer
    # and one has the student's.
    made = passages(IDS, TOKENIZER, context=120, max_positions=256, seed=0)
    for row, passage in enumerate(made):
        assert passage.needle is not None
        model = (teacher, teacher, student, None)[row % 4]
        answer = passage.needle.answer if model is None else greedy(model, passage)[:1]
        made[row] = replace(passage, needle=replace(passage.needle, answer=answer))
    monkeypatch.setattr(short, "passages", lambda *_, **__: made)
    found = measured(teacher, student)
    shares = []
    for line, model in zip(found.readings, (teacher, student), strict=False):
        right = sum(greedy(model, passage) == passage.needle.answer for passage in made if passage.needle)
        assert line.needles == wilson(right, 16)
        shares.append(right)
    assert found.needles == 16 and shares[0] >= 8 > shares[1] >= 4


def test_full_prefill_reads_contexts_as_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    made = passages(IDS, TOKENIZER, context=120, max_positions=256, seed=0)
    # The context alone predicts a text of one token.
    monkeypatch.setattr(
        short, "passages", lambda *_, **__: [replace(passage, text=passage.text[:1]) for passage in made]
    )
    teacher = tiny.llama()
    first, streaming, full = measured(teacher, windowed(teacher)).readings
    assert full.loss.mean == pytest.approx(first.loss.mean, abs=1e-6)
    assert streaming.loss.mean != pytest.approx(first.loss.mean, abs=1e-4)


def test_the_way_that_a_model_is_saved_with_is_told_and_stays() -> None:
    student = windowed(tiny.llama())
    student.config.prefill = "full"
    assert measured(None, student).saved_prefill == "full" and student.config.prefill == "full"


def test_seconds_are_of_contexts_and_of_single_tokens_without_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(short, "now", lambda: float(next(clock) ** 2))  # so no two intervals are equally long
    teacher = tiny.llama()
    readings = measured(teacher, windowed(teacher)).readings
    ticks = map(float, itertools.count())
    prefills: list[list[float]] = [[], [], []]
    decodes: list[list[float]] = [[], [], []]
    for row, turn in itertools.product(range(16), range(3)):
        prefills[turn].append(-(next(ticks) ** 2) + next(ticks) ** 2)
        for _ in range(8 if row < 4 else 0):
            decodes[turn].append(-(next(ticks) ** 2) + next(ticks) ** 2)
    for line, prefill, decode in zip(readings, prefills, decodes, strict=True):
        assert line.prefill_seconds == Spread.of(prefill[1:])
        assert line.decode_seconds == Spread.of(decode[1:])


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
    # Of the fact 12 tokens of the question and the answer are needed: at most 40 of 78 letters may stand behind it.
    assert found[1] == [number >= 8 for number in range(16)]
