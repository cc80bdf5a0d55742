"""What compiling the step brings: a softmax model and its conversion, each as it is and compiled, taking turns.

    python benchmarks/compiled.py --model src/linearize/demo/teacher --recipes lolcats
    python benchmarks/compiled.py --model llama-1b --dtype bfloat16 --device cuda --lengths 2048

Greedy decoding of random prompts, a batch of one: every model in every round, medians over rounds with the least and
the greatest. `--model` is as in models.py. A compiled model's first two steps are not counted. What its first step
takes, compilation included, is paid back after as many tokens as the last column says.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

import torch
from records import timing_arguments, write_results
from rich.console import Console
from rich.table import Table
from teachers import make_student, make_teacher, model_arguments

from linearize.base import UserError
from linearize.evaluation.speed import generation_speed
from linearize.evaluation.timings import Spread
from linearize.hf.compiled import compile_steps
from linearize.recipe import Recipe

TEACHER = "teacher"


def cell(seconds: Spread) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds.median:.2f} ({1e3 * seconds.low:.2f}-{1e3 * seconds.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 896], metavar="T", help="of the prompts")
    parser.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="of every prompt (default: %(default)s)"
    )
    timing_arguments(parser, repeats=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # as the command line does
    load, names, models = [os.getloadavg()[0]], [TEACHER, *arguments.recipes], {}
    try:
        for how in ("eager", "compiled"):
            torch.manual_seed(0)
            teacher = make_teacher(arguments.model, getattr(torch, arguments.dtype), torch.device(arguments.device))
            found = [teacher, *(make_student(teacher, Recipe.load(name)) for name in arguments.recipes)]
            models |= {(name, how): model for name, model in zip(names, found, strict=True)}
            if how == "compiled":
                compile_steps(*found)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    numbers = {"new_tokens": arguments.new_tokens, "repeats": arguments.repeats}
    speeds = generation_speed({" ".join(name): x for name, x in models.items()}, arguments.lengths, **numbers)
    of = {(x.model, x.prompt_length): x for x in speeds}
    table = Table("model", "prompt", "eager, ms a token", "compiled", "times faster", "compiled in, s", "paid after")
    for length in arguments.lengths:
        for name in names:
            eager, compiled = (of[f"{name} {how}", length] for how in ("eager", "compiled"))
            assert compiled.compiling is not None
            saved = eager.decode.median - compiled.decode.median
            ratio = f"{eager.decode.median / compiled.decode.median:.2f}"
            paid = f"{compiled.compiling / saved:,.0f}" if saved > 0 else "never"
            times = cell(eager.decode), cell(compiled.decode), ratio, f"{compiled.compiling:.1f}", paid
            table.add_row(name, f"{length:,}", *times)
    Console().print(table)
    load.append(os.getloadavg()[0])
    write_results(arguments, load, speed=[asdict(x) for x in speeds])


if __name__ == "__main__":
    main()
