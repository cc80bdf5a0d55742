"""A layer whose KV heads are divided, beside its parts alone: what the division costs, and what a step costs after it.

The layer has 32 query heads and 8 KV heads of 64, batch 1, fp32, on random inputs. Some KV heads keep softmax over all
keys or a KV cache with eviction; the others have a window. "Over the parts" is the time of the whole layer over that of
its parts one after the other, each a layer of its own with inputs of its own heads, round by round.

    python benchmarks/heads.py                                      # minutes
    python benchmarks/heads.py --json benchmarks/results/heads.json # keep the numbers

All take turns, round by round; medians, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from mixers import make_inputs
from records import timing_arguments, write_results
from turns import seconds_in_turns

from linearize.configs.mixer import HeadwiseConfig, MixerConfig
from linearize.configs.shape import LayerShape
from linearize.evaluation.timings import Spread
from linearize.mixers.headwise import HeadwiseMixer
from linearize.mixers.inputs import AttnInputs
from linearize.training.memory import head_mixer

SHAPE = LayerShape(num_heads=32, num_kv_heads=8, head_dim=64, hidden_size=2048, max_positions=32768)


def divisions() -> dict[str, HeadwiseConfig]:
    """Layers by what they have besides windows of 128."""
    kinds: dict[str, tuple[int, MixerConfig | None]] = {f"{n} softmax": (n, None) for n in (1, 2, 4)}
    kinds |= {"2 KV caches of 256": (2, head_mixer(16, 256, 0)), "2 windows of 512": (2, head_mixer(512, 0, 0))}
    found = {}
    for name, (number, kind) in kinds.items():
        config = HeadwiseConfig.of([kind] * number + [head_mixer(128, 0, 0)] * (SHAPE.num_kv_heads - number))
        assert isinstance(config, HeadwiseConfig)
        found[name] = config
    return found


def whole_and_parts(config: HeadwiseConfig, inputs: AttnInputs, prompt: int | None) -> tuple[Callable[[], Any], ...]:
    """The layer, and its parts one after the other: all of the inputs, or one token behind a prompt."""
    mixer = HeadwiseMixer(config, SHAPE)
    parts = [(part, inputs.heads(heads).map(torch.clone)) for heads, part in mixer.parts()]
    if prompt is None:
        return (lambda: mixer(inputs)), (lambda: [part(own) for part, own in parts])
    state = mixer.step(inputs.tokens(0, prompt), None)[1]
    token = inputs.tokens(prompt, prompt + 1)
    steps = [(part, own.tokens(prompt, prompt + 1), its) for (part, own), its in zip(parts, state.parts, strict=True)]
    return (lambda: mixer.step(token, state)), (lambda: [part.step(own, its) for part, own, its in steps])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prefill (default: 4096)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 8192], help="tokens before a step")
    timing_arguments(parser, repeats=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    torch.set_default_device(arguments.device)
    load, found = [os.getloadavg()[0]], []
    print("| heads that are no window of 128 | what | ms | over the parts |\n| --- | --- | --- | --- |")  # noqa: T201
    with torch.no_grad():
        for prompt in (None, *arguments.prompts):
            inputs = make_inputs(SHAPE, arguments.length if prompt is None else prompt + 1)
            what = f"prefill of {arguments.length:,}" if prompt is None else f"a step after {prompt:,}"
            for name, config in divisions().items():
                whole, parts = whole_and_parts(config, inputs, prompt)
                repeats = arguments.repeats * (1 if prompt is None else 10)
                seconds = seconds_in_turns({"whole": whole, "parts": parts}, repeats)
                ratio = Spread.of([a / b for a, b in zip(seconds["whole"], seconds["parts"], strict=True)])
                took = Spread.of(seconds["whole"])
                found.append({"heads": name, "what": what, "seconds": asdict(took), "over_parts": asdict(ratio)})
                cells = f"{1e3 * took.median:.2f}", f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
                print(f"| {name} | {what} | {' | '.join(cells)} |", flush=True)  # noqa: T201
    load.append(os.getloadavg()[0])
    write_results(arguments, load, results=found)


if __name__ == "__main__":
    main()
