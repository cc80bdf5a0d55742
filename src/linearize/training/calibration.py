"""Initialise the log-sum-exp merge of window and linear part, by measuring far keys' weights on the teacher.

With a wrong offset one part has all the weight, and gradients vanish. So the offset of each head, and the temperature
of its exponential features, are fitted to the share of its weight that softmax gives to all far keys together.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from linearize.configs.spans import SlidingSpan
from linearize.data.rows import Rows, on_device
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.sharding import run_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.combine import AbsoluteScaleCombine
from linearize.mixers.feature_maps.learned import Learned
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.backend import window_softmax
from linearize.ops.inputs import SoftmaxInputs
from linearize.ops.layout import SequenceLayout

LEAST_SHARE = 1e-4  # the least share of far keys to fit: a share of 0 would leave no gradient
MOST_LOG_ODDS = 20.0
TEMPERATURES = tuple(2.0**i for i in range(-5, 3))  # powers of 2, which can be undone without rounding


@torch.no_grad()
def calibrate(student: PreTrainedModel, rows: Rows, tokens: int) -> None:
    """Fit every layer with a log-sum-exp merge, in place, on the teacher's queries and keys of the first rows.

    This is a logistic regression of the far keys' share p of softmax on log(phi_q . z) less the window's log-sum-exp:
    the offset gives the right mean share, and the temperature the least cross-entropy of the shares. (Least squares of
    the logarithms would fit the few queries that attend to far keys, and make all others attend to them too.)

    Raises:
        UserError: an encoder, which does not divide keys into near and far ones.
    """
    shape = TeacherShape.from_config(student.config.to_dict())
    shape.refuse_encoder("transfer.calibration_tokens", "set it to null")
    fits = {
        (id(layer), heads): _Fit(mixer)
        for layer in linearized_layers(student).values()
        for heads, mixer in layer.mixer.parts()
        if isinstance(mixer, LinearMixer) and isinstance(mixer.combine, AbsoluteScaleCombine)
    }

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        for heads, _ in layer.mixer.parts():
            if (fit := fits.get((id(layer), heads))) is not None:
                at = SequenceLayout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
                fit.add(inputs.heads(heads), at)
        return softmax_output(layer, inputs, layout)

    with observed(student, observe):
        for row in range(min(len(rows), -(-tokens * len(rows) // rows.num_tokens))):
            run_layers(student, on_device(rows.rows(slice(row, row + 1)).inputs(), student.device))
    for fit in fits.values():
        fit.finish()


class _Fit:
    """Compute the far keys' share of softmax of one layer's queries, and its log odds at every temperature."""

    def __init__(self, mixer: LinearMixer) -> None:
        self.mixer = mixer
        self.temperatures, self.groups = (1.0,), 1
        if isinstance(mixer.feature_map, Learned):  # query heads that share a key map have one temperature
            self.temperatures, self.groups = TEMPERATURES, min(len(p) for p in mixer.feature_map.parameters())
        self.share: list[Float[Tensor, "H N"]] = []
        self.log_odds: list[Float[Tensor, "t H N"]] = []

    def add(self, inputs: AttnInputs, layout: SequenceLayout) -> None:
        every = SlidingSpan(window_size=layout.length)
        accumulated = inputs.accumulated()
        near, _ = self.mixer.partials(inputs, layout)
        assert near is not None
        q, k, v = accumulated.q, accumulated.k, accumulated.v
        whole = window_softmax(SoftmaxInputs(q, k, v, every, layout, inputs.scaling, inputs.softcap))
        log_near = near.den.log() + near.log_scale
        counts = self.mixer.has_linear(layout.query_position)[0]
        self.share.append(1 - (log_near - whole.den.log() - whole.log_scale).exp().clamp(0, 1)[0, :, counts].double())
        log_odds = []
        for temperature in self.temperatures:
            factor = torch.full(log_near.shape[1:2], temperature, device=log_near.device)
            _scale(self.mixer, factor)
            linear = self.mixer.partials(inputs, layout)[1]
            _scale(self.mixer, 1 / factor)
            assert linear is not None
            log_far = linear.den.clamp_min(torch.finfo(linear.den.dtype).tiny).log() + linear.log_scale
            log_odds.append((log_far - log_near)[0, :, counts].double())
        self.log_odds.append(torch.stack(log_odds))

    def finish(self) -> None:
        """Set each query head's offset, and the temperature of each head of keys."""
        share, log_odds = torch.cat(self.share, -1), torch.cat(self.log_odds, -1)
        if not share.shape[-1]:
            return
        offset = offset_of_mean(log_odds, share.mean(-1))
        fitted = log_odds + offset[..., None]
        loss = -(share * logsigmoid(fitted) + (1 - share) * logsigmoid(-fitted)).mean(-1)
        best = loss.unflatten(1, (self.groups, -1)).sum(2).argmin(0).repeat_interleave(len(share) // self.groups)
        self.mixer.combine.get_parameter("offset").copy_(offset.gather(0, best[None])[0])
        _scale(self.mixer, torch.tensor(self.temperatures, device=best.device)[best])


def offset_of_mean(log_odds: Float[Tensor, "t H N"], share: Float[Tensor, " H"]) -> Float[Tensor, "t H"]:
    """Return b for which the mean of sigmoid(log_odds + b) over N is `share`, by bisection: the mean grows with b."""
    wanted = share.clamp(LEAST_SHARE, 1 - LEAST_SHARE)
    low, high = -log_odds.amax(-1) - MOST_LOG_ODDS, -log_odds.amin(-1) + MOST_LOG_ODDS
    for _ in range(60):
        middle = (low + high) / 2
        below = (log_odds + middle[..., None]).sigmoid().mean(-1) < wanted
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _scale(mixer: LinearMixer, factor: Float[Tensor, " H"]) -> None:
    """Multiply the arguments of exponential features; query heads that share a key map have one factor."""
    if not isinstance(mixer.feature_map, Learned):
        return
    for parameter in mixer.feature_map.parameters():
        matrices = len(parameter)
        shape = matrices, *[1] * (parameter.ndim - 1)
        parameter.mul_(factor[:: len(factor) // matrices].view(shape).to(parameter.dtype))
