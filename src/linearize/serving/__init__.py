"""Serve converted models by an OpenAI-compatible API, with vLLM or with transformers' own server."""
