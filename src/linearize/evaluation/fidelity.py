"""Compare the output of each converted head with the softmax attention that it replaced.

The model runs with softmax attention in every converted layer, and the softmax outputs feed the next layer, as in
attention transfer. So errors of earlier layers do not count. In each layer the mixer and softmax read the same q, k and
v of the measured model, after fine-tuning those of its fine-tuned projections. "Teacher" means this softmax, "student"
the mixer.

Axes: B rows, H query heads, T tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import UserError, progress
from linearize.data.rows import Rows, inference, on_device
from linearize.evaluation.results import Fidelity, LayerFidelity
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.sharding import run_layers
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout


@dataclass(frozen=True)
class Visit:
    """One converted layer on some rows.

    Attributes:
        index: of the layer in the model.
        module: its attention module, with `.mixer`.
        target: softmax attention's output [B, H, T, D] before the output projection.
        first_row: the index of the first row of `inputs` among all rows.
    """

    index: int
    module: Any
    inputs: AttnInputs
    layout: SequenceLayout | None
    target: Tensor
    first_row: int

    def outputs(self) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N D"]]:
        """Return the outputs of the mixer and of softmax in double precision, without padding.

        Raises:
            FloatingPointError: an output of the mixer is not a finite number.
        """
        y, target = self.module.mixer(self.inputs, self.layout).double(), self.target.double()
        if self.layout is None:
            y, target = (x.transpose(0, 1).flatten(1, 2) for x in (y, target))
        else:
            valid = (self.layout.query_position >= 0).expand(len(y), -1)
            y, target = (x.transpose(1, 2)[valid].transpose(0, 1) for x in (y, target))
        if bad := int((~y.isfinite()).any(-1).sum()):
            raise FloatingPointError(f"fidelity: layer {self.index}: {bad} outputs of heads are not finite numbers")
        return y, target


def measure_fidelity(student: PreTrainedModel, rows: Rows, *, max_tokens: int, batch_size: int, seed: int) -> Fidelity:
    """Measure every converted layer of `student` on drawn rows.

    Args:
        max_tokens: of the rows that are drawn, together; one row is always drawn.
        batch_size: rows per forward pass.
        seed: draws the rows.

    Raises:
        UserError: a model without converted layers.
        FloatingPointError: a mixer's output is not a finite number.
    """
    sample = drawn_rows(rows, max_tokens, seed)
    squares: dict[int, Float[Tensor, "2 H"]] = {}

    def visit(layer: Visit) -> None:
        y, target = layer.outputs()
        both = torch.stack([(y - target).square().sum((1, 2)), target.square().sum((1, 2))]).cpu()
        squares[layer.index] = squares.get(layer.index, 0) + both

    visit_layers(student, sample, visit, batch_size=batch_size, title="fidelity")
    least = torch.finfo(torch.float64).tiny
    layers = [
        LayerFidelity(index, (error / square.clamp_min(least)).tolist())
        for index, (error, square) in sorted(squares.items())
    ]
    return Fidelity(sample.num_tokens, layers)


def drawn_rows(rows: Rows, max_tokens: int, seed: int) -> Rows:
    """Return rows drawn by `seed` with at most `max_tokens` tokens together, but at least one row.

    All rows count as having the mean length.
    """
    length = max(1, rows.num_tokens // len(rows))
    count = min(len(rows), max(1, max_tokens // length))
    return rows.rows(torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].sort().values)


def visit_layers(
    student: PreTrainedModel, rows: Rows, visit: Callable[[Visit], None], *, batch_size: int, title: str
) -> None:
    """Call `visit` for each converted layer, in order, on batches of rows; softmax outputs feed the next layer.

    Raises:
        UserError: a model without converted layers.
    """
    if not linearized_layers(student):
        raise UserError(f"model: expected a linearized one, found {type(student).__name__}; convert it first")
    with inference(student) as device:
        for first in progress(range(0, len(rows), batch_size), title):

            def observe(module: Any, inputs: AttnInputs, layout: SequenceLayout | None, first: int = first) -> Tensor:
                target = softmax_output(module, inputs, layout)
                visit(Visit(module.layer_idx, module, inputs, layout, target, first))
                return target

            with observed(student, observe):
                run_layers(student, on_device(rows.rows(slice(first, first + batch_size)).inputs(), device))
