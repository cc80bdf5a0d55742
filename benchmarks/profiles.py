"""Where the time of a prefill or of a step goes, and what matrix products alone would take of it.

    python benchmarks/profiles.py --model src/linearize/demo/teacher --length 512
    python benchmarks/profiles.py --model llama-1b --dtype bfloat16 --device cuda --length 8192 --pass prefill

The calls and `--model` are those of models.py. "ms" is the median over rounds, all models taking turns, without a
profiler. One more call is profiled: the time in torch's operations, the part of it in matrix products (attention of
SDPA counts as one), and the largest of the others. The profiler makes small operations slower, so on a CPU the second
number can exceed the first; what the first has beyond it is Python. "Limit, ms" is what these products would take at
the speed of one large square product on the same device, measured beside them. A step reads every weight for little
work, so that it stays far from that.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from models import TEACHER, make_calls, milliseconds
from records import timing_arguments, write_results
from teachers import make_student, make_teacher, model_arguments
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from turns import seconds_in_turns

from linearize.base import UserError
from linearize.evaluation.speed import require_positions
from linearize.evaluation.timings import Spread
from linearize.recipe import Recipe

# Kinds of SDPA, and where behind q and k each is told whether it is causal.
_CAUSAL_AT = {"flash_attention": 2, "flash_attention_for_cpu": 2, "efficient_attention": 4, "cudnn_attention": 4}
# What takes the time is the operation itself, or one within it.
ATTENTION = [name for kind in _CAUSAL_AT for name in (f"_scaled_dot_product_{kind}", f"_{kind}_forward")]
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", *ATTENTION)}


@dataclass(frozen=True)
class Row:
    """One model; times in seconds."""

    model: str
    seconds: Spread
    operations: float  # all that torch computes, under the profiler
    products: float  # of it, matrix products
    limit: float  # what their multiplications would take at the speed of one large product
    others: dict[str, float]  # all other operations, the longest first


def attention_flops(causal_at: int) -> Callable[..., int]:
    """A count of both products of an attention, from its arguments: q is [B, H, T, D], k [B, G, L, D]."""

    def count(q: Any, k: Any, *rest: Any, **options: Any) -> int:
        causal = rest[causal_at : causal_at + 1] == (True,)  # then T = L
        return 4 * q.numel() * (k[2] + 1) // 2 if causal else 4 * q.numel() * k[2]

    return count


def flops(call: Callable[[], object]) -> int:
    """Multiplications and additions of the matrix products of a call; torch itself counts all pairs of a causal one."""
    aten = torch.ops.aten
    counted = {getattr(aten, f"_scaled_dot_product_{kind}"): attention_flops(at) for kind, at in _CAUSAL_AT.items()}
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        call()
    return counter.get_total_flops()


def times_by_operation(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds in each operation itself, the longest first; on a GPU those of its kernels, and of our own."""
    cuda = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler reports its start and stop on standard error
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as recorded:
        call()
        if cuda:
            torch.cuda.synchronize()
    found, ours = recorded.key_averages(), set[str]()
    if cuda:
        from linearize.ops import triton_gradients, triton_kernels, triton_outputs

        modules = triton_kernels, triton_gradients, triton_outputs
        ours = {name for module in modules for name, x in vars(module).items() if hasattr(x, "fn")}
    events = [event for event in found if event.key.startswith("aten::") or event.key in ours]
    own = {event.key: 1e-6 * (event.self_device_time_total if cuda else event.self_cpu_time_total) for event in events}
    return dict(sorted(own.items(), key=lambda item: -item[1]))


def markdown_row(row: Row) -> str:
    """With the three longest of the other operations, as parts of all."""
    parts = [f"{name.removeprefix('aten::')} {x / row.operations:.0%}" for name, x in [*row.others.items()][:3]]
    share = f"{row.products / row.operations:.0%}"
    times = milliseconds(row.seconds), f"{1e3 * row.operations:,.1f}", share, f"{1e3 * row.limit:,.2f}"
    return f"| {' | '.join((row.model, *times, ', '.join(parts)))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments(parser)
    parser.add_argument("--length", type=int, default=1024, metavar="T", help="tokens of the context (default: 1024)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: 1)")
    parser.add_argument("--pass", dest="what", choices=["prefill", "decode"], default="prefill", help="to profile")
    timing_arguments(parser, repeats=5)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.set_flush_denormal(True)  # as the command line does
    torch.manual_seed(0)
    device, dtype, load = torch.device(a.device), getattr(torch, a.dtype), [os.getloadavg()[0]]
    try:
        teacher = make_teacher(a.model, dtype, device)
        require_positions(a.model, teacher.config, a.length + a.repeats + 3)  # counted, uncounted, of FLOPs, profiled
        models = {TEACHER: teacher} | {name: make_student(teacher, Recipe.load(name)) for name in a.recipes}
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    size = 8192 if device.type == "cuda" else 1024
    square, product = torch.randn(size, size, dtype=dtype, device=device), "one large product"
    rows = []
    with torch.no_grad():
        calls = make_calls(a.what, models, a.batch, a.length)
        seconds = seconds_in_turns(calls | {product: lambda: square @ square}, a.repeats)
        speed = 2 * size**3 / min(seconds.pop(product))
        for name, call in calls.items():
            limit, others = flops(call) / speed, times_by_operation(call, device)
            operations, products = sum(others.values()), sum(others.pop(key, 0) for key in PRODUCTS)
            rows.append(Row(name, Spread.of(seconds[name]), operations, products, limit, others))
    head = "model", "ms", "in operations, ms", "products", "limit, ms", "of the rest"
    table = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *map(markdown_row, rows)]
    print("\n".join(table), f"\n\nOne large product: {speed / 1e9:,.0f} GFLOP/s.", sep="")  # noqa: T201 (the result)
    load.append(os.getloadavg()[0])
    write_results(a, load, flops_per_second=speed, results=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
