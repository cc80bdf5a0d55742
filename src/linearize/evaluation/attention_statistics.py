"""Measure statistics of a softmax teacher's attention, which help to choose windows and sinks.

Axes: N rows, T tokens of a row, H query heads, C queries and K keys of a block.
"""

# The types of torch and transformers are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import UserError, progress
from linearize.configs.data import DataConfig
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import SlidingSpan
from linearize.data.packing import first_tokens
from linearize.data.rows import inference
from linearize.evaluation.results import NEAR, AttentionStatistics
from linearize.hf.attention import observed, sliding_window, softmax_output
from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.hf.convert import convert_layers
from linearize.hf.sharding import run_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.attention_weights import block_scores, query_blocks, softmax_weights
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout

TOKENS = 768  # tokens of a row


def attention_statistics(teacher: PreTrainedModel, tokens: Int64[Tensor, "N T"]) -> AttentionStatistics:
    """Measure the attention of a decoder on rows of text, by blocks of queries, without a T x T matrix of all heads.

    The queries of the first third of a row do not count: they have few keys. In layers with sliding windows, queries
    see the keys of their own window.

    Args:
        tokens: rows of at least 3 tokens, each read as one document; rows of `TOKENS` tokens give two digits.

    Raises:
        UserError: a model that is linearized already.
    """
    shape = TeacherShape.from_config(teacher.config.to_dict())
    watch = MixerConfig(span=SlidingSpan(window_size=1), feature_map=None, combine=WindowOnly())
    watched = convert_layers(teacher, (watch,) * shape.num_layers)
    skipped = tokens.shape[1] // 3
    queries = tokens.shape[1] - skipped
    sums: dict[int, list[Float[Tensor, "H 3"]]] = {}

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        sums.setdefault(layer.layer_idx, []).append(_summed(layer, inputs.accumulated(), skipped).cpu())
        return softmax_output(layer, inputs, layout)

    with inference(watched) as device, observed(watched, observe):
        for row in progress(tokens, "attention of the teacher"):
            run_layers(watched, {"input_ids": row[None].to(device), "use_cache": False})
    by_head = torch.cat([torch.stack(x).mean(0) for _, x in sorted(sums.items())]) / queries
    entropy, first_token, beyond_near = by_head.mean(0).tolist()
    sink_heads = int((by_head[:, 1] > 0.5).sum())
    return AttentionStatistics(entropy, first_token, sink_heads, len(by_head), beyond_near, len(tokens) * queries)


def measured_attention(
    model: str, shape: TeacherShape, data: DataConfig, *, dtype: torch.dtype, device: torch.device
) -> AttentionStatistics:
    """Read a teacher's weights and measure its attention on the first `TOKENS` tokens of a dataset.

    Args:
        shape: of the teacher, which may have fewer positions.

    Raises:
        UserError: an encoder, weights or data that cannot be read, or a dataset of few tokens.
    """
    if shape.bidirectional:
        raise UserError(
            f"--dataset: expected a decoder, found {shape.model_type}, an encoder, whose attention is not measured; "
            "leave the option out"
        )
    tokens = first_tokens(data, load_tokenizer(model), min(TOKENS, shape.max_positions))
    if len(tokens) <= 2 * NEAR:
        raise UserError(
            f"--dataset: expected more than {2 * NEAR} tokens to measure attention on, found {len(tokens)}; give a "
            "longer text"
        )
    return attention_statistics(load_model(model, dtype=dtype, device=device), tokens[None])


def _summed(layer: Any, inputs: AttnInputs, skipped: int) -> Float[Tensor, "H 3"]:
    """Sum entropy, weight on the first token and weight on the other far tokens over the queries of one row."""
    layout = SequenceLayout.full(inputs.q.shape[2], inputs.q.device)
    total = torch.zeros(inputs.q.shape[1], 3, dtype=torch.float64, device=inputs.q.device)
    for block in query_blocks(layer.mixer, layout, 1, sliding_window(layer)):
        weights = softmax_weights(block_scores(inputs, block), block.visible)[0].double()
        query, key = (layout.key_position[0, slots] for slots in (block.queries, block.keys))
        query = query[:, None]
        weights = weights * (query >= skipped)
        far = (query - key >= NEAR) & (key > 0)
        parts = torch.special.entr(weights), weights * (key == 0), weights * far
        total += torch.stack([part.sum((1, 2)) for part in parts], dim=-1)
    return total
