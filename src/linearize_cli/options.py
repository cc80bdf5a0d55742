"""Options of several commands and their parsing; heavy imports wait until a command runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from linearize.base import UserError, without_controls

if TYPE_CHECKING:
    import torch

    from linearize.recipe import Recipe
    from linearize.run.folder import Run

RECOMMENDED = "recommended"
RecipeName = Annotated[
    str, typer.Argument(help="a recipe's name (see `linearize recipes`) or a YAML file", metavar="[RECIPE]")
]
Model = Annotated[str, typer.Option(help="the softmax model: a Hugging Face folder, a GGUF file or a hub id")]
Student = Annotated[str, typer.Argument(help="a run's folder, or a linearized model's", metavar="RUN")]
OutputDir = Annotated[Path, typer.Option(help="the run's folder; the same command again resumes it")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a recipe field, e.g. mixer.span.window_size=32")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output and nothing else")]
TrustTasks = Annotated[
    bool, typer.Option("--trust-tasks", help="let the recipe name task YAMLs of lm-eval, which can run any code")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto: bfloat16 on a GPU, float32 on a CPU")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="compile the step from token to token (torch.compile, static cache): faster from several thousand tokens "
        "on; needs a C++ compiler, and continues without compilation if there is none",
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        help="memory of the GPU, e.g. 24GiB: set what fits it and changes no result (micro_batch_size, "
        "activation_checkpointing, layers_per_block), unless the recipe sets it"
    ),
]
Seed = Annotated[int | None, typer.Option(help="seed of everything random; the recipe's own by default")]
Text = Annotated[
    str | None,
    typer.Option(
        help="a txt, csv, tsv, json, jsonl (also .gz, .zst) or parquet file, a folder of them or of images, or a hub "
        "dataset id"
    ),
]


def recipe_of(recipe: str, set_: Set, options: dict[str, object]) -> Recipe:
    """Return a recipe with the changes of the command line; options that are None change nothing.

    Errors in a recipe are raised here, before slow imports.
    """
    from linearize.recipe import Recipe, parse_overrides

    named = {field: value for field, value in options.items() if value is not None}
    return Recipe.load(recipe, parse_overrides(set_ or []) | named)


def job_of(recipe: Recipe, model: str, output: Path, dtype: str, device: str) -> Run:
    """Return the run of a recipe on a device and in a dtype."""
    from linearize.run.folder import Run

    where = device_of(device)
    return Run(recipe, model, output, dtype_of(dtype, where), where)


def block_of(given: str | None) -> int | Literal["any"] | None:
    if given is None:
        return None
    if given == "any":
        return "any"
    if not given.removeprefix("-").isdecimal():
        raise UserError(f"--block: expected the number of a block, or any; found {given!r}")
    return int(given)


def command_line() -> str:
    return shlex.join(["linearize", *sys.argv[1:]])


def device_of(name: str) -> torch.device:
    import torch

    # Denormal numbers in features and gradients are tens of times slower on a CPU. All commands call this function
    # before they compute, and torch's threads, started later, inherit the setting.
    torch.set_flush_denormal(True)
    if name == "auto":
        # torchrun sets LOCAL_RANK, the number of the process on its machine.
        return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails on the device `meta`
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"--device: expected a device of this machine, found {name!r}: {reason}") from None
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in known:
        raise UserError(f"--dtype: expected auto or one of {', '.join(known)}; found {name!r}")
    return known[name]


def show(result: object, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.console import Console

    Console().print(result)


def note(text: str) -> None:
    """Print a line on standard error, with control characters escaped."""
    typer.echo(without_controls(text), err=True)
