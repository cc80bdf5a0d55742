"""The part of causal mixers for many tokens and for one: slots, features, gates, and their scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import DeltaUpdate
from linearize.configs.shape import LayerShape
from linearize.mixers.cached import SCORES
from linearize.mixers.combine import COMBINES, HasLinear, SharedDenominatorCombine, WindowOnlyCombine
from linearize.mixers.eviction_cache import EvictionScorer
from linearize.mixers.feature_maps.base import MIN_DENOMINATOR, exponentials
from linearize.mixers.gates import DECAYS
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.mixer import Mixer
from linearize.mixers.normalizers import NORMALIZERS
from linearize.mixers.rope import rotated
from linearize.mixers.update import DeltaRule
from linearize.ops.backend import backend_for
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import Quotient
from linearize.ops.layout import Layout, Tokens
from linearize.ops.partial import Partial, accumulation_dtype


class CausalMixer(Mixer):
    """The parts of a mixer that looks back only, and what they say of tokens.

    A token is a set of slots by name: `keys` and `values`; where its parts ask for them, `map_keys` (keys before RoPE),
    `cos` and `sin`, `log_decay_k` and `log_decay_v` of its step, `input_scale`, `beta` (delta rule), `offset` (the
    running maximum of an exponential key map), and `scores` (of a KV cache with eviction, `EvictionScorer.of_keys`).

    Attributes:
        keeps_maximum, maps_unrotated: as the config says.
        softmax_alone: whether softmax over window and cache is the output.
    """

    causal = True

    def __init__(self, config: MixerConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        if self.feature_map is not None:
            if config.decay is not None:
                features = self.feature_map.feature_dim
                self.gate = DECAYS[type(config.decay)](config.decay, shape, self.state_heads, features)
            if isinstance(config.update, DeltaUpdate):
                self.delta = DeltaRule(config.update, shape, self.state_heads)
            if config.in_closed_form:
                self.kernel = self.feature_map.kernel
        self.scorer = None if config.cache is None else EvictionScorer(config.cache, shape)
        self.keeps_maximum, self.maps_unrotated = config.keeps_maximum, config.maps_unrotated
        self.normalizer = NORMALIZERS[type(config.normalizer)](config.normalizer, shape)
        self.combine = COMBINES[type(config.combine)](config.combine, shape)
        self.softmax_alone = isinstance(self.combine, WindowOnlyCombine) and self.combine.sink_logit is None

    def quotient(self) -> Quotient | None:
        """Return how the output is one quotient of sums, None where it is not."""
        combine = self.combine
        if isinstance(combine, WindowOnlyCombine):
            return Quotient(None, MIN_DENOMINATOR) if self.softmax_alone else None
        assert self.feature_map is not None
        least = self.feature_map.min_denominator(torch.float32)
        if not self.config.sums:
            return None
        if not self.span.max_lag:
            return Quotient(None, least)
        return Quotient(combine.window_factor, least) if isinstance(combine, SharedDenominatorCombine) else None

    def new_tokens(self, inputs: AttnInputs) -> Tokens:
        """Return the slots of the inputs' tokens."""
        slots = {"keys": inputs.k, "values": inputs.v}
        if self.scorer is not None:
            slots[SCORES] = self.scorer.of_keys(inputs)
        if self.feature_map is None:
            return slots
        batch, groups = inputs.k.shape[:2]
        if self.maps_unrotated and inputs.unrotated is not None:
            slots["map_keys"] = inputs.unrotated[1]
            if self.feature_map.config.rotation == "after":
                assert inputs.rope is not None
                heads = 1 if self.scorer is None else groups  # each KV head's cache holds tokens of its own
                cos, sin = (x[:, None].expand(batch, heads, -1, -1) for x in inputs.rope)
                slots |= {"cos": cos, "sin": sin}
        if self.gate is not None:
            gates = self.gate(inputs)
            found = {"log_decay_k": gates.log_decay_k, "log_decay_v": gates.log_decay_v}
            found["input_scale"] = gates.input_scale
            slots |= {name: x.expand(batch, -1, -1, -1) for name, x in found.items() if x is not None}
        if self.delta is not None:
            slots["beta"] = self.delta(inputs)
        return slots

    def with_step(self, slots: Tokens, log_decay: Float[Tensor, "B Hk T"]) -> Float[Tensor, "B Hs T X"]:
        """The gate's log decay and that of the running maximum in one."""
        step = repeat_kv(log_decay[..., None], self.state_heads).to(accumulation_dtype(slots["values"].dtype))
        return step + slots["log_decay_k"] if "log_decay_k" in slots else step

    def map_keys(self, slots: Tokens, position: Int[Tensor, "#B K"]) -> Float[Tensor, "B Hk K F"]:
        """The key map's features, or for an exponential map their logarithms; or what `kernel` makes them of."""
        assert self.feature_map is not None
        keys = slots.get("map_keys", slots["keys"])
        return self.feature_map.k(keys, position) if self.kernel is None else self.feature_map.kernel_input(keys)

    def key_features(self, slots: Tokens, phi_k: Tensor, layout: Layout | None) -> Float[Tensor, "B Hs K F"]:
        """phi_k as it is written to the state, from what the map gave."""
        assert self.feature_map is not None
        if self.feature_map.exponential:
            phi_k = phi_k - (slots["offset"] if self.keeps_maximum else phi_k.amax(-1, keepdim=True))
            if layout is not None and not layout.uniform:
                # Padding takes no part in the maximum and could be anything.
                phi_k = phi_k.masked_fill((layout.key_position < 0)[:, None, :, None], -torch.inf)
            phi_k = exponentials(phi_k.to(accumulation_dtype(slots["values"].dtype)))
        if self.delta is not None:
            phi_k = self.delta.normalize(phi_k)
        if "cos" in slots:
            cos, sin = (x if len(x[0]) == 1 else repeat_kv(x, phi_k.shape[1]) for x in (slots["cos"], slots["sin"]))
            phi_k = rotated(phi_k, cos, sin)
        if phi_k.shape[1] != self.state_heads:
            phi_k = repeat_kv(phi_k, self.state_heads)
        return phi_k * repeat_kv(slots["input_scale"], self.state_heads) if "input_scale" in slots else phi_k

    def in_scale(self, linear: Partial, log_scale: Tensor | None, own: Tokens) -> Partial:
        """The linear part with the logarithm it is relative to: the query's, and the keys' running maximum."""
        if not self.config.absolute:
            return linear
        assert log_scale is not None
        offset = repeat_kv(own["offset"], self.shape.num_heads)[..., 0]
        return replace(linear, log_scale=(log_scale + offset).to(linear.den.dtype))

    def combined(
        self, inputs: AttnInputs, window: Partial | None, linear: Partial | None, has_linear: HasLinear
    ) -> Float[Tensor, "B H T D"]:
        """The output, in the inputs' dtype, from the parts, which may be overwritten where no gradient is wanted."""
        dtype = inputs.v.dtype
        y = backend_for(inputs.q.device).output(window, linear, self.quotient, dtype)
        if y is not None:
            return y
        y = self.combine(window, linear, lambda sums: self.normalized(sums, inputs), has_linear)
        # A copy lies as it is read next: the heads of a token side by side.
        if y.dtype == dtype:
            return y
        return y.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).transpose(1, 2)

    def rules(self, tokens: Tokens) -> dict[str, Any]:
        """Return beta, log decays and the kernel of the tokens, as the ops take them."""
        return {name: tokens.get(name) for name in ("beta", "log_decay_k", "log_decay_v")} | {"kernel": self.kernel}
