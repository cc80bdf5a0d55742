"""Stage 1, attention transfer: every mixer learns to give what softmax attention gives (LoLCATs sec. 3.2).

Memory-flat. Softmax outputs feed the next layer and a mixer's loss touches that mixer only, so the model runs forward
without a graph, and inside each attention call the mixer runs with one, its loss is back-propagated at once and the
graph is freed. Peak memory is that of inference plus one layer, and no T x T matrix exists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from linearize.errors import UserError
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.mixers import AttnInputs
from linearize.ops import Layout
from linearize.stages import TransferConfig
from linearize.training.bypass import dropped_windows
from linearize.training.data import PackedRows
from linearize.training.loop import Step, TrainResult, Unit, load_trained, train


def attention_transfer(
    student: PreTrainedModel,
    train_rows: PackedRows,
    validation_rows: PackedRows,
    config: TransferConfig,
    *,
    output_dir: Path,
    seed: int = 0,
) -> TrainResult:
    """Train the student's mixers in place, each layer clipped, scheduled and best-checkpointed on its own.

    Layers are independent given the teacher's activations, so this equals training any subset of them alone.
    """
    student.requires_grad_(False)
    student.eval()
    objective = TransferObjective(student, config)
    return train(
        objective, train_rows, validation_rows, config, output_dir=output_dir, seed=seed, title="attention transfer"
    )


def transfer_errors(output_dir: Path, num_layers: int) -> list[float]:
    """Each layer's held-out loss after a finished stage; 0 for layers that were not trained."""
    result = json.loads((output_dir / "result.json").read_text(encoding="utf-8"))
    errors = [0.0] * num_layers
    for name, loss in result["best_loss"].items():
        errors[layer_index(name)] = loss
    return errors


def layer_index(name: str) -> int:
    """Which layer a module is in, by its name: the one number in it."""
    return int(next(part for part in name.split(".") if part.isdigit()))


def load_transferred(student: PreTrainedModel, config: TransferConfig, output_dir: Path) -> None:
    """Load the mixers of a finished stage into `student`, in place."""
    load_trained(TransferObjective(student, config).units, output_dir)


class TransferObjective:
    """The loss of each converted layer: `config.output_mse` times the MSE of outputs before the output projection.

    The mean is over tokens, heads and head dimension (LoLCATs eq. 5 for one layer). Layers without a parameter are left
    out.

    Raises:
        UserError: no layer has any.
    """

    def __init__(self, student: PreTrainedModel, config: TransferConfig) -> None:
        self._student, self._config = student, config
        self._names = {id(layer): name for name, layer in linearized_layers(student).items()}
        units = []
        for name, layer in linearized_layers(student).items():
            layer.mixer.requires_grad_(True)
            if parameters := {f"{name}.mixer.{key}": p for key, p in layer.mixer.named_parameters()}:
                units.append(Unit(name, parameters))
        if not units:
            raise UserError("transfer: expected mixers that learn, found none with parameters; set transfer=null")
        self.units: Sequence[Unit] = units

    def backward(self, micro_batches: list[PackedRows], step: Step) -> dict[str, float]:
        """Gradients of the mean loss over the rows, layer by layer while the model runs forward."""
        with dropped_windows(self._student, self._config, step):
            return self._losses(micro_batches, learn=True)

    def evaluate(self, rows: PackedRows) -> dict[str, float]:
        """The held-out loss of each layer."""
        size = self._config.micro_batch_size or self._config.batch_size
        batches = [rows.rows(slice(start, start + size)) for start in range(0, len(rows), size)]
        return self._losses(batches, learn=False)

    def _losses(self, batches: list[PackedRows], learn: bool) -> dict[str, float]:
        total, learners = sum(len(batch) for batch in batches), {unit.name for unit in self.units}
        sums: dict[str, Tensor] = {}

        for batch in batches:
            share = len(batch) / total

            def observe(layer: Any, inputs: AttnInputs, layout: Layout | None, share: float = share) -> Tensor:
                target, name = softmax_output(layer, inputs, layout), self._names[id(layer)]
                if name in learners:
                    with torch.set_grad_enabled(learn):
                        loss = share * self._config.output_mse * mean_squared_error(layer.mixer(inputs, layout), target)
                        if loss.requires_grad:  # without a window, nothing depends on how it is weighted
                            loss.backward()
                    sums[name] = sums.get(name, 0) + loss.detach()
                return target

            with torch.no_grad(), observed(self._student, observe):
                device = self._student.device
                self._student.base_model(
                    input_ids=batch.input_ids.to(device), position_ids=batch.position_ids.to(device), use_cache=False
                )
        return {name: float(value) for name, value in sums.items()}


def mean_squared_error(y: Float[Tensor, "B H T D"], target: Float[Tensor, "B H T D"]) -> Float[Tensor, ""]:
    """In fp32 (fp64 for fp64 outputs), since bf16 cannot hold small differences of outputs."""
    dtype = torch.promote_types(torch.float32, y.dtype)
    return torch.nn.functional.mse_loss(y.to(dtype), target.to(dtype))
