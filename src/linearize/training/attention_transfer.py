"""Stage 1, attention transfer: train every mixer to match softmax attention (LoLCATs sec. 3.2).

Softmax outputs feed the next layer, and a mixer's loss depends on that mixer alone. So the model runs forward without a
graph. Each attention call runs its mixer with a graph, back-propagates its loss and frees the graph. Peak memory is
that of inference plus one layer, and no T x T matrix exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.configs.training import TransferConfig
from linearize.data.rows import Rows, on_device
from linearize.distributed import all_reduce_losses, shard_batches
from linearize.hf.attention import (
    linearized_layers,
    observed,
    softmax_output,
)
from linearize.hf.sharding import run_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout
from linearize.training.calibration import calibrate
from linearize.training.loop import TrainResult, Unit, load_trained, train
from linearize.training.resumption import RESULT, read_stage_json
from linearize.training.transfer_losses import check_losses, transfer_loss

NO_PARAMETERS = "transfer: expected mixers with parameters to train, found none; set transfer=null"


def attention_transfer(
    student: PreTrainedModel,
    train_rows: Rows,
    validation_rows: Rows,
    config: TransferConfig,
    *,
    output_dir: Path | str,
    seed: int = 0,
    title: str = "attention transfer",
) -> TrainResult:
    """Train the student's mixers in place. Each layer has its own clipping, schedule and best snapshot.

    Layers are independent given the teacher's activations, so this equals training any subset of them alone. The loss
    is `config.loss` (LoLCATs, arXiv 2410.10254, eq. 6; Hedgehog, arXiv 2402.04347, eq. 4). Files in `output_dir`,
    errors and resumption are those of `training.loop.train`.

    Args:
        train_rows, validation_rows: of `build_dataset`, token ids of shape (rows, `sequence_length`).
    """
    output_dir = Path(output_dir)
    student.requires_grad_(False)
    student.eval()
    objective = TransferObjective(student, config)
    if config.calibration_tokens is not None and not (output_dir / RESULT).is_file():
        calibrate(student, train_rows, config.calibration_tokens)
    return train(
        objective, train_rows, validation_rows, config, output_dir=output_dir, seed=seed, title=title, model=student
    )


def transfer_errors(output_dir: Path, num_layers: int) -> list[float]:
    """Return each layer's best held-out loss of a finished stage; 0 for layers that were not trained."""
    result = read_stage_json(output_dir / RESULT)
    errors = [0.0] * num_layers
    for name, loss in result["best_loss"].items():
        errors[layer_index(name)] = loss
    return errors


def layer_index(name: str) -> int:
    """Return a module's layer: the first number in its name. (ALBERT's names have a second number, 0.)"""
    return int(next(part for part in name.split(".") if part.isdigit()))


def load_transferred(student: PreTrainedModel, config: TransferConfig, output_dir: Path) -> None:
    """Load the mixers of a finished stage into `student`, in place."""
    load_trained(TransferObjective(student, config).units, output_dir)


class TransferObjective:
    """The loss of each converted layer with parameters: the weighted sum of `transfer_losses.transfer_loss`.

    If the residual stream goes through a layer several times (ALBERT), its loss is the mean over these passes. Means
    are over the valid tokens of all batches together; padding does not count.

    Raises:
        UserError: no layer has parameters, or a loss is not defined for a layer's mixer.
    """

    def __init__(self, student: PreTrainedModel, config: TransferConfig) -> None:
        self._student, self._config = student, config
        self._names = {id(layer): name for name, layer in linearized_layers(student).items()}
        self._passes = layer_passes(student)
        units = []
        for name, layer in linearized_layers(student).items():
            layer.mixer.requires_grad_(True)
            if parameters := {f"{name}.mixer.{key}": p for key, p in layer.mixer.named_parameters()}:
                units.append(Unit(name, parameters))
        check_transfer(config, {name: layer.mixer for name, layer in linearized_layers(student).items()})
        self.units: Sequence[Unit] = units

    def backward(self, micro_batches: list[Rows]) -> dict[str, float]:
        """Add gradients of the mean loss over the rows, layer by layer in the forward pass; return the losses."""
        return self._losses(micro_batches, gradients=True)

    def evaluate(self, rows: Rows) -> dict[str, float]:
        """Return the held-out loss of each layer."""
        size = self._config.micro_batch_size or self._config.batch_size
        batches = [rows.rows(slice(start, start + size)) for start in range(0, len(rows), size)]
        return self._losses(batches, gradients=False)

    def _losses(self, batches: list[Rows], *, gradients: bool) -> dict[str, float]:
        """Return the loss of each layer; with `gradients`, also add its gradients."""
        sums: dict[str, Tensor] = {}
        tokens = sum(batch.num_tokens for batch in batches)  # without padding
        names = {unit.name for unit in self.units}
        for index, counts in shard_batches(batches):

            def observe(
                layer: Any, inputs: AttnInputs, layout: SequenceLayout | None, index: int = index, counts: int = counts
            ) -> Tensor:
                target, name = softmax_output(layer, inputs, layout), self._names[id(layer)]
                if name in names:
                    share = batches[index].num_tokens / tokens
                    with torch.set_grad_enabled(gradients):
                        loss = transfer_loss(layer, inputs, layout, target, self._config, share)
                        loss = counts * loss / self._passes[name]
                        if loss.requires_grad:  # without a window, no parameter may affect the loss
                            loss.backward()
                    sums[name] = sums.get(name, 0) + loss.detach()
                return target

            with torch.no_grad(), observed(self._student, observe):
                run_layers(self._student, on_device(batches[index].inputs(), self._student.device))
        return all_reduce_losses({name: float(value) for name, value in sums.items()})


def check_transfer(config: TransferConfig, mixers: Mapping[str, nn.Module]) -> None:
    """Check that attention transfer has parameters to train, and losses that are defined for their mixers.

    Args:
        mixers: by the name of their layer; they may be on the meta device.

    Raises:
        UserError: no mixer has parameters, or a loss is not defined for one that has.
    """
    learning = {name: mixer for name, mixer in mixers.items() if any(True for _ in mixer.parameters())}
    for name, mixer in learning.items():
        check_losses(config, name, mixer)
    if not learning:
        raise UserError(NO_PARAMETERS)


def layer_passes(student: PreTrainedModel) -> dict[str, int]:
    """Return how often the residual stream goes through each converted layer."""
    layers = linearized_layers(student)
    if not any(layer.bidirectional for layer in layers.values()):
        return dict.fromkeys(layers, 1)
    passes = TeacherShape.from_config(student.config.to_dict()).passes
    return {name: passes[layer.layer_idx] for name, layer in layers.items()}
