"""Which pairs an exact cache should keep: every score at the same bytes, nothing trained.

    python scripts/write_stdlib_corpus.py corpus
    python experiments/memory/scores.py --model src/linearize/demo/teacher --dataset corpus

The teacher gets a window of 64 in all KV heads but two: those that are measured to lose the most with it. These have a
window of 32 and a cache, of 192 pairs and of 64, once by each score; and, in as many bytes, a longer window instead. A
score whose sums take bytes has fewer pairs. What is measured of each, over several seeds, which choose the held-out
rows, the tokens to copy, the needles, and what the score `random` keeps:

    far gain   the share, beyond position 128, of what the teacher gains over windows of 64 in all heads
    copying    of the teacher's gain on random tokens copied from 200 tokens back
    needle     of the teacher's right answers to needles beyond 64 tokens

Writes OUTPUT, as JSON, and the table beside it (.md). A quarter of an hour for the bundled teacher on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from linearize.base import UserError, progress
from linearize.data.load import load_dataset, load_processor
from linearize.data.packing import Dataset
from linearize.data.repeats import ordinary_tokens
from linearize.data.rows import PackedRows
from linearize.evaluation.candidates import BATCH_SIZE
from linearize.evaluation.copying import CopyRows, copy_losses, copy_rows
from linearize.evaluation.perplexity import TokenLosses, token_losses
from linearize.evaluation.retrieval import RetrievalTest, answer, retrieval_result, retrieval_tests
from linearize.evaluation.shares import kept_copying
from linearize.hf.attention import linearized_layers
from linearize.hf.checkpoint import load_model, read_config
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.config import MixerConfig
from linearize.mixers.exact_cache import SCORES, Score, random
from linearize.recipe import Recipe
from linearize.run.folder import versions
from linearize.training.allocation import allocated_plan, measured_losses
from linearize.training.cache_scores import fit_scores
from linearize.training.memory import cached, candidate_bytes, window

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import write_page

OTHERS = 64  # the window of all other heads
PAIRS = (192, 64)
COPIED_FROM = 200
HEADS = 2
LONGER = "a longer window instead"
MEASURES = ("far gain", "copying", "needle")


@dataclass(frozen=True)
class Ruler:
    """What one seed measures all models with."""

    rows: PackedRows
    copies: CopyRows
    needles: RetrievalTest

    @classmethod
    def of(cls, dataset: Dataset, tokenizer: Any, args: argparse.Namespace, length: int, seed: int) -> Ruler:
        test = dataset.test
        assert isinstance(test, PackedRows)
        chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))[: args.rows]
        vocabulary = ordinary_tokens(len(tokenizer), tokenizer.all_special_ids)
        copies = copy_rows(vocabulary, window_size=COPIED_FROM // 2, max_positions=length, rows=args.copies, seed=seed)
        assert copies is not None
        given = {"window_size": OTHERS, "max_positions": min(length, args.needle_length), "haystack": test.input_ids}
        tests = retrieval_tests(tokenizer, trials=args.needles, seed=seed, **given)
        return cls(test.rows(chosen.sort().values), copies, next(test for test in tests if test.task.name == "needle"))

    def see(self, model: PreTrainedModel, title: str) -> dict[str, Any]:
        """What a model makes of it."""
        return {
            "losses": token_losses(model, self.rows, batch_size=BATCH_SIZE, title=title),
            "copies": copy_losses(model, self.copies, batch_size=BATCH_SIZE),
            "answers": answer(model, self.needles, batch_size=BATCH_SIZE, title=title),
        }

    def compare(self, seen: dict[str, dict[str, Any]]) -> dict[str, float | None]:
        """The student's share of each measure beside "teacher" and "window"; None where the teacher has nothing."""
        far = {name: _mean_loss(x["losses"].beyond(2 * OTHERS)) for name, x in seen.items()}
        copying = kept_copying(seen["teacher"]["copies"], seen["student"]["copies"]).share
        needle = retrieval_result(self.needles, {name: x["answers"] for name, x in seen.items()}).recovery
        return {
            "far gain": (far["window"] - far["student"]) / (far["window"] - far["teacher"]),
            "copying": copying and copying.mean,
            "needle": needle and needle.mean,
        }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All of it, as it stands in the JSON."""
    texts = {"data.dataset": str(args.dataset / "train.jsonl")}
    texts |= {"data.validation_dataset": str(args.dataset / "held_out.jsonl"), "data.validation_rows": args.held_out}
    for path in (args.dataset / "train.jsonl", args.dataset / "held_out.jsonl"):
        if not path.is_file():
            raise UserError(f"--dataset: expected a folder with {path.name}, as scripts/write_stdlib_corpus.py writes")
    config = read_config(args.model)
    shape = TeacherShape.from_config(config)
    length = min(shape.max_positions, args.length)
    recipe = Recipe.load("recommended", texts | {"data.sequence_length": length, "data.repeats": 0.0})
    tokenizer = load_processor(recipe.data.task, args.model)
    dataset = load_dataset(recipe.data, tokenizer, config, seed=0)
    assert isinstance(dataset.train, PackedRows)
    rulers = [Ruler.of(dataset, tokenizer, args, length, seed) for seed in range(args.seeds)]
    teacher = load_model(args.model, dtype=torch.float32, device=torch.device(args.device))

    needs = measured_losses(teacher, dataset.train, [window(OTHERS)], tokens=args.tokens, seed=0)
    ranked = sorted(((its[0], layer, head) for layer, heads in needs.items() for head, its in enumerate(heads)))
    chosen = [(layer, head) for _, layer, head in ranked[: -HEADS - 1 : -1]]
    size_of = partial(candidate_bytes, teacher=shape, dtype=torch.float32, length=length)

    def student(mixer: MixerConfig) -> PreTrainedModel:
        """The teacher with this in the heads that need the most, and a window of 64 elsewhere."""
        places = {layer: [int((layer, head) in chosen) for head in range(shape.num_kv_heads)] for layer in needs}
        model = convert_layers(teacher, allocated_plan(places, [window(OTHERS), mixer], shape.num_layers))
        fit_scores(model, dataset.train, args.tokens)
        return model

    alone = student(window(OTHERS))
    base = [
        {name: ruler.see(model, f"seed {seed}: {name}") for name, model in (("teacher", teacher), ("window", alone))}
        for seed, ruler in enumerate(rulers)
    ]
    points = []
    jobs = [(pairs, name) for pairs in PAIRS for name in (*get_args(Score), LONGER)]
    for pairs, name in progress(jobs, "scores"):
        budget = size_of([cached(pairs, "redundancy_and_age")])[0]
        mixer, kept = _largest(name, budget, size_of)
        model, shares = student(mixer), []
        for seed, ruler in enumerate(rulers):
            if name == "random":
                reseed(model, seed)
            shares.append(ruler.compare(base[seed] | {"student": ruler.see(model, f"seed {seed}: {name}")}))
        by_seed = {measure: [share[measure] for share in shares] for measure in MEASURES}
        points.append({"pairs": pairs, "name": name, "kept": kept, "bytes": size_of([mixer])[0], "shares": by_seed})
    return {
        "command": args.command,
        "versions": versions(),
        "seeds": args.seeds,
        "rows": len(rulers[0].rows),
        "tokens": args.tokens,
        "heads": [f"{layer}.{head}" for layer, head in chosen],
        "needs": {layer: [its[0] for its in heads] for layer, heads in needs.items()},
        "points": points,
    }


def _mean_loss(losses: TokenLosses) -> float:
    """Of all tokens alike. What the rows of one seed leave to luck shows between the seeds."""
    totals = losses.totals()
    return float(totals.sum.sum() / totals.count.sum())


def _largest(name: str, budget: int, size_of: Any) -> tuple[MixerConfig, int]:
    """The largest cache by a score, or window, of so many bytes in one head; and its pairs."""
    make = window if name == LONGER else partial(cached, score=name)  # type: ignore[arg-type]
    low, high = 1, budget
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size_of([make(middle)])[0] <= budget else (low, middle)
    return make(low), low


def reseed(model: PreTrainedModel, seed: int) -> None:
    """Let the score `random` keep other pairs."""
    for layer in linearized_layers(model).values():
        for _, part in layer.mixer.parts():
            if part.config.cache is not None:
                part.worth = replace(SCORES["random"], compare=partial(random, seed=seed))


def page(found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "# Scores of an exact cache at equal bytes",
        "",
        f"A window of 32 and an exact cache in the KV heads {' and '.join(found['heads'])} (layer.head), which lose "
        f"the most with a window of {OTHERS}; a window of {OTHERS} in all others; nothing trained. Pairs: how many the "
        "cache keeps, or the window has, in the same bytes of one of these heads. Far gain: the share, beyond position "
        f"{2 * OTHERS}, of what the teacher gains over windows of {OTHERS} in all heads. Copying: of the teacher's "
        f"gain on random tokens copied from {COPIED_FROM} back. Needle: of the teacher's right answers to needles "
        f"beyond {OTHERS} tokens. Mean of {found['seeds']} seeds, which choose {found['rows']} held-out rows, the "
        "copies, the needles and what `random` keeps; in brackets the least and the greatest.",
    ]
    for pairs in dict.fromkeys(point["pairs"] for point in found["points"]):
        points = [point for point in found["points"] if point["pairs"] == pairs]
        points.sort(key=lambda point: -(_mean(point["shares"]["far gain"]) or 0))
        lines += ["", f"A cache of {pairs} pairs:", "", f"| score | pairs | bytes of a head | {' | '.join(MEASURES)} |"]
        lines += [f"|{' --- |' * (3 + len(MEASURES))}", *map(_row, points)]
    return "\n".join([*lines, "", f"    {found['command']}", ""])


def _row(point: dict[str, Any]) -> str:
    name = point["name"] if point["name"] == LONGER else f"`{point['name']}`"
    shares = (_share(point["shares"][measure]) for measure in MEASURES)
    return f"| {' | '.join([name, str(point['kept']), format(point['bytes'], ','), *shares])} |"


def _share(values: list[float | None]) -> str:
    found = _mean(values)
    known = [x for x in values if x is not None]
    return "-" if found is None else f"{found:.0%} [{min(known):.0%}, {max(known):.0%}]"


def _mean(values: list[float | None]) -> float | None:
    """Over the seeds; None where a seed has none."""
    known = [x for x in values if x is not None]
    return mean(known) if len(known) == len(values) else None


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the teacher: a folder or hub id")
    parser.add_argument("--dataset", required=True, type=Path, help="a folder with train.jsonl and held_out.jsonl")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="the JSON to write")
    parser.add_argument("--seeds", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row, as far as the teacher has positions")
    parser.add_argument("--held-out", type=int, default=400, help="rows to choose from")
    parser.add_argument("--rows", type=int, default=10, help="of them, how many each seed chooses")
    parser.add_argument("--copies", type=int, default=16, help="rows of random tokens")
    parser.add_argument("--needles", type=int, default=4, help="trials of each distance and depth")
    parser.add_argument(
        "--tokens", type=int, default=16384, help="of training text, to measure needs and fit scores on"
    )
    parser.add_argument("--needle-length", type=int, default=512, help="tokens of the text that hides a needle")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = options().parse_args(arguments)
    args.command = " ".join(["python experiments/memory/scores.py", *_shown(arguments or sys.argv[1:])])
    write_page(args.output, lambda: measure(args), page)


def _shown(arguments: list[str]) -> Iterator[str]:
    """The arguments, without those that say where things lie."""
    for flag, value in zip(arguments[::2], arguments[1::2], strict=True):
        if flag != "--output":
            yield f"{flag} {Path(value).name if flag == '--dataset' else value}"


if __name__ == "__main__":
    main()
