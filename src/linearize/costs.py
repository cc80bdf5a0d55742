"""What one mixer costs: parameters and bytes of state, exactly; FLOPs and activations of a token, as estimates.

Letters: H query heads, G KV heads, Hk heads of key features (H or G), Hs heads of the linear state (H or G), D head
dimension, F features per head.
"""

from __future__ import annotations

from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import MixerConfig
from linearize.mixers.update import DeltaUpdate

FP32 = 4


def new_parameters(mixer: MixerConfig, teacher: TeacherShape) -> int:
    """Trainable numbers of one layer's mixer; each part knows its own."""
    return _map_parameters(mixer, teacher) + _other_parameters(mixer, teacher)


def state_bytes(mixer: MixerConfig, teacher: TeacherShape, kv_bytes_per_element: int, layer: int) -> int:
    """The state of one converted layer, by its index, per sequence, in bytes.

    The slots of the window and the sinks; and in fp32 S [Hs, F, D] and z [Hs, F], twice for a terraced span (the block
    that is being folded), and the running maximum [Hk] of an exponential map (Performer's in fp64).
    """
    slots = mixer.span.slots * slot_bytes(mixer, teacher, kv_bytes_per_element, teacher.rotary_dims[layer])
    if mixer.feature_map is None:
        return slots
    heads, features = mixer.state_heads(teacher.layer), mixer.feature_map.features(teacher.layer)
    states = mixer.span.states * heads * features * (teacher.head_dim + 1)
    return slots + FP32 * states + _maximum_bytes(mixer, teacher)


def slot_bytes(mixer: MixerConfig, teacher: TeacherShape, kv_bytes_per_element: int, rotary_dim: int) -> int:
    """What is kept of one token in the window, or of a sink, until it is folded.

    In the model's dtype: key and value [G, D]; where the map sees unrotated keys, these too [G, D]; where features are
    rotated, their cosines and sines [rotary_dim]. In fp32 what folding will need: log decays [Hs, F or 1] and [Hs, D],
    input scale and write strength [Hs], and the running maximum [Hk] that the token found.
    """
    keys_and_values = 2 * teacher.num_kv_heads * teacher.head_dim
    if mixer.feature_map is None:
        return keys_and_values * kv_bytes_per_element
    shape, rotation = teacher.layer, mixer.feature_map.rotation
    unrotated = teacher.num_kv_heads * teacher.head_dim if rotary_dim and rotation != "before" else 0
    cos_and_sin = 2 * rotary_dim if rotation == "after" else 0
    write_strength = mixer.state_heads(shape) if isinstance(mixer.update, DeltaUpdate) else 0
    in_model_dtype = (keys_and_values + unrotated + cos_and_sin) * kv_bytes_per_element
    for_folding = FP32 * (_gate_numbers(mixer, teacher) + write_strength) + _maximum_bytes(mixer, teacher)
    return in_model_dtype + for_folding


def mixer_flops(mixer: MixerConfig, teacher: TeacherShape, sequence_length: int) -> int:
    """One token, forward: window; map; 2 per other parameter; fold S (2 Hs F D) and read it (2 H F D).

    The delta rule reads S once more before it writes (2 Hs F D).
    """
    window = softmax_flops(teacher, min(mixer.span.slots, sequence_length))
    if mixer.feature_map is None:
        return window
    heads, features = mixer.state_heads(teacher.layer), mixer.feature_map.features(teacher.layer)
    folds = 2 if isinstance(mixer.update, DeltaUpdate) else 1
    state = 2 * (teacher.num_heads + folds * heads) * features * teacher.head_dim
    return window + mixer.feature_map.flops(teacher.layer) + 2 * _other_parameters(mixer, teacher) + state


def softmax_flops(teacher: TeacherShape, keys: int) -> int:
    """Scores and weighted values of one query token over `keys` keys: 2 x 2 x H x D x keys, forward."""
    return 4 * teacher.num_heads * teacher.head_dim * keys


def mixer_activations(mixer: MixerConfig, teacher: TeacherShape) -> int:
    """Bytes per token kept for backward: features, gates, window scores, numerators and output, in fp32."""
    keys = mixer.span.slots * teacher.num_heads
    outputs = 3 * teacher.num_heads * teacher.head_dim
    features = 0
    if mixer.feature_map is not None:
        heads = teacher.num_heads + mixer.state_heads(teacher.layer)
        kept_as_inputs = mixer.in_closed_form and not teacher.bidirectional
        features = heads * (teacher.head_dim if kept_as_inputs else mixer.feature_map.features(teacher.layer))
    return FP32 * (keys + outputs + features + _gate_numbers(mixer, teacher))


def _map_parameters(mixer: MixerConfig, teacher: TeacherShape) -> int:
    return 0 if mixer.feature_map is None else mixer.feature_map.parameters(teacher.layer)


def _other_parameters(mixer: MixerConfig, teacher: TeacherShape) -> int:
    """Of gates, write strengths, norms and the combination."""
    shape = teacher.layer
    parameters = mixer.normalizer.parameters(shape) + mixer.combine.parameters(shape)
    if mixer.feature_map is not None:
        heads, features = mixer.state_heads(shape), mixer.feature_map.features(shape)
        parameters += mixer.update.parameters(shape, heads)
        parameters += 0 if mixer.decay is None else mixer.decay.parameters(shape, heads, features)
    return parameters


def _maximum_bytes(mixer: MixerConfig, teacher: TeacherShape) -> int:
    """The running maximum of all heads [Hk] at one position."""
    if mixer.feature_map is None or not mixer.keeps_maximum:
        return 0
    return mixer.feature_map.maximum_bytes * mixer.feature_map.key_heads(teacher.layer)


def _gate_numbers(mixer: MixerConfig, teacher: TeacherShape) -> int:
    """Per token: log decays and input scale. A running maximum is a decay per head too, and shares a gate's numbers."""
    if mixer.feature_map is None:
        return 0
    features, width, values, scale = mixer.feature_map.features(teacher.layer), 0, 0, 0
    if mixer.decay is not None:
        width, scale = mixer.decay.key_width(features), int(mixer.decay.scales_input)
        values = teacher.head_dim if mixer.decay.values else 0
    if mixer.keeps_maximum:
        width = max(width, 1)
    return mixer.state_heads(teacher.layer) * (width + values + scale)
