"""Print a continuation of a prompt while it is generated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

from linearize.base import UserError, check_text, without_controls
from linearize.hf.checkpoint import CAUSAL, check_tokens, load_model, load_tokenizer, read_config
from linearize.hf.prefill import PREFILL_COSTS, STREAMING
from linearize.run.folder import student_folder
from linearize.run.validation import GENERATES, compile_if_possible, require_finite, require_head, require_linearized


class Printer(transformers.TextStreamer):
    """Print each token when it is generated; on a terminal, print control characters as escape sequences."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text, as in transformers."""
        if sys.stdout.isatty():
            text = without_controls(text)
        super().on_finalized_text(text, stream_end)


def generate(
    model: str,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    prefill: str | None,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    compiled: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Print a continuation of `prompt` while it is generated; `temperature` 0 takes the likeliest token.

    Args:
        model: a model's folder or hub id, or the folder of the run that made it.
        prefill: how a linearized model reads the prompt, "streaming" or "full"; None: as its config says.
        compiled: whether the step from token to token is compiled.
        note: called with the way of reading, and with the reason if steps cannot be compiled.
    """
    check_text(prompt, "--prompt")
    if not 0 <= seed < 2**62:
        raise UserError(f"--seed: expected a whole number from 0 to {2**62 - 1}, found {seed}")
    model = student_folder(model)
    config = read_config(model)
    require_head(model, config, CAUSAL, GENERATES)
    if prefill is not None:
        require_linearized(model)
        if prefill not in PREFILL_COSTS:
            raise UserError(f"--prefill: expected {' or '.join(PREFILL_COSTS)}, found {prefill!r}")
    tokenizer = load_tokenizer(model)
    loaded: Any = load_model(model, dtype=dtype, device=device)
    require_finite(loaded)
    inputs = tokenizer(prompt, return_tensors="pt").to(device)
    if not inputs["input_ids"].shape[1]:
        raise UserError("--prompt: expected some text, found none")
    check_tokens(inputs["input_ids"], loaded.config.vocab_size)
    if prefill is not None:
        loaded.config.prefill = prefill
    if compiled:
        compile_if_possible(loaded, note=note)
    if config.get("linearize") and (way := loaded.config.prefill or STREAMING) in PREFILL_COSTS:
        note(f"the prompt is read with prefill={way}: {PREFILL_COSTS[way]}")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    streamer = Printer(tokenizer, skip_special_tokens=True)
    loaded.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
