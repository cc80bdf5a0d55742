"""Prompts and scores of RULER's needle tasks with one needle: `niah_single_1`, `niah_single_2`, `niah_single_3`.

A sentence that gives a word a value (the needle) is hidden in a long text (the haystack), and the prompt ends with the
question for the value. Source: RULER, arXiv 2404.06654, section 3.1 and its prompt templates (github.com/NVIDIA/RULER).

Three things differ from RULER, because they would need downloads. The haystack of `niah_single_2` and `niah_single_3`
is a text that the caller gives, not Paul Graham's essays. The words come from two short lists, not from the package
wonderwords. Sentences of the text end at ".", "!" or "?" before a space, not where nltk's model says. A fourth: a
haystack is as long as fits, to one word or line, where RULER goes in steps of 5 to 25 lines or 500 words.
"""

from __future__ import annotations

import random
import re
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError

ANSWER_TOKENS = 128  # RULER's room for a generated answer; part of the length


@dataclass(frozen=True)
class NeedleTask:
    """One of RULER's tasks: what the haystack is made of, and what kind of value is hidden in it."""

    haystack: Literal["line", "text"]  # one line repeated, or the beginning of the caller's text
    value: Literal["number", "uuid"]


TASKS = {
    "niah_single_1": NeedleTask("line", "number"),
    "niah_single_2": NeedleTask("text", "number"),
    "niah_single_3": NeedleTask("text", "uuid"),
}


@dataclass(frozen=True)
class Sample:
    """One question: the prompt's tokens, the value that the answer must contain, and where it is hidden.

    `depth` is the share of the haystack's lines or sentences before the needle.
    """

    input_ids: list[int]
    value: str
    depth: float


def build_samples(
    task: str, tokenizer: Tokenizer, text: str, *, length: int, count: int, chat: bool, seed: int = 0
) -> list[Sample]:
    """Return `count` questions of a task, the same ones for the same tokenizer and arguments.

    Each prompt has the longest haystack with which the prompt and `ANSWER_TOKENS` have at most `length` tokens. The
    needle stands before a random line (`niah_single_1`), or at one of 40 depths from 0 to 100 % of the sentences.

    Args:
        task: a name in `TASKS`.
        text: its first words are the haystack of `niah_single_2` and `niah_single_3`.
        chat: put the question into the tokenizer's chat template, and the answer's first words after the header of the
            assistant's turn. Otherwise they follow the question, and the tokenizer adds its own special tokens.

    Raises:
        UserError: `length` is too short for the question, or `text` too short for `length`.
    """
    words = text.split()
    return [_sample(task, tokenizer, words, length, chat, f"{task} {length} {seed} {index}") for index in range(count)]


def _sample(task: str, tokenizer: Tokenizer, words: Sequence[str], length: int, chat: bool, seed: str) -> Sample:
    source, of_text, kind = random.Random(seed), TASKS[task].haystack == "text", TASKS[task].value
    key = f"{source.choice(_ADJECTIVES.split())}-{source.choice(_NOUNS.split())}"
    value = _value(kind, source)
    needle = f"One of the special magic {kind}s for {key} is: {value}."
    place = source.random()

    def hide(size: int) -> tuple[str, float]:
        return _hide_in_text(words[:size], needle, place) if of_text else _hide_among_lines(size, needle, place)

    def prompt(size: int) -> list[int]:
        return _encode(tokenizer, _question(kind, key, hide(size)[0]), _answer_prefix(kind, key), chat)

    # A word has a token or more, a line has more than eight. Prompts grow with their haystacks.
    most = min(length, len(words)) if of_text else length // 8
    size = bisect_right(range(1, most + 1), length - ANSWER_TOKENS, key=lambda size: len(prompt(size)))
    if of_text and size == len(words):
        raise UserError(f"text: expected one that fills {length} tokens, found {size} words; give a longer text")
    if size == 0:
        shortest = len(prompt(1)) + ANSWER_TOKENS
        raise UserError(f"length: expected {shortest} tokens or more for {task} with this tokenizer, found {length}")
    return Sample(prompt(size), value, hide(size)[1])


def is_right(sample: Sample, answer: str) -> bool:
    """Return whether a generated answer contains the hidden value, in upper or lower case (RULER's string match)."""
    return sample.value.lower() in answer.lower()


def batches(samples: Sequence[Sample], batch_size: int) -> list[list[int]]:
    """Return the samples' indices in batches of at most `batch_size` whose prompts have the same number of tokens."""
    by_length: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        by_length.setdefault(len(sample.input_ids), []).append(index)
    return [
        group[start : start + batch_size]
        for _, group in sorted(by_length.items())
        for start in range(0, len(group), batch_size)
    ]


# --- prompts ----------------------------------------------------------------------------------------------------------

_LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = [round(100 * step / 39) / 100 for step in range(40)]
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def _hide_among_lines(size: int, needle: str, place: float) -> tuple[str, float]:
    """Return `size` lines with the needle before one of them, and the share of lines before it; `place` in [0, 1)."""
    before = int(place * size)
    return "\n".join([*[_LINE] * before, needle, *[_LINE] * (size - before)]), before / size


def _hide_in_text(words: Sequence[str], needle: str, place: float) -> tuple[str, float]:
    """Return the text with the needle between two sentences, and the share of sentences before it; `place` as above."""
    sentences = _SENTENCE_END.split(" ".join(words))
    before = int(len(sentences) * _DEPTHS[int(place * len(_DEPTHS))])
    return " ".join([*sentences[:before], needle, *sentences[before:]]), before / len(sentences)


def _question(value: str, key: str, context: str) -> str:
    return (
        f"A special magic {value} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {value} afterwards.\n{context}\n"
        f"What is the special magic {value} for {key} mentioned in the provided text?"
    )


def _answer_prefix(value: str, key: str) -> str:
    return f"The special magic {value} for {key} mentioned in the provided text is"


def _encode(tokenizer: Tokenizer, question: str, answer_prefix: str, chat: bool) -> list[int]:
    if chat:
        turn: Any = [{"role": "user", "content": question}]
        question = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    else:
        question += " "
    # verbose=False: no warning about prompts that are longer than the model's context.
    encoded: Any = tokenizer(question + answer_prefix, add_special_tokens=not chat, verbose=False)
    return encoded["input_ids"]


def _value(kind: str, source: random.Random) -> str:
    if kind == "number":
        return str(source.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


_ADJECTIVES = (
    "able ancient bold brave brief bright calm careful cheerful clever cold common curious damp distant eager "
    "early empty fair famous fierce fine fresh gentle giant glad grand green happy heavy honest humble jolly kind "
    "large late lively lonely loud lucky mellow mighty modern narrow neat noble odd patient plain polite proud "
    "quick quiet rapid rare ready round sharp shiny silent simple slow smooth solid steady strong sweet tender "
    "tidy tiny warm wild wise"
)
_NOUNS = (
    "anchor apple arrow badger banner basket beacon bell bottle branch bridge bucket button camera candle canyon "
    "castle cherry circle cloud copper cottage cricket crown desert dolphin drum eagle engine falcon feather "
    "fiddle forest fountain garden glacier hammer harbor helmet honey island jacket kettle ladder lantern lemon "
    "library magnet maple marble meadow mirror mountain needle ocean orchard otter paper pebble pencil piano "
    "pillow planet pocket rabbit ribbon river rocket saddle shadow shelter silver spider spoon station stone "
    "tiger timber tunnel valley violin wagon walnut whistle window"
)
