"""The models of benchmarks of quality: a teacher, models converted from it, and its window in as many bytes."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError
from linearize.configs.mixer import MixerConfig
from linearize.configs.mixer_parts import WindowOnly
from linearize.configs.spans import SlidingSpan
from linearize.evaluation.controls import SINKS
from linearize.evaluation.intervals import wilson
from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.hf.convert import convert_layers
from linearize.hf.prefill import PREFILL_COSTS
from linearize.hf.teacher import TeacherShape


@dataclass(frozen=True)
class Contender:
    """A model to measure: its name in tables, how it reads prompts (None: a field that it has not), its fingerprint."""

    name: str
    prefill: str | None
    weights: str
    model: PreTrainedModel
    tokenizer: Tokenizer


def contender_arguments(parser: argparse.ArgumentParser, results: str) -> None:
    """Add the arguments that say which models are measured, in which numbers, and where the results go."""
    parser.add_argument(
        "models",
        nargs="+",
        metavar="[NAME=]MODEL",
        help="folders or hub ids, the teacher first; NAME is the one in the table (default: the last part of MODEL)",
    )
    parser.add_argument(
        "--window",
        type=int,
        nargs="*",
        default=[],
        metavar="N",
        help=f"also the teacher with N keys in each KV head of every layer: the first {SINKS} and the last N - {SINKS}",
    )
    parser.add_argument(
        "--prefill", choices=sorted(PREFILL_COSTS), help="how converted models read a prompt (default: as they say)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (default: 2)")
    default = Path(__file__).parent / "results" / results
    parser.add_argument("--json", type=Path, default=default, metavar="FILE", help="results, and a .md beside it")


def compare(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], str]) -> None:
    """Parse the command line, measure, and print the page; what a user can fix is one line and exit 2."""
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # as the command line does
    try:
        print(measure(arguments))  # noqa: T201 (the result)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def contenders(arguments: argparse.Namespace) -> Iterator[Contender]:
    """Load the models one after the other: the teacher, its windows, and the others.

    Raises:
        UserError: two of one name, a window with no room, a model that cannot be read, or one that has no `prefill`.
    """
    named = [_named(word) for word in arguments.models]
    names = [name for name, _ in named]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"models: expected a name for each, found {twice.pop()!r} twice; give NAME=MODEL")
    for number, (name, path) in enumerate(named):
        model = load_model(path, dtype=getattr(torch, arguments.dtype), device=torch.device(arguments.device))
        tokenizer = load_tokenizer(path)
        yield _contender(name, model, tokenizer, arguments.prefill)
        for pairs in arguments.window if number == 0 else ():
            yield _contender(
                f"window of {pairs - SINKS} and {SINKS} sinks",
                window_control(model, pairs),
                tokenizer,
                arguments.prefill,
            )


def teacher_name(arguments: argparse.Namespace) -> str:
    """Return the name of the first model."""
    return _named(arguments.models[0])[0]


def window_control(teacher: PreTrainedModel, pairs: int) -> PreTrainedModel:
    """Return the teacher with `pairs` keys and values in each KV head: those of the first 4 and of the last tokens.

    Raises:
        UserError: `pairs` leaves no room for a window, or the model is not a softmax model.
    """
    if pairs <= SINKS:
        raise UserError(f"--window: expected more than the {SINKS} first tokens, found {pairs}")
    span = SlidingSpan(window_size=pairs - SINKS, sinks=SINKS)
    mixer = MixerConfig(span=span, feature_map=None, combine=WindowOnly())
    layers = TeacherShape.from_config(teacher.config.to_dict()).num_layers
    return convert_layers(teacher, (mixer,) * layers).eval()


def fingerprint(model: PreTrainedModel) -> str:
    """Return the beginning of the SHA-256 of all tensors and of the layer plan, if there is one.

    `config.prefill` and the path that a model was loaded from do not count.
    """
    plan = getattr(model.config, "linearize", None)
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


def share_of_right(right: int, count: int, teacher: int | None) -> str:
    """Return a cell of a table: the share of right answers in % with its interval, and as a share of the teacher's.

    Args:
        teacher: right answers of the teacher to the same questions; None for the teacher itself.
    """
    share = wilson(right, count)
    cell = f"{share.mean:.1%} [{share.low:.1%}, {share.high:.1%}]".replace("%", "")
    return cell if not teacher else f"{cell}, {right / teacher:.0%}"


def _named(word: str) -> tuple[str, str]:
    name, equals, model = word.partition("=")
    return (name, model) if equals else (Path(word).name, word)


def _contender(name: str, model: PreTrainedModel, tokenizer: Tokenizer, prefill: str | None) -> Contender:
    converted = getattr(model.config, "linearize", None) is not None
    if prefill is not None and converted:
        if not hasattr(model.config, "prefill"):
            raise UserError(f"--prefill: expected a model with a config.prefill, found none in {name}; leave it out")
        model.config.prefill = prefill
    return Contender(name, getattr(model.config, "prefill", None), fingerprint(model), model, tokenizer)
