"""What it takes to measure what each KV head of a model needs, beside a forward pass of the model on the same rows.

    python benchmarks/needs.py --model src/linearize/demo/teacher
    python benchmarks/needs.py --model SHAPE --new            # a folder with a config.json: random weights in bf16

Times and memory do not depend on the weights or the text: rows are random tokens. "Times a forward pass": medians over
rounds in which all take turns, with the least and the greatest. "MiB" is the most memory that a call takes beside what
is there before it.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

import torch
from records import timing_arguments, write_results
from transformers import AutoConfig, AutoModelForCausalLM

from linearize.data.rows import PackedRows
from linearize.evaluation.speed import Spread, peak_bytes, seconds_in_turns
from linearize.hf.checkpoint import load_model
from linearize.training.allocation import measured_losses
from linearize.training.memory import Choice, MemoryConfig


def random_rows(vocabulary: int, rows: int, length: int) -> PackedRows:
    """Documents of random tokens, as long as a row."""
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0), device="cpu")
    return PackedRows(ids, torch.arange(length).expand(rows, -1).contiguous(), ids)


def calls(model: Any, rows: PackedRows, candidates: dict[str, tuple[Choice, ...]]) -> dict[str, Any]:
    """A forward pass, one forward and back to the first layer's inputs, and measuring each of the `candidates`."""
    ids = rows.input_ids.to(model.device)

    def forward() -> None:
        with torch.no_grad():
            for row in ids.split(1):
                model(row, use_cache=False)

    def back() -> None:
        for row in ids.split(1):
            inputs = model.get_input_embeddings()(row).detach().requires_grad_()
            model(inputs_embeds=inputs, use_cache=False).logits.float().logsumexp(-1).sum().backward()

    def measuring(chosen: tuple[Choice, ...]) -> Any:
        return lambda: measured_losses(model, rows, chosen, tokens=rows.num_tokens, seed=0)

    measured = {name: measuring(chosen) for name, chosen in candidates.items()}
    return {"forward": forward, "forward and back": back} | measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or hub id")
    parser.add_argument("--new", action="store_true", help="of its config alone: random weights, in bfloat16")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row, and memory.of_cache_at")
    parser.add_argument("--rows", type=int, default=1)
    timing_arguments(parser, repeats=3)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    device, load = torch.device(a.device), [os.getloadavg()[0]]
    if a.new:
        with device:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(a.model), dtype=torch.bfloat16).eval()
    else:
        model = load_model(a.model, dtype=torch.float32, device=device)
    model.requires_grad_(False)
    config = MemoryConfig(fraction=0.1, of_cache_at=a.length)
    windows = config.model_copy(update={"caches": ()}).candidates()
    candidates = {"windows": windows, "windows and exact caches": config.candidates()}
    named = calls(model, random_rows(model.config.vocab_size, a.rows, a.length), candidates)
    seconds, found = seconds_in_turns(named, a.repeats), []
    print("| what | candidates | times a forward pass | MiB |\n| --- | --- | --- | --- |")  # noqa: T201
    numbers = {name: len(chosen) for name, chosen in candidates.items()}
    for name, call in named.items():
        ratio = Spread.of([x / y for x, y in zip(seconds[name], seconds["forward"], strict=True)])
        peak = peak_bytes(call, device)
        found.append({"what": name, "candidates": numbers.get(name), "times": asdict(ratio), "peak_bytes": peak})
        cells = numbers.get(name, ""), f"{ratio.median:.1f} ({ratio.low:.1f}-{ratio.high:.1f})", f"{peak / 2**20:.0f}"
        print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)  # noqa: T201
    load.append(os.getloadavg()[0])
    write_results(a, load, results=found)


if __name__ == "__main__":
    main()
