"""Turn a converted model of full attention and gated DeltaNet layers into a model of the class `qwen3_5_text`.

The class has parts that Llama and the recipe `gated-deltanet-native` do not have. These weights make them neutral:

- A convolution over 4 tokens before SiLU in linear layers: its last tap is 1, the others 0.
- SiLU of values: silu(x) is x / 2 for x near 0, so values have the factor `SMALL`.
- QK-norm in full layers: x / sqrt(mean x^2 + eps) is x / sqrt(eps) for x near 0, so queries and keys have the factor
  `SMALL` sqrt(eps), and the norm's weight removes it.
- A gate of full attention: its rows are 0, so that it is 1/2 everywhere, and the output projection has the factor 2.

All norms of the class share one eps. That of the recipe's output norm has to be scaled with the values; the residual
stream has a factor that makes it right for the other norms too. All factors are powers of 2 if both eps are equal. The
weights of norms before projections are multiplied into these: the class stores them less 1, which rounds small ones
coarsely in bfloat16. The smallest numbers need the exponents of float32 or bfloat16; float16 cannot represent them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from linearize.base import UserError
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import DeltaUpdate, ScalarDecay
from linearize.export.stock import COPIED, head_dim_of
from linearize.hf.attention import linearized_layers
from linearize.hf.convert import to_softmax
from linearize.recipe import Recipe

CLASS = "qwen3_5_text"
RECIPE = "gated-deltanet-native"
SOURCES = ("llama", "mistral")
SMALL = 2.0**-20
TAPS = 4  # of the class's convolution
TO_RESIDUAL = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "mlp.down_proj.weight")
NORMS = ("input_layernorm", "post_attention_layernorm")


def has_delta_rule(student: PreTrainedModel) -> bool:
    """Return whether a layer of a student has the delta rule."""
    configs = (layer.mixer.config for layer in linearized_layers(student).values())
    return any(isinstance(config, MixerConfig) and isinstance(config.update, DeltaUpdate) for config in configs)


def delta_net_model(student: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the class with a student's function, in its dtype and on its device.

    Raises:
        UserError: a part of the student has no place in the class.
    """
    _require_place(student)
    mixers = {layer.layer_idx: layer.mixer for layer in linearized_layers(student).values()}
    source: Any = student.config
    # silu(SMALL v) is SMALL v / 2.
    eps = next(iter(mixers.values())).config.normalizer.eps * (SMALL / 2) ** 2
    residual = math.sqrt(eps / source.rms_norm_eps)
    config = _config(source, set(mixers), eps)
    softmax = to_softmax(student).state_dict()
    state: dict[str, Tensor] = {}
    state["model.embed_tokens.weight"] = softmax["model.embed_tokens.weight"] * residual
    tied = bool(source.tie_word_embeddings)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if tied else softmax["lm_head.weight"]
    state["model.norm.weight"] = softmax["model.norm.weight"].double() / (residual if tied else 1) - 1
    for index in range(source.num_hidden_layers):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): x.double() for name, x in softmax.items() if name.startswith(prefix)}
        mixer = mixers.get(index)
        made = _mlp(layer) | (_full(layer, source, eps) if mixer is None else _linear(layer, source, mixer))
        for name, tensor in made.items():
            state[prefix + name] = tensor * residual if name in TO_RESIDUAL else tensor
    stock: Any = Qwen3_5ForCausalLM
    model: Any = stock.from_pretrained(
        None, config=config, state_dict={name: x.to(student.dtype) for name, x in state.items()}, dtype=student.dtype
    )
    model.generation_config = student.generation_config
    return model.to(student.device).eval()


def _require_place(student: PreTrainedModel) -> None:
    """Raise UserError if a part of a student has no place in the class."""
    config: Any = student.config
    source = str(config.model_type).removeprefix("linearized_")
    if source not in SOURCES or getattr(config, "sliding_window", None) is not None:
        raise UserError(f"model_type: expected {' or '.join(SOURCES)} without a sliding window, found {source!r}")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise UserError(f"model: expected no biases, which linear layers of {CLASS} do not have, found some")
    layers = linearized_layers(student)
    if len(layers) == config.num_hidden_layers:
        raise UserError(
            f"layers.keep_softmax: expected at least one layer with full attention, because {CLASS} otherwise has no "
            "cache in transformers, found none"
        )
    wanted: Any = Recipe.load(RECIPE).mixer
    for layer in layers.values():
        found = layer.mixer.config
        if isinstance(found, MixerConfig) and isinstance(found.decay, ScalarDecay):
            initial = {"bias_init": wanted.decay.bias_init}  # has no effect after training
            found = found.model_copy(update={"decay": found.decay.model_copy(update=initial)})
        if found != wanted:
            raise UserError(f"layer {layer.layer_idx}: expected full attention or the mixer of {RECIPE}, found another")


def _config(source: Any, linear: set[int], eps: float) -> Qwen3_5TextConfig:
    """Return the config of the class for a model whose layers `linear` are linear."""
    fields = {field: getattr(source, field) for field in COPIED if getattr(source, field, None) is not None}
    del fields["rms_norm_eps"]
    fields.pop("mlp_bias", None)
    head_dim, heads = head_dim_of(source), source.num_attention_heads
    rope = {**fields.pop("rope_parameters"), "partial_rotary_factor": 1.0}
    layer_types = [
        "linear_attention" if index in linear else "full_attention" for index in range(source.num_hidden_layers)
    ]
    return Qwen3_5TextConfig(
        **fields,
        head_dim=head_dim,
        rms_norm_eps=eps,
        rope_parameters=rope,
        layer_types=layer_types,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_conv_kernel_dim=TAPS,
    )


def _mlp(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a layer's MLP and of its two norms, which are multiplied into the next projections."""
    made = {f"{name}.weight": torch.zeros_like(layer[f"{name}.weight"]) for name in NORMS}
    for name in ("gate_proj", "up_proj"):
        made[f"mlp.{name}.weight"] = layer[f"mlp.{name}.weight"] * layer["post_attention_layernorm.weight"]
    return made | {"mlp.down_proj.weight": layer["mlp.down_proj.weight"]}


def _projections(layer: dict[str, Tensor], *names: str) -> Iterator[Tensor]:
    """Yield the weights of attention projections, multiplied by that of the norm before them."""
    for name in names:
        yield layer[f"self_attn.{name}_proj.weight"] * layer["input_layernorm.weight"]


def _full(layer: dict[str, Tensor], source: Any, eps: float) -> dict[str, Tensor]:
    """Return the weights of full attention."""
    q, k, v = _projections(layer, "q", "k", "v")
    q = (SMALL * math.sqrt(eps) * q).unflatten(0, (source.num_attention_heads, -1))
    # The class stores norms' weights less 1.
    norm = torch.full((head_dim_of(source),), 1 / SMALL - 1, dtype=q.dtype)
    return {
        "self_attn.q_proj.weight": torch.cat([q, torch.zeros_like(q)], dim=1).flatten(0, 1),
        "self_attn.k_proj.weight": SMALL * math.sqrt(eps) * k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": 2 * layer["self_attn.o_proj.weight"],
        "self_attn.q_norm.weight": norm,
        "self_attn.k_norm.weight": norm.clone(),
    }


def _linear(layer: dict[str, Tensor], source: Any, mixer: Any) -> dict[str, Tensor]:
    """Return the weights of a linear layer. The class has a state per query head, so shared KV heads are copied."""
    heads, groups = source.num_attention_heads, source.num_key_value_heads

    def per_query_head(x: Tensor) -> Tensor:
        return x.unflatten(0, (groups, -1)).repeat_interleave(heads // groups, dim=0).flatten(0, 1)

    q, k, v = _projections(layer, "q", "k", "v")
    qkv = torch.cat([q, per_query_head(k), SMALL * per_query_head(v)])
    taps = torch.zeros(len(qkv), 1, TAPS, dtype=qkv.dtype)
    taps[..., -1] = 1
    norm = layer["input_layernorm.weight"]
    # log sigmoid(w x + b) = -softplus(-w x - b), and the class's decay is -exp(A_log) softplus(a x + dt_bias).
    return {
        "linear_attn.in_proj_qkv.weight": qkv,
        "linear_attn.in_proj_z.weight": mixer.normalizer.gate_weight.double().T * norm,
        "linear_attn.in_proj_b.weight": per_query_head(mixer.delta.strength.weight.double().T) * norm,
        "linear_attn.in_proj_a.weight": -per_query_head(mixer.gate.g.weight.double().T) * norm,
        "linear_attn.dt_bias": -per_query_head(mixer.gate.g.bias.double()),
        "linear_attn.A_log": torch.zeros(heads, dtype=qkv.dtype),
        "linear_attn.conv1d.weight": taps,
        "linear_attn.norm.weight": torch.ones(head_dim_of(source), dtype=qkv.dtype),
        "linear_attn.out_proj.weight": layer["self_attn.o_proj.weight"] * mixer.normalizer.weight.double().flatten(),
    }
