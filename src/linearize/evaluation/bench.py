"""Teacher and student timed side by side over batch sizes and lengths, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.evaluation.speed import Crossover, Speed, Spread, generation_speed

HEADER = (
    "batch",
    "prompt tokens",
    "model",
    "prefill, ms",
    "tokens/s",
    "cache bytes",
    "prefill peak bytes",
)


@dataclass(frozen=True)
class Bench:
    """All measurements, and the crossover of each batch size."""

    speeds: list[Speed]
    crossovers: dict[int, Crossover]
    repeats: int
    seed: int
    setting: str  # device, dtype, version of torch

    def to_json(self) -> dict[str, Any]:
        """Plain data; the crossovers as a list, each with its batch size."""
        return {
            "speed": [speed.to_json() for speed in self.speeds],
            "crossovers": [{"batch_size": size} | asdict(found) for size, found in self.crossovers.items()],
            "repeats": self.repeats,
            "seed": self.seed,
            "setting": self.setting,
        }

    def title(self) -> str:
        return (
            f"Prefill, then {self.speeds[0].new_tokens} tokens; medians of {self.repeats} rounds, least and greatest "
            f"({self.setting})"
        )

    def lines(self) -> list[str]:
        """The findings, a sentence or more for each batch size."""
        return [f"Batch of {size}: {found.words}" for size, found in self.crossovers.items()]

    def render(self) -> Group:
        """For a terminal."""
        table = Table(title=self.title(), title_justify="left")
        for name in HEADER:
            table.add_column(name, justify="left" if name == "model" else "right")
        before = None
        for speed in self.speeds:
            if before not in (None, (speed.batch_size, speed.prompt_length)):
                table.add_section()
            before = speed.batch_size, speed.prompt_length
            table.add_row(*map(Text, _cells(speed)))
        return Group(table, *(Text(f"- {line}") for line in self.lines()))

    def to_markdown(self) -> str:
        """The same as Markdown."""
        rows = [HEADER, ["---" if name == "model" else "---:" for name in HEADER], *map(_cells, self.speeds)]
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        return f"{self.title()}\n\n{table}\n" + "".join(f"- {line}\n" for line in self.lines())


def bench(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    *,
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    new_tokens: int,
    repeats: int,
    seed: int,
) -> Bench:
    """Time both models in one process, in turns, on random prompts.

    Raises:
        UserError: a size, length or count is not positive, or a model with learned positions has too few of them.
    """
    numbers = {"batch sizes": batch_sizes, "prompt lengths": prompt_lengths, "new tokens": [new_tokens]}
    for name, values in (numbers | {"repeats": [repeats]}).items():
        if not values or min(values) < 1:
            raise UserError(f"{name}: expected 1 or more, found {', '.join(map(str, values)) or 'none'}")
    sizes = sorted(set(batch_sizes))
    speeds = generation_speed(
        {"teacher": teacher, "student": student},
        sorted(set(prompt_lengths)),
        batch_sizes=sizes,
        new_tokens=new_tokens,
        repeats=repeats,
        seed=seed,
    )
    crossovers = {size: Crossover.of([speed for speed in speeds if speed.batch_size == size]) for size in sizes}
    return Bench(speeds, crossovers, repeats, seed, _setting(student))


def _setting(model: PreTrainedModel) -> str:
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} {'thread' if threads == 1 else 'threads'}"
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu
    return f"{device}, {str(model.dtype).removeprefix('torch.')}, torch {torch.__version__}"


def _cells(speed: Speed) -> list[str]:
    batch = speed.batch_size
    per_second = Spread(*(batch / x for x in (speed.decode.median, speed.decode.high, speed.decode.low)))
    return [
        f"{batch}",
        f"{speed.prompt_length:,}",
        speed.model,
        _spread(speed.prefill, 1e3, ".1f"),
        _spread(per_second, 1.0, ".0f"),
        f"{speed.cache_bytes:,}",
        "-" if speed.prefill_bytes is None else f"{speed.prefill_bytes:,}",
    ]


def _spread(spread: Spread, unit: float, form: str) -> str:
    median, low, high = (format(unit * x, form) for x in (spread.median, spread.low, spread.high))
    return f"{median} [{low}, {high}]"
