"""Time and memory of one layer's mixer, by recipe, beside softmax attention, on random inputs in one process.

A whole mixer is timed, from q, k, v and the layer's input to its output: feature maps, gates, window, linear part,
normalizer. Beside it runs torch's own `scaled_dot_product_attention(is_causal=True)` over the same q, k, v. "Both" is
forward and backward, with the gradients of all inputs and parameters.

    python benchmarks/mixers.py                                       # an hour or so: every recipe, 1k to 32k tokens
    python benchmarks/mixers.py --recipes lolcats gla --lengths 4096  # seconds
    python benchmarks/mixers.py --json benchmarks/results/mixers.json # keep the numbers
    python benchmarks/mixers.py --recipes lolcats gla --dtype bfloat16 --device cuda --implementations chunked triton

With `--implementations`, every recipe is timed by each of them (`LINEARIZE_IMPL`), else by the one that users get.
`--dtype` is of the inputs; parameters are fp32, as in a converted model.

All take turns, round by round; a first round is not counted. Times are medians over rounds, with the least and the
greatest; "times faster" is the median over rounds of softmax time / ours in the same round. Memory is the most that was
allocated at once beyond the inputs. On a busy machine, where threads wait for each other, many small operations lose
more than one large one does: look at the load average.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from records import write_results
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from turns import seconds_in_turns

from linearize.configs.shape import LayerShape
from linearize.evaluation.speed import peak_bytes
from linearize.evaluation.timings import Spread
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.ops.dispatch import ENVIRONMENT
from linearize.recipe import Recipe, recipe_names

SOFTMAX = "softmax"


@dataclass(frozen=True)
class Result:
    """One recipe at one length; times in seconds, memory in bytes."""

    recipe: str
    feature_dim: int
    length: int
    backward: bool
    ours: Spread
    softmax: Spread
    times_faster: Spread
    peak_bytes: int
    softmax_peak_bytes: int


def make_mixer(recipe: str, shape: LayerShape) -> LinearMixer:
    return LinearMixer(Recipe.load(recipe).mixer.resolved(shape), shape)


def by_implementation(name: str | None, call: Callable[[], object]) -> Callable[[], object]:
    """`call`, by this implementation of the primitives; None: the one that is chosen."""

    def forced() -> object:
        before = os.environ.get(ENVIRONMENT)
        os.environ[ENVIRONMENT] = name or ""
        try:
            return call()
        finally:
            os.environ.pop(ENVIRONMENT) if before is None else os.environ.update({ENVIRONMENT: before})

    return call if name is None else forced


def make_inputs(shape: LayerShape, length: int, dtype: torch.dtype = torch.float32) -> AttnInputs:
    """Random inputs of one sequence; unrotated q and k are others than the rotated ones, which no time depends on."""
    queries, keys = (1, shape.num_heads, length, shape.head_dim), (1, shape.num_kv_heads, length, shape.head_dim)
    q, k, v, q0, k0 = (torch.randn(size, dtype=dtype) for size in (queries, keys, keys, queries, keys))
    cos, sin = (torch.randn(1, length, shape.head_dim, dtype=dtype) for _ in range(2))
    hidden = torch.randn(1, length, shape.hidden_size, dtype=dtype)
    return AttnInputs(q, k, v, shape.head_dim**-0.5, None, hidden, (q0, k0), (cos, sin))


def mixer_call(mixer: LinearMixer, inputs: AttnInputs, grad: Tensor, backward: bool) -> Callable[[], object]:
    if not backward:
        return lambda: mixer(inputs)
    assert inputs.hidden is not None and inputs.unrotated is not None
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "hidden": inputs.hidden}
    leaves = {name: x.detach().requires_grad_() for name, x in named.items()}
    unrotated = tuple(x.detach().requires_grad_() for x in inputs.unrotated)
    arguments = AttnInputs(**leaves, unrotated=unrotated, rope=inputs.rope, scaling=inputs.scaling)
    wanted = [*leaves.values(), *unrotated, *mixer.parameters()]
    return lambda: torch.autograd.grad(mixer(arguments), wanted, grad, allow_unused=True)


def softmax_call(inputs: AttnInputs, grad: Tensor, backward: bool) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v)]

    def attention() -> Tensor:
        return scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    return (lambda: torch.autograd.grad(attention(), leaves, grad)) if backward else attention


def measure(
    recipes: Sequence[str],
    implementations: Sequence[str | None],
    shape: LayerShape,
    length: int,
    dtype: torch.dtype,
    backward: bool,
    repeats: int,
    advance: Callable[[], None],
) -> list[Result]:
    """Rounds of softmax attention and of every recipe's mixer, in alternating order."""
    inputs = make_inputs(shape, length, dtype)
    grad = torch.randn_like(inputs.q)
    calls, features = {SOFTMAX: softmax_call(inputs, grad, backward)}, {}
    for recipe in recipes:
        mixer = make_mixer(recipe, shape)
        call = mixer_call(mixer, inputs, grad, backward)
        for implementation in implementations:
            name = recipe if implementation is None else f"{recipe}, {implementation}"
            calls[name] = by_implementation(implementation, call)
            features[name] = 0 if mixer.feature_map is None else mixer.feature_map.feature_dim
    with torch.set_grad_enabled(backward):
        seconds = seconds_in_turns(calls, repeats, advance)
        peaks = {}
        for name, call in calls.items():
            peaks[name] = peak_bytes(call, torch.get_default_device())
            advance()
    softmax, results = seconds.pop(SOFTMAX), []
    for name, ours in seconds.items():
        faster = Spread.of([theirs / mine for theirs, mine in zip(softmax, ours, strict=True)])
        times = Spread.of(ours), Spread.of(softmax), faster
        results.append(Result(name, features[name], length, backward, *times, peaks[name], peaks[SOFTMAX]))
    return results


def markdown(results: Sequence[Result], backward: bool) -> str:
    """Times faster than softmax attention by length, seconds per doubling, and memory at the greatest length."""
    lengths = sorted({result.length for result in results})
    by = {(result.recipe, result.length): result for result in results if result.backward is backward}
    head = [
        "recipe",
        "features",
        *(f"{length // 1024}k" for length in lengths),
        "time per doubling",
        "MiB per 1k tokens",
    ]
    rows = [head, ["---"] * len(head)]
    for recipe in dict.fromkeys(name for name, _ in by):
        ours = [by[recipe, length] for length in lengths if (recipe, length) in by]
        cells = [f"{x.times_faster.median:.1f} ({x.times_faster.low:.1f}-{x.times_faster.high:.1f})" for x in ours]
        cells += ["-"] * (len(lengths) - len(ours))
        pairs = itertools.pairwise(ours)
        growth = [f"{b.ours.median / a.ours.median:.2f}" for a, b in pairs if a.length >= 4096]
        memory = f"{ours[-1].peak_bytes / 2**20 / (ours[-1].length / 1024):.0f}"
        rows.append([recipe, str(ours[0].feature_dim), *cells, ", ".join(growth), memory])
    longest = max(by.values(), key=lambda result: result.length)
    rows.append(
        [
            "softmax, MiB",
            "",
            *(["" for _ in lengths]),
            "",
            f"{longest.softmax_peak_bytes / 2**20 / (longest.length / 1024):.0f}",
        ]
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=recipe_names(), metavar="NAME", help="default: all")
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=lengths, metavar="T", help="tokens (default: 1k to 32k)"
    )
    parser.add_argument("--passes", nargs="+", choices=["forward", "both"], default=["forward", "both"], help="to time")
    parser.add_argument(
        "--implementations", nargs="+", default=[None], metavar="NAME", help="of the primitives: chunked, triton, ..."
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=8, metavar="H", help="query heads (default: 8)")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="G", help="KV heads (default: 8)")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="default: 64")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="counted rounds (default: 5)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and parameters (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    torch.set_default_device(arguments.device)
    heads, head_dim = arguments.heads, arguments.head_dim
    shape = LayerShape(heads, arguments.kv_heads, head_dim, heads * head_dim, max(arguments.lengths))
    results, load, console = [], [os.getloadavg()[0]], Console(stderr=True)
    calls = len(arguments.recipes) * len(arguments.implementations) + 1
    total = len(arguments.lengths) * len(arguments.passes) * calls * (arguments.repeats + 2)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("mixers", total=total)
        for length in arguments.lengths:
            for which in arguments.passes:
                results += measure(
                    arguments.recipes,
                    arguments.implementations,
                    shape,
                    length,
                    getattr(torch, arguments.dtype),
                    which == "both",
                    arguments.repeats,
                    lambda: progress.advance(task),
                )
                load.append(os.getloadavg()[0])
                write_results(arguments, load, results=[asdict(x) for x in results])
    for which in arguments.passes:
        print(f"\n{which}, times faster than softmax attention\n")  # noqa: T201 (the result)
        print(markdown(results, which == "both"))  # noqa: T201


if __name__ == "__main__":
    main()
