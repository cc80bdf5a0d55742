"""Compare a model's summaries with people's by ROUGE (Hedgehog App. B.5).

The protocol is SAMSum's: greedy, at most 100 new tokens, cut at the first end-of-text token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, progress
from linearize.configs.tasks import Summarisation
from linearize.data.rows import IGNORED, inference
from linearize.data.splits import ENOUGH
from linearize.data.templates import TokenDocument
from linearize.evaluation.agreement import greedy
from linearize.evaluation.metrics import Answered, Similarities


def summarising(
    task: Summarisation, held_out: Sequence[TokenDocument], tokenizer: Tokenizer
) -> Callable[[PreTrainedModel, str], Answered]:
    """Return the function that scores a model's summaries of the first held-out dialogues.

    Raises:
        UserError: `rouge-score` is not installed, or there are no dialogues with a prompt and a summary.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise UserError(
            "data.task `summarisation`: expected the package rouge-score, found none; pip install 'linearize[eval]'"
        ) from None
    scorer = RougeScorer(list(task.scores), use_stemmer=True)
    dialogues = [document for document in held_out if 0 < _prompt_length(document) < len(document)]
    asked = dialogues[: max(ENOUGH, task.summaries)]
    if len(asked) < ENOUGH:
        raise UserError(
            f"data.task `summarisation`: expected at least {ENOUGH} held-out dialogues with summaries, found "
            f"{len(asked)}; use more data with the columns dialogue and summary (data.format samsum)"
        )
    references = [_text(tokenizer, document.labels[document.labels != IGNORED].tolist()) for document in asked]

    def answer(model: PreTrainedModel, title: str) -> Answered:
        made = [_text(tokenizer, tokens) for tokens in summaries(model, asked, tokenizer, task.new_tokens, title=title)]
        scores = [scorer.score(reference, text) for reference, text in zip(references, made, strict=True)]
        values = {name: torch.tensor([score[name].fmeasure for score in scores]) for name in task.scores}
        return Similarities(values)

    return answer


def summaries(
    model: PreTrainedModel, asked: Sequence[TokenDocument], tokenizer: Tokenizer, new_tokens: int, *, title: str
) -> list[list[int]]:
    """Return the greedy tokens of a model after each prompt, up to the first end-of-text token."""
    end: Any = tokenizer.eos_token_id
    found = []
    with inference(model) as device, greedy(model, new_tokens, [] if end is None else [end]):
        for document in progress(asked, title):
            prompt = document.input_ids[: _prompt_length(document)][None].to(device)
            made: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt))  # type: ignore[operator]
            tokens = made[0, prompt.shape[1] :].tolist()
            found.append(tokens[: tokens.index(end)] if end in tokens else tokens)
    return found


def _prompt_length(document: TokenDocument) -> int:
    """Return the number of tokens before the first label."""
    return int((document.labels == IGNORED).long().cumprod(0).sum())


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
