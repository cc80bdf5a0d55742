"""Forecast the peak memory of a step or an evaluation of a training stage, beyond the memory before it.

The stage's own code runs on fake tensors (`footprint`), so no formula has to be maintained. Equal layers take equal
memory: two of each kind are run, and the difference to one is the memory of every further layer. The same holds for
rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from linearize.base import progress
from linearize.configs.mixer import LayerPlan
from linearize.configs.training import Constant, FinetuneConfig, TrainConfig, TransferConfig
from linearize.data.rows import Indices, PackedRows, Rows
from linearize.hf.architectures import ARCHITECTURES
from linearize.hf.attention import linearized_layers
from linearize.hf.convert import convert_layers
from linearize.hf.meta import MetaModel
from linearize.ops.block_sizes import blocks_for
from linearize.ops.dense import MOST_KEYS
from linearize.ops.layout import forget_layouts
from linearize.planning.footprint import Footprint
from linearize.training.attention_transfer import TransferObjective
from linearize.training.finetune import OutputObjective, prepared


@dataclass(frozen=True)
class StepBytes:
    """Memory of one optimizer step, gradients included, and of an evaluation, in bytes.

    Attributes:
        forward: peak until the gradients of the first layer are computed; 0 if this moment is not observed.
        backward: peak after that.
        left: bytes of the gradients at the end.
        evaluation: peak of a held-out loss, without gradients.
    """

    forward: int
    backward: int
    left: int
    evaluation: int


def step_bytes(
    model: MetaModel,
    layers: LayerPlan,
    config: TransferConfig | FinetuneConfig,
    *,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
) -> int:
    """Return the peak bytes of a stage in a step, gradients included, or in an evaluation if that takes more.

    Evaluations have outputs, and weights of one layer at a time, in fp32.

    Args:
        layers: the plan; with block-wise transfer, layers of the first block are run.
        dtype: of the model.
        length: tokens of a row; rows of a language model have two documents each.
        device: of the run; blocks of scores are larger on a GPU.
    """
    rows = config.micro_batch_size or config.batch_size

    def found(rows: int) -> int:
        key: Any = _what_counts(config, rows)
        return _step_bytes(_Teacher(model.contents, model), layers, key, dtype, length, device)

    if rows <= 2 or length <= MOST_KEYS:  # the form of short rows depends on their number
        return found(rows)
    return found(2) + (rows - 2) * (found(2) - found(1))


@dataclass(frozen=True)
class _Teacher:
    """A cache key of a teacher: its config.json."""

    contents: str
    model: MetaModel = field(compare=False)


@lru_cache(maxsize=256)
def _step_bytes(
    teacher: _Teacher,
    layers: LayerPlan,
    config: TransferConfig | FinetuneConfig,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
) -> int:
    model, bidirectional = teacher.model, ARCHITECTURES[teacher.model.model.config.model_type].bidirectional
    size = config.layers_per_block if isinstance(config, TransferConfig) else None
    types = getattr(model.model.config, "layer_types", None) or [None] * len(layers)
    kinds = list(zip(layers, model.layers, model.used, model.rotary_dims, types, strict=True))[:size]
    counts = Counter(kinds)

    def run(most: Mapping[Any, int]) -> StepBytes:
        """Return the bytes with at most this number of layers of each kind."""
        seen, kept = Counter[Any](), list[int]()
        for index, kind in enumerate(kinds):
            seen[kind] += 1
            if seen[kind] <= most[kind]:
                kept.append(index)
        return _run(model, layers, kept, config, dtype, length, device)

    # An encoder's layers are few and may share weights, so all of them are run.
    two = {kind: count if bidirectional else min(2, count) for kind, count in counts.items()}
    more = [kind for kind, count in counts.items() if count > two[kind]]
    variants = [two, *(two | {kind: 1} for kind in more)]
    found, *fewer = [run(most) for most in progress(variants, "forecasting memory")]
    forward, backward = found.forward, found.backward
    for kind, less in zip(more, fewer, strict=True):
        forward += (counts[kind] - 2) * (found.forward - less.forward)
        backward += (counts[kind] - 2) * (found.left - less.left)
    return max(forward, backward, found.evaluation)


def _what_counts(config: TransferConfig | FinetuneConfig, rows: int) -> TransferConfig | FinetuneConfig:
    """Return the stage with micro batches of `rows` rows, and defaults for fields that do not affect memory."""
    several = config.micro_batch_size is not None and config.batch_size > config.micro_batch_size
    nothing: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "epochs": 1, "max_tokens": None, "clip_norm": None}
    nothing |= {"schedule": Constant(), "eval_every": 1, "early_stopping": None, "optimizer": "adamw"}
    # From the second micro batch on, gradients exist already.
    return config.model_copy(update=nothing | {"batch_size": rows * (1 + several), "micro_batch_size": rows})


class _Counted(Exception):
    """Ends the preparation of a stage whose step has been counted, without merging adapters."""


def _run(
    model: MetaModel,
    layers: LayerPlan,
    kept: Sequence[int],
    config: TransferConfig | FinetuneConfig,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
) -> StepBytes:
    """Return the bytes of one step of a model with these layers."""
    teacher = model.reduced(kept, dtype)
    footprint, known = Footprint(getattr(teacher.config, "num_local_experts", 1)), dict[int, Tensor]()
    rows = _rows(teacher, config.micro_batch_size or config.batch_size, length)
    found: StepBytes | None = None
    with torch.random.fork_rng(devices=[]), suppress(_Counted):
        student = convert_layers(teacher, tuple(layers[index] for index in kept))
        if isinstance(config, TransferConfig):
            footprint.pretend(student.requires_grad_(False), known)
            return _counted(footprint, TransferObjective(student, config), student, rows, config, device)
        with prepared(student, config, seed=0) as (module, autocast, _):
            for part in (module, teacher):
                footprint.pretend(part, known)
            objective = OutputObjective(module, config, teacher, autocast)
            found = _counted(footprint, objective, student, rows, config, device)
            raise _Counted
    assert found is not None
    return found


def _counted(
    footprint: Footprint,
    objective: TransferObjective | OutputObjective,
    student: PreTrainedModel,
    rows: Rows,
    config: TrainConfig,
    device: torch.device,
) -> StepBytes:
    parameters = [p for unit in objective.units for p in unit.parameters.values()]
    forward = 0

    def back(_: Tensor) -> None:  # only the first layer's gradients are not computed yet
        nonlocal forward
        forward, footprint.peak = footprint.peak, footprint.held

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        if stream.requires_grad and stream.grad_fn is not None:
            stream.register_hook(back)

    forget_layouts()  # layouts cache tensors
    first = next(iter(linearized_layers(student).values()))
    hook = first.register_forward_hook(watch)
    try:
        with footprint, blocks_for(device):
            if config.batch_size > len(rows):
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            objective.backward([rows])
            left, backward = sum(p.grad.nbytes for p in parameters if p.grad is not None), footprint.peak
            for parameter in parameters:
                parameter.grad = None
            footprint.peak = footprint.held
            objective.evaluate(rows)
    finally:
        hook.remove()
        forget_layouts()
    return StepBytes(forward, backward, left, footprint.peak)


def _rows(model: PreTrainedModel, count: int, length: int) -> Rows:
    """Return rows of arbitrary contents, with two documents in each row of a decoder."""
    config: Any = model.config
    if not ARCHITECTURES[config.model_type].bidirectional:
        position = torch.arange(length) - torch.where(torch.arange(length) < length // 2, 0, length // 2)
        ids = torch.full((count, length), int(config.pad_token_id == 0))
        return PackedRows(ids, position.expand(count, -1).contiguous(), ids)
    if getattr(config, "vocab_size", None):
        ids = torch.zeros(count, length, dtype=torch.int64)
        return _Encoded({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    height, width = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
    return _Encoded({"pixel_values": torch.zeros(count, config.num_channels, height, width)})


@dataclass(frozen=True)
class _Encoded:
    """Rows of an encoder without a head; the first hidden state of a row is used as its logits."""

    arguments: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.arguments.values())))

    @property
    def num_tokens(self) -> int:
        return len(self)

    def target_counts(self) -> Tensor:
        return torch.ones(len(self), dtype=torch.int64)

    def rows(self, indices: Indices) -> _Encoded:
        return _Encoded({name: x[indices] for name, x in self.arguments.items()})

    def inputs(self) -> dict[str, Tensor]:
        return dict(self.arguments)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.arguments.values()

    def compared(self, outputs: BaseModelOutput) -> Tensor:
        assert outputs.last_hidden_state is not None
        return outputs.last_hidden_state[:, 0]

    def targets(self) -> Tensor:
        return torch.zeros(len(self), dtype=torch.int64)
