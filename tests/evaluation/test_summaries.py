"""Summaries: written greedily behind the dialogue alone, cut at the end of text, and scored by ROUGE."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.configs.tasks import Summarisation
from linearize.data.packing import Dataset, build_dataset
from linearize.data.templates import SAMSUM, TokenDocument
from linearize.evaluation.answers import summaries, summarising
from linearize.evaluation.metrics import Similarities
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("few")

TASK = Summarisation(new_tokens=8, summaries=5)
EOS, NEW_TOKENS = 258, 8


def data() -> Dataset:
    config = DataConfig(
        task=TASK, dataset=tiny.dialogues_file(), format="samsum", sequence_length=48, validation_fraction=0.4
    )
    return build_dataset(config, byte_tokenizer(), seed=0)


def ending_model() -> PreTrainedModel:
    """A Llama that ends its texts now and then."""
    model: Any = tiny.llama()
    with torch.no_grad():
        model.lm_head.weight[EOS] = model.lm_head.weight.mean(0) + 0.3 * torch.randn(
            32, generator=torch.Generator().manual_seed(3)
        )
    return model


def greedily(model: Any, prompt: list[int]) -> list[int]:
    """One token after another, without a cache."""
    tokens: list[int] = []
    with torch.no_grad():
        while len(tokens) < NEW_TOKENS:
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            if (token := int(logits.argmax())) == EOS:
                break
            tokens.append(token)
    return tokens


def prompts_and_summaries(documents: Any) -> list[tuple[str, str]]:
    """What the file says of these documents, as text."""
    tokenizer, found = byte_tokenizer(), []
    for document in documents:
        text = str(tokenizer.decode(document.input_ids, skip_special_tokens=True))
        dialogue, summary = text.split("\n---\nSummary:\n")
        found.append((f"{dialogue}\n---\nSummary:\n", summary))
    return found


def test_greedy_until_the_end_of_text() -> None:
    documents, tokenizer = data().test_documents, byte_tokenizer()
    found = summaries(ending_model(), documents, tokenizer, NEW_TOKENS, title="summaries")
    expected = []
    for prompt, _ in prompts_and_summaries(documents):
        assert prompt.startswith(SAMSUM.split("{")[0])
        expected.append(greedily(ending_model(), [256, *tokenizer(prompt)["input_ids"]]))
    assert found == expected
    model: Any = ending_model()
    model.generation_config.repetition_penalty = 5.0
    assert summaries(model, documents, tokenizer, NEW_TOKENS, title="summaries") == expected
    lengths = {len(tokens) for tokens in found}
    assert NEW_TOKENS in lengths and len(lengths) > 1, "some end before the limit, others do not"


def writing(texts: Iterator[list[int]], asked: list[list[int]]) -> PreTrainedModel:
    """A model that writes these tokens, whatever it is asked."""

    def generate(prompt: Tensor, **_: Any) -> Tensor:
        asked.append(prompt[0].tolist())
        return torch.cat([prompt, torch.tensor([next(texts)])], dim=1)

    model: Any = tiny.llama()
    model.generate = generate
    return model


def test_prompts_hold_nothing_of_the_summary() -> None:
    asked: list[list[int]] = []
    documents, tokenizer = data().test_documents, byte_tokenizer()
    model = writing(itertools.repeat([97, EOS, 98]), asked)
    assert summaries(model, documents, tokenizer, NEW_TOKENS, title="summaries") == [[97]] * len(documents)
    texts = [tokenizer.decode(tokens[1:]) for tokens in asked]
    assert texts == [prompt for prompt, _ in prompts_and_summaries(documents)]


def test_rouge_is_the_scorer_s() -> None:
    documents, tokenizer = data().test_documents, byte_tokenizer()
    pairs = prompts_and_summaries(documents)[: TASK.summaries]
    given = [pairs[0][1], f"{pairs[1][1].split()[0]} else", "nothing alike", pairs[3][1] + " and more", ""]
    model = writing(([*tokenizer(text)["input_ids"], EOS, 97] for text in given), [])
    found = summarising(TASK, documents, tokenizer)(model, "summaries")
    assert isinstance(found, Similarities) and len(found) == TASK.summaries
    for name in TASK.scores:
        scorer = RougeScorer([name], use_stemmer=True)
        scores = [scorer.score(target, text)[name].fmeasure for (_, target), text in zip(pairs, given, strict=True)]
        assert found.scores()[name] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
        assert scores[0] == 1.0 and scores[2] == scores[4] == 0


def test_documents_without_summaries_are_refused() -> None:
    plain = TokenDocument(torch.arange(9), torch.arange(9))
    with pytest.raises(UserError, match="expected at least 2 held-out dialogues with summaries, found 0"):
        summarising(TASK, [plain, plain], byte_tokenizer())
