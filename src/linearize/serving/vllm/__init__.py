"""vLLM plugin for converted models: `vllm serve OUT/model`, `LLM(model=...)`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

# vLLM's modules of the base classes whose attention calls `self.attn(q, k, v)` after RoPE.
BASES = {
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def register() -> None:
    """Register the converted models' classes; vLLM calls this in each of its processes (`vllm.general_plugins`)."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from linearize.hf.classes import MODEL_CLASSES
    from linearize.serving.vllm.refusals import ServingConfig

    for classes in MODEL_CLASSES.values():
        for cls in (cls for made in classes.values() for cls in made):
            # vLLM imports a model's class before `ServingConfig` can refuse it, so name one that exists.
            served = cls.__name__ if cls.__name__.removeprefix("Linearized") in BASES else "LinearizedLlamaForCausalLM"
            ModelRegistry.register_model(cls.__name__, f"linearize.serving.vllm.models:{served}")
            MODELS_CONFIG_MAP[cls.__name__] = ServingConfig
    # The compiler splits a model at this operator; the parts between can be CUDA graphs.
    if "vllm::linearize_mixer" not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append("vllm::linearize_mixer")
