"""What we rely on in vLLM, by name: where a version changes it, this says what, before anything else fails."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import pytest

from linearize.serving.vllm import BASES

pytestmark = pytest.mark.vllm

# Module, name in it, and the attributes or parameters of that which we use.
RELIED_ON: list[tuple[str, str, tuple[str, ...]]] = [
    ("vllm", "ModelRegistry", ("register_model",)),
    ("vllm.config", "CompilationConfig", ("_attention_ops",)),
    ("vllm.config", "get_current_vllm_config", ()),
    ("vllm.config", "set_current_vllm_config", ()),
    ("vllm.forward_context", "get_forward_context", ()),
    ("vllm.forward_context", "ForwardContext", ("attn_metadata", "no_compile_layers")),
    ("vllm.model_executor.layers.attention", "Attention", ("forward",)),
    (
        "vllm.model_executor.layers.mamba.abstract",
        "MambaBase",
        ("bind_kv_cache", "get_state_shape", "get_state_dtype", "mamba_type", "get_attn_backend", "get_kv_cache_spec"),
    ),
    ("vllm.model_executor.layers.mamba.mamba_utils", "get_temporal_copy_spec", ("state", "block_ids")),
    ("vllm.model_executor.models.config", "MODELS_CONFIG_MAP", ()),
    ("vllm.model_executor.models.config", "MambaModelConfig", ("verify_and_update_config",)),
    (
        "vllm.model_executor.models.config",
        "VerifyAndUpdateConfig",
        ("verify_and_update_config", "verify_and_update_model_config"),
    ),
    ("vllm.model_executor.models.interfaces", "HasInnerState", ("has_inner_state",)),
    (
        "vllm.model_executor.models.interfaces",
        "IsHybrid",
        ("is_hybrid", "get_mamba_state_shape_from_config", "get_mamba_state_copy_func", "get_mamba_state_copy_funcs"),
    ),
    ("vllm.model_executor.models.interfaces", "SupportsMambaPrefixCaching", ("supports_mamba_prefix_caching",)),
    ("vllm.model_executor.models.utils", "extract_layer_index", ()),
    ("vllm.utils.torch_utils", "direct_register_custom_op", ("op_name", "op_func", "mutates_args", "fake_impl")),
    ("vllm.v1.attention.backend", "AttentionCGSupport", ("NEVER",)),
    (
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        ("compute_num_computed_tokens", "query_start_loc_cpu"),
    ),
    ("vllm.v1.attention.backends.linear_attn", "LinearAttentionBackend", ("get_name", "get_builder_cls")),
    (
        "vllm.v1.attention.backends.linear_attn",
        "LinearAttentionMetadata",
        ("num_decodes", "num_prefills", "state_indices_tensor"),
    ),
    ("vllm.v1.attention.backends.linear_attn", "LinearAttentionMetadataBuilder", ("build", "_cudagraph_support")),
    ("vllm.v1.attention.backends.registry", "MambaAttentionBackendEnum", ("LINEAR",)),
    ("vllm.v1.kv_cache_interface", "MambaSpec", ("shapes", "dtypes", "page_size_padded")),
]


def names_of(found: Any) -> set[str]:
    """Attributes, annotated fields of it and of its bases, and parameters."""
    names = set(dir(found)) | {
        name for base in getattr(found, "__mro__", ()) for name in vars(base).get("__annotations__", {})
    }
    return names | (set(inspect.signature(found).parameters) if callable(found) else set())


@pytest.mark.parametrize("module, name, attributes", RELIED_ON)
def test_it_is_there(module: str, name: str, attributes: tuple[str, ...]):
    found = getattr(import_module(module), name)
    assert not set(attributes) - names_of(found)


@pytest.mark.parametrize("base", sorted(BASES))
def test_an_attention_calls_attn_with_q_k_and_v_after_rope(base: str):
    """It hands its layer's input over by name, too, and rotates by `rotary_emb`; scores are multiplied by `scaling`."""
    module = import_module(f"vllm.model_executor.models.{BASES[base]}")
    assert hasattr(module, base)
    (attention,) = [x for name, x in vars(module).items() if name == base.replace("ForCausalLM", "Attention")] or [
        import_module("vllm.model_executor.models.llama").LlamaAttention
    ]
    source = inspect.getsource(attention)
    assert "self.attn(q, k, v)" in source
    assert "self.rotary_emb(positions, q, k)" in source
    assert "hidden_states" in inspect.signature(attention.forward).parameters


def test_the_plugin_is_found():
    """By an installed package's entry point, whose function vLLM calls."""
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "linearize"]
    assert found.load().__module__ == "linearize.serving.vllm"
