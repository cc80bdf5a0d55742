"""How many sequences generate at once on a GPU: of a softmax model, and of its conversions.

    python benchmarks/batches.py --model llama-1b --dtype bfloat16 --device cuda --lengths 32768

`--model` and the contexts before a step are those of models.py. The largest batch is the largest whose step fits on the
GPU together with the weights of all models here, which students share with the teacher. It is found by doubling, and
then by bisection to within a sixteenth. Tokens per second are those of all sequences, from the median of the rounds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from models import TEACHER, decode_call, filled_cache, random_cache
from records import timing_arguments, write_results
from rich.console import Console
from teachers import make_student, make_teacher, model_arguments
from transformers import PreTrainedModel
from turns import seconds_in_turns

from linearize.base import UserError
from linearize.evaluation.speed import require_positions
from linearize.evaluation.timings import Spread
from linearize.recipe import Recipe


@dataclass(frozen=True)
class Row:
    """One model at one length: seconds of a step of the largest batch; None, where not one sequence fits."""

    model: str
    length: int
    batch: int
    seconds: Spread | None


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, or less by up to a sixteenth; 0: not one does."""
    found, step = 0, 1
    while found + step <= most and fits(found + step):
        found += step
        step = found
    while step > max(1, found // 16):
        step = (step + 1) // 2
        if found + step <= most and fits(found + step):
            found += step
    return found


def find(name: str, model: PreTrainedModel, length: int, most: int, repeats: int) -> Row:
    """The largest batch, and what its steps take."""
    one = None if name == TEACHER else filled_cache(model, 1, length)

    def cache_of(batch: int) -> Any:
        if one is None:
            return random_cache(model, batch, length)
        cache = copy.deepcopy(one)
        cache.batch_repeat_interleave(batch)
        return cache

    def timed(batch: int, repeats: int) -> Spread | None:
        try:
            return Spread.of(seconds_in_turns({name: decode_call(model, cache_of(batch), batch)}, repeats)[name])
        except torch.OutOfMemoryError:
            return None
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    batch = largest(lambda batch: timed(batch, repeats=1) is not None, most)
    return Row(name, length, batch, timed(batch, repeats) if batch else None)


def markdown_row(row: Row) -> str:
    """Model, tokens, sequences, and what they do a second."""
    times = (
        ("", "")
        if row.seconds is None
        else (f"{1e3 * row.seconds.median:,.1f}", f"{row.batch / row.seconds.median:,.0f}")
    )
    return f"| {' | '.join((row.model, f'{row.length:,}', f'{row.batch:,}', *times))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768], metavar="T", help="tokens of each sequence")
    parser.add_argument("--most", type=int, default=2**16, metavar="B", help="no more sequences (default: %(default)s)")
    timing_arguments(parser, repeats=5)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    load, rows = [os.getloadavg()[0]], list[Row]()
    try:
        teacher = make_teacher(a.model, getattr(torch, a.dtype), torch.device(a.device))
        require_positions(a.model, teacher.config, max(a.lengths) + a.repeats + 1)
        models = {TEACHER: teacher} | {name: make_student(teacher, Recipe.load(name)) for name in a.recipes}
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    print("| model | tokens | sequences | a step, ms | tokens/s |\n| --- | --- | --- | --- | --- |")  # noqa: T201 (the result)
    with torch.no_grad(), Console(stderr=True).status("batches: how many fit"):
        for length in a.lengths:
            for name, model in models.items():
                rows.append(find(name, model, length, a.most, a.repeats))
                print(markdown_row(rows[-1]), flush=True)  # noqa: T201
                load.append(os.getloadavg()[0])
                write_results(a, load, results=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
