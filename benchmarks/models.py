"""Whole models: prefill and a step of generation of a softmax model and of its conversions, all taking turns.

    python benchmarks/models.py --model src/linearize/demo/teacher --lengths 128 512
    python benchmarks/models.py --model llama-1b --dtype bfloat16 --device cuda --batch 1 16

`--model` is a folder, a hub id, or a shape whose weights are random. Conversions are not trained. `NAME:full` is the
recipe with prompts read in full, by the teacher's softmax attention. No time depends on weights: what heads get where
they share a budget is that of SmolLM2-135M-Instruct.
Prefill is of random tokens, with the last one's logits only. A step is of one more token of every sequence:
behind random keys and values of that length for the teacher (a prompt would cost the square of it and change nothing),
behind a real prompt of that length for students, read once and repeated for every sequence of the batch. The teacher's
cache is the one that generate() has by default, which copies keys and values to append to them.

"Times faster" is the teacher's time over the student's in the same round: the median over rounds, with the least and
the greatest.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from records import timing_arguments, write_results
from rich.console import Console
from rich.progress import Progress
from teachers import make_student, make_teacher, model_arguments
from transformers import PreTrainedModel
from turns import seconds_in_turns

from linearize.base import UserError
from linearize.evaluation.speed import require_positions
from linearize.evaluation.timings import Spread
from linearize.hf.compiled import decoding
from linearize.hf.prefill import FULL
from linearize.hf.teacher import TeacherShape
from linearize.recipe import Recipe

TEACHER = "teacher"


@dataclass(frozen=True)
class Row:
    """One student and the teacher; times in seconds, of all sequences of the batch together."""

    what: str
    recipe: str
    batch: int
    length: int
    times_faster: Spread
    student: Spread
    teacher: Spread


def student_of(teacher: PreTrainedModel, name: str) -> PreTrainedModel:
    """A student by its recipe, or by `NAME:full`, which reads prompts in full."""
    recipe = name.removesuffix(f":{FULL}")
    student = make_student(teacher, Recipe.load(recipe))
    student.config.prefill = None if recipe == name else FULL
    return student


def prefill_call(model: PreTrainedModel, batch: int, length: int) -> Callable[[], object]:
    """Reading prompts into a new cache."""
    tokens = torch.randint(model.config.vocab_size, (batch, length), device=model.device)

    def call() -> object:
        forward, cache = decoding(model, length)
        return forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    return call


def decode_call(model: PreTrainedModel, cache: Any, batch: int) -> Callable[[], object]:
    """One more token of every sequence in the cache, which goes on by it."""
    token = torch.randint(model.config.vocab_size, (batch, 1), device=model.device)
    return lambda: model(input_ids=token, past_key_values=cache, use_cache=True)


def random_cache(teacher: PreTrainedModel, batch: int, length: int) -> Any:
    """As a prompt of so many tokens would leave it, but for what the keys and values are."""
    shape, (_, cache) = TeacherShape.from_config(teacher.config.to_dict()), decoding(teacher, length)
    size = batch, shape.num_kv_heads, length, shape.head_dim
    for index in range(shape.num_layers):
        cache.update(*(torch.randn(size, dtype=teacher.dtype, device=teacher.device) for _ in range(2)), index)
    return cache


def filled_cache(student: PreTrainedModel, batch: int, length: int) -> Any:
    """After one prompt of random tokens, the same for every sequence of the batch."""
    tokens = torch.randint(student.config.vocab_size, (1, length), device=student.device)
    forward, cache = decoding(student, length)
    forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(batch)
    return cache


def make_calls(
    what: str, models: Mapping[str, PreTrainedModel], batch: int, length: int
) -> dict[str, Callable[[], object]]:
    """What takes turns: a prefill or a step of every model."""
    if what == "prefill":
        return {name: prefill_call(model, batch, length) for name, model in models.items()}
    caches = {name: random_cache if name == TEACHER else filled_cache for name in models}
    return {name: decode_call(model, caches[name](model, batch, length), batch) for name, model in models.items()}


def rows_of(what: str, batch: int, length: int, seconds: Mapping[str, list[float]]) -> list[Row]:
    """Every student and the teacher, by the seconds of each round."""
    rows, theirs = [], seconds[TEACHER]
    for name, ours in seconds.items():
        if name != TEACHER:
            faster = Spread.of([slow / fast for slow, fast in zip(theirs, ours, strict=True)])
            rows.append(Row(what, name, batch, length, faster, Spread.of(ours), Spread.of(theirs)))
    return rows


def markdown_row(rows: Sequence[Row]) -> str:
    """One student at every length, in the columns of `head`."""
    cells = [f"{x.median:.2f} ({x.low:.2f}-{x.high:.2f})" for x in (row.times_faster for row in rows)]
    return f"| {' | '.join((rows[0].what, str(rows[0].batch), rows[0].recipe, *cells))} |"


def head(lengths: Sequence[int]) -> str:
    """The first two lines of the table."""
    columns = ["pass", "batch", "recipe", *(f"{length:,}" for length in lengths)]
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def milliseconds(seconds: Spread) -> str:
    return f"{1e3 * seconds.median:,.1f} [{1e3 * seconds.low:,.1f}, {1e3 * seconds.high:,.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser)
    lengths = [2**n for n in range(7, 16)]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, metavar="T", help="tokens of the context")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B", help="sequences (default: 1)")
    parser.add_argument(
        "--pass", dest="passes", nargs="+", choices=["prefill", "decode"], default=["prefill", "decode"], help="to time"
    )
    timing_arguments(parser, repeats=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # as the command line does
    torch.manual_seed(0)
    load, rows, console = [os.getloadavg()[0]], list[Row](), Console(stderr=True)
    try:
        teacher = make_teacher(arguments.model, getattr(torch, arguments.dtype), torch.device(arguments.device))
        require_positions(arguments.model, teacher.config, max(arguments.lengths) + arguments.repeats + 1)
        models = {TEACHER: teacher} | {name: student_of(teacher, name) for name in arguments.recipes}
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    print(head(arguments.lengths))  # noqa: T201 (the result)
    cases = [*product(arguments.passes, arguments.batch)]
    with torch.no_grad(), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        calls_made = len(cases) * len(arguments.lengths) * len(models) * (arguments.repeats + 1)
        task = progress.add_task("models", total=calls_made)
        for what, batch in cases:
            found: dict[str, list[Row]] = {name: [] for name in arguments.recipes}
            for length in arguments.lengths:
                calls = make_calls(what, models, batch, length)
                seconds = seconds_in_turns(calls, arguments.repeats, lambda: progress.advance(task))
                for row in rows_of(what, batch, length, seconds):
                    found[row.recipe].append(row)
                    rows.append(row)
                load.append(os.getloadavg()[0])
                write_results(arguments, load, results=[asdict(row) for row in rows])
            print("\n".join(map(markdown_row, found.values())), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
