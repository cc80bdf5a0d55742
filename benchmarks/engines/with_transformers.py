"""Greedy continuations of prompts by transformers, with the bytes of the cache behind each, and the time.

    python benchmarks/engines/with_transformers.py --model DIR --prompts prompts.json --output transformers.json

Does not import linearize for a stock model. A converted model needs `--import linearize`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--prompts", type=Path, required=True, help="from prompts.py")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="of weights and activations (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--import", dest="module", help="a module that registers the model's class")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.module:
        importlib.import_module(arguments.module)
    torch.set_num_threads(arguments.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    settings = {"do_sample": False, "max_new_tokens": arguments.new_tokens, "min_new_tokens": arguments.new_tokens}
    tokens, reading, writing, held = [], [], [], 0
    for prompt in json.loads(arguments.prompts.read_text(encoding="utf-8")):
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        model.generate(ids, do_sample=False, max_new_tokens=1)
        read = time.perf_counter()
        found = model.generate(ids, return_dict_in_generate=True, **settings)
        ended = time.perf_counter()
        tokens.append(found.sequences[0, len(prompt) :].tolist())
        reading.append(read - began)
        writing.append((ended - read - reading[-1]) / (arguments.new_tokens - 1))
        held = max(held, cache_bytes(found.past_key_values))
    about = {
        "engine": f"transformers {transformers.__version__}",
        "model_type": model.config.model_type,
        "tokens": tokens,
        "bytes_per_sequence": held,
        "seconds_of_a_prompt": statistics.median(reading),
        "seconds_of_a_token": statistics.median(writing),
    }
    arguments.output.write_text(json.dumps(about), encoding="utf-8")


def cache_bytes(cache: transformers.Cache) -> int:
    """Return the bytes of all keys and values, or states, of a cache."""
    return sum(getattr(layer, "nbytes", None) or tensor_bytes(vars(layer)) for layer in cache.layers)


def tensor_bytes(attributes: dict[Any, Any]) -> int:
    """Return the bytes of tensors among these values; a layer of linear attention has dictionaries of states."""
    tensors = [x for x in attributes.values() if isinstance(x, torch.Tensor)]
    states = [x for x in attributes.values() if isinstance(x, dict)]
    return sum(x.nbytes for x in tensors) + sum(map(tensor_bytes, states))


if __name__ == "__main__":
    main()
