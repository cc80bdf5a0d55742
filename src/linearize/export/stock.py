"""Turn a converted model of full and windowed layers into a model of a stock class.

Stock classes have, per layer, full attention or one sliding window that all windowed layers share. `granite_swa` adds
a sink logit per query head. The value u of our learned sink becomes a bias: attention weights and the sink's share sum
to 1, so values v - u give y - u, and the output projection's bias adds W_o u again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from linearize.base import UserError
from linearize.configs.mixer import HeadwiseConfig
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import SlidingSpan
from linearize.hf.attention import linearized_layers
from linearize.hf.convert import to_softmax
from linearize.hf.teacher import TeacherShape
from linearize.mixers.combine import WindowOnlyCombine
from linearize.ops.heads import repeat_kv

RECIPE = "convert with the recipe local-global"
NO_SINK = -1e4  # a sink logit whose exponential is 0 compared with any other


@dataclass(frozen=True)
class StockClass:
    """The parts that a class of transformers has.

    Attributes:
        sinks: whether query heads have sink logits.
        biases: the projections of attention that always have biases: `none`, `qkv`, or `all`.
        fields: config fields that all converted models need.
    """

    sinks: bool
    biases: str
    fields: dict[str, Any]


# In order of preference: the first that fits is chosen.
STOCK_CLASSES = {
    "ministral": StockClass(False, "none", {}),
    "cwm": StockClass(False, "none", {}),
    "qwen2": StockClass(False, "qkv", {"use_sliding_window": True}),
    "granite_swa": StockClass(
        True, "all", {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    ),
}
SOURCES = {"llama": "none", "mistral": "none", "qwen2": "qkv"}  # by teacher, the biases that its attention has
COPIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "mlp_bias"),
)


@dataclass(frozen=True)
class Layers:
    """The layers of a converted model that have a window.

    Attributes:
        windowed: whether each layer has a window.
        window: in tokens, the query's own included; None: no layer has a window.
        sinks: whether the windows have a learned sink.
    """

    windowed: tuple[bool, ...]
    window: int | None
    sinks: bool


def read_layers(student: PreTrainedModel) -> Layers:
    """Return the windows of a student's layers.

    Raises:
        UserError: a layer has a part that no stock class has.
    """
    shape = TeacherShape.from_config(student.config.to_dict())
    windows: dict[int, int] = {}
    if shape.sliding_layers:
        own: int = student.config.sliding_window
        windows |= dict.fromkeys(shape.sliding_layers, own)
    sinks = set[bool]()
    for layer in linearized_layers(student).values():
        config = layer.mixer.config
        _refuse_parts(layer.layer_idx, config)
        windows[layer.layer_idx] = config.span.window_size
        sinks.add(config.learned_sink)
    if len(set(windows.values())) > 1:
        sizes = ", ".join(f"layer {layer}: {size}" for layer, size in sorted(windows.items()))
        raise UserError(f"layers: expected one window in all layers that have one, found {sizes}; {RECIPE}")
    return Layers(
        windowed=tuple(index in windows for index in range(shape.num_layers)),
        window=next(iter(windows.values()), None),
        sinks=True in sinks,
    )


def _refuse_parts(layer: int, config: Any) -> None:
    """Raise UserError for a layer whose mixer's config has more than a sliding window."""
    if isinstance(config, HeadwiseConfig):
        found = "KV heads with mixers of their own"
    elif config.cache is not None:
        found = f"a KV cache with eviction ({config.cache.size} pairs per head)"
    elif config.feature_map is not None:
        found = f"a linear part (feature_map `{config.feature_map.type}`)"
    elif not isinstance(config.span, SlidingSpan):
        found = f"span `{config.span.type}`"
    elif config.span.sinks:
        found = (
            f"{config.span.sinks} first tokens kept as sinks, which memory.learned_sink=true memory.sinks=0 replaces"
        )
    else:
        return
    raise UserError(
        f"layer {layer}: expected full attention or a sliding window, which stock classes have; found {found}; {RECIPE}"
    )


def choose_class(student: PreTrainedModel, layers: Layers, name: str | None = None) -> str:
    """Return the model type of a stock class that has all parts of a student.

    Args:
        name: the requested class; None: the first that fits.

    Raises:
        UserError: the named class does not fit, or none does.
    """
    source = str(student.config.model_type).removeprefix("linearized_")
    if source not in SOURCES:
        raise UserError(
            f"model_type: expected a converted {', '.join(SOURCES)}, found {source!r}, for whose weights "
            "no stock class with a window per layer has a place"
        )
    if name is not None and name not in STOCK_CLASSES:
        raise UserError(f"--class: expected one of {', '.join(STOCK_CLASSES)}, found {name!r}")
    reasons = {known: _unfit(student, source, layers, known) for known in STOCK_CLASSES}
    if name is not None:
        if reason := reasons[name]:
            raise UserError(f"--class: expected a class that has {reason}, found {name}; leave --class out")
        return name
    fitting = [known for known, reason in reasons.items() if reason is None]
    if not fitting:
        listed = "; ".join(f"{known} has none for {reason}" for known, reason in reasons.items())
        raise UserError(f"model: expected a stock class that has all of its parts, found none: {listed}")
    return fitting[0]


def _unfit(student: PreTrainedModel, source: str, layers: Layers, name: str) -> str | None:
    """Return a part of the student that a stock class lacks; None: it lacks none."""
    stock, config = STOCK_CLASSES[name], student.config
    biases = "qkv" if getattr(config, "attention_bias", False) else SOURCES[source]
    if layers.sinks and not stock.sinks:
        return "learned sinks"
    if biases != "none" and stock.biases == "none":
        return "biases of attention"
    if getattr(config, "mlp_bias", False) and name != "granite_swa":
        return "biases of the MLP"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act}"
    if name == "granite_swa" and head_dim_of(config) * config.num_attention_heads != config.hidden_size:
        return f"heads of {head_dim_of(config)} with a hidden size of {config.hidden_size}"
    return None


def stock_model(student: PreTrainedModel, name: str | None = None) -> PreTrainedModel:
    """Return a model of a stock class with a student's function, in its dtype and on its device.

    Args:
        student: a converted model, or an unconverted one, whose layers all have full attention.
        name: the model type of the class; None: the first of STOCK_CLASSES that fits.

    Raises:
        UserError: a part of the student has no place in the class.
    """
    layers = read_layers(student)
    chosen = choose_class(student, layers, name)
    config = _config(student, layers, chosen)
    softmax = to_softmax(student) if linearized_layers(student) else student
    state = {name: tensor.clone() for name, tensor in softmax.state_dict().items()}
    if STOCK_CLASSES[chosen].biases != "none":
        state = _zero_biases(student, chosen) | state
    if STOCK_CLASSES[chosen].sinks:
        state |= _sinks(student, state)
    stock_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, info = stock_class.from_pretrained(
        None, config=config, state_dict=state, dtype=student.dtype, output_loading_info=True
    )
    others, missing = sorted(info["unexpected_keys"]), sorted(info["missing_keys"])
    if others or missing:
        raise UserError(
            f"weights: expected those of {chosen}, found {', '.join(others[:3]) or 'no others'} in addition and "
            f"{', '.join(missing[:3]) or 'none'} missing; this model has parts that {chosen} does not"
        )
    model.generation_config = student.generation_config
    return model.to(student.device).eval()


def _config(student: PreTrainedModel, layers: Layers, name: str) -> Any:
    """Return the config of the stock class."""
    source = student.config
    fields = {field: getattr(source, field) for field in COPIED if getattr(source, field, None) is not None}
    fields |= STOCK_CLASSES[name].fields
    head_dim = head_dim_of(source)
    types = ["sliding_attention" if windowed else "full_attention" for windowed in layers.windowed]
    fields |= {"head_dim": head_dim, "layer_types": types, "dtype": student.dtype}
    fields["sliding_window"] = source.max_position_embeddings if layers.window is None else layers.window
    if name == "granite_swa":
        fields |= {"attention_bias": True, "attention_multiplier": head_dim**-0.5}
    if name == "qwen2":
        # vLLM reads layer_types only if this equals the number of layers.
        fields["max_window_layers"] = source.num_hidden_layers
    return CONFIG_MAPPING[name](**fields)


def head_dim_of(config: Any) -> int:
    """Return the width of a head of attention."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _zero_biases(student: PreTrainedModel, name: str) -> dict[str, Tensor]:
    """Return zeros for the biases of attention that the class has."""
    config = student.config
    head_dim = head_dim_of(config)
    sizes = {
        "q_proj": config.num_attention_heads * head_dim,
        "k_proj": config.num_key_value_heads * head_dim,
        "v_proj": config.num_key_value_heads * head_dim,
    }
    if STOCK_CLASSES[name].biases == "all":
        sizes["o_proj"] = config.hidden_size
    return {
        f"model.layers.{layer}.self_attn.{projection}.bias": torch.zeros(size, dtype=student.dtype)
        for layer in range(config.num_hidden_layers)
        for projection, size in sizes.items()
    }


def _sinks(student: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return sink logits of all layers, and the biases that hold the values of the learned sinks."""
    config = student.config
    found: dict[str, Tensor] = {}
    for index in range(config.num_hidden_layers):
        found[f"model.layers.{index}.self_attn.sinks"] = torch.full(
            (config.num_attention_heads,), NO_SINK, dtype=student.dtype
        )
    for layer in linearized_layers(student).values():
        combine, prefix = layer.mixer.combine, f"model.layers.{layer.layer_idx}.self_attn"
        assert isinstance(combine, WindowOnlyCombine) and isinstance(combine.config, WindowOnly)
        if combine.sink_logit is None or combine.sink_value is None:
            continue
        found[f"{prefix}.sinks"] = combine.sink_logit.detach().to(student.dtype).clone()
        value = combine.sink_value.detach().double()
        of_queries = repeat_kv(value[None, :, None], config.num_attention_heads).flatten()
        added = state[f"{prefix}.o_proj.weight"].double() @ of_queries
        for name, change in (("v_proj", -value.flatten()), ("o_proj", added)):
            bias = state[f"{prefix}.{name}.bias"]
            found[f"{prefix}.{name}.bias"] = (bias.double().to(change) + change).to(student.dtype)
    return found
