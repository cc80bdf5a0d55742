"""Measure seconds and bytes of generation by teacher and student, which alternate in one process."""

# The types of torch and transformers are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from linearize.base import UserError, progress
from linearize.data.rows import inference
from linearize.evaluation.timings import Bench, Crossover, Speed, Spread
from linearize.hf.compiled import decoding, is_compiled

# First compiled steps, which are not counted: CUDA graphs record the addresses of a new cache in them.
_RECORDING = 2


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the peak bytes that `call` allocates on a device, beyond those allocated before it."""
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its start and stop on standard error
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def generation_speed(
    models: Mapping[str, PreTrainedModel],
    prompt_lengths: Sequence[int],
    *,
    batch_sizes: Sequence[int] = (1,),
    new_tokens: int = 32,
    repeats: int = 5,
    seed: int = 0,
) -> list[Speed]:
    """Time prefill and greedy decoding of random prompts: one uncounted run first, then `repeats` counted ones.

    The models alternate, so that a slower machine affects all of them. The uncounted run measures bytes, and compiles
    the steps of models that were given to `compile_steps`, for each batch size and length.

    Returns:
        A list by batch size, then by length, then by model in the given order.

    Raises:
        UserError: a model with learned positions has too few of them.
    """
    for name, model in models.items():
        require_positions(name, model.config, max(prompt_lengths) + new_tokens)
    generator = torch.Generator().manual_seed(seed)
    vocab_size = min(model.config.vocab_size for model in models.values())
    turns = (list(models), list(models)[::-1])
    speeds: list[Speed] = []
    for batch_size, length in progress([*product(batch_sizes, prompt_lengths)], "speed"):
        prompts = torch.randint(vocab_size, (batch_size, length), generator=generator)
        if any(map(is_compiled, models.values())):
            torch.compiler.reset()  # else graphs would have dynamic lengths, and their number would reach a limit
        held = {name: _bytes(models[name], prompts, new_tokens) for name in turns[0]}
        seconds: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for repeat in range(1, repeats + 1):
            for name in turns[repeat % 2]:
                seconds[name].append(_seconds(models[name], prompts, new_tokens))
        for name in turns[0]:
            prefill, decode = zip(*seconds[name], strict=True)
            spreads = Spread.of(prefill), Spread.of(decode)
            cached, peak, compiling = held[name]
            speeds.append(Speed(name, length, *spreads, cached, batch_size, new_tokens, peak, compiling))
    return speeds


def bench(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    *,
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    new_tokens: int,
    repeats: int,
    seed: int,
) -> Bench:
    """Time both models in one process, alternating, on random prompts.

    Raises:
        UserError: a model with learned positions has too few of them.
    """
    models, sizes = {"teacher": teacher, "student": student}, sorted(set(batch_sizes))
    options: dict[str, Any] = {"new_tokens": new_tokens, "repeats": repeats, "seed": seed}
    speed = generation_speed(models, sorted(set(prompt_lengths)), batch_sizes=sizes, **options)
    crossovers = {size: Crossover.of([s for s in speed if s.batch_size == size]) for size in sizes}
    return Bench(speed, crossovers, repeats, seed, _setting(student))


def _setting(model: PreTrainedModel) -> str:
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} {'thread' if threads == 1 else 'threads'}"
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu
    return f"{device}, {str(model.dtype).removeprefix('torch.')}, torch {torch.__version__}"


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of the storages that the tensors of a transformers cache use, each storage counted once."""
    storages: dict[tuple[torch.device, int], int] = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer)):
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextmanager
def _generation(
    model: PreTrainedModel, slots: int
) -> Generator[tuple[Callable[[Int[Tensor, "B T"]], Int[Tensor, "B 1"]], Cache], None, None]:
    """Yield a function from new tokens to the next greedy token, and the cache that it fills."""
    with inference(model):
        step, cache = decoding(model, slots)
        forward: Callable[..., Any] = model  # of the prompt; steps come after it

        def next_token(tokens: Int[Tensor, "B T"]) -> Int[Tensor, "B 1"]:
            nonlocal forward
            # As in generate(), only the last logits: those of all tokens would dominate the time at long lengths.
            output = forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            forward = step
            return output.logits[:, -1:].argmax(dim=-1)

        yield next_token, cache


def _seconds(model: PreTrainedModel, prompts: Int[Tensor, "B T"], new_tokens: int) -> tuple[float, float]:
    """Return the seconds of prefill, and of a step, as the mean over `new_tokens` steps."""
    prompts = prompts.to(model.device)
    uncounted = min(_RECORDING, new_tokens - 1) if is_compiled(model) else 0
    with _generation(model, prompts.shape[1] + new_tokens) as (next_token, _):
        start = now()
        token = next_token(prompts)
        prefilled = begun = now()
        for index in range(new_tokens):
            if index and index == uncounted:
                begun = now()
            token = next_token(token)
        return prefilled - start, (now() - begun) / (new_tokens - uncounted)


def _bytes(model: PreTrainedModel, prompts: Int[Tensor, "B T"], new_tokens: int) -> tuple[int, int, float | None]:
    """Return the bytes of the cache after all tokens, the peak of the prefill, and the seconds of the first step.

    The seconds are None if steps are not compiled.
    """
    prompts = prompts.to(model.device)
    with _generation(model, prompts.shape[1] + new_tokens) as (next_token, _):
        next_token(prompts)  # memory that stays allocated after the first call does not count
    with _generation(model, prompts.shape[1] + new_tokens) as (next_token, cache):
        first: list[Tensor] = []
        replaced = list(cache.layers)  # kept alive: the profiler warns about memory that it did not see allocated
        peak = peak_bytes(lambda: first.append(next_token(prompts)), model.device)
        del replaced
        start = time.perf_counter()
        token = next_token(first[0])
        compiling = time.perf_counter() - start if is_compiled(model) else None
        for _ in range(new_tokens - 1):
            token = next_token(token)
        return cache_bytes(cache), peak, compiling


def now() -> float:
    """Return the time in seconds, after all work that was started on a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels run asynchronously
    return time.perf_counter()


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield all tensors in nested dicts, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in cast(Mapping[object, object], value).values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in cast(Sequence[object], value):
            yield from _tensors(item)


def require_positions(name: str, config: PreTrainedConfig, needed: int) -> None:
    """Raise UserError if a model has fewer than `needed` learned positions; rotary positions have no limit here."""
    available: int | None = getattr(config, "max_position_embeddings", None)
    if available is not None and getattr(config, "rope_parameters", None) is None and needed > available:
        raise UserError(
            f"{name}: expected prompt and generated tokens to fit its {available} learned positions, "
            f"found {needed}; choose shorter prompt lengths"
        )
