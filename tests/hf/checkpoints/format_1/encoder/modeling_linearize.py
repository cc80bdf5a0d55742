from linearize.hf.classes import LinearizedBertConfig, LinearizedBertForMaskedLM

__all__ = ["LinearizedBertConfig", "LinearizedBertForMaskedLM"]
