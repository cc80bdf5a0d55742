"""Time a step as `generate` runs it: of a softmax model and its conversions, by their defaults, all taking turns.

    python benchmarks/generate.py --model llama-1b --recipes lolcats --dtype bfloat16 --device cuda --lengths 2048

Every model answers random prompts by `model.generate`, greedily, a batch of one. `--model` is as in models.py. On a
GPU, conversions whose state is constant in size compile their steps by themselves; here they do so at the first call,
however few tokens pay. Each conversion is also timed with `disable_compile=True`. Two calls of each model are not
counted, nor are the first steps of a call. The last column is the first step of all, compilation included.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass

import torch
from records import timing_arguments, write_results
from rich.console import Console
from teachers import make_student, make_teacher, model_arguments
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from linearize.base import UserError
from linearize.evaluation.speed import now, require_positions
from linearize.evaluation.timings import Spread
from linearize.hf import compiled
from linearize.recipe import Recipe

TEACHER = "teacher"
HEAD = "| model | prompt | compiled | ms a token | times faster | first step, s |"
UNCOUNTED_CALLS = 2
UNCOUNTED_STEPS = 3  # of a call: CUDA graphs may be recorded in them


class Stopwatch(BaseStreamer):
    """Notes when the prompt and each token after it arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """As in transformers."""
        self.times.append(now())

    def end(self) -> None:
        """Do nothing: the last token has arrived."""

    def steps(self) -> list[float]:
        """Return the seconds of each step; the first token comes of the prompt and is none."""
        return [after - before for before, after in zip(self.times[1:-1], self.times[2:], strict=True)]


@dataclass(frozen=True)
class Row:
    """One model behind prompts of one length; times in seconds."""

    model: str
    length: int
    compiled: bool
    step: Spread
    first_step: float


def steps_of(model: PreTrainedModel, ids: Tensor, new_tokens: int, eager: bool) -> list[float]:
    """Return the seconds of each step of one `generate`, which may compile unless it is to be `eager`."""
    watch = Stopwatch()
    model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=watch,
        disable_compile=eager or None,
    )
    return watch.steps()


def measure(models: dict[str, tuple[PreTrainedModel, bool]], ids: Tensor, new_tokens: int, repeats: int) -> list[Row]:
    """Time all models, each with whether it is to be eager, behind one prompt."""
    first_step: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(UNCOUNTED_CALLS + repeats):
        for name, (model, eager) in models.items():
            steps = steps_of(model, ids, new_tokens, eager)
            first_step.setdefault(name, steps[0])
            if turn >= UNCOUNTED_CALLS:
                counted = steps[UNCOUNTED_STEPS:]
                seconds[name].append(sum(counted) / len(counted))
    rows = []
    for name, (model, eager) in models.items():
        is_compiled = not eager and bool(compiled.history(model).compiled)
        rows.append(Row(name, ids.shape[1], is_compiled, Spread.of(seconds[name]), first_step[name]))
    return rows


def markdown_row(row: Row, teacher: Row) -> str:
    """Return a row in the columns of `HEAD`; the teacher's is of the same prompt."""
    spread = f"{1e3 * row.step.median:.2f} ({1e3 * row.step.low:.2f}-{1e3 * row.step.high:.2f})"
    faster = f"{teacher.step.median / row.step.median:.2f}"
    answer = "yes" if row.compiled else "no"
    return f"| {row.model} | {row.length:,} | {answer} | {spread} | {faster} | {row.first_step:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048], metavar="T", help="of the prompts")
    parser.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="of every prompt (default: %(default)s)"
    )
    timing_arguments(parser, repeats=5)
    arguments = parser.parse_args()
    if arguments.new_tokens < UNCOUNTED_STEPS + 2:
        parser.error(f"--new-tokens: expected {UNCOUNTED_STEPS + 2} or more, found {arguments.new_tokens}")
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # as the command line does
    compiled.STEPS_TO_PAY = 1
    load = [os.getloadavg()[0]]
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    try:
        teacher = make_teacher(arguments.model, getattr(torch, arguments.dtype), device)
        require_positions(TEACHER, teacher.config, max(arguments.lengths) + arguments.new_tokens)
        models = {TEACHER: (teacher, False)}
        for name in arguments.recipes:
            student = make_student(teacher, Recipe.load(name))
            models |= {f"{name} eager": (student, True), name: (student, False)}
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    rows: list[Row] = []
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    for length in arguments.lengths:
        ids = torch.randint(teacher.config.vocab_size, (1, length), device=device)
        measured = measure(models, ids, arguments.new_tokens, arguments.repeats)
        rows += measured
        lines += [markdown_row(row, measured[0]) for row in measured]
    Console().print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    load.append(os.getloadavg()[0])
    write_results(arguments, load, steps=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
