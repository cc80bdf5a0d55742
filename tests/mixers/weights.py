"""The parameters of the package's mixers as the raw weights that the oracles read."""

from __future__ import annotations

from typing import Any

from linearize.mixers.bidirectional import BidirectionalMixer
from linearize.mixers.linear import LinearMixer
from tests.oracles.heads import Weights


def weights_of(mixer: LinearMixer | BidirectionalMixer) -> Weights:
    """Every entry of the mixer's state, by the oracles' names and shapes."""
    state, found = dict(mixer.state_dict()), {}
    config, shape = mixer.config, mixer.shape
    heads = shape.num_heads

    def rename(theirs: str, ours: str) -> None:
        if theirs in state:
            found[ours] = state.pop(theirs)

    def per_head(theirs: str, ours: str, heads: int) -> None:
        """Affine maps: weights [inputs, heads width] and biases [heads width] as [heads, width, inputs] and so on."""
        if f"{theirs}.weight" in state:
            found[f"{ours}_weight"] = state.pop(f"{theirs}.weight").T.unflatten(0, (heads, -1))
        if f"{theirs}.bias" in state:
            found[f"{ours}_bias"] = state.pop(f"{theirs}.bias").unflatten(0, (heads, -1))

    for name in ("query_weight", "query_bias", "key_weight", "key_bias", "sigma"):
        rename(f"feature_map.{name}", name)
    rename("feature_map.weight", "projection")
    if "projection" in found and found["projection"].ndim == 2:  # one for all heads
        found["projection"] = found["projection"][None]
    if getattr(config.feature_map, "tied", False):
        for name in ("weight", "bias"):
            if f"query_{name}" in found:
                shared = found[f"key_{name}"] = found[f"query_{name}"]
                if config.feature_map.per == "kv_head":  # the query heads of a group share their keys' map
                    found[f"query_{name}"] = shared.repeat_interleave(heads // len(shared), 0)
    found["longest"] = getattr(config.feature_map, "max_length", None) or shape.max_positions

    state_heads = _state_heads(config, shape)
    per_head("gate.g", "gate", state_heads)
    if config.decay is not None and config.decay.type == "scalar":
        found["gate_weight"], found["gate_bias"] = found["gate_weight"][:, 0], found["gate_bias"][:, 0]
    per_head("gate.r", "refine", state_heads)
    per_head("gate.f", "feature_gate", state_heads)
    per_head("gate.z", "value_gate", state_heads)
    if "gate.down.weight" in state:
        found["gate_down"] = state.pop("gate.down.weight").T
    per_head("gate.up", "gate", state_heads)
    if config.decay is not None and config.decay.type == "feature":
        found["gate_up"] = found.pop("gate_weight")
    per_head("delta.strength", "write", state_heads)
    if "write_weight" in found:
        found["write_weight"] = found["write_weight"][:, 0]

    for name in ("window_factor", "window_weight"):
        if f"combine.{name}" in state:
            found[name] = state.pop(f"combine.{name}").sigmoid()
    rename("combine.offset", "offset")
    rename("combine.sink_logit", "sink_logit")
    rename("combine.sink_value", "sink_value")
    rename("scorer.weight", "score_weight")
    rename("scorer.recency", "score_recency")
    rename("normalizer.weight", "norm_weight")
    if "normalizer.gate_weight" in state:
        found["output_gate"] = state.pop("normalizer.gate_weight").T.unflatten(0, (heads, -1))
    assert not state, f"unknown to the oracles: {sorted(state)}"
    return Weights(**found)


def _state_heads(config: Any, shape: Any) -> int:
    """Hs: heads of the state; every one of them has its own row of the gates."""
    if config.feature_map is None:
        return shape.num_heads
    key_heads = config.feature_map.key_heads(shape)
    return key_heads if config.decay is None else config.decay.heads(shape, key_heads)
