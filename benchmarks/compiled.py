"""What compiling the step brings: a softmax model and its conversion, each as it is and compiled, taking turns.

    python benchmarks/compiled.py --model M --recipe lolcats

Greedy decoding of random prompts, a batch of one: every model in every round, medians over rounds with the least and
the greatest. A compiled model's first two steps are not counted. What its first step takes, compilation included, is
paid back after as many tokens as the last column says.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path

import torch
from records import write_results
from rich.console import Console
from rich.table import Table

import linearize
from linearize.evaluation.speed import Spread, generation_speed
from linearize.hf.checkpoint import load_model
from linearize.recipe import Recipe


def cell(seconds: Spread) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds.median:.2f} ({1e3 * seconds.low:.2f}-{1e3 * seconds.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a softmax model: a folder or hub id")
    parser.add_argument("--recipe", required=True, help="by which to convert it; it is not trained")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 896], help="tokens of the prompts")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)
    load, models = os.getloadavg(), {}
    for how in ("eager", "compiled"):
        teacher = load_model(arguments.model, dtype=torch.float32, device=torch.device(arguments.device))
        student = linearize.convert(teacher, Recipe.load(arguments.recipe)).eval()
        models |= {("teacher", how): teacher, ("student", how): student}
        if how == "compiled":
            linearize.compile_steps(teacher, student)
    numbers = {"new_tokens": arguments.new_tokens, "repeats": arguments.repeats}
    speeds = generation_speed({" ".join(name): x for name, x in models.items()}, arguments.lengths, **numbers)
    found = {(x.model, x.prompt_length): x for x in speeds}
    table = Table("model", "prompt", "eager, ms a token", "compiled", "times faster", "compiled in, s", "paid after")
    for length in arguments.lengths:
        for name in ("teacher", "student"):
            eager, compiled = (found[f"{name} {how}", length] for how in ("eager", "compiled"))
            assert compiled.compiling is not None
            saved = eager.decode.median - compiled.decode.median
            ratio = f"{eager.decode.median / compiled.decode.median:.2f}"
            paid = f"{compiled.compiling / saved:,.0f}" if saved > 0 else "never"
            times = cell(eager.decode), cell(compiled.decode), ratio, f"{compiled.compiling:.1f}", paid
            table.add_row(name, f"{length:,}", *times)
    Console().print(table)
    write_results(arguments, load, speed=[asdict(x) for x in speeds])


if __name__ == "__main__":
    main()
