"""Time the measurement behind per-head KV budget allocation, beside a forward pass of the model.

    python benchmarks/needs.py --model src/linearize/demo/teacher
    python benchmarks/needs.py --model SHAPE --new            # a folder with a config.json: random weights in bf16

Times and memory do not depend on the weights or the text: rows are random tokens. "Times a forward pass": medians over
rounds in which both take turns, with the least and the greatest. "MiB" is the most memory that a call takes beside what
is there before it. The measurement reads CONTEXTS contexts twice each; the forward pass reads as many tokens.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from records import timing_arguments, write_results
from transformers import AutoConfig, AutoModelForCausalLM
from turns import seconds_in_turns

from linearize.data.rows import PackedRows
from linearize.evaluation.speed import peak_bytes
from linearize.evaluation.timings import Spread
from linearize.hf.checkpoint import load_model
from linearize.training.eviction_scores import CONTEXTS, LONGEST, REQUEST, SHORTEST, measure_attention


def random_rows(vocabulary: int, rows: int, length: int) -> PackedRows:
    """Documents of random tokens, as long as a row."""
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0), device="cpu")
    return PackedRows(ids, torch.arange(length).expand(rows, -1).contiguous(), ids)


class Bytes:
    """A tokenizer for random tokens: one token for each character."""

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(input_ids=[ord(character) % 128 for character in text])


def calls(model: Any, rows: PackedRows) -> dict[str, Any]:
    """Return a forward pass over rows, and the measurement of attention, by name."""
    ids = rows.input_ids.to(model.device)

    def forward() -> None:
        with torch.no_grad():
            for row in ids.split(1):
                model.base_model(row, use_cache=False)

    def measure() -> None:
        measure_attention(model, rows, Bytes(), seed=0)  # type: ignore[arg-type]

    return {"forward": forward, "measurement": measure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or hub id")
    parser.add_argument("--new", action="store_true", help="of its config alone: random weights, in bfloat16")
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
    longest = min(LONGEST, (model.config.max_position_embeddings - len(REQUEST)) // 2)  # as `measure_attention` has it
    length = (SHORTEST + LONGEST) * longest // LONGEST  # tokens of a context on average, twice
    named = calls(model, random_rows(model.config.vocab_size, CONTEXTS, length))
    seconds, found = seconds_in_turns(named, a.repeats), []
    print("| what | times a forward pass | MiB |\n| --- | --- | --- |")  # noqa: T201
    for name, call in named.items():
        ratio = Spread.of([x / y for x, y in zip(seconds[name], seconds["forward"], strict=True)])
        peak = peak_bytes(call, device)
        found.append({"what": name, "times": asdict(ratio), "peak_bytes": peak})
        cells = f"{ratio.median:.1f} ({ratio.low:.1f}-{ratio.high:.1f})", f"{peak / 2**20:.0f}"
        print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)  # noqa: T201
    load.append(os.getloadavg()[0])
    write_results(a, load, results=found)


if __name__ == "__main__":
    main()
