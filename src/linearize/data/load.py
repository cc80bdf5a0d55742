"""Load the tokenizer or image processor, and the rows, of a recipe's task."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.configs.tasks import AnyTask, AssociativeRecall, ImageClassification, ListOps, TextClassification
from linearize.data.examples import build_examples
from linearize.data.images import build_images
from linearize.data.labels import Classes
from linearize.data.packing import Dataset, Score, build_dataset
from linearize.data.rows import PackedRows
from linearize.data.synthetic import PAD, build_generated, check_generated
from linearize.hf.checkpoint import CAUSAL, check_tokens, load_image_processor, load_tokenizer, read_config
from linearize.hf.teacher import TeacherShape


def load_processor(task: AnyTask, model: str) -> Any:
    """Return the tokenizer or image processor of a model; None for built-in tasks, whose examples are numbers.

    Raises:
        UserError: there is none, or the model does not fit the task.
    """
    check_kind(task, TeacherShape.from_config(read_config(model)))
    if task.built_in:
        return None
    return load_image_processor(model) if isinstance(task, ImageClassification) else load_tokenizer(model)


def check_kind(task: AnyTask, shape: TeacherShape) -> None:
    """Raise UserError unless images have a vision model, texts a text model, and next tokens a decoder."""
    vision = shape.bidirectional and not shape.vocab_size
    if isinstance(task, ImageClassification) and not vision:
        raise UserError(
            f"data.task: expected a vision model for image_classification, found {shape.model_type}; use one, or set "
            "data.task.type to another task"
        )
    if vision and not isinstance(task, ImageClassification):
        raise UserError(
            f"data.task: expected image_classification for a vision model ({shape.model_type}), found {task.type}; "
            "use the recipe hedgehog-vit, or set data.task.type"
        )
    if shape.bidirectional and task.auto_class == CAUSAL:
        raise UserError(
            f"data.task: expected a task for an encoder ({shape.model_type}), found {task.type}; use the recipe "
            "hedgehog-bert, or set data.task.type to text_classification, token_classification, "
            "masked_language_modelling or text_embedding"
        )


def row_length(data: DataConfig, shape: TeacherShape) -> tuple[int, str]:
    """Return the most tokens of a row, and the field that sets it; images have the model's own length."""
    task = data.task
    if isinstance(task, AssociativeRecall):
        return task.length, "data.task.length"
    if isinstance(task, ListOps):
        return task.max_length + 1, "data.task.max_length"
    images = isinstance(task, ImageClassification) or not shape.vocab_size
    return shape.max_positions if images else data.sequence_length, "data.sequence_length"


def check_data(data: DataConfig, shape: TeacherShape) -> None:
    """Raise UserError if a model does not fit the task by its config.json: kind, classes, tokens, positions."""
    task, classes = data.task, Classes.of(shape.contents)
    check_kind(task, shape)
    length, field = row_length(data, shape)
    if length > shape.max_positions:
        raise UserError(
            f"{field}: expected at most the model's {shape.max_positions} positions, found "
            f"{length}; pass --set {field}={shape.max_positions}"
        )
    if isinstance(task, TextClassification) and task.regression and classes.count != 1:
        raise UserError(
            f"data.task.metrics: expected a model with one output for `spearman`, found {classes.count} classes; use a "
            "model with num_labels 1, or set data.task.metrics=[accuracy]"
        )
    check_generated(data, shape, classes)


def _check_padding(task: AnyTask, shape: TeacherShape, config: dict[str, Any], processor: Any) -> None:
    """Raise UserError if the model lacks the padding token, or its config names another one."""
    padding = PAD if isinstance(task, ListOps) else getattr(processor, "pad_token_id", None)
    if padding is None or task.language:
        return
    if padding >= shape.vocab_size:
        raise UserError(
            f"tokenizer: expected a padding token below the model's vocab_size of {shape.vocab_size}, found {padding}; "
            "resize the model's embeddings"
        )
    # transformers reads the class at the last token that is not the config's padding token.
    at_the_end = task.auto_class == "AutoModelForSequenceClassification" and not shape.bidirectional
    if at_the_end and config.get("pad_token_id") != padding:
        raise UserError(
            f"config.json: pad_token_id: expected {padding}, the padding of the rows, found "
            f"{config.get('pad_token_id')}; set it there"
        )


def load_dataset(
    data: DataConfig,
    processor: Any,
    config: dict[str, Any],
    score: Score | None = None,
    *,
    seed: int,
) -> Dataset:
    """Return the rows of a task.

    Args:
        processor: of `load_processor`.
        config: the contents of the model's ``config.json``.
        score: the score for `data.select_rows_by_esl`.

    Raises:
        UserError: a model that does not fit the task or the tokenizer, no dataset named, rows longer than the model's
            positions, or data that cannot be used.
    """
    task, shape, classes = data.task, TeacherShape.from_config(config), Classes.of(config)
    check_data(data, shape)
    _check_padding(task, shape, config, processor)
    use_cache = None if shape.bidirectional else False
    if isinstance(task, AssociativeRecall | ListOps):
        dataset = build_generated(task, seed=seed, use_cache=use_cache)
    elif isinstance(task, ImageClassification):
        dataset = build_images(data, processor, classes, positions=shape.max_positions, seed=seed)
    elif task.language:

        def checked(rows: PackedRows) -> Tensor:
            assert score is not None
            check_tokens(rows.input_ids, shape.vocab_size)
            return score(rows)

        dataset = build_dataset(data, processor, seed=seed, score=None if score is None else checked)
    else:
        dataset = build_examples(data, processor, classes, seed=seed, use_cache=use_cache)
    for rows in (dataset.train, dataset.validation, dataset.test):
        if shape.vocab_size:
            check_tokens(rows.inputs()["input_ids"], shape.vocab_size)
    return dataset
