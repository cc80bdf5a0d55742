from linearize.hf.classes import LinearizedLlamaConfig, LinearizedLlamaForCausalLM

__all__ = ["LinearizedLlamaConfig", "LinearizedLlamaForCausalLM"]
