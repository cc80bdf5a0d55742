"""One decoding step of one layer's mixer, by recipe, beside softmax attention over a KV cache that grows.

The layer has the shape of Llama 3 8B (32 query heads, 8 KV heads, D = 128), batch 1, fp32, on random inputs: q, k, v
and hidden state of one token go in, its output and the next state come out. Learned maps are timed with one key map per
query head (the papers) and one per KV head (a smaller state). Softmax attention reads q against a cache of L keys and
values; writing the new ones into it is not counted.

    python benchmarks/decode.py                                        # minutes
    python benchmarks/decode.py --recipes lolcats gla --repeats 20     # seconds
    python benchmarks/decode.py --json benchmarks/results/decode.json  # keep the numbers

All take turns; medians over the counted rounds, with the least and the greatest. "Even in time": the length from which
the softmax step takes longer, interpolated between the lengths measured. "Even in bytes": the length from which the
state is smaller than the cache, for keys and values in bf16 (the linear state is fp32 in any case).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from mixers import make_inputs
from records import write_results
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from turns import seconds_in_turns

from linearize.configs.feature_maps import LearnedMap
from linearize.configs.mixer import MixerConfig
from linearize.configs.shape import LayerShape
from linearize.evaluation.timings import Spread, even
from linearize.hf.teacher import break_even_tokens
from linearize.mixers.inputs import AttnInputs
from linearize.mixers.linear import LinearMixer
from linearize.recipe import Recipe, recipe_names

SHAPE = LayerShape(num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, max_positions=8192)


@dataclass(frozen=True)
class Step:
    """One mixer; time in seconds. `even_*`: cache lengths, None beyond the longest measured."""

    recipe: str
    key_maps: str
    seconds: Spread
    state_bytes: int  # keys and values in bf16
    even_in_time: int | None
    even_in_bytes: int | None


def variants(recipes: Sequence[str]) -> dict[tuple[str, str], MixerConfig]:
    """Each recipe's mixer, twice where its key map can be per query head or per KV head."""
    found: dict[tuple[str, str], MixerConfig] = {}
    for name in recipes:
        config = Recipe.load(name).mixer
        feature_map = config.feature_map
        if not isinstance(feature_map, LearnedMap) or feature_map.per == "model":
            found[name, "per KV head"] = config.resolved(SHAPE)
            continue
        for per, words in (("query_head", "per query head"), ("kv_head", "per KV head")):
            changed = config.model_copy(update={"feature_map": feature_map.model_copy(update={"per": per})})
            found[name, words] = changed.resolved(SHAPE)
    return found


def one_token(inputs: AttnInputs, at: int, dtype: torch.dtype) -> AttnInputs:
    def cut(x: Tensor, axis: int) -> Tensor:
        return x.narrow(axis, at, 1).to(dtype)

    assert inputs.hidden is not None and inputs.unrotated is not None and inputs.rope is not None
    q, k, v, q0, k0 = (cut(x, 2) for x in (inputs.q, inputs.k, inputs.v, *inputs.unrotated))
    rope = cut(inputs.rope[0], 1), cut(inputs.rope[1], 1)
    return AttnInputs(q, k, v, inputs.scaling, None, cut(inputs.hidden, 1), (q0, k0), rope)


def step_call(config: MixerConfig, inputs: AttnInputs) -> tuple[Callable[[], object], int]:
    """A step behind a prompt, and the bytes of its state where keys and values are bf16."""
    mixer = LinearMixer(config, SHAPE)
    state = mixer.step(inputs, None)[1]
    token = one_token(inputs, 0, torch.float32)
    small = mixer.state_like(one_token(inputs, 0, torch.bfloat16))
    return (lambda: mixer.step(token, state)), small.nbytes


def softmax_call(length: int) -> Callable[[], object]:
    q = torch.randn(1, SHAPE.num_heads, 1, SHAPE.head_dim)
    k, v = (torch.randn(1, SHAPE.num_kv_heads, length, SHAPE.head_dim) for _ in range(2))
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)


def markdown(steps: Sequence[Step], longest: int) -> str:
    rows = [["recipe", "key maps", "ms", "state, MiB", "even in time", "even in bytes"], ["---"] * 6]
    for step in steps:
        ms = [x * 1e3 for x in (step.seconds.median, step.seconds.low, step.seconds.high)]
        time_even = f"beyond {longest:,}" if step.even_in_time is None else f"{step.even_in_time:,}"
        numbers = [f"{ms[0]:.2f} ({ms[1]:.2f}-{ms[2]:.2f})", f"{step.state_bytes / 2**20:.2f}", time_even]
        rows.append([step.recipe, step.key_maps, *numbers, f"{step.even_in_bytes:,}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=recipe_names(), metavar="NAME", help="default: all")
    lengths = [2**n for n in range(8, 18)]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, metavar="L", help="of the cache")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="counted rounds (default: 30)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and parameters (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    torch.set_default_device(arguments.device)
    console, load = Console(stderr=True), [os.getloadavg()[0]]
    with torch.no_grad(), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        inputs = make_inputs(SHAPE, 128)
        calls: dict[object, Callable[[], object]] = {length: softmax_call(length) for length in arguments.lengths}
        state_bytes = {}
        for name, config in variants(arguments.recipes).items():
            calls[name], state_bytes[name] = step_call(config, inputs)
        task = progress.add_task("decode", total=len(calls) * (arguments.repeats + 1))
        seconds = seconds_in_turns(calls, arguments.repeats, lambda: progress.advance(task))
        spreads = {name: Spread.of(times) for name, times in seconds.items()}
    load.append(os.getloadavg()[0])
    softmax = {length: spreads[length].median for length in arguments.lengths}
    per_token = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * torch.bfloat16.itemsize
    from_nothing = {0: 0.0} | softmax  # no cache, no time
    steps = []
    for name, size in state_bytes.items():
        in_time = even(dict.fromkeys(from_nothing, spreads[name].median), from_nothing)
        steps.append(Step(*name, spreads[name], size, in_time, break_even_tokens(size, per_token, 0)))
    print(markdown(steps, max(arguments.lengths)))  # noqa: T201 (the result)
    print("\nsoftmax, ms: " + ", ".join(f"{x * 1e3:.2f} at {length:,}" for length, x in softmax.items()))  # noqa: T201
    curve = {length: asdict(spreads[length]) for length in softmax}
    write_results(arguments, load, softmax=curve, steps=[asdict(x) for x in steps])


if __name__ == "__main__":
    main()
