"""Compute answers of models on the held-out rows of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.image_processing_utils import BaseImageProcessor

from linearize.base import UserError, progress
from linearize.configs.tasks import MaskedLanguageModelling, Summarisation, Task, TextEmbedding
from linearize.data.packing import Dataset
from linearize.data.rows import IGNORED, Rows, inference, on_device
from linearize.data.splits import ENOUGH
from linearize.data.templates import TokenDocument
from linearize.evaluation.agreement import greedy
from linearize.evaluation.metrics import Answered, MaskedTokens, Predictions, Similarities

BATCH_SIZE = 32  # rows per forward pass

Processor = Tokenizer | BaseImageProcessor

Answer = Callable[[PreTrainedModel, str], Answered]
"""Compute a model's answers on the held-out rows; the text is the title of the progress bar."""


def answering(task: Task, dataset: Dataset, tokenizer: Processor | None, teacher: PreTrainedModel | None) -> Answer:
    """Return the function that computes the answers of a model for this task.

    Args:
        teacher: the model whose embeddings are the reference; None: the task needs none.
    """
    if isinstance(task, MaskedLanguageModelling):
        return _masked_tokens(dataset.test)
    if isinstance(task, TextEmbedding):
        assert teacher is not None
        return _embedding(dataset.test, teacher)
    if isinstance(task, Summarisation):
        assert isinstance(tokenizer, Tokenizer)
        return summarising(task, dataset.test_documents, tokenizer)
    return _classifying(task, dataset.test)


def compared_outputs(model: nn.Module, rows: Rows, *, title: str) -> Float[Tensor, "M C"]:
    """Return the outputs of `rows` that are compared (`Rows.compared`), in fp32 on the CPU."""
    return torch.cat([outputs.cpu() for outputs, _ in _batches(model, rows, title=title)])


def _batches(model: nn.Module, rows: Rows, *, title: str) -> Iterator[tuple[Float[Tensor, "m C"], Tensor | None]]:
    """Yield the outputs of each batch that are compared, in fp32, and their targets, on the model's device."""
    with inference(model) as device:
        for start in progress(range(0, len(rows), BATCH_SIZE), title):
            batch = rows.rows(slice(start, start + BATCH_SIZE))
            targets = batch.targets()
            outputs = batch.compared(model(**on_device(batch.inputs(), device))).float()
            yield outputs, None if targets is None else targets.to(device)


def _expected(rows: Rows) -> tuple[Tensor, Int[Tensor, " M"]]:
    """Return the target of each answer, and the row it belongs to."""
    targets, counts = rows.targets(), rows.target_counts()
    assert targets is not None
    return targets, torch.arange(len(counts)).repeat_interleave(counts)


def _classifying(task: Task, rows: Rows) -> Answer:
    targets, example = _expected(rows)

    def answer(model: PreTrainedModel, title: str) -> Answered:
        return Predictions(compared_outputs(model, rows, title=title), targets, example, task.scores)

    return answer


def _masked_tokens(rows: Rows) -> Answer:
    targets, example = _expected(rows)

    def predicted(outputs: Float[Tensor, "M V"], labels: Int[Tensor, " M"]) -> list[Tensor]:
        likelihood = outputs.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        return [likelihood.cpu(), outputs.argmax(-1).cpu()]

    def answer(model: PreTrainedModel, title: str) -> Answered:
        # All logits of all places would not fit in memory.
        batches = _batches(model, rows, title=title)
        found = [predicted(outputs, labels) for outputs, labels in batches if labels is not None]
        likelihood, tokens = map(torch.cat, zip(*found, strict=True))
        return MaskedTokens(tokens == targets, likelihood, tokens, example)

    return answer


def embeddings(model: nn.Module, rows: Rows, *, title: str) -> Float[Tensor, "N E"]:
    """Return the mean of the last hidden states over the tokens of each row, scaled to length 1."""
    counts = rows.target_counts()
    hidden = compared_outputs(model, rows, title=title)
    row = torch.arange(len(counts)).repeat_interleave(counts)
    sums = hidden.new_zeros(len(counts), hidden.shape[1]).index_add_(0, row, hidden)
    return nn.functional.normalize(sums / counts[:, None], dim=-1)


def _embedding(rows: Rows, teacher: PreTrainedModel) -> Answer:
    expected = embeddings(teacher, rows, title="embeddings of the teacher")

    def answer(model: PreTrainedModel, title: str) -> Answered:
        return Similarities({"cosine": (embeddings(model, rows, title=title) * expected).sum(-1)})

    return answer


def summarising(task: Summarisation, held_out: Sequence[TokenDocument], tokenizer: Tokenizer) -> Answer:
    """Return the function that scores a model's summaries of the first held-out dialogues by ROUGE (Hedgehog App. B.5).

    The protocol is SAMSum's: greedy, at most 100 new tokens, cut at the first end-of-text token.

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
