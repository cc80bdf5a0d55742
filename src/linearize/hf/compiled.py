"""Compile steps of generation: automatically on a GPU if that saves time, else by transformers' own settings."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, CompileConfig, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan, is_constant
from linearize.distributed import world
from linearize.hf.attention import linearized_layers
from linearize.hf.cache import layer_of
from linearize.hf.unsupported import angles_change

logger = logging.getLogger(__name__)

# After this many steps, compiling has saved the time that it took. Measured on an H100 after 2,048 tokens: compiling
# takes 55 s for the shape of Llama 3.2 1B and 108 s for Llama 3.1 8B, and saves about 22 and 55 ms in every step.
STEPS_TO_PAY = 2048


@dataclass
class StepHistory:
    """The steps that `generate()` has taken with one model in this process.

    Attributes:
        steps: number of steps, by rows of the batch.
        compiled: the numbers of rows for which the step is compiled.
        layers: by rows and settings of compiled steps: the cache that used them last, and its layers, whose tensors
            captured CUDA graphs read and write.
        possible: whether this machine can compile; None: not tried yet.
    """

    steps: Counter[int] = field(default_factory=Counter)
    compiled: set[int] = field(default_factory=set)
    layers: dict[Any, tuple[weakref.ref[StaticCache], list[Any]]] = field(default_factory=dict)
    possible: bool | None = None


_HISTORY: weakref.WeakKeyDictionary[PreTrainedModel, StepHistory] = weakref.WeakKeyDictionary()


def history(model: PreTrainedModel) -> StepHistory:
    """Return the history of `model`; a copy of a model has an empty one."""
    return _HISTORY.setdefault(model, StepHistory())


def cache_to_compile(
    model: Any,
    plan: Callable[[], LayerPlan],
    settings: GenerationConfig,
    model_kwargs: dict[str, Any],
    mode: str,
    rows: int,
) -> StaticCache | None:
    """Return an empty static cache, for which transformers compiles the steps; None: `generate()` stays eager.

    Steps are compiled on a GPU once that saves time: when the steps that the model has taken with this number of rows,
    plus the `max_new_tokens` of this call, reach `STEPS_TO_PAY`. They are not compiled if shapes change from step to
    step, if the caller chooses or gets the cache, or outside the main thread, to which captured CUDA graphs belong.

    Args:
        model_kwargs: arguments that `generate()` passes to the model's forward.
        mode: of generation, by transformers' name.
        rows: of the batch.
    """
    past = history(model)
    pays = rows in past.compiled or past.steps[rows] + (settings.max_new_tokens or 0) >= STEPS_TO_PAY
    if past.possible is False or not pays:
        return None
    # Every step has one token of every row, in the same order. transformers would also compile the chunks of a prompt.
    one_token = (
        mode in ("greedy_search", "sample") and not settings.is_assistant and settings.prefill_chunk_size is None
    )
    default_cache = (
        settings.use_cache is not False
        and settings.cache_implementation is None
        and not settings.return_dict_in_generate
        and model_kwargs.get("past_key_values") is None
    )
    one_device = len(set(getattr(model, "hf_device_map", {"": 0}).values())) == 1 and world().size == 1
    if not (one_token and default_cache and one_device and threading.current_thread() is threading.main_thread()):
        return None
    if angles_change(model.config) or not is_constant(plan()):
        return None
    cache = StaticCache(config=model.config, max_cache_len=1)  # a length that no linearized layer reads
    for module in linearized_layers(model).values():
        layer_of(cache, module)
    if not model._valid_auto_compile_criteria({"past_key_values": cache}, settings):
        return None
    if rows not in past.compiled and not _begin(model, past, rows):
        return None
    _reuse_layers(cache, past, (rows, model.config.state_dtype, model.config.prefill))
    return cache


def _begin(model: PreTrainedModel, past: StepHistory, rows: int) -> bool:
    """Log that steps are compiled from now on, or why they cannot be; return whether they can."""
    if past.possible is None:
        try:
            require_compiler(model.device)
        except UserError as error:
            logger.warning("%s; generating without compilation", error)
            past.possible = False
            return False
        past.possible = True
    logger.warning(
        "generate: steps of this model are compiled from here on, for a batch of %d: the first one takes a minute or "
        "two, once (55 s in the shape of a 1B model on an H100), and later ones about twice as fast; to turn this "
        "off, set model.generation_config.disable_compile = True",
        rows,
    )
    past.compiled.add(rows)
    return True


def _reuse_layers(cache: StaticCache, past: StepHistory, key: tuple[object, ...]) -> None:
    """Put the layers of the last compiled `generate()` with this key into `cache`, unless its cache is still in use."""
    last_cache, layers = past.layers.get(key, (None, []))
    if last_cache is not None and last_cache() is None:
        for layer in layers:
            layer.reset()
        cache.layers = layers
    past.layers[key] = weakref.ref(cache), cache.layers


def compile_steps(*models: PreTrainedModel) -> None:
    """Let `generate()` of these models, linearized or softmax, use a static cache and a compiled step from now on.

    Steps are compiled by torch.compile's inductor, with CUDA graphs on a GPU. The prompt is read as before. The
    settings are in `model.generation_config`; `save_pretrained` writes the static cache, not the compile settings.

    Raises:
        UserError: this machine cannot compile; the models are unchanged.
    """
    for device in {model.device for model in models}:
        require_compiler(device)
    for model in models:
        settings = CompileConfig()
        settings._compile_all_devices = True  # type: ignore[assignment]  # else a CPU would be skipped
        assert model.generation_config is not None
        model.generation_config.update(cache_implementation="static", compile_config=settings)


def is_compiled(model: PreTrainedModel) -> bool:
    """Return whether the model's generation config makes `generate()` compile the steps."""
    settings = model.generation_config
    return settings is not None and settings.compile_config is not None


def decoding(model: PreTrainedModel, slots: int) -> tuple[Callable[..., Any], Cache]:
    """Return the step function of `generate()` and an empty cache; a static cache has room for `slots` tokens."""
    if not is_compiled(model):
        return model, DynamicCache(config=model.config)
    assert model.generation_config is not None
    step = model.get_compiled_call(model.generation_config.compile_config)
    return step, StaticCache(config=model.config, max_cache_len=slots)


def require_compiler(device: torch.device) -> None:
    """Compile a tiny function, which finds a missing compiler in seconds instead of a minute.

    Raises:
        UserError: this machine cannot compile for this device.
    """
    # A cached result on disk would need no compiler.
    plus_one = torch.compile(lambda x: x + 1, options={"fx_graph_cache": False})
    try:
        plus_one(torch.zeros(8, device=device))
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            "compile: expected a C++ compiler (g++, or the one that the variable CXX names) and Python's headers, on a "
            f"GPU Triton too, found: {reason}; install what is missing"
        ) from None
