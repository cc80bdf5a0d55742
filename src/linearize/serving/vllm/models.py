"""vLLM's model classes with our mixers: `Linearized<X>ForCausalLM` is derived from vLLM's `<X>ForCausalLM`.

A converted layer's attention keeps its projections, norms and RoPE; its `attn`, called with q, k and v, is replaced.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching
from vllm.model_executor.models.utils import extract_layer_index

from linearize.base import UserError
from linearize.hf.classes import read_plan
from linearize.mixers.head_shards import shard_of_heads
from linearize.serving.vllm import BASES
from linearize.serving.vllm.layer import Extras, StateLayer
from linearize.serving.vllm.pages import heads_of_ranks, page_bytes, page_layouts, teacher_shape

INTERFACES = (HasInnerState, IsHybrid, SupportsMambaPrefixCaching)


class LinearizedCausalLM:
    """Mixin for vLLM's model classes: builds and loads mixers, and implements vLLM's interface of stateful models."""

    supports_lora = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        with set_current_vllm_config(vllm_config):
            exchange_attention(self, vllm_config)  # type: ignore[arg-type]

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return ((page_bytes(vllm_config),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,)  # a page is copied whole

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the base's weights by vLLM's loader and the mixers' by name; return the names of loaded parameters.

        Raises:
            UserError: a mixer's weights are missing, or belong to no mixer of this model.
        """
        layers = {
            name.removesuffix(".attn"): layer
            for name, layer in self.named_modules()  # type: ignore[attr-defined]
            if isinstance(layer, StateLayer)
        }
        shards = {f"{name}.mixer.{key}": x for name, layer in layers.items() for key, x in layer.shards.items()}
        mine = {
            f"{name}.attn.mixer.{key}": x
            for name, layer in layers.items()
            for key, x in layer.mixer.state_dict().items()
        }
        seen: set[str] = set()

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, x in weights:
                if ".mixer." not in name:
                    yield name, x
                elif name not in shards or shards[name].shape != x.shape:
                    expected = shards[name].shape if name in shards else "no such weight"
                    raise UserError(f"{name}: expected {expected}, found {tuple(x.shape)}; convert the model again")
                else:
                    seen.add(name)
                    if shards[name].name is not None:
                        layer = name.partition(".mixer.")[0]
                        mine[f"{layer}.attn.mixer.{shards[name].name}"].copy_(shards[name](x))

        with torch.no_grad():
            loaded = super().load_weights(others())  # type: ignore[misc]
        if missing := sorted(shards.keys() - seen):
            raise UserError(f"{missing[0]}: expected the mixer's weights in the folder, found none; convert it again")
        return set(loaded or ()) | mine.keys()


def exchange_attention(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Replace every converted layer's `Attention` by a `StateLayer`, in place."""
    config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
    heads = heads_of_ranks(config, get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]
    shape, plan, layouts = teacher_shape(config).layer, read_plan(config), page_layouts(config, dtype, heads)
    size = page_bytes(vllm_config)
    module: Any
    for name, module in list(model.named_modules()):
        attention: Any = getattr(module, "attn", None)
        if not isinstance(attention, Attention) or plan[extract_layer_index(name)] is None:
            continue
        index = extract_layer_index(name)
        device, before = next(module.parameters()).device, torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # for mixers, in models of any dtype
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            mixer, shards = shard_of_heads(plan[index], shape, heads)  # type: ignore[arg-type]
        torch.set_default_dtype(before)
        prefix = attention.layer_name
        del vllm_config.compilation_config.static_forward_context[prefix]
        layer = StateLayer(
            mixer.requires_grad_(False).to(device),
            shards,
            layouts[index],  # type: ignore[arg-type]
            scaling=module.scaling,
            softcap=getattr(config, "attn_logit_softcapping", None),
            page_bytes=size,
            kept=_kept(mixer, attention, module, vllm_config),
            prefix=prefix,
        )
        module.attn = layer
        if mixer.wants_unrotated:
            if not hasattr(module.rotary_emb, "cos_sin_cache"):
                raise UserError(
                    f"rope_parameters: expected RoPE whose angles do not depend on the text's length, because "
                    f"{name}'s mixer rotates features by them; found {type(module.rotary_emb).__name__}"
                )
            layer.rope, module.rotary_emb = module.rotary_emb, KeepUnrotated(module.rotary_emb, layer)
        if mixer.wants_hidden:
            module.__class__ = type(module.__class__.__name__, (KeepHidden, module.__class__), {})


def _kept(mixer: Any, attention: Attention, module: Any, vllm_config: VllmConfig) -> Attention | None:
    """Return vLLM's attention over all keys for the KV heads of a layer that stay softmax; None if there are none."""
    kept = mixer.shape.num_kv_heads - sum(len(heads) for heads, part in mixer.parts() if part.config is not None)
    if not kept:
        return None
    cache = copy.copy(vllm_config.cache_config)
    cache.sliding_window = None
    return Attention(
        kept * (mixer.shape.num_heads // mixer.shape.num_kv_heads),
        mixer.shape.head_dim,
        module.scaling,
        num_kv_heads=kept,
        cache_config=cache,
        quant_config=vllm_config.quant_config,
        logits_soft_cap=getattr(vllm_config.model_config.hf_config, "attn_logit_softcapping", None),
        prefix=f"{attention.layer_name}.kept",
    )


class KeepUnrotated(nn.Module):
    """Wrapper of an attention's RoPE that also passes its inputs to the `StateLayer`."""

    layer: StateLayer

    def __init__(self, rope: nn.Module, layer: StateLayer) -> None:
        super().__init__()
        self.rope = rope
        object.__setattr__(self, "layer", layer)  # not registered as a child module

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        # Some of vLLM's kernels rotate in place.
        self.layer.extras = Extras(self.layer.extras.hidden, positions, query.clone(), key.clone())
        return self.rope(positions, query, key)


class KeepHidden:
    """Mixin for an attention class whose mixer reads the layer's input."""

    attn: StateLayer

    def forward(self, positions: Tensor, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.attn.extras = Extras(hidden_states)
        output = super().forward(positions=positions, hidden_states=hidden_states, **kwargs)  # type: ignore[misc]
        self.attn.extras = Extras()
        return output


def __getattr__(name: str) -> type:
    """Return the class of an architecture, made when vLLM looks it up by name."""
    base = name.removeprefix("Linearized")
    if base == name or base not in BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    parent = getattr(import_module(f"vllm.model_executor.models.{BASES[base]}"), base)
    made = type(name, (LinearizedCausalLM, parent, *INTERFACES), {"__module__": __name__})
    globals()[name] = made
    return made
