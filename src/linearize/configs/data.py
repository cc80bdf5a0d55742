"""Configs of data and tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from linearize.base import Config
from linearize.configs.tasks import AnyTask, LanguageModelling


class DataConfig(Config):
    """Name the task and its data: text in packed rows, or the examples of a task.

    `dataset` is a hub id, or a local txt / json / jsonl / csv / tsv / parquet file or a folder of them, jsonl also
    compressed as .jsonl.gz or .jsonl.zst; of images, a folder with a folder per class.
    """

    task: AnyTask = LanguageModelling()
    dataset: str | None = Field(default=None, description="set by --dataset")
    validation_dataset: str | None = Field(
        default=None,
        description="separate held-out text or examples, instead of a share of `dataset`",
    )
    format: Literal["auto", "text", "alpaca", "chat", "samsum"] = Field(
        default="auto",
        description="auto: `messages` -> chat, `instruction` and `output` -> alpaca, `dialogue` and `summary` -> "
        "samsum, else the text column",
    )
    text_column: str = "text"
    columns: tuple[str, ...] | None = Field(
        default=None, description="names of the columns of a csv or tsv file whose first line does not name them"
    )
    split: str = Field(default="train", description="the split of a hub dataset")
    subset: str | None = Field(default=None, description="the configuration of a hub dataset, e.g. sample-10BT")
    sequence_length: int = Field(default=1024, ge=2, description="tokens per packed row; examples are cut there")
    max_documents: PositiveInt | None = Field(
        default=None, description="read at most this many documents, conversations or examples"
    )
    max_tokens: PositiveInt | None = Field(
        default=None, description="stop reading at this many tokens; what a stream of pre-training text needs"
    )
    min_document_tokens: PositiveInt = Field(default=1, description="leave shorter documents out")
    select_rows_by_esl: PositiveInt | None = Field(
        default=None,
        description="train on this many packed rows, those of the largest effective sequence length (LoLCATs eq. 9)",
    )
    repeated_span_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the training rows that contain repeated spans, of text and of random tokens, with a long "
        "distance between the copies; trains a language model to recall",
    )
    validation_fraction: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="share of the documents, conversations or examples held out; at most a quarter of these choose "
        "checkpoints and drive schedules, the others are the test, which is measured once, at the end",
    )
    validation_rows: PositiveInt = Field(
        default=64, description="at most this many rows, packed or examples, choose checkpoints; as many are the test"
    )
