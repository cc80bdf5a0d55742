"""KV budget allocation per layer: full softmax attention in some layers, one common window with a sink in the others.

Stock engines run such models (docs/running.md). A measurement chooses the layers that stay full: each layer alone gets
the window, and the outputs on a text and its repetition are compared with the teacher's (KL).

Axes: H query heads, G KV heads, T tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import Record, UserError, progress
from linearize.configs.memory import MemoryConfig
from linearize.configs.mixer import LayerPlan
from linearize.data.rows import PackedRows
from linearize.hf.attention import observed, softmax_output
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.inputs import AttnInputs
from linearize.ops.layout import SequenceLayout
from linearize.training.eviction_scores import REQUEST, context_length, contexts
from linearize.training.learned_sinks import SINK_CONTEXTS, WINDOW, LearnedSinks, measure_first_tokens
from linearize.training.memory import budget_bytes, layer_mixer, layer_sizes, layers_bytes

CONTEXTS = 2  # that the teacher repeats once per layer


class LayerAllocation(Record):
    """The memory of each layer that can be converted.

    Attributes:
        window: tokens of a layer that is not full, the query's own included.
        full: layers with full softmax attention, in rising order.
        losses: as `measure_layers` returns them.
        budget, held: bytes of one sequence of `reference_length` tokens: at most, and as allocated.
    """

    window: int
    full: list[int]
    sinks: int
    learned_sink: bool
    losses: dict[int, float]
    budget: int
    held: int

    def plan(self, num_layers: int) -> LayerPlan:
        """Return the layer plan; full layers and those that cannot be converted stay softmax."""
        mixer = layer_mixer(self.window, self.sinks, learned_sink=self.learned_sink)
        converted = set(self.losses) - set(self.full)
        return tuple(mixer if layer in converted else None for layer in range(num_layers))


def allocate_layers(
    memory: MemoryConfig, losses: Mapping[int, float], teacher: TeacherShape, dtype: torch.dtype
) -> LayerAllocation:
    """Keep the layers full whose window has the largest loss, as many as the budget allows (`layer_sizes`).

    Args:
        losses: by layer that can be converted, as `measure_layers` returns them.
        dtype: of keys and values, in which bytes are counted.
    """
    layers = sorted(losses)
    count, window = layer_sizes(memory, teacher, len(layers), dtype)
    full = sorted(sorted(layers, key=lambda layer: -losses[layer])[:count])
    return LayerAllocation(
        window=window,
        full=full,
        sinks=memory.sinks,
        learned_sink=memory.learned_sink,
        losses=dict(losses),
        budget=budget_bytes(memory, teacher, dtype),
        held=layers_bytes(memory, teacher, count, len(layers) - count, window, dtype),
    )


@torch.no_grad()
def measure_layers(
    teacher: PreTrainedModel,
    layers: Sequence[int],
    memory: MemoryConfig,
    rows: PackedRows,
    tokenizer: Tokenizer,
    *,
    seed: int,
) -> tuple[dict[int, float], LearnedSinks]:
    """Measure the loss of a window in each layer, and the logit and the value of the first token.

    Costs CONTEXTS forward passes of about 1,050 tokens per layer, and SINK_CONTEXTS for all layers.

    Args:
        layers: indices of layers that can be converted.
        rows: training text.

    Returns:
        By layer, the KL from the teacher in nats per token, if this layer alone has a window of WINDOW tokens with its
        sink, over a text and its repetition; and the first token's logits and values.

    Raises:
        UserError: the model has too few positions, or there is too little text.
    """
    shape = TeacherShape.from_config(teacher.config.to_dict())
    request: list[int] = tokenizer(REQUEST, add_special_tokens=False).input_ids
    longest = context_length(shape, len(request))
    window = min(WINDOW, longest // 4)
    mixer = layer_mixer(window, memory.sinks, learned_sink=memory.learned_sink)
    watched = convert_layers(teacher, tuple(mixer if i in layers else None for i in range(shape.num_layers)))
    texts = list(contexts(rows, tokenizer, longest=longest, seed=seed, count=SINK_CONTEXTS))
    sinks = measure_first_tokens(watched, texts, window)
    sinks.apply(watched)
    losses = dict.fromkeys(layers, 0.0)
    windowed = -1  # no layer

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        return layer.mixer(inputs, layout) if layer.layer_idx == windowed else softmax_output(layer, inputs, layout)

    passes = progress([(text, layer) for text in texts[:CONTEXTS] for layer in (-1, *layers)], "KL of windows by layer")
    targets = torch.empty(0)
    with observed(watched, observe):
        for text, windowed in passes:
            ids = torch.tensor([text + request + text], device=watched.device)
            log_probs = watched(input_ids=ids, use_cache=False).logits[0, window:].float().log_softmax(-1)
            if windowed < 0:
                targets = log_probs
            else:
                kl = torch.nn.functional.kl_div(log_probs, targets, reduction="sum", log_target=True)
                losses[windowed] += kl.item() / len(targets) / CONTEXTS
    if not all(torch.tensor(list(losses.values())).isfinite()):
        raise UserError("memory: expected finite logits of the teacher, found others; load it in float32 or bfloat16")
    return {layer: round(loss, 6) for layer, loss in losses.items()}, sinks
