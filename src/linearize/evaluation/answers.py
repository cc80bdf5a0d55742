"""Answers of models on the held-out rows of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.image_processing_utils import BaseImageProcessor

from linearize.base import progress
from linearize.configs.tasks import MaskedLanguageModelling, Summarisation, Task, TextEmbedding
from linearize.data.packing import Dataset
from linearize.data.rows import Rows, inference, on_device
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
        # Imported here because it needs the extra `eval`.
        from linearize.evaluation.summaries import summarising

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
