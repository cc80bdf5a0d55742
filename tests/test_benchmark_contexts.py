"""Rows of contexts and continuations of the benchmarks, and what models lose on them."""

from __future__ import annotations

import itertools
import random
import string
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from benchmarks.contexts import ContextRow, measure, needle_rows, text_rows
from linearize.base import UserError
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import SlidingSpan
from linearize.hf.convert import convert_layers
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer

TEXT = "".join(random.Random(0).choices(string.ascii_lowercase, k=3000))  # one token a letter
TOKENIZER = byte_tokenizer()
IDS = TOKENIZER(TEXT, add_special_tokens=False)["input_ids"]
BOS = 256


def rows() -> list[ContextRow]:
    """Texts and needles, short enough for the tiny models."""
    texts = text_rows(IDS, TOKENIZER, rows=3, context=60, continuation=20)
    return [*texts, *needle_rows(IDS, TOKENIZER, needles=3, context=90)]


def windowed(teacher: Any) -> Any:
    """The teacher with a window of 16 keys and 4 sinks in every layer."""
    window = MixerConfig(span=SlidingSpan(window_size=16, sinks=4), feature_map=None, combine=WindowOnly())
    return convert_layers(teacher, (window,) * teacher.config.num_hidden_layers).eval()


def expected(model: Any, row: ContextRow) -> tuple[float, bool]:
    """Loss and whether greedy decoding is right, by one forward pass without a cache."""
    ids = torch.tensor([row.context + row.continuation])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, -row.scored - 1 : -1]
    target = ids[0, -row.scored :]
    return F.cross_entropy(logits, target).item(), bool((logits.argmax(-1) == target).all())


class Copier(nn.Module):
    """Names the token that followed the last 12 tokens when they stood in its cache before; counts its calls."""

    def __init__(self, *, keeps: int = 10**6) -> None:
        super().__init__()
        self.device_of = nn.Parameter(torch.zeros(()))
        self.config = PreTrainedConfig(max_position_embeddings=1024)
        self.keeps = keeps  # how many of a call's tokens stay in the cache
        self.calls: list[int] = []

    def forward(
        self, input_ids: Tensor, use_cache: bool, past_key_values: Any = (), logits_to_keep: int = 0
    ) -> SimpleNamespace:
        assert use_cache and not self.training and not torch.is_grad_enabled()
        self.calls.append(input_ids.shape[1])
        seen, logits = list(past_key_values), torch.zeros(1, input_ids.shape[1], tiny.VOCABULARY)
        for index, token in enumerate(input_ids[0].tolist()):
            seen.append(token)
            tail = seen[-12:]
            for place in range(len(seen) - 13, -1, -1):
                if seen[place : place + 12] == tail:
                    logits[0, index, seen[place + 12]] = 20.0
                    break
        return SimpleNamespace(logits=logits[:, -logits_to_keep:], past_key_values=seen[-self.keeps :])


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", ["<s>", None])
def test_texts_are_stretches_of_the_text_that_do_not_overlap(bos: str | None) -> None:
    start = [] if bos is None else [BOS]
    made = text_rows(IDS, byte_tokenizer(bos=bos), rows=36, context=61, continuation=20, seed=1)
    assert len(made) == 36 and all(len(row.context) == 61 and len(row.continuation) == 20 for row in made)
    assert all(row.context[: len(start)] == start and row.scored == 20 for row in made)
    size = 61 + 20 - len(start)
    found = [TEXT.index(TOKENIZER.decode(row.context[len(start) :] + row.continuation)) for row in made]
    assert all(after - before >= size for before, after in itertools.pairwise(found))


def test_seeds_draw_other_rows() -> None:
    sizes: dict[str, Any] = dict(context=60, continuation=20)
    assert text_rows(IDS, TOKENIZER, rows=3, **sizes) == text_rows(IDS, TOKENIZER, rows=3, **sizes)
    assert text_rows(IDS, TOKENIZER, rows=3, **sizes) != text_rows(IDS, TOKENIZER, rows=3, seed=1, **sizes)
    assert needle_rows(IDS, TOKENIZER, needles=3, context=90) == needle_rows(IDS, TOKENIZER, needles=3, context=90)
    assert needle_rows(IDS, TOKENIZER, needles=3, context=90) != needle_rows(
        IDS, TOKENIZER, needles=3, context=90, seed=1
    )


def test_needles_stand_at_depths_from_5_to_95_percent_of_contexts_of_one_length() -> None:
    made = needle_rows(IDS, TOKENIZER, needles=7, context=200)
    for number, row in enumerate(made):
        assert len(row.context) == 200 and row.context[0] == BOS
        context, asked = TOKENIZER.decode(row.context[1:]), TOKENIZER.decode(row.continuation)
        question, answer = asked[: -row.scored], asked[-row.scored :]
        assert question.startswith("\nThe secret number for ") and question.endswith(" is")
        assert answer[0] == " " and answer[1:].isdigit() and len(answer) == 6
        before, after = context.split(f"{question}{answer}.\n")
        assert before + after in TEXT
        assert len(before) == pytest.approx((0.05 + 0.9 * number / 6) * len(before + after), abs=0.51)


@pytest.mark.parametrize("bos", ["<s>", None])
def test_too_short_texts_and_contexts_are_refused_in_one_line(bos: str | None) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    with pytest.raises(UserError, match=r"^held-out text: expected at least \S+ tokens for 16 rows .* found 3,000;"):
        text_rows(IDS, tokenizer)
    size = 60 + 20 - (bos is not None)
    assert len(text_rows(IDS[: 3 * size], tokenizer, rows=3, context=60, continuation=20)) == 3
    with pytest.raises(UserError, match=f"at least {3 * size} tokens"):
        text_rows(IDS[: 3 * size - 1], tokenizer, rows=3, context=60, continuation=20)
    with pytest.raises(UserError, match=r"expected at least 1,4.. tokens for contexts of 1500 tokens, found 1,000;"):
        needle_rows(IDS[:1000], tokenizer, context=1500)
    with pytest.raises(UserError, match=r"^needles: expected a context of at least .*, found 50; choose a longer"):
        needle_rows(IDS, tokenizer, context=50)


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
def test_a_teacher_loses_what_it_loses_without_a_cache(make: Any) -> None:
    teacher = make()
    found = measure(teacher, rows())
    for index, row in enumerate(rows()):
        loss, right = expected(teacher, row)
        assert found.loss[index].item() == pytest.approx(loss, abs=1e-5) and found.found[index].item() == right


def test_a_streaming_window_loses_what_it_loses_without_a_cache() -> None:
    teacher = tiny.llama()
    student = windowed(teacher)
    found, theirs = measure(student, rows()), measure(teacher, rows())
    assert (found.loss - theirs.loss).abs().min() > 1e-3  # the window forgets most of every context
    for index, row in enumerate(rows()):
        assert found.loss[index].item() == pytest.approx(expected(student, row)[0], abs=1e-4)


def test_needles_are_found_by_what_the_cache_holds() -> None:
    made = needle_rows(IDS, TOKENIZER, needles=10, context=300)
    assert measure(Copier(), made).found.all()
    # About 258 tokens of text stand around a fact; those at depths of 0.65 and more have 90 or fewer of them behind it.
    assert measure(Copier(keeps=120), made).found.tolist() == [False] * 6 + [True] * 4
    assert not measure(Copier(keeps=10), made).found.any()


def test_context_and_continuation_are_read_in_one_call_each() -> None:
    model, made = Copier(), rows()
    measure(model.train(), made)
    assert model.training
    assert model.calls == [len(part) for row in made for part in (row.context, row.continuation)]


def test_a_loss_that_is_not_finite_and_too_few_positions_are_refused() -> None:
    teacher = tiny.llama()
    with torch.no_grad():
        teacher.lm_head.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="6 of 6 rows"):
        measure(teacher, rows())
    with pytest.raises(UserError, match=r"expected prompt and generated tokens to fit its 64 learned positions"):
        measure(tiny.gpt2(n_positions=64), rows())
