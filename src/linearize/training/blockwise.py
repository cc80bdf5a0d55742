"""Attention transfer of a model that is never in memory as a whole (LoLCATs sec. 3.3, eq. 8, App. A.2).

It trains one block of layers at a time. The input of a block is the un-normalised residual stream after the previous
block with softmax attention. So no block depends on another's training, and each can be a separate job. Clipping,
schedule and best snapshot are per layer, so the result equals that of training all layers together.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import UserError, atomic_file, writing
from linearize.configs.mixer import LayerPlan
from linearize.configs.training import TransferConfig
from linearize.data.rows import PackedRows, on_device
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.checkpoint import read_config
from linearize.hf.convert import convert_layers
from linearize.hf.partial_model import load_block
from linearize.hf.teacher import TeacherShape
from linearize.training.activations import FILE_BYTES, Activations, StoredRows
from linearize.training.attention_transfer import NO_PARAMETERS, attention_transfer
from linearize.training.locks import claimed
from linearize.training.loop import TrainResult
from linearize.training.resumption import RESULT, TRAINED, StageFolder, read_stage, run_identity


@dataclass(frozen=True)
class BlockwiseTransfer:
    """The transfer of `model` (a folder or a hub id) to the mixers of `plan`, in blocks of `config.layers_per_block`.

    `folder` has a stage folder ``block-<i>`` for each block, the blocks' inputs in ``activations``, and at the end the
    files of one stage, as `attention_transfer` writes them.
    """

    model: str
    plan: LayerPlan
    config: TransferConfig
    train_rows: PackedRows
    validation_rows: PackedRows
    folder: Path
    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    @property
    def blocks(self) -> list[range]:
        """Return the layers of each block."""
        return layer_blocks(len(self.plan), self.config)

    def unfinished(self) -> list[int]:
        """Return the blocks that are still to be trained."""
        return unfinished_blocks(self.folder, len(self.blocks))

    def train(self, blocks: Collection[int]) -> None:
        """Train these blocks, resume those already begun, and write missing inputs of blocks.

        Raises:
            UserError: weights cannot be read, the disk is full, files belong to another run, or another job trains a
                block.
        """
        self._make_room_for_claims()
        with ExitStack() as claims:
            for index in sorted(set(blocks) & set(self.unfinished())):
                if not claims.enter_context(claimed(self._claim(index))):
                    raise UserError(
                        f"block {index}: expected one that no job trains, found another job at it; wait for that, or "
                        "choose another with --block"
                    )
            self._train(blocks)

    def train_unclaimed(self) -> None:
        """Train each block that no other job has claimed, one after another; errors are those of `train`."""
        self._make_room_for_claims()
        for index in self.unfinished():
            with claimed(self._claim(index)) as mine:
                if mine:
                    self._train([index])

    def _train(self, blocks: Collection[int]) -> None:
        wanted = set(blocks) & set(self.unfinished())
        for index in range(max(wanted, default=-1) + 1):
            written = all(self._leaving(index, side).complete for side in self._sides)
            hands_on = any(later > index for later in wanted) and not written
            if index in wanted or hands_on:
                self._visit(index, learns=index in wanted, hands_on=hands_on)

    def merge(self) -> None:
        """Write the trained parameters of all blocks as one finished stage, and delete the activations.

        Raises:
            UserError: a block is not finished, or of another run.
        """
        if not (self.folder / RESULT).is_file():
            if unfinished := self.unfinished():
                raise UserError(f"{self._stage(unfinished[0])}: expected a finished block, found none; train it first")
            self._merge()
        # A job that ended between its result and the removal of checkpoints leaves checkpoints.
        for done in ("activations", "claims", "block-*/checkpoint-*"):
            for path in self.folder.glob(done):
                shutil.rmtree(path, ignore_errors=True)

    # --- one block ----------------------------------------------------------------------------------------------------

    def _visit(self, index: int, *, learns: bool, hands_on: bool) -> None:
        layers, name = self.blocks[index], f"block {index} of {len(self.blocks)}"
        block = load_block(self.model, layers, dtype=self.dtype, device=self.device)
        student = convert_layers(block, self.plan[layers.start : layers.stop], seed=self.seed)
        student.requires_grad_(False)
        if learns:
            self._learn(index, student, name)
        if hands_on:
            Console(stderr=True).print(f"{name}: running its softmax layers for the next block", soft_wrap=True)
            self._hand_on(index, student)

    def _learn(self, index: int, student: PreTrainedModel, name: str) -> None:
        if any(next(layer.mixer.parameters(), None) is not None for layer in linearized_layers(student).values()):
            rows = self._entering(index, "train"), self._entering(index, "validation")
            options = {"output_dir": self._stage(index), "seed": self.seed, "title": f"attention transfer, {name}"}
            attention_transfer(student, *rows, self.config, **options)
        else:  # its layers stay softmax, or their mixers have no parameters
            nothing = TrainResult(0, 0, best_loss={}, initial_loss={}, seconds=0.0, stopped_early=False)
            StageFolder(self._stage(index), self._identity({})).finish({}, asdict(nothing))

    def _hand_on(self, index: int, student: PreTrainedModel) -> None:
        """Write the output of a block, computed as in training, so that rounding is equal."""
        for side in ("train", "validation"):
            rows = self._entering(index, side)

            def stream(chosen: slice, rows: PackedRows = rows) -> Float[Tensor, "N L E"]:
                starts = range(chosen.start, chosen.stop, self._pass_rows)
                passes = [rows.rows(slice(s, min(s + self._pass_rows, chosen.stop))) for s in starts]
                return torch.cat([residual_stream(student, part).cpu() for part in passes])

            self._leaving(index, side).write(stream, self._row_bytes)

    # --- files --------------------------------------------------------------------------------------------------------

    def _make_room_for_claims(self) -> None:
        folder = self._claim(0).parent
        with writing(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)

    def _claim(self, index: int) -> Path:
        return self.folder / "claims" / self._stage(index).name

    def _stage(self, index: int) -> Path:
        return _stage(self.folder, index)

    def _entering(self, index: int, side: str) -> PackedRows:
        rows = self._sides[side]
        if index == 0:
            return rows
        numbers, stored = torch.arange(len(rows)), self._leaving(index - 1, side)
        return StoredRows(rows.input_ids, rows.position_ids, rows.labels, stored, numbers)

    def _leaving(self, index: int, side: str) -> Activations:
        passes = max(1, FILE_BYTES // (self._pass_rows * self._row_bytes))
        layer = self.blocks[index].stop
        made_from = {"model": self.model, "dtype": str(self.dtype), "layer": str(layer), "data": self._data}
        folder = self.folder / "activations" / f"boundary-{index + 1:03d}"
        return Activations(folder, side, len(self._sides[side]), passes * self._pass_rows, made_from)

    @property
    def _sides(self) -> dict[str, PackedRows]:
        return {"train": self.train_rows, "validation": self.validation_rows}

    @property
    def _pass_rows(self) -> int:
        return self.config.micro_batch_size or self.config.batch_size

    @cached_property
    def _row_bytes(self) -> int:
        hidden = TeacherShape.from_config(read_config(self.model)).hidden_size
        return self.train_rows.input_ids.shape[1] * hidden * self.dtype.itemsize

    @cached_property
    def _data(self) -> str:
        return self._identity({})["data"]

    def _identity(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        rows = [t for r in self._sides.values() for t in r.tensors()]
        return run_identity(tensors, rows, self.config.identity(), self.seed)

    # --- all blocks ---------------------------------------------------------------------------------------------------

    def _merge(self) -> None:
        stages = [self._stage(index) for index in range(len(self.blocks))]
        read = [read_stage(stage / TRAINED, stage / RESULT, {}) for stage in stages]
        found = [result for _, result in read]
        tensors = {name: tensor for trained, _ in read for name, tensor in trained.items()}
        identity = self._identity(tensors)
        for stage, block in zip(stages, found, strict=True):
            for field, expected in identity.items():
                if field != "parameters" and block["identity"].get(field) != expected:
                    raise UserError(
                        f"{stage / RESULT}: belongs to another run: expected {field} = {expected}, found {field} = "
                        f"{block['identity'].get(field)}; use another output folder"
                    )
        learned = [block for block in found if block["best_loss"]]
        if not learned:
            raise UserError(NO_PARAMETERS)
        result = TrainResult(
            steps=max(block["steps"] for block in learned),
            tokens=max(block["tokens"] for block in learned),
            best_loss={name: loss for block in learned for name, loss in block["best_loss"].items()},
            initial_loss={name: loss for block in learned for name, loss in block["initial_loss"].items()},
            seconds=sum(block["seconds"] for block in learned),
            stopped_early=all(block["stopped_early"] for block in learned),
        )
        logs = [stage / "metrics.jsonl" for stage in stages]
        lines = [json.dumps(line) + "\n" for line in merged_metrics([_read_log(log) for log in logs if log.is_file()])]
        with atomic_file(self.folder / "metrics.jsonl", sum(map(len, lines))) as scratch:
            scratch.write_text("".join(lines), encoding="utf-8")
        StageFolder(self.folder, identity).finish(tensors, asdict(result))


def layer_blocks(num_layers: int, config: TransferConfig) -> list[range]:
    """Return the layers of each block, `config.layers_per_block` of them; the last block may have fewer."""
    size = config.layers_per_block
    assert size is not None
    return [range(start, min(start + size, num_layers)) for start in range(0, num_layers, size)]


def unfinished_blocks(folder: Path, num_blocks: int) -> list[int]:
    """Return the blocks that are still to be trained for the transfer in `folder`."""
    if (folder / RESULT).is_file():
        return []
    return [index for index in range(num_blocks) if not (_stage(folder, index) / RESULT).is_file()]


def _stage(folder: Path, index: int) -> Path:
    return folder / f"block-{index:03d}"


@torch.no_grad()
def residual_stream(student: PreTrainedModel, rows: PackedRows) -> Float[Tensor, "N L E"]:
    """Return the residual stream after a converted block, with softmax attention in all of its layers."""
    with observed(student, softmax_output):
        return student.base_model(**on_device(rows.inputs(), student.device)).last_hidden_state


def merged_metrics(logs: Sequence[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Merge the metrics of several stages into lines of one stage with all of their units.

    A stage that stopped early stays in the evaluations with its last losses, like a unit that has stopped. Seconds are
    summed.
    """
    # By step and kind: a step comes before the evaluation that follows it.
    ordered = [{(line["step"], line["event"] == "evaluation"): line for line in log} for log in logs]
    latest: list[dict[str, Any]] = [{} for _ in logs]
    evaluated: list[dict[str, Any]] = [{} for _ in logs]
    for moment in sorted({moment for log in ordered for moment in log}):
        there = {index: log[moment] for index, log in enumerate(ordered) if moment in log}
        is_step = next(iter(there.values()))["event"] == "step"
        for index, line in there.items():
            latest[index] = line
            if not is_step:
                evaluated[index] = line
        units = {
            name: unit for line in (there.values() if is_step else evaluated) for name, unit in line["units"].items()
        }
        merged = next(iter(there.values())) | {
            "seconds": sum(line["seconds"] for line in latest),
            "loss": sum(unit["loss"] for unit in units.values()) / len(units),
            "units": units,
        }
        if is_step:
            merged["tokens_per_second"] = 1 / sum(1 / line["tokens_per_second"] for line in there.values())
        yield merged


def _read_log(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise UserError(
            f"{path}: expected JSON lines, found others ({error}); delete {path.parent} to train the block again"
        ) from None
