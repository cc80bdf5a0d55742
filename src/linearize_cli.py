"""The command line. One function per command and no logic; heavy imports wait until a command runs.

It lies beside the package, because importing `linearize` registers classes with transformers, and ``--help`` should not
wait for that.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from linearize.run.folder import Run

app = typer.Typer(
    help="Turn a softmax Transformer into one with linear-time prefill and constant-memory generation, "
    "and say what was kept and what was lost. Try `linearize demo` first.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RECOMMENDED = "recommended"
RecipeName = Annotated[
    str, typer.Argument(help="a recipe's name (see `linearize recipes`) or a YAML file", metavar="[RECIPE]")
]
Model = Annotated[str, typer.Option(help="the softmax model: a Hugging Face folder or hub id")]
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
        help="compile the step from token to token (torch.compile, static cache), which pays from some thousand tokens "
        "on; needs a C++ compiler, and goes on without it where there is none",
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        help="of the GPU, e.g. 24GiB: choose what fits it, and changes no result: micro_batch_size, "
        "activation_checkpointing, layers_per_block, where the recipe does not set them"
    ),
]
Seed = Annotated[int | None, typer.Option(help="seed of everything random; the recipe's own by default")]
Text = Annotated[
    str | None,
    typer.Option(
        help="a txt, csv, tsv, json, jsonl or parquet file, a folder of them or of images, or a hub dataset id"
    ),
]


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="print this one as YAML, to edit")] = None) -> None:
    """List the recipes, or print one as YAML."""
    import yaml

    package = importlib.util.find_spec("linearize")
    assert package is not None and package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]) / "recipes"
    shipped = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")}
    if name is None:
        for known in sorted(shipped):
            typer.echo(f"{known:20} {yaml.safe_load(shipped[known])['description']}")
    elif name in shipped:
        typer.echo(shipped[name], nl=False)
    else:
        with _importing():
            from linearize.recipe import Recipe
        typer.echo(Recipe.load(name).to_yaml(), nl=False)


@app.command()
def plan(
    model: Model,
    recipe: RecipeName = RECOMMENDED,
    set_: Set = None,
    dtype: Dtype = "bfloat16",
    cluster: Annotated[str | None, typer.Option(help="GPUs and the memory of each, as in 8x80GiB: what fits")] = None,
    gpu_memory: GpuMemory = None,
    as_json: Json = False,
) -> None:
    """Say what a run would do and cost, and from which length on memory is saved. Touches no weights."""
    with _importing():
        import torch

        from linearize.hf.checkpoint import read_config
        from linearize.hf.teacher import TeacherShape
        from linearize.planning import cluster as clusters
        from linearize.planning import plan as planning
        from linearize.planning.fit import fit, parse_memory
        from linearize.recipe import KeepByTransferError, Recipe, parse_overrides, resolve

    chosen = Recipe.load(recipe, parse_overrides(set_ or []))
    shape = TeacherShape.from_config(read_config(model))
    gpus = None if cluster is None else clusters.Cluster.parse(cluster)
    computed_in = _dtype(dtype, torch.device("cpu"))
    # Which layers transfer worst is not known before; how many stay softmax is, and costs the same for any.
    layers = resolve(chosen, shape, errors=[float(index) for index in range(shape.num_layers)])
    found = None
    if gpu_memory is not None:
        found = fit(chosen, shape, layers, dtype=computed_in, memory=parse_memory(gpu_memory))
        chosen = found.recipe
    # Forecasting memory runs the stages' own code, which takes seconds.
    where = None if gpus is None and found is None else torch.device("cuda")
    result = planning.make_plan(chosen, shape, layers, dtype=computed_in, device=where, training_tokens=None)
    shares = [] if gpus is None else clusters.shares(chosen, shape, layers, gpus, dtype=computed_in)
    if as_json:
        more = {"fit": found and found.to_json(), "cluster": [share.to_json() for share in shares]}
        _show(result.to_json() | {name: value for name, value in more.items() if value}, as_json)
    else:
        _show(planning.render(result), as_json)
        if gpus is not None:
            _show(clusters.render(shares, gpus), as_json)
    for line in found.lines() if found is not None else ():
        _note(line)
    if isinstance(chosen.layers.keep_softmax, KeepByTransferError):
        _note("which layers stay softmax is decided by their transfer errors; those above stand in for them")
    if chosen.memory is not None:
        grown = "; some may keep all their keys, which is counted to memory.of_cache_at" if chosen.memory.grows else ""
        _note(f"a run measures what each KV head needs, and spreads these bytes over them{grown}")


@app.command()
def run(
    model: Model,
    output_dir: OutputDir,
    recipe: RecipeName = RECOMMENDED,
    dataset: Text = None,
    until: Annotated[str, typer.Option(help="last stage to run: transfer, adapt, finetune or evaluate")] = "evaluate",
    block: Annotated[
        str | None,
        typer.Option(
            help="only train this block of layers, from 0, or any: one after another that no other job has taken; "
            "transfer.layers_per_block says how many layers each has"
        ),
    ] = None,
    trust_tasks: TrustTasks = False,
    set_: Set = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    gpu_memory: GpuMemory = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Linearize a model: convert, train, measure beside every control, and write an ordinary Hugging Face folder."""
    from linearize.base import UserError
    from linearize.distributed import joined
    from linearize.report import terminal
    from linearize.report.load import load_run
    from linearize.run import pipeline, settings

    if until not in pipeline.STAGES:
        raise UserError(f"--until: expected one of {', '.join(pipeline.STAGES)}; found {until!r}")
    job = _job(model, output_dir, recipe, dataset, set_, dtype, device, seed)
    job = settings.settled(job, gpu_memory, note=_note)
    with joined(job.device):
        worth = pipeline.run(job, until=until, block=_block(block), command=_command(), trust_tasks=trust_tasks)
    if worth is not None:
        _show(worth.to_json() if as_json else terminal.measured(load_run(output_dir)), as_json)
    _note(f"run folder: {output_dir}" + ("" if worth is None else f"; the model: {output_dir / 'model'}"))
    if block is not None:
        left = ", ".join(map(str, pipeline.blocks_to_do(job)))
        _note(f"blocks still to do: {left or 'none; the same command without --block goes on'}")


@app.command(name="eval")
def evaluate(
    model: Student,
    teacher: Annotated[str | None, typer.Option(help="the softmax model; the run folder's own by default")] = None,
    dataset: Text = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="a public benchmark (repeatable): lm-eval's name, its YAML, or a .jsonl file of questions"),
    ] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="solved examples before each question of a task")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first questions of every task")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="also write the JSON there, e.g. RUN/evaluation.json for `linearize report`, and a .md"),
    ] = None,
    trust_tasks: TrustTasks = False,
    set_: Set = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    compiled: Compile = False,
    as_json: Json = False,
) -> None:
    """Measure a linearized model beside its teacher and controls: held-out text, generations, recall, heads, speed."""
    from linearize.base import UserError
    from linearize.distributed import joined
    from linearize.recipe import parse_overrides
    from linearize.report import terminal
    from linearize.report.card import evaluation_page
    from linearize.report.load import as_written, load_run
    from linearize.run import evaluate as measuring
    from linearize.run import folder as runs

    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise UserError(f"--output: expected a file in a folder that can be written to, found {str(output)!r}")
    where, overrides = _device(device), parse_overrides(set_ or [])
    given = {"evaluation.tasks": tasks, "evaluation.shots": shots, "evaluation.task_limit": limit}
    overrides |= {field: value for field, value in given.items() if value is not None}
    with joined(where) as world:
        worth = measuring.evaluate(
            model,
            teacher=teacher,
            dataset=dataset,
            overrides=overrides,
            dtype=_dtype(dtype, where),
            device=where,
            command=_command(),
            trust_tasks=trust_tasks,
            compiled=compiled,
            note=_note,
        )
    if not world.main:
        return
    folder = Path(model).resolve().parent
    with as_written([folder]):
        found = load_run(folder, worth.to_json())
        page, table = evaluation_page(found), terminal.measured(found)
    if output is not None:
        runs.write_json(output, found.evaluation)
        runs.write_text(output.with_suffix(".md"), page)
    _show(found.evaluation if as_json else table, as_json)


@app.command()
def frontier(
    model: Model,
    output_dir: OutputDir,
    recipe: RecipeName = RECOMMENDED,
    dataset: Text = None,
    fractions: Annotated[
        list[float] | None,
        typer.Option("--fraction", min=0.001, max=1, help="of the teacher's cache (repeatable); 0.2, 0.11, 0.06, 0.03"),
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="the window that gains are measured from")] = 64,
    set_: Set = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Draw quality against bytes: memory where heads need it beside windows and caches of as many bytes.

    Each is measured as it comes; then windows and memory by need are trained alike (--set finetune=null: not).
    """
    from linearize.report import frontier as words
    from linearize.run import frontier as measuring
    from linearize.run.folder import write_json, write_text

    job = _job(model, output_dir, recipe, dataset, set_, dtype, device, seed)
    found = measuring.frontier(job, fractions or [0.2, 0.11, 0.06, 0.03], reference=window, command=_command())
    write_json(output_dir / "frontier.json", found)
    write_text(output_dir / "frontier.md", words.page(found))
    write_text(output_dir / "frontier.svg", words.figure(found))
    _show(found if as_json else words.table(found), as_json)
    _note(f"the table and its figure: {output_dir / 'frontier.md'}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="run folders; several: side by side", metavar="DIR...")],
    output: Annotated[Path | None, typer.Option(help="the page; DIR/report.html by default")] = None,
) -> None:
    """One self-contained HTML page on what a run made: what was kept, what was lost, and what it cost."""
    from linearize.base import UserError
    from linearize.report.page import write_report

    if output is None and len(folders) > 1:
        raise UserError("--output: expected a file for the page about several runs, found nothing; name one")
    _note(f"report: {write_report(folders, output or folders[0] / 'report.html')}")


@app.command()
def bench(
    model: Student,
    teacher: Annotated[str | None, typer.Option(help="the softmax model; the run folder's own by default")] = None,
    lengths: Annotated[list[int] | None, typer.Option(min=1, help="prompt tokens (repeatable)")] = None,
    batch_sizes: Annotated[list[int] | None, typer.Option("--batch-size", min=1, help="(repeatable)")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="generated behind each prompt")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="counted rounds")] = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    compiled: Compile = False,
    as_json: Json = False,
) -> None:
    """Time prefill and generation of a linearized model and its teacher, taking turns, and weigh their caches."""
    from linearize.report import terminal
    from linearize.run import evaluate as measuring

    where = _device(device)
    found = measuring.bench(
        model,
        teacher=teacher,
        batch_sizes=batch_sizes or [1],
        prompt_lengths=lengths or [256, 1024, 4096],
        new_tokens=new_tokens,
        repeats=repeats,
        dtype=_dtype(dtype, where),
        device=where,
        compiled=compiled,
        note=_note,
    )
    _show(found.to_json() if as_json else terminal.timed(found.to_json()), as_json)


@app.command()
def generate(
    model: Student,
    prompt: Annotated[str, typer.Option(help="the text to continue")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    compiled: Compile = False,
    seed: Seed = None,
) -> None:
    """Continue a prompt, printing tokens as they come."""
    from linearize.run import generate as generating

    where = _device(device)
    generating.generate(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=_dtype(dtype, where),
        device=where,
        seed=seed or 0,
        compiled=compiled,
        note=_note,
    )


@app.command()
def serve(
    model: Student,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8000,
    host: Annotated[str, typer.Option(help="0.0.0.0: of every network; then with an --api-key")] = "127.0.0.1",
    api_key: Annotated[
        str | None, typer.Option(help="what clients must send as their key", envvar="LINEARIZE_API_KEY")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="open a chat in the browser: the student beside its teacher, bytes of each")
    ] = False,
    teacher: Annotated[
        str | None,
        typer.Option(help="serve this softmax model beside it; for the page the run folder's own by default"),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="vllm or transformers; auto: vLLM where it is installed, but not for the page")
    ] = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Serve a model by an OpenAI-compatible API: by vLLM where it is installed, else by transformers' own server."""
    from linearize.serving import command as serving

    where = {"host": host, "port": port, "api_key": api_key}
    if serving.choose_engine(engine, alone=not page and teacher is None) == "vllm":
        serving.start_vllm(model, **where, dtype=dtype, note=_note)
    computed_on = _device(device)
    computed = {"dtype": _dtype(dtype, computed_on), "device": computed_on}
    serving.start_transformers(model, **where, **computed, page=page, teacher=teacher, note=_note)


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Option(help="the run's folder; the same command again resumes it")] = Path(
        "demo-output"
    ),
    device: Device = "cpu",
) -> None:
    """Linearize the small bundled model on Python's own sources: start to finish in minutes on a CPU, no network."""
    from linearize.demo.run import run_demo

    where = _device(device)
    _show(run_demo(output_dir, _dtype("auto", where), where), as_json=False)
    _note(f"run folder: {output_dir}; the model: {output_dir / 'model'}")


def _job(
    model: str, output: Path, recipe: str, dataset: str | None, set_: Set, dtype: str, device: str, seed: int | None
) -> Run:
    """What a command line asks for: the recipe, what it changes there, and where to compute."""
    from linearize.recipe import Recipe, parse_overrides
    from linearize.run.folder import Run

    named = {"data.dataset": dataset, "seed": seed}
    overrides = parse_overrides(set_ or []) | {field: value for field, value in named.items() if value is not None}
    where = _device(device)
    return Run(Recipe.load(recipe, overrides), model, output, _dtype(dtype, where), where)


def _block(given: str | None) -> Any:
    from linearize.base import UserError

    if given is None or given == "any":
        return given
    if not given.lstrip("-").isdecimal():
        raise UserError(f"--block: expected the number of a block, or any; found {given!r}")
    return int(given)


def _command() -> str:
    return shlex.join(["linearize", *sys.argv[1:]])


def _device(name: str) -> Any:
    import torch

    from linearize.base import UserError

    # Features and gradients hold numbers so near 0 that a CPU takes tens of times as long for them. Whoever computes
    # asks for the device first: torch's threads, started later, inherit this.
    torch.set_flush_denormal(True)
    if name == "auto":
        # torchrun tells each process of a machine its number there.
        return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"--device: expected a device of this machine, found {name!r}: {reason}") from None
    return device


def _dtype(name: str, device: Any) -> Any:
    import torch

    from linearize.base import UserError

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in known:
        raise UserError(f"--dtype: expected auto or one of {', '.join(known)}; found {name!r}")
    return known[name]


@contextmanager
def _importing() -> Iterator[None]:
    """Without looking for garbage: what imports make stays, and to look would take a fifth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _show(result: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.console import Console

    Console().print(result)


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _is_out_of_memory(error: Exception) -> bool:
    """Of a GPU; of a CPU, for which torch has no error of its own; or of Python."""
    words = ("not enough memory", "can't allocate memory", "Storage size calculation overflowed")
    out = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return out or (isinstance(error, RuntimeError) and any(x in str(error) for x in words))


def main() -> None:
    """Exit status 0: done. 2: the user can fix it, one line says how. 1: a bug, with its traceback."""
    # torch's threads wait for one another in a loop, 100 times as long by default, and if another program has the core
    # of the one they wait for, the loop is all that runs. Read when torch is loaded; benchmarks/neighbours.py.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    out, errors = sys.stdout, sys.stderr
    main_process = os.environ.get("RANK", "0") == "0"  # of those that torchrun starts
    if not main_process:  # the main one shows progress and results
        sys.stdout = sys.stderr = StringIO()
    try:
        app()
    except (ValueError, RuntimeError, MemoryError) as error:
        # Not imported at the top: the module is free of heavy imports, but its package is not.
        from linearize.base import UserError

        if _is_out_of_memory(error):
            reason = " ".join(str(error).split())[:200]
            error = UserError(
                f"memory: expected room for what the command holds, found none left ({reason}); `linearize plan` with "
                "--gpu-memory says what it takes, and a smaller micro_batch_size takes less for the same steps"
            )
        elif not isinstance(error, UserError):
            raise
        if not main_process:
            time.sleep(5)  # what all find wrong, the main one says, and torchrun ends the others
        # One line, also where it quotes what a stranger has written.
        line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(error))
        typer.echo(f"error: {line}", file=errors)
        sys.exit(2)
    except SystemExit as status:
        if status.code == 130:  # typer's own for Ctrl-C
            _note("interrupted; the same command again resumes")
        raise
    finally:
        sys.stdout, sys.stderr = out, errors


if __name__ == "__main__":
    main()
