"""Requests to a teacher and to its students within vLLM, one model after the other: how fast, and how many fit.

Weights and prompts are random. Every model gets a process of its own and a cache of the same size. For each length of
context, all requests are handed over at once: requests per second, the time until a request's first token, the time
between its later ones (medians), and how many sequences of this length fit the cache, by vLLM's own count. No request
shares anything with another.

    python benchmarks/serving.py --model llama-135m --json benchmarks/results/serving.json  # most of an hour on 2 cores
    python benchmarks/serving.py --model llama-135m --requests 2 2 1 --new-tokens 4         # minutes

It runs where vLLM is installed: in the `.venv-vllm` of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from records import write_results
from teachers import make_student, make_teacher, model_arguments

from linearize import Recipe

TEACHER = "teacher"
# One process and no network, so that an engine can be asked for its cache.
SETTING = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def write_models(arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """The teacher and what each recipe makes of it, untrained, in folders of their names."""
    torch.manual_seed(0)
    teacher = make_teacher(arguments.model, getattr(torch, arguments.dtype), torch.device("cpu"))
    teacher.save_pretrained(scratch / TEACHER)
    for recipe in arguments.recipes:
        make_student(teacher, Recipe.load(recipe)).save_pretrained(scratch / recipe)
    return [TEACHER, *arguments.recipes]


def measure(name: str, length: int, requests: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One model at one length of context; in a process that ends with it."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    new, source = arguments.new_tokens, random.Random(0)
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=length + new,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        disable_log_stats=False,
        distributed_executor_backend="uni",
    )
    core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    fit = get_max_concurrency_for_kv_cache_config(llm.llm_engine.vllm_config, core.scheduler.kv_cache_config)
    row: dict[str, Any] = {"model": name, "length": length, "requests": requests, "sequences_that_fit": int(fit)}
    if not requests:
        return row
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    texts: Any = [{"prompt_token_ids": [source.randrange(40_000) for _ in range(length)]} for _ in range(requests)]
    llm.generate([{"prompt_token_ids": [1] * 16}], sampling, use_tqdm=False)  # what is compiled on first use
    start = time.perf_counter()
    done = [found.metrics for found in llm.generate(texts, sampling, use_tqdm=False)]
    seconds = time.perf_counter() - start
    between = [(m.last_token_ts - m.first_token_ts) / (new - 1) for m in done if m is not None]
    row["requests_per_second"] = requests / seconds
    row["first_token_seconds"] = statistics.median(m.first_token_latency for m in done if m is not None)
    row["token_seconds"] = statistics.median(between)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| context | model | requests | requests/s | first token, s | per token, ms | sequences that fit |"]
    lines.append(f"|{' --- |' * 7}")
    for x in sorted(rows, key=lambda row: row["length"]):
        speed = "- | - | -"
        if x["requests"]:
            speed = f"{x['requests_per_second']:.3f} | {x['first_token_seconds']:.2f} | {1e3 * x['token_seconds']:.0f}"
        lines.append(f"| {x['length']:,} | {x['model']} | {x['requests']} | {speed} | {x['sequences_that_fit']:,} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 8192], metavar="T", help="of contexts")
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[16, 8, 2],
        metavar="N",
        help="at each length; 0: only how many sequences fit",
    )
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="per request (default: 32)")
    parser.add_argument("--cache-gib", type=int, default=1, metavar="N", help="of every model's cache (default: 1)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of torch (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # model, length, folder: in a process of its own
    arguments = parser.parse_args()
    if arguments.measure:
        name, length, folder = arguments.measure
        requests = dict(zip(arguments.lengths, arguments.requests, strict=True))[int(length)]
        print(json.dumps(measure(name, int(length), requests, arguments, Path(folder))))  # noqa: T201
        return
    load, rows = [os.getloadavg()[0]], list[dict[str, Any]]()
    setting = SETTING | {
        "VLLM_CPU_KVCACHE_SPACE": str(arguments.cache_gib),
        "OMP_NUM_THREADS": str(arguments.threads),
    }
    with tempfile.TemporaryDirectory() as scratch:
        models = write_models(arguments, Path(scratch))
        for length in arguments.lengths:
            for name in models:
                command = [*sys.argv, "--measure", name, str(length), str(Path(scratch, name))]
                found = subprocess.run(
                    [sys.executable, *command], env=os.environ | setting, stdout=subprocess.PIPE, check=True
                )
                rows.append(json.loads(found.stdout.splitlines()[-1]))
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)  # noqa: T201
                write_results(arguments, [*load, os.getloadavg()[0]], results=rows)
    print(table(rows))  # noqa: T201 (the result)


if __name__ == "__main__":
    main()
