"""Which documents to train on: how far back the teacher looks in them (LoLCATs, effective sequence length).

Axes: N documents, H heads, T tokens of the documents that share a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import PreTrainedModel

from linearize.data.packing import document_progress
from linearize.data.rows import inference
from linearize.data.templates import TokenDocument
from linearize.hf.attention import observed, softmax_output
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers import AttnInputs
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import MixerConfig
from linearize.ops import Layout, SlidingSpan

# No layer computes its mixer: what feeds the next layer is softmax attention. Conversion lets us watch it.
_WATCHED = MixerConfig(span=SlidingSpan(window_size=1), feature_map=None, combine=WindowOnly())


def effective_sequence_lengths(
    teacher: PreTrainedModel, documents: Sequence[TokenDocument], max_length: int
) -> Float64[Tensor, " N"]:
    """sum_i sum_{j<=i} (i - j) a_ij of each document, in tokens, a mean over heads and layers (LoLCATs eq. 9).

    No T x T matrix exists: attention is linear in its values, so sum_j j a_ij is what it gives where the values are
    the positions of the keys. In fp32 (fp64 for an fp64 teacher), since bf16 holds no position above 256. The teacher
    is left as it is.

    Args:
        max_length: only that many first tokens of a document are read.

    Raises:
        UserError: an architecture that is not supported, or an encoder.
    """
    shape = TeacherShape.from_config(teacher.config.to_dict())
    shape.refuse_encoder("data.top_esl", "set it to null")
    watched = convert_layers(teacher, (_WATCHED,) * shape.num_layers)
    lengths = []
    title = f"effective sequence lengths of {len(documents):,}:"
    with inference(watched) as device, document_progress(title) as advance:
        for row in _rows(documents, max_length):
            lengths += _row_lengths(watched, [tokens.to(device) for tokens in row])
            advance(len(row))
    return torch.tensor(lengths, dtype=torch.float64)


def _rows(documents: Sequence[TokenDocument], max_length: int) -> Iterator[list[Int64[Tensor, " _"]]]:
    """The documents' beginnings, in order, as many together as `max_length` tokens hold."""
    row: list[Tensor] = []
    for document in documents:
        tokens = document.input_ids[:max_length]
        if sum(map(len, row)) + len(tokens) > max_length:
            yield row
            row = []
        row.append(tokens)
    if row:
        yield row


def _row_lengths(watched: PreTrainedModel, documents: list[Int64[Tensor, " _"]]) -> list[float]:
    input_ids = torch.cat(documents)[None]
    position = torch.cat([torch.arange(len(tokens), device=input_ids.device) for tokens in documents])
    reach: list[Float[Tensor, " T"]] = []

    def observe(layer: Any, inputs: AttnInputs, layout: Layout | None) -> Tensor:
        exact = inputs.accumulated()
        # Contiguous: a fused kernel, which builds no T x T matrix, reads values of stride 1 only.
        values = position[:, None].to(exact.v.dtype).expand_as(exact.v).contiguous()
        attended: Float[Tensor, "1 H T"] = softmax_output(layer, replace(exact, v=values), layout)[..., 0]
        reach.append(position - attended[0].mean(dim=0))
        return softmax_output(layer, inputs, layout)

    with observed(watched, observe):
        watched.base_model(input_ids=input_ids, position_ids=position[None], use_cache=False)
    of_tokens: Float64[Tensor, " T"] = torch.stack(reach).mean(dim=0).cpu().double()
    return [float(part.sum()) for part in of_tokens.split([len(tokens) for tokens in documents])]
