"""Compiled steps of generation, by transformers' own settings: what `generate()` reads, and timings too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, CompileConfig, DynamicCache, PreTrainedModel, StaticCache

from linearize.base import UserError


def compile_steps(*models: PreTrainedModel) -> None:
    """From here on `generate()` of these models, linearized or softmax, has a static cache and compiles the step.

    That is torch.compile's inductor, with CUDA graphs on a GPU. The prompt is read as before. The settings stand in
    `model.generation_config`, of which `save_pretrained` writes the static cache.

    Raises:
        UserError: nothing can be compiled on this machine; the models are left as they were.
    """
    for device in {model.device for model in models}:
        _try_compiler(device)
    for model in models:
        settings = CompileConfig()
        settings._compile_all_devices = True  # type: ignore[assignment]  # or a CPU would be passed over
        assert model.generation_config is not None
        model.generation_config.update(cache_implementation="static", compile_config=settings)


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether `generate()` compiles the model's steps without being told each time."""
    settings = model.generation_config
    return settings is not None and settings.compile_config is not None


def decoding(model: PreTrainedModel, slots: int) -> tuple[Callable[..., Any], Cache]:
    """What `generate()` feeds one more token to, and an empty cache; a static one has room for `slots` tokens."""
    if not is_compiled(model):
        return model, DynamicCache(config=model.config)
    assert model.generation_config is not None
    step = model.get_compiled_call(model.generation_config.compile_config)
    return step, StaticCache(config=model.config, max_cache_len=slots)


def _try_compiler(device: torch.device) -> None:
    """Compile next to nothing: what a large graph would miss after a minute, this misses in seconds."""
    # From a cache on disk it would come without a compiler.
    plus_one = torch.compile(lambda x: x + 1, options={"fx_graph_cache": False})
    try:
        plus_one(torch.zeros(8, device=device))
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            "compile: expected a C++ compiler (g++, or the one that the variable CXX names) and Python's headers, on a "
            f"GPU Triton too, found: {reason}; install what is missing"
        ) from None
