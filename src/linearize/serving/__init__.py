"""Converted models behind an OpenAI-compatible API: by vLLM, or by transformers' own server."""
