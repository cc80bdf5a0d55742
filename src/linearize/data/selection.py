"""Select training rows by the distance over which the teacher attends (LoLCATs, effective sequence length).

Axes: N rows, L tokens per row, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import progress
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import SlidingSpan
from linearize.data.packing import Score
from linearize.data.rows import PackedRows, inference, on_device
from linearize.hf.attention import observed, softmax_output
from linearize.hf.convert import convert_layers
from linearize.hf.sharding import run_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout

# No layer computes this mixer: softmax outputs feed the next layer. Conversion makes them observable.
_WATCHED = MixerConfig(span=SlidingSpan(window_size=1), feature_map=None, combine=WindowOnly())


def effective_sequence_lengths(teacher: PreTrainedModel, rows: PackedRows) -> Float64[Tensor, " N"]:
    """Return sum_i sum_{j<=i} (i - j) a_ij of each row, in tokens, a mean over heads and layers (LoLCATs eq. 9).

    As in the paper (App. B.2.2), rows are packed samples of equal length; sums over texts of different lengths cannot
    be compared. Documents in a row do not see each other. Without a T x T matrix: attention is linear in its values, so
    with positions of keys as values its output is sum_j j a_ij. In fp32 (fp64 for an fp64 teacher), since bf16 does not
    represent all positions above 256. The teacher is unchanged.

    Raises:
        UserError: an architecture that is not supported, or an encoder.
    """
    shape = TeacherShape.from_config(teacher.config.to_dict())
    shape.refuse_encoder("data.select_rows_by_esl", "set it to null")
    watched = convert_layers(teacher, (_WATCHED,) * shape.num_layers)
    lengths: list[Tensor] = []
    with inference(watched) as device:
        for row in progress(range(len(rows)), "effective sequence lengths"):
            inputs = on_device(rows.rows(slice(row, row + 1)).inputs(), device)
            lengths.append(_reach(watched, inputs).sum())
    return torch.stack(lengths) if lengths else torch.empty(0, dtype=torch.float64)


def reach_by(load_teacher: Callable[[], PreTrainedModel]) -> Score:
    """Return a score of rows by effective sequence length; it loads the model when it is called."""
    return lambda rows: effective_sequence_lengths(load_teacher(), rows)


def _reach(watched: PreTrainedModel, inputs: dict[str, Any]) -> Float64[Tensor, " L"]:
    """Return the mean distance of each token's attention, in tokens, over heads and layers."""
    position: Tensor = inputs["position_ids"][0]
    found: list[Float[Tensor, " L"]] = []

    def observe(layer: Any, at: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        exact = at.accumulated()
        # Contiguous, because fused kernels, which build no T x T matrix, need values of stride 1.
        values = position[:, None].to(exact.v.dtype).expand_as(exact.v).contiguous()
        attended: Float[Tensor, "1 H L"] = softmax_output(layer, replace(exact, v=values), layout)[..., 0]
        found.append(position - attended[0].mean(dim=0))
        return softmax_output(layer, at, layout)

    with observed(watched, observe):
        run_layers(watched, inputs)
    return torch.stack(found).mean(dim=0).cpu().double()
