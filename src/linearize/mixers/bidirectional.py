"""The mixer of encoders: linear attention over all tokens of a document, before and after."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linearize import parts
from linearize.mixers.combine import NORMALIZERS, scale_of
from linearize.mixers.feature_maps import FEATURE_MAPS, FeatureMap
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.rope import apply_rope, map_inputs
from linearize.ops import Layout, NoSpan, Partial, SlidingSpan, linear_scan
from linearize.ops.partial import accumulation_dtype
from linearize.ops.state import expand_heads
from linearize.parts import MixerConfig
from linearize.teacher import LayerShape


class BidirectionalMixer(nn.Module):
    """y_n = (phi_q(n) . S) / (phi_q(n) . z), or S otherwise normalised; S and z sum over all tokens of n's document.

    There is no order among keys, so a span, a decay and the delta rule have no meaning here and are refused.
    """

    def __init__(self, config: MixerConfig, shape: LayerShape) -> None:
        super().__init__()
        refuse_what_needs_an_order(config)
        assert config.feature_map is not None  # only `window_only` has none
        self.config, self.shape = config, shape
        self.feature_map: FeatureMap = FEATURE_MAPS[type(config.feature_map)](config.feature_map, shape)
        self.rotation: Literal["before", "after", "none"] = config.feature_map.rotation
        self.scale = scale_of(config, shape, self.feature_map.feature_dim)
        self.normalizer = NORMALIZERS[type(config.normalizer)](config.normalizer, shape)

    def reset_parameters(self) -> None:
        """Initialise every parameter as the config says."""
        part: Any
        for part in self.children():
            part.reset_parameters()

    @property
    def wants_hidden(self) -> bool:
        """Whether `AttnInputs.hidden` is read."""
        return self.config.reads_hidden

    @property
    def wants_unrotated(self) -> bool:
        """Whether `AttnInputs.unrotated` and `.rope` are read, in a model with RoPE."""
        return self.config.reads_unrotated

    def forward(self, inputs: AttnInputs, layout: Layout | None = None) -> Float[Tensor, "B H T D"]:
        """Outputs, 0 for padding. `layout` None: one full document per row."""
        layout = Layout.full(inputs.q.shape[2], inputs.q.device) if layout is None else layout
        assert layout.key_position.shape[1] == inputs.q.shape[2], "encoders carry no keys over from earlier calls"
        with torch.autocast(inputs.q.device.type, enabled=False):
            q, k = map_inputs(self.rotation, inputs)
            phi_q = self.feature_map.q(q, layout.query_position)
            phi_k = self.feature_map.k(k, layout.key_position)
            if self.feature_map.exponential:
                # Logarithms may come in fp64, for the sake of this difference.
                phi_k = below_maximum(phi_k, layout).to(accumulation_dtype(inputs.v.dtype)).exp()
            if self.rotation == "after" and inputs.rope is not None:
                phi_q, phi_k = apply_rope(phi_q, inputs.rope), apply_rope(phi_k, inputs.rope)
            phi_q = phi_q if self.scale == 1 else phi_q * self.scale
            sums = sum_over_documents(phi_q, phi_k, inputs.v, layout)
            y = self.normalizer(sums, inputs, self.feature_map.min_denominator)
        return without_padding(y, layout).to(inputs.v.dtype)


def refuse_what_needs_an_order(config: MixerConfig) -> None:
    """ValueError for parts that only a causal mixer can have."""
    additive = (parts.Add, parts.SharedDenominator)
    for field, expected, allowed, found in (
        ("span", "`none`", isinstance(config.span, parts.NoSpan), config.span),
        ("decay", "null", config.decay is None, config.decay),
        ("update", "`additive`", isinstance(config.update, parts.AdditiveUpdate), config.update),
        ("combine", "`add` or `shared_denominator`", isinstance(config.combine, additive), config.combine),
    ):
        if not allowed:
            raise ValueError(
                f"{field}: expected {expected}, because an encoder's linear attention sums over all tokens alike, "
                f"before and after; found `{getattr(found, 'type', found)}`"
            )


def below_maximum(logs: Float[Tensor, "B Hk T F"], layout: Layout) -> Float[Tensor, "B Hk T F"]:
    """logs - m, m the maximum over features and over the tokens of the document; differentiable in m too."""
    top = logs.amax(-1)
    if layout.uniform:
        return logs - top.amax(-1)[..., None, None]
    document, padding = numbered(layout)[:, None].expand_as(top), (layout.key_position < 0)[:, None]
    m = torch.full_like(top, -torch.inf)
    m = m.scatter_reduce(2, document, top.masked_fill(padding, -torch.inf), "amax").gather(2, document)
    # Padding has no part in the maximum and could lie above it.
    return (logs - m[..., None]).masked_fill(padding[..., None], -torch.inf)


def without_padding(x: Float[Tensor, "B h T X"], layout: Layout) -> Float[Tensor, "B h T X"]:
    """`x`, 0 for padding, which could hold anything, also what is not a number."""
    return x if layout.uniform else x.masked_fill((layout.key_position < 0)[:, None, :, None], 0)


def sum_over_documents(
    phi_q: Float[Tensor, "B H T F"], phi_k: Float[Tensor, "B Hk T F"], v: Float[Tensor, "B G T D"], layout: Layout
) -> Partial:
    """num_n = phi_q(n) . sum_j phi_k(j) v_j^T over all tokens j of n's document, den_n with 1 for v_j.

    Padding is never read as a key; as a query it gives anything.
    Linear in T, whatever the number of documents and their lengths: the tokens up to n, in a scan, and those after n,
    in a scan from the end.
    """
    dtype = accumulation_dtype(v.dtype)
    phi_k, v = (without_padding(x.to(dtype), layout) for x in (phi_k, v))
    if layout.uniform or bool(one_document_per_row(layout)):
        S = phi_k.mT @ expand_heads(v, phi_k.shape[1])
        S, z = (expand_heads(x, phi_q.shape[1]) for x in (S, phi_k.sum(2)[..., None]))
        den = (phi_q @ z).squeeze(-1)
        return Partial(phi_q @ S, den, torch.zeros_like(den))
    before = linear_scan(phi_q, phi_k, v, span=NoSpan(), layout=layout)
    backwards = (x.flip(2) for x in (phi_q, phi_k, v))
    after = linear_scan(*backwards, span=SlidingSpan(1), layout=reversed_layout(layout))
    den = before.den + after.den.flip(2)
    return Partial(before.num + after.num.flip(2), den, torch.zeros_like(den))


def numbered(layout: Layout) -> Int[Tensor, "#B T"]:
    """Each slot's document, in order of appearance from 0."""
    begins = layout.key_document[:, 1:] != layout.key_document[:, :-1]
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


def one_document_per_row(layout: Layout) -> Bool[Tensor, ""]:
    """Whether no row holds tokens of two documents."""
    valid, document = layout.key_position >= 0, numbered(layout)
    first, last = document.masked_fill(~valid, document.shape[1]).amin(1), document.masked_fill(~valid, -1).amax(1)
    return (first >= last).all()


def reversed_layout(layout: Layout) -> Layout:
    """The same tokens from the last to the first."""
    position, document = layout.key_position, numbered(layout)
    last = torch.zeros_like(document).scatter_reduce(1, document, position, "amax").gather(1, document)
    position = torch.where(position >= 0, last - position, -1)
    return Layout(position.flip(1), (document[:, -1:] - document).flip(1), layout.length)
