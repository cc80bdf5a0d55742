"""The mixer of encoders: linear attention over all tokens of a document, before and after."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import Add
from linearize.configs.shape import LayerShape
from linearize.configs.spans import NoSpan, SlidingSpan
from linearize.mixers.combine import AddCombine
from linearize.mixers.feature_maps.base import exponentials
from linearize.mixers.inputs import AttnInputs, apply_rope, map_inputs
from linearize.mixers.mixer import LinearFeatures, Mixer
from linearize.mixers.normalizers import NORMALIZERS
from linearize.ops.backend import linear_scan
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import LinearInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import Partial, accumulation_dtype


class BidirectionalMixer(Mixer):
    """y_n = (phi_q(n) . S) / (phi_q(n) . z), or phi_q(n) . S with another normalizer.

    S and z sum over all tokens of n's document. Keys have no order, so a span, a decay and the delta rule are refused.
    There is no window, so the output is the linear part, with any `combine`.

    Raises:
        ValueError: the config has a part that needs an order.
    """

    causal = False

    def __init__(self, config: MixerConfig, shape: LayerShape) -> None:
        if config.encoder_error is not None:
            raise ValueError(config.encoder_error)
        super().__init__(config, shape)
        self.normalizer = NORMALIZERS[type(config.normalizer)](config.normalizer, shape)
        self.combine = AddCombine(Add(), shape)

    def forward(self, inputs: AttnInputs, layout: SequenceLayout | None = None) -> Float[Tensor, "B H T D"]:
        """Return outputs, 0 for padding. `layout` None: one full document per row."""
        layout = SequenceLayout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        with inputs.outside_autocast():
            y = self.normalized(self.partials(inputs, layout)[1], inputs)
        return without_padding(y, layout).to(inputs.v.dtype)

    def partials(self, inputs: AttnInputs, layout: SequenceLayout) -> tuple[None, Partial]:
        """Return None for the window, and the sums over each query's document; those of padding are arbitrary."""
        with inputs.outside_autocast():
            found = self.linear_features(inputs, layout)
            return None, sum_over_documents(found.phi_q, found.phi_k, inputs.v, layout)

    def linear_features(self, inputs: AttnInputs, layout: SequenceLayout) -> LinearFeatures:
        """Return the features of all tokens; key features of padding are 0."""
        assert layout.key_position.shape[1] == inputs.q.shape[2], "encoders carry no keys over from earlier calls"
        assert self.feature_map is not None and self.config.feature_map is not None  # null only with `window_only`
        rotation, dtype = self.config.feature_map.rotation, accumulation_dtype(inputs.v.dtype)
        phi_k = self.feature_map.k(map_inputs(rotation, inputs)[1], layout.key_position)
        if self.feature_map.exponential:
            # The logarithms may be fp64, which this difference needs.
            phi_k = exponentials(below_maximum(phi_k, layout).to(dtype))
        if rotation == "after" and inputs.rope is not None:
            phi_k = apply_rope(phi_k, inputs.rope)
        phi_k = without_padding(phi_k.to(dtype), layout)
        nothing = inputs.v[..., :0]
        phi_q, _ = self.scaled_queries(
            inputs, layout.query_position, lambda phi_q: sum_over_documents(phi_q, phi_k, nothing, layout).den
        )
        return LinearFeatures({}, phi_q, phi_k, phi_q.new_zeros(phi_q.shape[:3]))


def below_maximum(logs: Float[Tensor, "B Hk T F"], layout: SequenceLayout) -> Float[Tensor, "B Hk T F"]:
    """Return logs - m, with m the maximum over features and tokens of the document; differentiable in m too."""
    top = logs.amax(-1)
    if layout.uniform:
        return logs - top.amax(-1)[..., None, None]
    document, padding = numbered(layout)[:, None].expand_as(top), (layout.key_position < 0)[:, None]
    m = torch.full_like(top, -torch.inf)
    m = m.scatter_reduce(2, document, top.masked_fill(padding, -torch.inf), "amax").gather(2, document)
    # Padding is not in the maximum and could exceed it.
    return (logs - m[..., None]).masked_fill(padding[..., None], -torch.inf)


def without_padding(x: Float[Tensor, "B h T X"], layout: SequenceLayout) -> Float[Tensor, "B h T X"]:
    """Return `x` with 0 for padding, which may hold any number and NaN."""
    return x if layout.uniform else x.masked_fill((layout.key_position < 0)[:, None, :, None], 0)


def sum_over_documents(
    phi_q: Float[Tensor, "B H T F"],
    phi_k: Float[Tensor, "B Hk T F"],
    v: Float[Tensor, "B G T D"],
    layout: SequenceLayout,
) -> Partial:
    """Return num_n = phi_q(n) . sum_j phi_k(j) v_j^T over all tokens j of n's document, and den_n with 1 for v_j.

    Key features of padding must be 0; outputs of padding are arbitrary. Takes O(T) time for any number of documents:
    one scan adds the tokens up to n, and one from the end those after n.
    """
    dtype = accumulation_dtype(v.dtype)
    v = without_padding(v.to(dtype), layout)
    if layout.uniform or bool(one_document_per_row(layout)):
        S = phi_k.mT @ repeat_kv(v, phi_k.shape[1])
        S, z = (repeat_kv(x, phi_q.shape[1]) for x in (S, phi_k.sum(2)[..., None]))
        den = (phi_q @ z).squeeze(-1)
        return Partial(phi_q @ S, den, torch.zeros_like(den))
    before = linear_scan(LinearInputs(phi_q, phi_k, v, NoSpan(), layout))
    phi_q, phi_k, v = (x.flip(2) for x in (phi_q, phi_k, v))
    after = linear_scan(LinearInputs(phi_q, phi_k, v, SlidingSpan(window_size=1), reversed_layout(layout)))
    den = before.den + after.den.flip(2)
    return Partial(before.num + after.num.flip(2), den, torch.zeros_like(den))


def numbered(layout: SequenceLayout) -> Int[Tensor, "#B T"]:
    """Return each slot's document, numbered from 0 in order of appearance."""
    begins = layout.key_document[:, 1:] != layout.key_document[:, :-1]
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


def one_document_per_row(layout: SequenceLayout) -> Bool[Tensor, ""]:
    """Return whether no row holds tokens of two documents."""
    valid, document = layout.key_position >= 0, numbered(layout)
    first, last = document.masked_fill(~valid, document.shape[1]).amin(1), document.masked_fill(~valid, -1).amax(1)
    return (first >= last).all()


def reversed_layout(layout: SequenceLayout) -> SequenceLayout:
    """Return the layout of the tokens in reverse order."""
    position, document = layout.key_position, numbered(layout)
    last = torch.zeros_like(document).scatter_reduce(1, document, position, "amax").gather(1, document)
    position = torch.where(position >= 0, last - position, -1)
    return SequenceLayout(position.flip(1), (document[:, -1:] - document).flip(1), layout.length)
