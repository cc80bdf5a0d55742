"""What exact caches know of the teacher before they see a text: the scores that are fitted to its own attention.

Each layer's mixers are fitted alone, on softmax attention's queries, keys and values, in closed form. Axes: B rows, H
query heads, G KV heads, T slots of a row, D head dimension, F features of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import progress
from linearize.data.rows import Rows, on_device
from linearize.hf.attention import linearized_layers, observed, softmax_output
from linearize.hf.sharding import run_layers
from linearize.mixers.exact_cache import ExpectedAttention, Learned, copy_worth
from linearize.mixers.inputs import AttnInputs
from linearize.ops.dispatch import window_softmax
from linearize.ops.layout import Layout, SlidingSpan, TerracedSpan

TOKENS = 16384  # that scores are fitted on, where nobody says otherwise
RIDGE = 1e-3  # of features of variance 1
KEYS_AT_ONCE = 64  # whose attention from all queries exists

Fitted = Mapping[int, Sequence[tuple[Sequence[int], Any]]]  # by layer: mixers, and the KV heads of the layer they have


def fit_scores(student: PreTrainedModel, rows: Any, tokens: int = TOKENS) -> None:
    """Fit the scores of all exact caches of a student that are measured on the teacher, in place.

    Nothing where there are none. The same rows give the same numbers.

    Args:
        rows: packed text, of which the first `tokens` are read.
    """
    layers = linearized_layers(student).values()
    fit_mixers(student, {layer.layer_idx: list(layer.mixer.parts()) for layer in layers}, rows, tokens)


def copy_scores(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give a student the scores of another one of the same plan, linear parts apart."""
    both = (linearized_layers(model).values() for model in (source, target))
    for one, other in zip(*both, strict=True):
        copy_worth(one.mixer, other.mixer)


@torch.no_grad()
def fit_mixers(model: PreTrainedModel, mixers: Fitted, rows: Rows, tokens: int) -> None:
    """Fit these mixers' scores, in place, on what the layers of a converted `model` see of the teacher's softmax."""
    fits: dict[int, dict[Any, _Fit]] = {}
    for index, of_layer in mixers.items():
        for heads, mixer in of_layer:
            worth: Any = getattr(mixer, "worth", None)
            if (kind := FITS.get(type(worth))) is not None:
                # Mixers that differ in the size of their caches alone are fitted together.
                key = tuple(heads), kind, mixer.span
                fit = fits.setdefault(index, {}).setdefault(key, kind(mixer.span))
                fit.heads, fit.targets = heads, [*fit.targets, worth]
    if not fits:
        return

    def observe(layer: Any, inputs: AttnInputs, layout: Layout | None) -> Tensor:
        at = Layout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        for fit in fits.get(layer.layer_idx, {}).values():
            fit.add(inputs.accumulated().heads(fit.heads), at)
        return softmax_output(layer, inputs, layout)

    with observed(model, observe):
        for row in progress(range(min(len(rows), -(-tokens * len(rows) // rows.num_tokens))), "scores of exact caches"):
            run_layers(model, on_device(rows.rows(slice(row, row + 1)).inputs(), model.device))
    for fit in (fit for of_layer in fits.values() for fit in of_layer.values()):
        for target in fit.targets:
            target.load_state_dict(fit.result())


class _Fit:
    """What is counted of one layer, and what comes of it: the buffers of `targets`."""

    def __init__(self, span: Any) -> None:
        assert isinstance(span, TerracedSpan)  # as of every exact cache
        self.span = span
        self.heads: Sequence[int] = ()
        self.targets: list[torch.nn.Module] = []

    def add(self, inputs: AttnInputs, layout: Layout) -> None:
        """One row."""
        raise NotImplementedError

    def result(self) -> dict[str, Tensor]:
        """The buffers."""
        raise NotImplementedError


class _Queries(_Fit):
    """Mean and covariance of the scaled queries of each head, in fp64."""

    count: Any = 0
    sums: Any = 0
    products: Any = 0

    def add(self, inputs: AttnInputs, layout: Layout) -> None:
        valid = (layout.query_position >= 0).to(inputs.q.device)[:, None, :, None]
        q = torch.where(valid, inputs.q.double() * inputs.scaling, 0)
        self.count = self.count + valid.sum()
        self.sums = self.sums + q.sum((0, 2))
        self.products = self.products + (q.mT @ q).sum(0)

    def result(self) -> dict[str, Tensor]:
        mean = self.sums / self.count
        covariance = self.products / self.count - mean[:, :, None] * mean[:, None]
        return {"mean": mean.float(), "covariance": covariance.float()}


class _Largest(_Fit):
    """Ridge regression of the logarithm of the largest attention that a pair will get, at every doubling of its age.

    That of all queries, of all query heads of the KV head, that come when the pair has left the window and is so old.
    """

    products: Any = 0  # of features, 1 and the target, [G, F + 2, F + 2]

    def add(self, inputs: AttnInputs, layout: Layout) -> None:
        span, length = self.span, inputs.q.shape[2]
        ages, reach = [1], length - span.fold_lag
        while 2 * ages[-1] < reach:
            ages.append(2 * ages[-1])
        q, k, v, groups = inputs.q, inputs.k, inputs.v, inputs.k.shape[1]
        options = {"scaling": inputs.scaling, "softcap": inputs.softcap}
        whole = window_softmax(q, k, v, span=SlidingSpan(window_size=length), layout=layout, **options)
        log_sums = (whole.den.log() + whole.log_scale).unflatten(1, (groups, -1))
        position, document = layout.query_position, layout.query_document
        for start in range(0, length, KEYS_AT_ONCE):
            some = slice(start, start + KEYS_AT_ONCE)
            logits = q.unflatten(1, (groups, -1)) @ k[:, :, None, some].mT * inputs.scaling
            if inputs.softcap is not None:
                logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
            reads = (document[:, :, None] == document[:, None, some]) & (
                position[:, :, None] >= position[:, None, some]
            )
            reads &= (position[:, None, some] >= span.sinks) & (position[:, :, None] >= 0)
            logs = (logits - log_sums[..., None]).amax(2).masked_fill(~reads[:, None], -torch.inf)  # [B, G, T, keys]
            ahead = logs.flip(2).cummax(2).values.flip(2)  # of this query and all that follow
            for age in ages:
                first = torch.arange(start, start + ahead.shape[3], device=q.device) + span.fold_lag + age
                found = ahead.take_along_dim(first.clamp_max(length - 1)[None, None, None], 2)[:, :, 0]
                there = (first < length) & found.isfinite()
                old = torch.full_like(found, age)
                x = Learned.features(k[:, :, some], v[:, :, some], old).double()
                x = torch.cat([x, torch.ones_like(x[..., :1]), found[..., None].double()], dim=-1)
                x = torch.where(there[..., None], x, 0)
                self.products = self.products + (x.mT @ x).sum(0)

    def result(self) -> dict[str, Tensor]:
        sums = self.products
        mean = sums[:, -2] / sums[:, -2, -2, None].clamp_min(1)
        moments = sums / sums[:, -2, -2, None, None].clamp_min(1) - mean[:, :, None] * mean[:, None]
        covariance, target = moments[:, :-2, :-2], moments[:, :-2, -1]
        scale = covariance.diagonal(dim1=1, dim2=2).clamp_min(1e-12).sqrt()
        ridge = RIDGE * torch.eye(scale.shape[1], dtype=scale.dtype, device=scale.device)
        found = torch.linalg.solve(covariance / (scale[:, :, None] * scale[:, None]) + ridge, target / scale) / scale
        return {"weight": found.float()}


FITS: dict[type, type[_Fit]] = {ExpectedAttention: _Queries, Learned: _Largest}
