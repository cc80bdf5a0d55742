"""Configs of tasks: a model's head, its examples and their scores."""

# Properties that depend on a field override class variables.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from linearize.base import Config


class Task(Config):
    """Base of all tasks.

    Attributes:
        auto_class: transformers' class that loads a model with the task's head.
        pipeline_tag: the task's name on the hub.
        language: whether the model is a language model, and is measured as one.
        built_in: whether the examples are generated, not read.
        scores: names of the metrics, the most important one first; none for plain language modelling.
    """

    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    pipeline_tag: ClassVar[str] = "text-generation"
    language: ClassVar[bool] = False
    built_in: ClassVar[bool] = False
    scores: ClassVar[tuple[str, ...]] = ()


class LanguageModelling(Task):
    """Predict the next token."""

    type: Literal["language_modelling"] = "language_modelling"
    language: ClassVar[bool] = True


class Summarisation(Task):
    """Predict the next token of summaries; held-out dialogues are summarised, and scored by ROUGE (Hedgehog B.5)."""

    type: Literal["summarisation"] = "summarisation"
    language: ClassVar[bool] = True
    new_tokens: PositiveInt = Field(default=100, description="tokens of a summary at most")
    summaries: int = Field(default=64, ge=2, description="held-out dialogues that are summarised")
    scores: ClassVar[tuple[str, ...]] = ("rouge1", "rouge2", "rougeL")


Metric = Literal["accuracy", "f1", "matthews", "spearman"]


class TextClassification(Task):
    """A text, or a pair of texts, and its class; or a number, where the metric is Spearman's correlation."""

    type: Literal["text_classification"] = "text_classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    pipeline_tag: ClassVar[str] = "text-classification"
    text_columns: tuple[str, ...] = Field(default=("sentence",), min_length=1, max_length=2)
    label_column: str = "label"
    metrics: tuple[Metric, ...] = Field(default=("accuracy",), min_length=1)

    @model_validator(mode="after")
    def _classes_or_numbers(self) -> TextClassification:
        if self.regression and len(self.metrics) > 1:
            raise ValueError("metrics: `spearman` is for numbers, the others for classes; name one kind")
        return self

    @property
    def regression(self) -> bool:
        """Return whether labels are numbers."""
        return "spearman" in self.metrics

    @property
    def scores(self) -> tuple[str, ...]:
        return self.metrics


class TokenClassification(Task):
    """A list of words and the class of each; the first piece of a word carries its label."""

    type: Literal["token_classification"] = "token_classification"
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    pipeline_tag: ClassVar[str] = "token-classification"
    words_column: str = "tokens"
    labels_column: str = "tags"
    metrics: tuple[Literal["accuracy", "f1"], ...] = Field(default=("accuracy", "f1"), min_length=1)

    @property
    def scores(self) -> tuple[str, ...]:
        return self.metrics


class ImageClassification(Task):
    """An image and its class."""

    type: Literal["image_classification"] = "image_classification"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    pipeline_tag: ClassVar[str] = "image-classification"
    image_column: str = Field(
        default="image", description="a column of files' bytes, or of paths relative to the table's folder"
    )
    label_column: str = "label"
    scores: ClassVar[tuple[str, ...]] = ("accuracy",)


class MaskedLanguageModelling(Task):
    """Predict masked tokens of a text: of the chosen ones, 80 % are replaced by the mask, 10 % by another token.

    The others do not change (BERT, arXiv 1810.04805, sec. 3.1). The choice depends on the text's own tokens only.
    """

    type: Literal["masked_language_modelling"] = "masked_language_modelling"
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    pipeline_tag: ClassVar[str] = "fill-mask"
    share: float = Field(default=0.15, gt=0, le=1, description="share of a text's tokens that are predicted")
    scores: ClassVar[tuple[str, ...]] = ("accuracy", "likelihood")


class TextEmbedding(Task):
    """The teacher's embeddings of texts, means of its last hidden states over the tokens; there are no labels."""

    type: Literal["text_embedding"] = "text_embedding"
    auto_class: ClassVar[str] = "AutoModel"
    pipeline_tag: ClassVar[str] = "sentence-similarity"
    scores: ClassVar[tuple[str, ...]] = ("cosine",)


class AssociativeRecall(Task):
    """Keys and values in turn, then a key seen before: predict its value (Hedgehog B.1).

    One half of the vocabulary are keys, the other values; every sequence has associations of its own.
    """

    type: Literal["associative_recall"] = "associative_recall"
    built_in: ClassVar[bool] = True
    vocabulary_size: int = Field(default=40, ge=4, multiple_of=2)
    length: int = Field(default=128, ge=4, multiple_of=2, description="tokens of a sequence, the answer among them")
    train_examples: PositiveInt = 10_000
    held_out_examples: int = Field(default=2000, ge=2)
    labels: Literal["last", "every"] = Field(
        default="last",
        description="every: the loss is on the values of all keys seen before; only the last one is scored",
    )
    scores: ClassVar[tuple[str, ...]] = ("accuracy",)


class ListOps(Task):
    """Nested MIN, MAX, MED and SM (sum modulo 10) of digits; the class is the value (Long Range Arena)."""

    type: Literal["list_ops"] = "list_ops"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    pipeline_tag: ClassVar[str] = "text-classification"
    built_in: ClassVar[bool] = True
    min_length: PositiveInt = Field(default=20, description="tokens of an expression at least")
    max_length: PositiveInt = Field(default=200, description="and at most")
    max_depth: PositiveInt = 10
    max_arguments: int = Field(default=10, ge=2)
    train_examples: PositiveInt = 20_000
    held_out_examples: int = Field(default=2000, ge=2)
    scores: ClassVar[tuple[str, ...]] = ("accuracy",)

    @model_validator(mode="after")
    def _some_length(self) -> ListOps:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length ({self.min_length}) must not be above max_length ({self.max_length})")
        return self


AnyTask = Annotated[
    LanguageModelling
    | Summarisation
    | TextClassification
    | TokenClassification
    | ImageClassification
    | MaskedLanguageModelling
    | TextEmbedding
    | AssociativeRecall
    | ListOps,
    Field(discriminator="type"),
]
