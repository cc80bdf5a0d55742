"""Greedy continuations of prompts by vLLM, with the bytes that a sequence may take, and the time.

    python benchmarks/engines/with_vllm.py --model DIR --prompts prompts.json --output vllm.json

The bytes are those that vLLM says it needs for one sequence of `--max-model-len` tokens: the memory of its cache,
divided by how many such sequences it can hold at once. Plugins are not loaded: linearize's own takes no part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

CACHE = 512 * 2**20  # bytes, for keys and values
BATCH = 512  # tokens of a prompt at a time, as llama.cpp has it: layers with a window hold a batch besides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--prompts", type=Path, required=True, help="from prompts.py")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="of weights and activations (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        generate(arguments)
        return
    # vLLM logs how many sequences its cache holds; its engine is another process, whose log is read here.
    environment = os.environ | {"VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, *sys.argv, "--here"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.search(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", done.stdout)
    if done.returncode or found is None:
        sys.exit(f"vLLM failed, or did not say how many sequences it holds:\n{done.stdout[-4000:]}")
    about = json.loads(arguments.output.read_text(encoding="utf-8"))
    about["bytes_per_sequence"] = round(CACHE / float(found[1]))
    arguments.output.write_text(json.dumps(about), encoding="utf-8")


def generate(arguments: argparse.Namespace) -> None:
    """Run vLLM in this process."""
    import vllm

    prompts = [{"prompt_token_ids": ids} for ids in json.loads(arguments.prompts.read_text(encoding="utf-8"))]
    engine = vllm.LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=CACHE,
        max_num_seqs=1,
        max_num_batched_tokens=BATCH,
    )

    def timed(count: int) -> tuple[list[list[int]], float]:
        settings = vllm.SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        outputs = engine.generate(prompts, settings, use_tqdm=False)
        seconds = (time.perf_counter() - began) / len(prompts)
        return [list(output.outputs[0].token_ids) for output in outputs], seconds

    timed(1)  # what is compiled or loaded at first is not counted
    _, reading = timed(1)
    tokens, both = timed(arguments.new_tokens)
    about = {
        "engine": f"vllm {vllm.__version__}",
        "tokens": tokens,
        "seconds_of_a_prompt": reading,
        "seconds_of_a_token": (both - reading) / (arguments.new_tokens - 1),
    }
    arguments.output.write_text(json.dumps(about), encoding="utf-8")


if __name__ == "__main__":
    main()
