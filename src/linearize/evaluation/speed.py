"""Seconds and bytes: of any calls that take turns in one process, and of generation by teacher and student."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, PreTrainedModel

from linearize.errors import UserError
from linearize.evaluation.perplexity import inference

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def seconds_in_turns(
    calls: Mapping[Name, Callable[[], object]], repeats: int, advance: Callable[[], object] = lambda: None
) -> dict[Name, list[float]]:
    """Seconds of each call, `repeats` times; one uncounted round first. `advance` is called after every call.

    The calls take turns, in alternating order, so that a machine that slows down slows all of them, and the numbers of
    one round can be divided by each other.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    turns = (list(calls), list(calls)[::-1])
    for repeat in range(repeats + 1):
        for name in turns[repeat % 2]:
            start = _now()
            calls[name]()
            took = _now() - start
            if repeat > 0:
                seconds[name].append(took)
            advance()
    return seconds


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The most bytes that `call` holds at once on a device beyond what stood before it."""
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
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


@dataclass(frozen=True)
class Speed:
    """One model at one prompt length, batch of one."""

    model: str
    prompt_length: int
    prefill: Spread  # seconds for the whole prompt
    decode: Spread  # seconds per generated token
    cache_bytes: int  # held after prompt and generated tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def generation_speed(
    models: Mapping[str, PreTrainedModel],
    prompt_lengths: Sequence[int],
    *,
    new_tokens: int = 32,
    repeats: int = 5,
    seed: int = 0,
) -> list[Speed]:
    """Time prefill and greedy decoding of random prompts; one uncounted run first, then `repeats` counted ones.

    The models take turns, in alternating order, so that a machine that slows down slows all of them.

    Raises:
        UserError: a model with learned positions has too few of them.
    """
    for name, model in models.items():
        _require_positions(name, model.config, max(prompt_lengths) + new_tokens)
    generator = torch.Generator().manual_seed(seed)
    vocab_size = min(model.config.vocab_size for model in models.values())
    turns = (list(models), list(models)[::-1])
    speeds = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("speed", total=len(prompt_lengths) * (repeats + 1))
        for length in prompt_lengths:
            prompt = torch.randint(vocab_size, (1, length), generator=generator)
            prefill, decode, held = defaultdict(list), defaultdict(list), {}
            for repeat in range(repeats + 1):
                for name in turns[repeat % 2]:
                    prefill_seconds, decode_seconds, held[name] = _generate(models[name], prompt, new_tokens)
                    if repeat > 0:
                        prefill[name].append(prefill_seconds)
                        decode[name].append(decode_seconds / new_tokens)
                progress.advance(task)
            speeds += [Speed(n, length, Spread.of(prefill[n]), Spread.of(decode[n]), held[n]) for n in turns[0]]
    return speeds


def cache_bytes(cache: Any) -> int:
    """Bytes of memory that the tensors of a Hugging Face cache keep alive, whole storages and each counted once."""
    storages = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer)):
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def break_even(state_bytes: int, kv_bytes_per_token: int) -> int:
    """The least number of tokens whose K/V cache is larger than a constant state of `state_bytes`."""
    if kv_bytes_per_token <= 0:
        raise ValueError(f"kv_bytes_per_token must be positive, got {kv_bytes_per_token}")
    return state_bytes // kv_bytes_per_token + 1


def _generate(model: PreTrainedModel, prompt: Int[Tensor, "1 T"], new_tokens: int) -> tuple[float, float, int]:
    """Seconds of prefill, seconds of decoding `new_tokens` tokens, and bytes of the cache afterwards."""
    with inference(model) as device:
        cache = DynamicCache(config=model.config)

        def next_token(tokens: Int[Tensor, "1 T"]) -> Int[Tensor, "1 1"]:
            # As in generate(): no logits of the prompt but the last, which would dominate at long lengths.
            output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return output.logits[:, -1:].argmax(dim=-1)

        prompt = prompt.to(device)
        start = _now()
        token = next_token(prompt)
        prefilled = _now()
        for _ in range(new_tokens):
            token = next_token(token)
        return prefilled - start, _now() - prefilled, cache_bytes(cache)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels run behind the program's back
    return time.perf_counter()


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _require_positions(name: str, config: Any, needed: int) -> None:
    """Rotary positions go on for ever as far as time is concerned; a table of learned ones does not."""
    available = config.max_position_embeddings
    if getattr(config, "rope_parameters", None) is None and needed > available:
        raise UserError(
            f"{name}: expected prompt and generated tokens to fit its {available} learned positions, "
            f"found {needed}; choose shorter prompt lengths"
        )
