"""Seconds and bytes of generation, teacher and student side by side in one process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from linearize.errors import UserError
from linearize.evaluation.perplexity import inference


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of repeated timings, in seconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        return cls(median(seconds), min(seconds), max(seconds))


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
        start = _now(device)
        token = next_token(prompt)
        prefilled = _now(device)
        for _ in range(new_tokens):
            token = next_token(token)
        return prefilled - start, _now(device) - prefilled, cache_bytes(cache)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels run behind the program's back
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
