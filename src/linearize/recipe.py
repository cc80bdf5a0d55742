"""Recipes: configs of methods, read from YAML; `linearize.layer_plan` makes a layer plan from one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, cast

import yaml
from pydantic import BeforeValidator, Field, PositiveInt, ValidationError, model_validator

from linearize.base import Config, UserError
from linearize.configs.data import DataConfig
from linearize.configs.evaluation import EvaluationConfig
from linearize.configs.memory import MemoryConfig
from linearize.configs.mixer import MixerConfig
from linearize.configs.tasks import TextEmbedding
from linearize.configs.training import DistributedConfig, FinetuneConfig, TransferConfig
from linearize.plain_yaml import parse_yaml

# --- which layers ---


class KeepLayers(Config):
    """Layers that stay softmax; negative indices count from the end."""

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        """Return the indices of the layers to keep; `errors`: their transfer errors, None before these are measured."""
        raise NotImplementedError

    def _known(self, indices: Iterable[int], num_layers: int) -> set[int]:
        for index in indices:
            if not -num_layers <= index < num_layers:
                raise UserError(
                    f"layers.keep_softmax: expected indices from {-num_layers} to {num_layers - 1}, found {index}"
                )
        return {index % num_layers for index in indices}


class KeepListed(KeepLayers):
    """These layers stay softmax. A plain list of indices means the same."""

    type: Literal["listed"] = "listed"
    layers: tuple[int, ...] = ()

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        return self._known(self.layers, num_layers)


class KeepAllBut(KeepLayers):
    """All layers but these stay softmax."""

    type: Literal["all_but"] = "all_but"
    layers: tuple[int, ...]

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        return set(range(num_layers)) - self._known(self.layers, num_layers)


class KeepEvery(KeepLayers):
    """Every n-th layer stays softmax: layers n - 1, 2 n - 1, ..."""

    type: Literal["every"] = "every"
    n: PositiveInt

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        return set(range(self.n - 1, num_layers, self.n))


class KeepRatio(KeepLayers):
    """This share of the layers stays softmax, rounded, evenly spread."""

    type: Literal["ratio"] = "ratio"
    ratio: float = Field(ge=0, lt=1)

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        count = round(self.ratio * num_layers)
        return {(2 * i + 1) * num_layers // (2 * count) for i in range(count)}


class KeepByTransferError(KeepLayers):
    """Keep softmax in the n layers with the largest held-out transfer loss. To measure it, all are transferred."""

    type: Literal["transfer_error"] = "transfer_error"
    n: PositiveInt

    def kept(self, num_layers: int, errors: Sequence[float] | None) -> set[int]:
        if errors is None:
            return set()
        return set(sorted(range(num_layers), key=lambda index: errors[index], reverse=True)[: self.n])


def _listed(value: object) -> object:
    if isinstance(value, list | tuple):
        return {"type": "listed", "layers": cast(Sequence[object], value)}
    return value


Keep = Annotated[KeepListed | KeepAllBut | KeepEvery | KeepRatio | KeepByTransferError, Field(discriminator="type")]


class LayersConfig(Config):
    """Say which layers are linearized."""

    keep_softmax: Annotated[Keep, BeforeValidator(_listed)] = Field(
        default=KeepListed(), description="which layers stay softmax: a list of indices, or a rule"
    )
    convert_sliding: bool = Field(
        default=False, description="also convert layers whose teacher attention slides already"
    )


class ListedHeads(Config):
    """KV heads, each as "layer.head" with both counted from 0, and the mixer they have instead; null: softmax."""

    kv_heads: tuple[str, ...] = Field(min_length=1)
    mixer: MixerConfig | None = None

    def places(self, num_layers: int, num_kv_heads: int) -> list[tuple[int, int]]:
        """Return the layer and head of each, in a teacher with `num_layers` layers and `num_kv_heads` KV heads.

        Raises:
            UserError: the teacher has no such head.
        """
        found: list[tuple[int, int]] = []
        for name in self.kv_heads:
            layer, _, head = name.partition(".")
            numbers = layer.isdecimal() and head.isdecimal()
            if not (numbers and int(layer) < num_layers and int(head) < num_kv_heads):
                last = f"{num_layers - 1}.{num_kv_heads - 1}"
                raise UserError(f"heads.kv_heads: expected layer.head, from 0.0 to {last}, found {name!r}")
            found.append((int(layer), int(head)))
        return found


class Recipe(Config):
    """A method, as data: which mixer, on which layers, trained how.

    Training stages, each optional (null): `transfer` trains mixers to match attention, `adapt` trains new weights on
    the model's outputs (the first of SUPRA's two steps), and `finetune`.
    """

    name: str
    description: str = ""
    weights: Literal["pretrained", "random"] = Field(
        default="pretrained", description="random: a new model of the teacher's shape, trained from scratch"
    )
    mixer: MixerConfig = MixerConfig()
    layers: LayersConfig = LayersConfig()
    heads: tuple[ListedHeads, ...] = Field(
        default=(), description="KV heads that have another mixer than their layer; the others have `mixer`"
    )
    memory: MemoryConfig | None = Field(
        default=None, description="a KV budget that is allocated to KV heads or layers, instead of `mixer`"
    )
    transfer: TransferConfig | None = TransferConfig()
    adapt: FinetuneConfig | None = None
    finetune: FinetuneConfig | None = FinetuneConfig()
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    distributed: DistributedConfig = DistributedConfig()
    seed: int = Field(default=0, ge=0, lt=2**62)

    @model_validator(mode="after")
    def _stages_fit(self) -> Recipe:
        if isinstance(self.layers.keep_softmax, KeepByTransferError) and self.transfer is None:
            raise ValueError("layers.keep_softmax `transfer_error` needs a transfer stage, which is null")
        for name, stage in (("adapt", self.adapt), ("finetune", self.finetune)):
            if isinstance(self.data.task, TextEmbedding) and stage is not None and stage.loss.labels:
                raise ValueError(f"texts to embed have no labels: set {name}.loss={{labels: 0, output_mse: 1}}")
        if self.data.select_rows_by_esl is not None and not self.data.task.language:
            raise ValueError("data.select_rows_by_esl is for language models: set data.select_rows_by_esl=null")
        if self.data.repeated_span_fraction and not self.data.task.language:
            raise ValueError("data.repeated_span_fraction is for language models: set data.repeated_span_fraction=0")
        if self.memory is not None and self.heads:
            raise ValueError("memory sets the mixer of every head: set heads=[]")
        if self.memory is not None and self.transfer is not None:
            raise ValueError("memory allocates caches, which attention transfer does not train: set transfer=null")
        if not self.data.task.language and (field := self._measured_on_text):
            raise ValueError(
                f"{field} is fitted to the attention of a language model: set it to null, or data.task.type to "
                "language_modelling"
            )
        if self.memory is not None and self.weights == "random":
            raise ValueError(
                "memory is allocated by the teacher's attention, which random weights do not have: set it to null"
            )
        if self.weights == "random":
            if self.transfer is not None:
                raise ValueError("weights `random` have no attention to transfer from: set transfer=null")
            if isinstance(self.data.task, TextEmbedding):
                raise ValueError("weights `random` have no embeddings to learn from: set another data.task")
            if any(stage is not None and stage.loss.needs_teacher for stage in (self.adapt, self.finetune)):
                raise ValueError("weights `random` have no outputs to train on: set loss.kl to 0")
            if self.data.select_rows_by_esl is not None:
                raise ValueError(
                    "weights `random` have no attention to choose documents by: set data.select_rows_by_esl=null"
                )
        return self

    @property
    def _measured_on_text(self) -> str | None:
        """Return the name of the field that requires measuring attention on text; None if there is none."""
        if self.memory is not None:
            return "memory"
        caches = {"mixer": self.mixer.cache} | {"heads": next((x.mixer.cache for x in self.heads if x.mixer), None)}
        return next((f"{name}.cache" for name, cache in caches.items() if cache is not None), None)

    @property
    def controls(self) -> tuple[str, ...]:
        """Return the controls that the long evaluation fine-tunes, on as many tokens as all stages of the student.

        `teacher_finetuned` is the teacher, and `window_finetuned` the student's window alone. If there is a linear
        part, there is also `equal_finetuned`, one window with as many bytes as the student's state; or, if heads have
        different memory, `exact_finetuned`, the student without linear parts. All are trained as `finetune` says.
        There are no controls if `finetune` trains only mixers, and no teacher if its outputs are the only target.
        """
        tuned = self.finetune
        if not self.data.task.language or not (self.evaluation.long and self.evaluation.trained_controls):
            return ()
        if tuned is None or not (tuned.lora or tuned.all_weights):
            return ()
        named = [self.mixer, *(heads.mixer for heads in self.heads)]
        mixers = [mixer for mixer in named if mixer is not None]
        spread = self.heads or self.memory or any(mixer.cache is not None for mixer in mixers)
        linear = any(mixer.feature_map is not None for mixer in mixers)
        windows = ("window_finetuned", *(("exact_finetuned" if spread else "equal_finetuned",) if linear else ()))
        return ("teacher_finetuned", *windows) if tuned.loss.labels else windows

    @classmethod
    def load(cls, name_or_path: str, overrides: Mapping[str, object] | None = None) -> Recipe:
        """Return a recipe by name (see `recipe_names`) or from a YAML file, with dotted `overrides` applied.

        Raises:
            UserError: no such recipe, unreadable YAML, an unknown field, or a value of the wrong type.
        """
        path = Path(name_or_path)
        if path.suffix in {".yaml", ".yml"}:
            if not path.is_file():
                raise UserError(f"recipe: expected a YAML file, found nothing at {name_or_path!r}; check the path")
            if (size := path.stat().st_size) > _MOST_BYTES:
                raise UserError(f"recipe {name_or_path}: expected at most {_MOST_BYTES:,} bytes, found {size:,}")
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"recipe {name_or_path}: expected a UTF-8 text file; {error}") from None
        elif name_or_path in recipe_names():
            text = recipe_text(name_or_path)
        else:
            raise UserError(
                f"recipe: expected one of {', '.join(recipe_names())} or a path that ends in .yaml; "
                f"found {name_or_path!r}"
            )
        try:
            data = parse_yaml(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise UserError(f"recipe {name_or_path}: not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise UserError(f"recipe {name_or_path}: expected a mapping of fields, found {type(data).__name__}")
        return cls.parse(_assigned(cast(dict[str, object], data), overrides or {}))

    @classmethod
    def parse(cls, data: Mapping[str, object]) -> Recipe:
        """Return plain data as a validated recipe; raise a `UserError` for the first field that is wrong."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise UserError(_one_line(error, data)) from None

    def override(self, overrides: Mapping[str, object]) -> Recipe:
        """Return this recipe with dotted fields replaced; raise a `UserError` as in `load`."""
        return Recipe.parse(_assigned(self.model_dump(mode="json"), overrides))

    def to_yaml(self) -> str:
        """Return the recipe as YAML with all fields."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=110)


_MOST_BYTES = 1_000_000  # of a recipe
_RECIPES = resources.files("linearize") / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the recipes in the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _RECIPES.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """Return the YAML of a recipe in the package."""
    return (_RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def parse_overrides(assignments: list[str]) -> dict[str, object]:
    """Return ``["mixer.span.window_size=32"]`` as ``{"mixer.span.window_size": 32}``; values are read as YAML."""
    overrides: dict[str, object] = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not equals or not field:
            raise UserError(f"--set: expected field=value, found {assignment!r}; e.g. --set finetune.lr=2e-4")
        try:
            overrides[field] = parse_yaml(value)
        except (yaml.YAMLError, RecursionError):
            raise UserError(f"--set {field}: expected a YAML value, found {value!r:.200}") from None
    return overrides


def _assigned(data: dict[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the data with dotted fields replaced in order; a part's type may come after its other fields."""
    for field in overrides:
        group, (*parents, last) = data, field.split(".")
        for parent in parents:
            inner = group.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise UserError(
                    f"--set {field}: expected a group of fields at {parent}, found {inner!r:.200}; set it first"
                )
            group = cast(dict[str, object], inner)
        if last == "type" and group.get("type") != overrides[field]:
            # The type changes, so drop the fields of the previous type.
            for name in [name for name in group if ".".join([*parents, name]) not in overrides]:
                del group[name]
        group[last] = copy.deepcopy(overrides[field])
    return data


def _one_line(error: ValidationError, data: object) -> str:
    first = error.errors(include_url=False)[0]
    # `recommended` is an example of `memory` and the fields that go with it, `lolcats` of all others.
    has_memory = _fields(data).get("memory") is not None
    example = "recommended" if first["loc"][:1] == ("memory",) or (has_memory and not first["loc"]) else "lolcats"
    # Pydantic adds a part's type to the location; it does not belong to the field's name.
    names: list[str] = []
    for name in first["loc"]:
        fields = _fields(data)
        if name not in fields and fields.get("type") == name:
            continue
        names.append(str(name))
        data = fields.get(name)
    message = {"extra_forbidden": "unknown field", "missing": "missing"}.get(first["type"], first["msg"])
    silent = {"missing", "extra_forbidden", "value_error"}
    found = "" if first["type"] in silent else f"; found {first['input']!r:.200}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = message.removeprefix("Value error, ")
    where = ".".join(names) or "(all)"
    return f"recipe field {where}: {message}{found}{more}; `linearize recipes {example}` shows a valid one"


def _fields(data: object) -> Mapping[str | int, object]:
    """Return the fields of a group; empty if the data is no group."""
    return cast(Mapping[str | int, object], data) if isinstance(data, Mapping) else {}
