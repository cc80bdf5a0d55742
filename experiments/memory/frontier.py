"""Quality against bytes of state, nothing trained: memory by need beside what needs no measuring, at the same bytes.

    python experiments/memory/frontier.py --model src/linearize/demo/teacher --dataset corpus/train.jsonl \\
        --validation-dataset corpus/held_out.jsonl

For each fraction of the teacher's cache at `--length` tokens: one window for all heads; the same with 4 sinks
(StreamingLLM); a window of 32 and an exact cache in every head, by each score (what H2O and SnapKV keep is chosen by
attention received; `value_norm`, `key_norm` and `random` stand here for scores that need no queries); and a budget
spread over heads by what each needs (`memory` of a recipe), constant and with heads that keep all keys.

Far gain is the share, beyond position `--beyond`, of what the teacher gains over a window of `--window`; copying the
share of the teacher's gain on a copy of random tokens at twice that distance. Writes frontier.json and frontier.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from linearize.data.load import load_dataset, load_processor
from linearize.data.packing import PackedRows
from linearize.data.splits import ENOUGH
from linearize.evaluation.perplexity import TokenLosses, token_losses
from linearize.evaluation.retrieval import copy_losses, copy_rows, ordinary_tokens
from linearize.evaluation.shares import kept_copying, kept_far_context
from linearize.hf.checkpoint import load_model, read_config
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.combine import WindowOnly
from linearize.mixers.config import LayerPlan, MixerConfig
from linearize.mixers.exact_cache import SCORES
from linearize.ops.layout import SlidingSpan
from linearize.recipe import Recipe
from linearize.run.folder import versions
from linearize.training.allocation import allocate, allocated_plan, measured_losses
from linearize.training.memory import BLOCK, MemoryConfig, cached, candidate_bytes, window

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import write_page

BATCH_SIZE = 4
SINKS = 4


def uniform(pairs: int) -> dict[str, MixerConfig]:
    """What every head can have in as many pairs of key and value, by name."""
    rest = pairs - 2 * BLOCK
    sunk = SlidingSpan(window_size=max(1, pairs - SINKS), sinks=SINKS)
    found = {
        "window": window(pairs),
        f"window + {SINKS} sinks": MixerConfig(span=sunk, feature_map=None, combine=WindowOnly()),
    }
    if rest > 0:
        found |= {f"exact cache, {score}": cached(rest, score) for score in SCORES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--validation-dataset", required=True)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.2, 0.11, 0.06, 0.03])
    parser.add_argument("--window", type=int, default=64, help="the window that gains are measured from")
    parser.add_argument("--beyond", type=int, default=128, help="positions from here on are far")
    parser.add_argument("--rows", type=int, default=48, help="held-out rows")
    parser.add_argument("--tokens", type=int, default=16384, help="training tokens that heads are measured on")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    write_page(arguments.output_dir / "frontier.json", lambda: frontier(arguments), page)


def frontier(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every line of the table, and how it was made."""
    data = {
        "data.dataset": arguments.dataset,
        "data.validation_dataset": arguments.validation_dataset,
        "data.sequence_length": arguments.length,
        "data.validation_rows": arguments.rows,
    }
    recipe, config = Recipe.load("lolcats", data), read_config(arguments.model)
    shape, processor = TeacherShape.from_config(config), load_processor(recipe.data.task, arguments.model)
    teacher = load_model(arguments.model, dtype=torch.float32, device=torch.device("cpu"))
    dataset = load_dataset(recipe.data, processor, config, seed=0)
    rows, train = dataset.test, dataset.train
    assert isinstance(rows, PackedRows) and isinstance(train, PackedRows)
    sizes = {"window_size": arguments.window, "max_positions": shape.max_positions}
    vocabulary = ordinary_tokens(len(processor), processor.all_special_ids)
    copies = copy_rows(vocabulary, **sizes, rows=ENOUGH, seed=0)
    assert copies is not None

    def losses(model: Any) -> tuple[TokenLosses, Any]:
        return token_losses(model, rows, batch_size=BATCH_SIZE), copy_losses(model, copies, batch_size=BATCH_SIZE)

    every = tuple(index for index in range(shape.num_layers) if index not in shape.sliding_layers)
    its, its_copies = losses(teacher)
    reference, _ = losses(convert_layers(teacher, _alike(window(arguments.window), every, shape)))
    found: list[dict[str, Any]] = []

    def measure(fraction: float, name: str, plan: LayerPlan, held: int) -> None:
        own, copied = losses(convert_layers(teacher, plan))
        far = kept_far_context({"teacher": its, "window": reference, "student": own}, arguments.beyond)
        assert far is not None
        copying = kept_copying(its_copies, copied)
        line = {"fraction": fraction, "name": name, "bytes": held, "far": asdict(far), "copying": asdict(copying)}
        found.append(line)
        print(f"{fraction:.0%} {name}: far {_percent(line['far'])}, copying {_percent(line['copying'])}", flush=True)  # noqa: T201

    heads = shape.num_kv_heads * len(every)
    memory = MemoryConfig(fraction=1.0, of_cache_at=arguments.length, grows=True, tokens=arguments.tokens)
    candidates, started = memory.candidates(), time.perf_counter()
    needs = measured_losses(teacher, train, candidates, tokens=memory.tokens, seed=0)
    seconds = time.perf_counter() - started
    in_bytes = candidate_bytes(candidates, shape, torch.float32, arguments.length)
    for fraction in arguments.fractions:
        budget = MemoryConfig(fraction=fraction, of_cache_at=arguments.length).budget(shape, torch.float32)
        for name, mixer in uniform(round(fraction * arguments.length)).items():
            held = heads * candidate_bytes([mixer], shape, torch.float32, arguments.length)[0]
            measure(fraction, name, _alike(mixer, every, shape), held)
        for name, some in (
            ("by need, windows", [c is not None and c.cache is None for c in candidates]),
            ("by need, constant", [c is not None for c in candidates]),
            ("by need, may grow", [True for _ in candidates]),
        ):
            places = [place for place, allowed in enumerate(some) if allowed]
            its_needs = {
                layer: [[x[place] for place in places] for x in its_heads] for layer, its_heads in needs.items()
            }
            chosen = allocate(its_needs, [in_bytes[place] for place in places], budget)
            held = sum(in_bytes[places[at]] for its_heads in chosen.values() for at in its_heads)
            plan = allocated_plan(chosen, [candidates[place] for place in places], shape.num_layers)
            measure(fraction, name, plan, held)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions(),
        **{name: getattr(arguments, name) for name in ("length", "window", "beyond", "tokens")},
        "seconds_of_measuring_heads": seconds,
        "needs": needs,
        "candidates": [c and c.model_dump(mode="json", exclude_defaults=True) for c in candidates],
        "candidate_bytes": in_bytes,
        "found": found,
    }


def _alike(mixer: MixerConfig, layers: tuple[int, ...], shape: TeacherShape) -> LayerPlan:
    return tuple(mixer if index in layers else None for index in range(shape.num_layers))


def _percent(kept: dict[str, Any]) -> str:
    share = kept["share"]
    return "-" if share is None else f"{share['mean']:.0%} [{share['low']:.0%}, {share['high']:.0%}]"


def page(about: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "# Memory where it is needed: quality against bytes, nothing trained",
        "",
        f"Far gain: the share, beyond position {about['beyond']}, of what the teacher gains over a window of "
        f"{about['window']}; copying: of the teacher's gain on random tokens copied from {2 * about['window']} back. "
        f"95 % bootstrap intervals. A budget is a fraction of the teacher's cache at {about['length']:,} tokens, fp32; "
        f"heads were measured on {about['tokens']:,} training tokens in {about['seconds_of_measuring_heads']:.0f} s.",
        "",
        "| budget | what is held | bytes | far gain | copying |",
        "| --- | --- | --- | --- | --- |",
    ]
    for x in about["found"]:
        cells = [f"{x['fraction']:.0%}", x["name"], f"{x['bytes']:,}", _percent(x["far"]), _percent(x["copying"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"    {about['command']}", ""])


if __name__ == "__main__":
    main()
