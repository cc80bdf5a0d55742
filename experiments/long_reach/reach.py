"""Say how far back models read: loss by position, copying and needles by distance.

    python scripts/write_stdlib_corpus.py corpus --join 30000 --held-out-packages fontTools hypothesis mpmath rich
    python experiments/long_reach/reach.py --dataset corpus/held_out.jsonl \\
        --model "long reach=experiments/long_reach/teacher" --model "bundled=src/linearize/demo/teacher"

Each model reads rows of --length tokens, however many its config has positions for, once with all of a row in sight
and once through a window of --window tokens in all heads, converted without training: what lies between the two is
what it gets from farther back. Copying is the loss on random tokens when they come a second time less that of the first
time; needles are those of `linearize eval`. The texts are standard Python and packages of PyPI.

Writes reach.json and the same as a page beside it (.md).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from linearize.configs.data import DataConfig
from linearize.data.packing import build_dataset
from linearize.data.repeats import ordinary_tokens
from linearize.data.rows import PackedRows
from linearize.evaluation.agreement import loss_by_position
from linearize.evaluation.copying import Copying, copy_losses, copy_rows
from linearize.evaluation.perplexity import token_losses
from linearize.evaluation.retrieval import answer, retrieval_tests
from linearize.hf.checkpoint import read_config
from linearize.hf.convert import convert_layers
from linearize.run.folder import versions
from linearize.training.memory import head_mixer

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import write_page

NEAREST = 128  # tokens: half of the first window that copying and needles lie beyond


def load(path: str, length: int) -> PreTrainedModel:
    """The model, taken to have `length` positions.

    Raises:
        UserError: there is none.
    """
    read_config(path)  # says in one line what is wrong
    config = AutoConfig.from_pretrained(path)
    config.max_position_embeddings = length
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype="float32").eval()


def measured(a: argparse.Namespace) -> dict[str, Any]:
    """Losses, copying and needles of every model.

    Raises:
        UserError: arguments or data that cannot be used.
    """
    paths = dict(name.split("=", 1) if "=" in name else (name, name) for name in a.model)
    models = {name: load(path, a.length) for name, path in paths.items()}
    tokenizer = AutoTokenizer.from_pretrained(next(iter(paths.values())))
    config = DataConfig(dataset=a.dataset, validation_fraction=0.95, sequence_length=a.length, validation_rows=a.rows)
    rows = build_dataset(config, tokenizer, seed=a.seed).test
    assert isinstance(rows, PackedRows)
    losses = {}
    for name, model in models.items():
        losses[name] = token_losses(model, rows, batch_size=1, title=name)
        near = convert_layers(model, (head_mixer(a.window, 0, 0),) * model.config.num_hidden_layers)
        losses[f"{name}, window of {a.window}"] = token_losses(near, rows, batch_size=1, title=f"{name}, window")
    ordinary = ordinary_tokens(len(tokenizer), tokenizer.all_special_ids)
    copying: dict[str, dict[int, Any]] = {name: {} for name in models}
    size = NEAREST
    while size * 3 <= a.length:
        copies = copy_rows(ordinary, window_size=size, max_positions=a.length, rows=a.trials, seed=a.seed)
        assert copies is not None
        for name, model in models.items():
            copying[name][copies.distance] = asdict(Copying.of(copy_losses(model, copies, batch_size=1)))
        size *= 2
    given = {"window_size": 2 * NEAREST, "max_positions": a.length, "haystack": rows.input_ids, "seed": a.seed}
    tests = retrieval_tests(tokenizer, **given, trials=a.trials)
    needle = next(test for test in tests if test.task.name == "needle")
    needles = {name: by_distance(answer(model, needle, batch_size=1, title=name)) for name, model in models.items()}
    return {
        "models": paths,
        "dataset": a.dataset,
        "length": a.length,
        "trials": a.trials,
        "by_position": asdict(loss_by_position(losses)),
        "copying": copying,
        "needles": needles,
        "versions": versions(),
    }


def by_distance(answers: dict[tuple[int, Any], Any]) -> dict[int, float]:
    """The share of right answers at each distance, over all depths."""
    found: dict[int, list[float]] = {}
    for (distance, _), right in answers.items():
        found.setdefault(distance, []).append(float(right.mean()))
    return {distance: sum(shares) / len(shares) for distance, shares in found.items()}


def markdown(found: dict[str, Any]) -> str:
    """The same as a page."""
    by_position, names = found["by_position"], list(found["models"])
    lines = ["# How far back the models read", ""]
    lines += [f"By `experiments/long_reach/reach.py`, on rows of {found['length']:,} held-out tokens.", ""]
    lines += ["## Loss by position, nats per token", "", "With 95 % intervals over documents.", ""]
    lines += [f"| position | {' | '.join(by_position['losses'])} |", "| --- |" + " --- |" * len(by_position["losses"])]
    for place, start in enumerate(by_position["edges"][:-1]):
        cells = [column[place] for column in by_position["losses"].values()]
        if start >= NEAREST and all(cells):
            shown = (f"{x['mean']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for x in cells)
            lines.append(f"| {start:,} to {by_position['edges'][place + 1] - 1:,} | {' | '.join(shown)} |")
    lines += ["", "## Copying random tokens: nats per token gained the second time", ""]
    lines += [f"| distance | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for distance in found["copying"][names[0]]:
        gains = (found["copying"][name][distance]["gain"] for name in names)
        shown = (f"{x['mean']:.2f} [{x['low']:.2f}, {x['high']:.2f}]" for x in gains)
        lines.append(f"| {int(distance):,} | {' | '.join(shown)} |")
    lines += ["", f"## Needles found, of {2 * found['trials']}", ""]
    lines += [f"| distance | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for distance in found["needles"][names[0]]:
        shown = (f"{found['needles'][name][distance]:.0%}" for name in names)
        lines.append(f"| {int(distance):,} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", required=True, metavar="NAME=PATH", help="of one tokenizer; several"
    )
    parser.add_argument("--dataset", required=True, help="held-out text: a file, a folder or a hub id")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row (%(default)s)")
    parser.add_argument("--window", type=int, default=1024, help="tokens in sight, for comparison (%(default)s)")
    parser.add_argument("--rows", type=int, default=24, help="of text (%(default)s)")
    parser.add_argument(
        "--trials", type=int, default=16, help="copies, and needles of a cell; 16 or more (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of rows, copies and needles (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the results go")
    a = parser.parse_args()
    write_page(a.json, lambda: measured(a), markdown)


if __name__ == "__main__":
    main()
