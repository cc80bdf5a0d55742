"""Needle questions: prompts as long as they may be, the needle in them once, where it should be; and their score."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from linearize.base import UserError
from linearize.evaluation.intervals import wilson
from tests.byte_tokenizer import CHATML, byte_tokenizer

PATH = Path(__file__).parents[1] / "benchmarks" / "ruler_tasks.py"
spec = importlib.util.spec_from_file_location("ruler_tasks", PATH)
assert spec is not None and spec.loader is not None
sys.modules["ruler_tasks"] = ruler_tasks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ruler_tasks)
ANSWER_TOKENS, TASKS, Sample = ruler_tasks.ANSWER_TOKENS, ruler_tasks.TASKS, ruler_tasks.Sample
batches, build_samples, is_right = ruler_tasks.batches, ruler_tasks.build_samples, ruler_tasks.is_right

LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TEXT = " ".join(f"This is sentence {number}.\n" for number in range(1000))
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for ([a-z]+-[a-z]+) is: ([0-9a-f-]+)\.")


def prompts(task: str, length: int = 1500, count: int = 40, chat: bool = False, text: str = TEXT) -> list[Any]:
    return build_samples(task, byte_tokenizer(template=CHATML), text, length=length, count=count, chat=chat)


def text_of(sample: Any) -> str:
    return byte_tokenizer().decode(sample.input_ids, clean_up_tokenization_spaces=False)


def haystack(prompt: str) -> str:
    """What stands between the task's description and the question."""
    return prompt.split("afterwards.\n", 1)[1].rsplit("\nWhat is the special magic ", 1)[0]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_as_long_as_they_may_be(task: str, chat: bool) -> None:
    """Tokens are bytes here: one more line, or one more word of the text, would be too long."""
    more = len(LINE) if task == "niah_single_1" else len(" sentence")
    for length in (1000, 1500):
        for sample in prompts(task, length, chat=chat):
            assert 0 <= length - ANSWER_TOKENS - len(sample.input_ids) <= more


def test_prompts_of_tokens_that_are_words() -> None:
    words = WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    backend = Tokenizer(words)
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    (sample,) = build_samples("niah_single_1", tokenizer, TEXT, length=1000, count=1, chat=False)
    assert 0 <= 1000 - ANSWER_TOKENS - len(sample.input_ids) <= len(LINE.split())


@pytest.mark.parametrize("task", TASKS)
def test_the_needle_is_hidden_once_and_asked_for(task: str) -> None:
    kind = TASKS[task].value
    for sample in prompts(task):
        prompt = text_of(sample)
        (needle,) = NEEDLE.finditer(prompt)
        kinds, key, value = needle.groups()
        assert kinds == f"{kind}s" and value == sample.value and prompt.count(value) == 1
        assert prompt.startswith(
            f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        )
        question = f"\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
        assert prompt.endswith(f"{question} The special magic {kind} for {key} mentioned in the provided text is")
        if kind == "number":
            assert re.fullmatch(r"[1-9]\d{6}", value)
        else:
            assert UUID(value).version == 4 and str(UUID(value)) == value


def test_depths_among_lines() -> None:
    depths = set()
    for sample in prompts("niah_single_1"):
        lines = haystack(text_of(sample)).split("\n")
        (place,) = (number for number, line in enumerate(lines) if line != LINE)
        assert NEEDLE.fullmatch(lines[place])
        assert sample.depth == place / (len(lines) - 1) < 1
        depths.add(place)
    assert depths == set(range(len(lines) - 1))  # with 40 questions, before every line once at least


def test_depths_in_the_text() -> None:
    depths = []
    for sample in prompts("niah_single_2", length=2000, count=150):
        hidden = haystack(text_of(sample))
        before, needle, after = hidden.partition(NEEDLE.search(hidden)[0])  # type: ignore[index]
        assert needle and " ".join(TEXT.split()).startswith(before + after.removeprefix(" "))
        sentences = [len(re.findall("This", part)) for part in (before, after)]
        assert sample.depth == pytest.approx(sentences[0] / sum(sentences), abs=1e-7)
        depths.append(sample.depth)
    assert min(depths) == 0 and max(depths) == 1 and len(set(depths)) > 30
    assert sum(depths) / len(depths) == pytest.approx(0.5, abs=0.1)


def test_the_answer_begins_behind_the_header_of_a_chat_template() -> None:
    (sample,) = prompts("niah_single_1", count=1, chat=True)
    prompt = byte_tokenizer().decode(sample.input_ids)
    assert prompt.startswith("<|im_start|>user\nA special magic number is hidden")
    header = "mentioned in the provided text?<|im_end|>\n<|im_start|>assistant\nThe special magic number for "
    assert prompt.count(header) == 1 and prompt.endswith("mentioned in the provided text is")


def test_questions_are_drawn_by_the_seed() -> None:
    few, many = prompts("niah_single_3", count=2), prompts("niah_single_3", count=3)
    assert few == many[:2] and len({sample.value for sample in many}) == 3
    options = {"length": 1500, "count": 2, "chat": False}
    assert build_samples("niah_single_3", byte_tokenizer(), TEXT, seed=1, **options) != few


def test_what_cannot_be_asked() -> None:
    with pytest.raises(UserError, match=r"text: expected one that fills 1500 tokens, found 100 words"):
        prompts("niah_single_2", text="word " * 100)
    with pytest.raises(UserError, match=r"text: .* found 0 words"):
        prompts("niah_single_2", text="")
    shortest = len(text_of(prompts("niah_single_1", count=1)[0])) + ANSWER_TOKENS
    with pytest.raises(
        UserError, match=r"length: expected \d+ tokens or more for niah_single_1 .* found 200"
    ) as raised:
        prompts("niah_single_1", length=200)
    assert 500 < int(re.findall(r"\d+", str(raised.value))[0]) < shortest


def test_right_answers() -> None:
    sample = Sample([], "4f0c6d1e-0000-4000-8000-000000000000", 0.0)
    assert is_right(sample, f"It is {sample.value}.") and is_right(sample, sample.value.upper())
    assert not is_right(sample, "") and not is_right(sample, sample.value[:-1])


def test_batches_are_of_prompts_of_one_length() -> None:
    samples = [Sample([0] * length, "", 0.0) for length in (5, 3, 5, 5, 3, 5)]
    assert batches(samples, 3) == [[1, 4], [0, 2, 3], [5]]


def test_wilson() -> None:
    """Its ends are the shares from which what was counted is 1.96 standard errors away."""
    for right, count in ((0, 10), (1, 10), (5, 10), (10, 10), (48, 50), (400, 1000)):
        interval = wilson(right, count)
        assert interval.mean == right / count and 0 <= interval.low < interval.high <= 1
        for end in (interval.low, interval.high):
            assert (right / count - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / count, abs=1e-7)
    assert wilson(0, 10).low == 0 and wilson(10, 10).high == 1
