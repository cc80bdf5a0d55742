"""Measure initial logits and values of learned sinks on the teacher: a learned sink replaces the first token.

Axes: H query heads, G KV heads, N queries, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import Record, progress
from linearize.configs.spans import SlidingSpan
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.mixers.combine import WithSink
from linearize.mixers.feature_maps.base import MIN_DENOMINATOR
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.backend import window_softmax
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.training.calibration import offset_of_mean

LEARNED_SINKS = "learned_sinks.json"  # in the folder of a run
SINK_CONTEXTS = 16  # over which the first token's logits and values are averaged
WINDOW = 64  # tokens; queries beyond them are averaged


class LearnedSinks(Record):
    """Logits and values of learned sinks; layers that are not listed keep theirs.

    Attributes:
        logits: by layer [H], the mean scaled logit that queries give to the first token. For heads with a learned sink
            and no window: the logit with which the sink's mean share of weights equals the first token's.
        values: by layer [G][D], the mean value of the first token.
    """

    logits: dict[int, list[float]]
    values: dict[int, list[list[float]]]

    def apply(self, student: PreTrainedModel) -> None:
        """Set the learned sinks of a student of the teacher that was measured, in place."""
        for layer in linearized_layers(student).values():
            if layer.layer_idx not in self.logits:
                continue
            values = torch.tensor(self.values[layer.layer_idx])
            logits = torch.tensor(self.logits[layer.layer_idx]).unflatten(0, (len(values), -1))
            for heads, mixer in layer.mixer.parts():
                if isinstance(mixer.combine, WithSink) and mixer.combine.sink_logit is not None:
                    assert mixer.combine.sink_value is not None
                    mixer.combine.sink_logit.data.copy_(logits[list(heads)].flatten())
                    mixer.combine.sink_value.data.copy_(values[list(heads)])


@torch.no_grad()
def measure_first_tokens(watched: PreTrainedModel, texts: Sequence[Sequence[int]], window: int) -> LearnedSinks:
    """Measure the first token's logit, over queries beyond the window, and its value.

    Args:
        watched: the teacher, with the mixers of the student in the layers that are measured.
        texts: token ids.
        window: tokens.
    """
    logits: dict[int, list[Tensor]] = {}
    values: dict[int, list[Tensor]] = {}
    # For heads with a sink and no window, by layer and KV heads: the first token's shares, and the linear part's sums.
    shares: dict[tuple[int, tuple[int, ...]], list[Tensor]] = {}
    sums: dict[tuple[int, tuple[int, ...]], list[Tensor]] = {}

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        logits.setdefault(layer.layer_idx, []).append(_first_token_logits(inputs)[0, :, window:].mean(-1))
        values.setdefault(layer.layer_idx, []).append(inputs.v[0, :, 0].float())
        for heads, mixer in layer.mixer.parts():
            if isinstance(mixer, LinearMixer) and mixer.config.learned_sink and not mixer.span.max_softmax_keys:
                own, key = inputs.heads(heads), (layer.layer_idx, heads)
                linear = mixer.partials(own, SequenceLayout.full(own.q.shape[2], own.q.device))[1]
                assert linear is not None
                shares.setdefault(key, []).append(_first_token_weights(own)[0, :, window:])
                sums.setdefault(key, []).append(linear.den[0, :, window:])
        return softmax_output(layer, inputs, layout)

    with observed(watched, observe):
        for text in progress(texts, "the first token's attention"):
            watched(input_ids=torch.tensor([list(text)], device=watched.device), use_cache=False)
    means = {layer: torch.stack(x).mean(0) for layer, x in logits.items()}
    for (layer, heads), dens in sums.items():
        log_odds = -torch.cat(dens, -1).double().clamp_min(MIN_DENOMINATOR).log()
        fitted = offset_of_mean(log_odds[None], torch.cat(shares[layer, heads], -1).double().mean(-1))[0]
        by_head = means[layer].unflatten(0, (len(values[layer][0]), -1))
        by_head[list(heads)] = fitted.float().view(len(heads), -1)
    return LearnedSinks(
        logits={layer: _rounded(x) for layer, x in means.items()},
        values={layer: [_rounded(head) for head in torch.stack(x).mean(0)] for layer, x in values.items()},
    )


def _first_token_logits(inputs: AttnInputs) -> Float[Tensor, "B H T"]:
    """Return the scaled, soft-capped logits that queries give to the first token."""
    first = repeat_kv(inputs.k[:, :, :1], inputs.q.shape[1])
    scores = (inputs.q * first).float().sum(-1) * inputs.scaling
    return scores if inputs.softcap is None else inputs.softcap * (scores / inputs.softcap).tanh()


def _first_token_weights(inputs: AttnInputs) -> Float[Tensor, "B H T"]:
    """Return the weights that softmax over all keys gives to the first token."""
    x, length = inputs.accumulated(), inputs.q.shape[2]
    every, layout = SlidingSpan(window_size=length), SequenceLayout.full(length, x.q.device)
    whole = window_softmax(SoftmaxInputs(x.q, x.k, x.v, every, layout, x.scaling, x.softcap))
    return (_first_token_logits(x) - whole.log_scale).exp() / whole.den


def _rounded(x: Tensor) -> list[float]:
    return [round(number, 5) for number in x.tolist()]
