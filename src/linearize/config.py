"""What we want (recipes) and what a teacher is (its shape), as torch-free pydantic models.

A `Recipe` names parts; `resolve()` turns it and a teacher's ``config.json`` into a `LayerPlan`: one `MixerConfig`, or
``None`` (the layer stays softmax), per layer. The plan is the only truth after conversion and is stored in the
student's ``config.json``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError, model_validator

from linearize.errors import UserError
from linearize.layers import KeepByTransferError, LayersConfig
from linearize.part import Part
from linearize.parts import Add, MixerConfig
from linearize.stages import FinetuneConfig, TransferConfig
from linearize.tasks import AnyTask, LanguageModelling, TextEmbedding
from linearize.teacher import TeacherShape

FORMAT_VERSION = 1


class DataConfig(Part):
    """What to learn, and from what: text in packed rows, or the examples of a task.

    `dataset` is a hub id, or a local txt / json / jsonl / csv / tsv / parquet file or a folder of them; of images, a
    folder with a folder per class.
    """

    task: AnyTask = LanguageModelling()
    dataset: str | None = Field(default=None, description="set by --dataset")
    validation_dataset: str | None = Field(
        default=None, description="held-out text from a source of its own, instead of a share of `dataset`"
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
    max_documents: PositiveInt | None = Field(default=None, description="read at most this many documents or examples")
    max_tokens: PositiveInt | None = Field(
        default=None, description="stop reading at this many tokens; what a stream of pre-training text needs"
    )
    min_document_tokens: PositiveInt = Field(default=1, description="leave shorter documents out")
    top_esl: PositiveInt | None = Field(
        default=None,
        description="train on this many documents, those of the largest effective sequence length (LoLCATs eq. 9)",
    )
    validation_fraction: float = Field(default=0.05, gt=0, lt=1, description="share of the documents held out")
    validation_rows: PositiveInt = Field(default=64, description="at most this many held-out rows, packed or examples")


class EvaluationConfig(Part):
    """What `run` measures at the end."""

    trained_controls: bool = Field(
        default=True, description="finetune the controls alike: teacher and window only, same budget"
    )
    bootstrap_samples: PositiveInt = 1000
    copy_rows: PositiveInt = Field(default=16, description="random sequences of the copying test")
    examine: bool = Field(
        default=True,
        description="agreement with the teacher, generations, recall, fidelity of heads and use of the linear part too",
    )
    examined_tokens: PositiveInt = Field(default=32768, description="held-out tokens that the examination looks at")
    fidelity_tokens: PositiveInt = Field(default=2048, description="of these, the ones whose attention is compared")
    prompts: int = Field(default=16, ge=2, description="held-out beginnings that teacher and student continue")
    new_tokens: PositiveInt = Field(default=64, description="tokens of each continuation")
    recall_trials: int = Field(default=8, ge=2, description="rows per cell of the recall tests")
    tasks: tuple[str, ...] = Field(
        default=(), description="public benchmarks: lm-eval's names, its YAML files or .jsonl files of questions"
    )
    shots: int = Field(default=0, ge=0, description="solved examples before each question of a task")
    task_limit: PositiveInt | None = Field(default=None, description="only the first questions of every task")


class Recipe(Part):
    """A method, as data: which mixer, on which layers, trained how.

    Stages, each of which may be left out (null): `transfer` to the mixers, `adapt` of new weights to the model's
    outputs (the first of SUPRA's two steps), and `finetune`.
    """

    name: str
    description: str = ""
    weights: Literal["pretrained", "random"] = Field(
        default="pretrained", description="random: a new model of the teacher's shape, trained from scratch"
    )
    mixer: MixerConfig = MixerConfig()
    layers: LayersConfig = LayersConfig()
    transfer: TransferConfig | None = TransferConfig()
    adapt: FinetuneConfig | None = None
    finetune: FinetuneConfig | None = FinetuneConfig()
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _stages_fit(self) -> Recipe:
        if isinstance(self.layers.keep_softmax, KeepByTransferError) and self.transfer is None:
            raise ValueError("layers.keep_softmax `transfer_error` needs a transfer stage, which is null")
        for name, stage in (("adapt", self.adapt), ("finetune", self.finetune)):
            if isinstance(self.data.task, TextEmbedding) and stage is not None and stage.loss.labels:
                raise ValueError(f"texts to embed have no labels: set {name}.loss={{labels: 0, output_mse: 1}}")
        if self.data.top_esl is not None and not self.data.task.language:
            raise ValueError("data.top_esl chooses texts for language models: set data.top_esl=null")
        if self.weights == "random":
            if self.transfer is not None:
                raise ValueError("weights `random` have no attention to transfer from: set transfer=null")
            if any(stage is not None and stage.loss.needs_teacher for stage in (self.adapt, self.finetune)):
                raise ValueError("weights `random` have no outputs to learn from: set loss.kl and loss.reverse_kl to 0")
            if isinstance(self.data.task, TextEmbedding):
                raise ValueError("weights `random` have no embeddings to learn from: set another data.task")
            if self.data.top_esl is not None:
                raise ValueError("weights `random` have no attention to choose documents by: set data.top_esl=null")
        return self

    @property
    def controls(self) -> tuple[str, ...]:
        """What the evaluation trains beside the student, with the same budget: `teacher_lora` and `window_lora`.

        None where fine-tuning trains nothing that a model without a linear part has. No teacher where its own outputs
        are all there is to learn: it has them already.
        """
        tuned = self.finetune
        if not self.data.task.language:
            return ()
        if tuned is None or not (tuned.lora or tuned.all_weights) or not self.evaluation.trained_controls:
            return ()
        return ("teacher_lora", "window_lora") if tuned.loss.labels else ("window_lora",)

    @classmethod
    def load(cls, name_or_path: str, overrides: dict[str, Any] | None = None) -> Recipe:
        """Read a recipe by name (see `recipe_names`) or from a YAML file, with dotted `overrides` applied.

        Raises:
            UserError: no such recipe, unreadable YAML, an unknown field, or a value of the wrong type.
        """
        path = Path(name_or_path)
        if path.suffix in {".yaml", ".yml"}:
            if not path.is_file():
                raise UserError(f"recipe: expected a YAML file, found nothing at {name_or_path!r}; check the path")
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"recipe {name_or_path}: expected a UTF-8 text file; {error}") from None
        elif name_or_path in recipe_names():
            text = (_RECIPES / f"{name_or_path}.yaml").read_text(encoding="utf-8")
        else:
            raise UserError(
                f"recipe: expected one of {', '.join(recipe_names())} or a path that ends in .yaml; "
                f"found {name_or_path!r}"
            )
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"recipe {name_or_path}: not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise UserError(f"recipe {name_or_path}: expected a mapping of fields, found {type(data).__name__}")
        for field, value in (overrides or {}).items():
            _assign(data, field, copy.deepcopy(value))
        return cls.parse(data)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Recipe:
        """Validate plain data as a recipe; `UserError` with one line for the first field that is wrong."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise UserError(_one_line(error, data)) from None

    def override(self, overrides: dict[str, Any]) -> Recipe:
        """This recipe with dotted fields replaced; `UserError` as in `load`."""
        data = self.model_dump(mode="json")
        for field, value in overrides.items():
            _assign(data, field, copy.deepcopy(value))
        return Recipe.parse(data)

    def to_yaml(self) -> str:
        """The recipe as YAML, every field written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=110)


_RECIPES = resources.files("linearize") / "recipes"


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _RECIPES.iterdir() if entry.name.endswith(".yaml"))


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """``["mixer.span.window_size=32"]`` as ``{"mixer.span.window_size": 32}``; values are read as YAML."""
    overrides = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not equals or not field:
            raise UserError(f"--set: expected field=value, found {assignment!r}; e.g. --set finetune.lr=2e-4")
        try:
            overrides[field] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"--set {field}: expected a YAML value, found {value!r}") from None
    return overrides


def _assign(data: dict[str, Any], field: str, value: Any) -> None:
    *parents, last = field.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise UserError(f"--set {field}: expected a group of fields at {parent}, found {data!r}; set it first")
    if last == "type" and data.get("type") != value:
        data.clear()  # another part: the fields of the one before do not belong to it
    data[last] = value


def _one_line(error: ValidationError, data: Any) -> str:
    first = error.errors(include_url=False)[0]
    # Pydantic puts the type of a part into the location; it is not part of the field's name.
    names = []
    for name in first["loc"]:
        if isinstance(data, dict) and name not in data and data.get("type") == name:
            continue
        names.append(str(name))
        data = data.get(name) if isinstance(data, dict) else None
    message = {"extra_forbidden": "unknown field", "missing": "missing"}.get(first["type"], first["msg"])
    silent = {"missing", "extra_forbidden", "value_error"}
    found = "" if first["type"] in silent else f"; found {first['input']!r}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = message.removeprefix("Value error, ")
    where = ".".join(names) or "(all)"
    return f"recipe field {where}: {message}{found}{more}; `linearize recipes lolcats` shows a valid one"


# --- recipe x teacher -> layer plan -----------------------------------------------------------------------------------

LayerPlan = tuple[MixerConfig | None, ...]


def resolve(recipe: Recipe, teacher: TeacherShape, errors: Sequence[float] | None = None) -> LayerPlan:
    """One complete `MixerConfig`, or None for a layer that stays softmax, per layer of the teacher.

    Args:
        errors: each layer's transfer error, where the layers to keep are chosen by it; None before it is measured,
            when all are converted.

    Raises:
        UserError: a layer index the teacher does not have, nothing left to convert, a size that makes no sense for
            these layers, or for an encoder what only a decoder can have.
    """
    if teacher.bidirectional:
        _check_encoder(recipe)
    kept = recipe.layers.keep_softmax.kept(teacher.num_layers, errors)
    if not recipe.layers.convert_sliding:
        kept |= set(teacher.sliding_layers)
    if len(kept) == teacher.num_layers:
        raise UserError(
            "layers: nothing to convert, every layer stays softmax; shorten layers.keep_softmax, or set "
            "layers.convert_sliding=true to convert layers that already attend within a sliding window"
        )
    mixer = recipe.mixer.resolved(teacher.layer)
    if teacher.bidirectional:
        mixer = mixer.model_copy(update={"combine": Add()})  # without a window there is nothing to share or to learn
    return tuple(None if index in kept else mixer for index in range(teacher.num_layers))


def _check_encoder(recipe: Recipe) -> None:
    """See that the recipe asks an encoder for nothing that needs an order of tokens, or a decoder's layers.

    Raises:
        UserError: it does.
    """
    if recipe.mixer.needs_order is not None:
        raise UserError(
            f"mixer.{recipe.mixer.needs_order}; use the recipe hedgehog-bert or hedgehog-vit, or set it with --set"
        )
    if recipe.transfer is not None and recipe.transfer.layers_per_block is not None:
        raise UserError(
            "transfer.layers_per_block: expected null, because an encoder is transferred as a whole; "
            f"found {recipe.transfer.layers_per_block}"
        )
    for name, stage in (("transfer", recipe.transfer), ("adapt", recipe.adapt), ("finetune", recipe.finetune)):
        if stage is not None and stage.window_dropout is not None:
            raise UserError(f"{name}.window_dropout: expected null, because an encoder's mixer has no window to hide")
    if recipe.data.top_esl is not None:
        raise UserError(
            "data.top_esl: expected null, because effective sequence lengths are a decoder's; "
            f"found {recipe.data.top_esl}"
        )
