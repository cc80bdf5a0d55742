"""Generate examples of associative recall and ListOps. Held-out examples are equal for all seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from statistics import median

import torch

from linearize.base import UserError, progress
from linearize.configs.data import DataConfig
from linearize.configs.tasks import AssociativeRecall, ListOps
from linearize.data.examples import Example, examples_dataset, padded_texts
from linearize.data.labels import Classes
from linearize.data.packing import Dataset
from linearize.data.rows import IGNORED, PackedRows
from linearize.data.splits import require_enough
from linearize.hf.teacher import TeacherShape

# --- associative recall -----------------------------------------------------------------------------------------------


def recall_rows(task: AssociativeRecall, examples: int, *, labels: str, seed: str) -> PackedRows:
    """Return sequences of alternating keys (the lower half of the vocabulary) and values; the last key is a repetition.

    Args:
        labels: ``last``: only the last value has a loss; ``every``: the value of every repeated key has one.
    """
    generator = torch.Generator().manual_seed(Random(seed).getrandbits(63))
    half, pairs = task.vocabulary_size // 2, task.length // 2
    table = torch.randint(half, 2 * half, (examples, half), generator=generator)
    keys = torch.randint(half, (examples, pairs), generator=generator)
    again = torch.randint(pairs - 1, (examples, 1), generator=generator)
    keys[:, -1:] = keys.gather(1, again)
    input_ids = torch.stack([keys, table.gather(1, keys)], dim=-1).flatten(1)
    known = torch.zeros(examples, pairs, dtype=torch.bool)
    if labels == "every":
        seen = torch.zeros(examples, half, dtype=torch.bool)
        for pair in range(pairs):
            known[:, pair : pair + 1] = seen.gather(1, keys[:, pair : pair + 1])
            seen.scatter_(1, keys[:, pair : pair + 1], True)
    known[:, -1] = True
    learned = torch.stack([torch.zeros_like(known), known], dim=-1).flatten(1)
    positions = torch.arange(task.length).expand(examples, -1).contiguous()
    return PackedRows(input_ids, positions, input_ids.masked_fill(~learned, IGNORED))


# --- ListOps ----------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
NESTED = 0.25  # share of an operator's arguments that are operators, below the greatest depth
PAD, CLS = 0, 1
TOKENS = {name: index for index, name in enumerate(("[PAD]", "[CLS]", *map(str, range(10)), *OPERATORS, "]"))}


def expression(random: Random, task: ListOps, room: int, depth: int = 1) -> tuple[list[str], int] | None:
    """Return the tokens and the value of a random expression; None: it is longer than `room` tokens.

    Most random expressions grow far too long, so stopping early saves most of the time.
    """
    operator = random.choice(list(OPERATORS))
    tokens, values = [operator], []
    for _ in range(random.randint(2, task.max_arguments)):
        if depth < task.max_depth and random.random() < NESTED:
            inner = expression(random, task, room - len(tokens) - 1, depth + 1)
            if inner is None:
                return None
            tokens += inner[0]
            values.append(inner[1])
        else:
            values.append(random.randrange(10))
            tokens.append(str(values[-1]))
        if len(tokens) >= room:
            return None
    return [*tokens, "]"], OPERATORS[operator](values)


def expressions(task: ListOps, seed: str) -> Iterator[Example]:
    """Yield different expressions of the task's lengths, endlessly."""
    random, seen = Random(seed), set[bytes]()
    while True:
        made = expression(random, task, task.max_length)
        if made is None or len(made[0]) < task.min_length:
            continue
        tokens, value = made
        example = Example([CLS, *(TOKENS[token] for token in tokens)], None, value)
        if example.key not in seen:
            seen.add(example.key)
            yield example


# --- both -------------------------------------------------------------------------------------------------------------


def check_generated(config: DataConfig, shape: TeacherShape, classes: Classes) -> None:
    """Raise UserError if a model lacks tokens or classes of a built-in task, or this task has other data too."""
    task = config.task
    recalls = isinstance(task, AssociativeRecall)
    if recalls and (shape.vocab_size < task.vocabulary_size or shape.bidirectional):
        raise UserError(
            f"data.task: expected a decoder with at least {task.vocabulary_size} tokens (data.task.vocabulary_size), "
            f"found {shape.model_type} with {shape.vocab_size}; use another model"
        )
    if isinstance(task, ListOps) and (shape.vocab_size < len(TOKENS) or classes.count < 10):
        raise UserError(
            f"data.task: expected a model with at least {len(TOKENS)} tokens and 10 classes, found {shape.vocab_size} "
            f"and {classes.count}; use a config with vocab_size {len(TOKENS)} and num_labels 10"
        )
    for field in ("dataset", "validation_dataset"):
        if task.built_in and (name := getattr(config, field)) is not None:
            raise UserError(
                f"data.{field}: expected none, because the task {task.type} generates its own data, found {name!r}; "
                "leave it out, or set data.task.type to a task that reads data"
            )


def build_generated(task: AssociativeRecall | ListOps, *, seed: int, use_cache: bool | None) -> Dataset:
    """Return the examples of a built-in task.

    Raises:
        UserError: fewer held-out examples than an interval needs.
    """
    count = task.held_out_examples
    require_enough(count, "examples (data.task.held_out_examples)", "set more of them")
    if isinstance(task, AssociativeRecall):
        train = recall_rows(task, task.train_examples, labels=task.labels, seed=f"recall, train {seed}")
        streams = ("recall, held out 0", "recall, test 0")
        return examples_dataset(train, *(recall_rows(task, count, labels="last", seed=stream) for stream in streams))
    total = task.train_examples + 2 * count
    made = list(progress(islice(expressions(task, "ListOps 0"), total), "making expressions", total))
    parts = made[count : total - count], made[:count], made[total - count :]
    return examples_dataset(*(padded_texts(part, PAD, use_cache) for part in parts))
