"""Time window + linear attention against softmax attention on random inputs, in one process.

One layer of LoLCATs' shape, B = 1, H = 8, D = 64, fp32: features phi_q and phi_k are given, the last `--window` are
read by softmax and all earlier ones through the linear state, with one denominator. Beside it runs torch's own
`scaled_dot_product_attention(is_causal=True)` over the same q, k, v. "Forward + backward" adds the gradients of all
inputs: q, k, v, phi_q and phi_k here, q, k and v there.

    python benchmarks/attention.py                                  # minutes: a round of 16384 tokens takes 20 s
    python benchmarks/attention.py --lengths 1024 4096              # seconds
    python benchmarks/attention.py --json benchmarks/attention.json # keep the numbers

All take turns, round by round; a first round is not counted. Times are medians over rounds, with the least and the
greatest; "times faster" is the median over rounds of softmax time / ours in the same round. On a busy machine, where
threads wait for each other, many small operations lose more than one large one does: look at the load average.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linearize.config import SharedDenominator
from linearize.evaluation.speed import Spread
from linearize.mixers.combine import SharedDenominatorCombine
from linearize.ops import Layout, SlidingSpan, linear_scan, window_softmax

HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True)
class Result:
    """One length, pass and feature dim; times in seconds."""

    length: int
    backward: bool
    feature_dim: int
    ours: Spread
    softmax: Spread
    times_faster: Spread


def measure(length: int, feature_dims: Sequence[int], *, window: int, backward: bool, repeats: int) -> list[Result]:
    """Rounds of softmax attention and of ours with each feature dim, in alternating order."""
    q, k, v, grad = (torch.randn(1, HEADS, length, HEAD_DIM) for _ in range(4))
    calls = {0: softmax_call((q, k, v), grad, backward)}
    for feature_dim in feature_dims:
        # Features of a softmax over features, as LoLCATs' map gives.
        phi_q, phi_k = (torch.randn(1, HEADS, length, feature_dim).softmax(-1) for _ in range(2))
        calls[feature_dim] = our_call((q, k, v, phi_q, phi_k), grad, window, backward)
    seconds: dict[int, list[float]] = {name: [] for name in calls}
    turns = (list(calls), list(calls)[::-1])
    with torch.set_grad_enabled(backward):
        for repeat in range(repeats + 1):
            for name in turns[repeat % 2]:
                start = time.perf_counter()
                calls[name]()
                if repeat > 0:
                    seconds[name].append(time.perf_counter() - start)
    softmax = seconds.pop(0)
    return [
        Result(
            length,
            backward,
            feature_dim,
            Spread.of(ours),
            Spread.of(softmax),
            Spread.of([theirs / mine for theirs, mine in zip(softmax, ours, strict=True)]),
        )
        for feature_dim, ours in seconds.items()
    ]


def our_call(inputs: tuple[Tensor, ...], grad: Tensor, window: int, backward: bool) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    q, k, v, phi_q, phi_k = leaves
    span = SlidingSpan(window)
    combine = SharedDenominatorCombine(SharedDenominator(), HEADS).requires_grad_(False)

    def attention() -> Tensor:
        layout = Layout.full(q.shape[2])
        near = window_softmax(q, k, v, span=span, scaling=HEAD_DIM**-0.5, layout=layout)
        return combine(near, linear_scan(phi_q, phi_k, v, span=span, layout=layout))

    return (lambda: torch.autograd.grad(attention(), leaves, grad)) if backward else attention


def softmax_call(inputs: tuple[Tensor, ...], grad: Tensor, backward: bool) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    q, k, v = leaves

    def attention() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    return (lambda: torch.autograd.grad(attention(), leaves, grad)) if backward else attention


def table(results: Sequence[Result], title: str) -> Table:
    columns = ("tokens", "pass", "features", "ours (ms)", "softmax (ms)", "times faster")
    table = Table(*columns, title=title)
    for result in results:
        table.add_row(
            f"{result.length}",
            "forward + backward" if result.backward else "forward",
            f"{result.feature_dim}",
            *(f"{x.median * 1e3:.1f} ({x.low * 1e3:.1f}-{x.high * 1e3:.1f})" for x in (result.ours, result.softmax)),
            f"{result.times_faster.median:.2f} ({result.times_faster.low:.2f}-{result.times_faster.high:.2f})",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], metavar="T", help="tokens")
    parser.add_argument("--features", type=int, nargs="+", default=[64, 128], metavar="F", help="features per head")
    parser.add_argument("--window", type=int, default=64, metavar="W", help="softmax keys per query (default: 64)")
    parser.add_argument("--passes", nargs="+", choices=["forward", "both"], default=["forward", "both"], help="to time")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="counted rounds (default: 7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    results, load, console = [], [os.getloadavg()[0]], Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for length in progress.track(arguments.lengths, description="attention"):
            for which in arguments.passes:
                options = {"window": arguments.window, "backward": which == "both", "repeats": arguments.repeats}
                results += measure(length, arguments.features, **options)
                load.append(os.getloadavg()[0])
    title = f"{arguments.threads} threads, window {arguments.window}, load {min(load):.1f} to {max(load):.1f}"
    Console().print(table(results, title))
    if arguments.json:
        setting = {"threads": arguments.threads, "window": arguments.window, "torch": torch.__version__, "load": load}
        scratch = arguments.json.with_name(f".{arguments.json.name}.incomplete")
        scratch.write_text(json.dumps(setting | {"results": [asdict(x) for x in results]}, indent=2) + "\n")
        scratch.replace(arguments.json)


if __name__ == "__main__":
    main()
