"""Export a converted model, and compare the written model with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError
from linearize.export.delta_net import CLASS as DELTA_NET
from linearize.export.delta_net import delta_net_model, has_delta_rule
from linearize.export.gguf import CLASS, TYPES, gguf_package, read_gguf, write_gguf
from linearize.export.stock import read_layers, stock_model
from linearize.hf.checkpoint import atomic_folder, load_model, load_tokenizer, read_config, save_student
from linearize.run.folder import student_folder
from linearize.run.validation import require_linearized

FORMATS = ("hf", "gguf")
TOLERANCE = 1e-3  # difference of logits in float32, relative to the largest logit
NEW_TOKENS = 32  # of the greedy continuation that is compared
LONGEST = 2048  # tokens of the text that is compared
TEXT = (
    "The Danube rises in the Black Forest and flows through ten countries before it reaches the Black Sea. In 1856 a "
    "commission was founded to keep the mouths of the river open to ships, and for the first time small states and "
    "great powers shared an office, a fleet of dredgers and 37 lighthouses. Its engineers straightened the channel, "
    "measured the depth every morning and printed the result; captains paid by the ton. What they wrote down is still "
    "read today, because nobody else kept such long and careful records of a river. "
)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Exported:
    """The exported model, and how it compares with the converted model.

    Attributes:
        path: the folder or file.
        stock_class: model type of the stock class.
        layer_types, window: of its config.
        tokens: of the text on which both are compared.
        difference: the largest difference of any logit between the two in float32, relative to the largest logit.
        agreed: number of equal greedy tokens, of NEW_TOKENS, before the first that differs, with the written weights
            (rounded to the dtype of the file).
    """

    path: str
    stock_class: str
    layer_types: list[str]
    window: int | None
    tokens: int
    difference: float
    agreed: int

    def lines(self) -> list[str]:
        """Return the lines to print."""
        full = [index for index, kind in enumerate(self.layer_types) if kind == "full_attention"]
        others = "gated DeltaNet" if self.stock_class == DELTA_NET else f"a window of {self.window} tokens"
        return [
            f"{self.path}: {self.stock_class} with full attention in layers {', '.join(map(str, full)) or 'none'}, "
            f"and {others} in the others",
            f"checked on {self.tokens} tokens: in float32 the logits differ from the converted model's by at most "
            f"{self.difference:.1e} of the largest logit; as written, the first {self.agreed} of {NEW_TOKENS} greedy "
            "tokens are the same",
        ]


@torch.no_grad()
def export(
    model: str,
    directory: Path,
    *,
    to: str,
    stock_class: str | None = None,
    kind: str | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write a converted model as one that engines run without linearize, and check it.

    Args:
        model: a converted model's folder or hub id, or the folder of the run that made it.
        directory: a folder that is not there yet, or is empty.
        to: `hf`, a folder of a stock class of transformers, or `gguf`, a folder with one file for llama.cpp.
        stock_class: for `hf`, its model type; None: the first that fits.
        kind: dtype of the weights: bf16, f16 or f32, for `gguf` also q8_0; None: the model's own, or bf16.
        note: called with each step.

    Raises:
        UserError: a part of the model has no place in the format, `directory` is not empty, or the stock model computes
            other logits than the model.
    """
    if to not in FORMATS:
        raise UserError(f"--to: expected {' or '.join(FORMATS)}, found {to!r}")
    kinds = tuple(DTYPES) if to == "hf" else TYPES
    if kind is not None and kind not in kinds:
        raise UserError(f"--type: expected one of {', '.join(kinds)} for --to {to}, found {kind!r}")
    if to == "gguf" and stock_class not in {None, CLASS}:
        raise UserError(f"--class: expected {CLASS} for --to gguf, found {stock_class!r}; leave --class out")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: expected a new or an empty folder to export to, found something there")
    if to == "gguf":
        gguf_package()
    model = student_folder(model)
    require_linearized(model)
    tokenizer = load_tokenizer(model)
    student = load_model(model, dtype=torch.float32, device=torch.device("cpu"))
    if has_delta_rule(student):
        _require_delta_net(to, stock_class, kind)
        stock: Any = delta_net_model(student)
        window = None
    else:
        stock = stock_model(student, CLASS if to == "gguf" else stock_class)
        window = read_layers(student).window
    ids = _text_ids(tokenizer, window or 1, student.config.max_position_embeddings)
    note(f"comparing logits of {stock.config.model_type} and the converted model on {ids.shape[1]} tokens")
    difference = _compare(student, stock, ids)
    stored = {name: dtype for name, dtype in DTYPES.items() if str(read_config(model).get("dtype")) in str(dtype)}
    if to == "hf":
        stock = stock.to(DTYPES[kind] if kind is not None else next(iter(stored.values()), torch.bfloat16))
        save_student(stock, tokenizer, {}, directory)
        path, written = directory, stock.float()
    else:
        kind = kind or "bf16"
        path = directory / f"model-{kind}.gguf"
        with atomic_folder(directory, stock.get_memory_footprint()) as scratch:
            write_gguf(stock, tokenizer, scratch / path.name, kind=kind, name=Path(model).resolve().parent.name)
            stock.load_state_dict(read_gguf(stock, scratch / path.name))
        written = stock
    return Exported(
        path=str(path),
        stock_class=str(written.config.model_type),
        layer_types=list(written.config.layer_types),
        window=window,
        tokens=ids.shape[1],
        difference=difference,
        agreed=_agreed(student, written, ids[:, : -ids.shape[1] // 4]),
    )


def _require_delta_net(to: str, stock_class: str | None, kind: str | None) -> None:
    """Raise UserError for options that gated DeltaNet has no place for."""
    for option, value, expected in (
        ("--to", to, ("hf",)),
        ("--class", stock_class or DELTA_NET, (DELTA_NET,)),
        ("--type", kind or "bf16", ("bf16", "f32")),  # weights with exponents that float16 does not have
    ):
        if value not in expected:
            raise UserError(f"{option}: expected {' or '.join(expected)} for gated DeltaNet, found {value!r}")


def _text_ids(tokenizer: Tokenizer, window: int, positions: int) -> torch.Tensor:
    """Return the ids [1, T] of a text longer than two windows, if the model has as many positions."""
    ids: list[int] = tokenizer(TEXT).input_ids
    length = max(1, min(2 * window + len(ids), positions - NEW_TOKENS, LONGEST))
    return torch.tensor([(ids * (length // len(ids) + 1))[:length]])


def _compare(student: PreTrainedModel, stock: PreTrainedModel, ids: torch.Tensor) -> float:
    """Return the largest difference of logits, relative to the largest logit.

    Raises:
        UserError: it is more than TOLERANCE.
    """
    ours, theirs = (model(input_ids=ids, use_cache=False).logits for model in (student, stock))
    difference = float((ours - theirs).abs().max() / ours.abs().max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"export: expected logits of {stock.config.model_type} within {TOLERANCE:g} of the converted model's, "
            f"found {difference:.1e}; nothing was written; please report this model"
        )
    return difference


def _agreed(student: PreTrainedModel, written: PreTrainedModel, ids: torch.Tensor) -> int:
    """Return how many greedy tokens are equal before the first that differs."""
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    models: list[Any] = [student, written]
    ours, theirs = (model.generate(input_ids=ids, **options)[0, ids.shape[1] :] for model in models)
    same = (ours == theirs).long().cumprod(0)
    return int(same.sum())
