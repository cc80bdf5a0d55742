"""One function per command and no logic; heavy imports wait until a command runs."""

# No postponed annotations: typer would evaluate the strings again for every --help.
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from linearize.base import UserError
from linearize_cli.options import (
    RECOMMENDED,
    Compile,
    Device,
    Dtype,
    GpuMemory,
    Json,
    Model,
    OutputDir,
    RecipeName,
    Seed,
    Set,
    Student,
    Text,
    TrustTasks,
    block_of,
    command_line,
    device_of,
    dtype_of,
    job_of,
    note,
    recipe_of,
    show,
)

app = typer.Typer(
    help="Convert a softmax Transformer into one with linear-time prefill and constant-memory generation, "
    "and measure what it lost. Try `linearize demo` first.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    """Print the version and exit if `wanted`."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"linearize {version('linearize')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="print this one as YAML, to edit")] = None) -> None:
    """List the recipes, or print one as YAML."""
    from linearize.recipe import Recipe, recipe_names, recipe_text

    if name is None:
        names = recipe_names()
        width = max(map(len, names))
        for known in names:
            typer.echo(f"{known:{width}}  {Recipe.load(known).description}")
    elif name in recipe_names():
        typer.echo(recipe_text(name), nl=False)
    else:
        typer.echo(Recipe.load(name).to_yaml(), nl=False)


@app.command()
def plan(
    model: Model,
    recipe: RecipeName = RECOMMENDED,
    set_: Set = None,
    dtype: Dtype = "bfloat16",
    cluster: Annotated[
        str | None, typer.Option(help="print what fits these GPUs: their number and the memory of each, e.g. 8x80GiB")
    ] = None,
    gpu_memory: GpuMemory = None,
    dataset: Annotated[
        str | None, typer.Option(help="text on which the teacher's attention is measured; this reads its weights")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a run would do and cost, and from which length on it saves memory. Only --dataset reads weights."""
    from linearize.recipe import KeepByTransferError

    chosen = recipe_of(recipe, set_, {"data.dataset": dataset})  # before the imports of torch and transformers

    import torch

    from linearize.hf.checkpoint import read_config
    from linearize.hf.teacher import TeacherShape
    from linearize.layer_plan import resolve
    from linearize.planning import cluster as clusters
    from linearize.planning import plan as planning
    from linearize.planning.fit import fit, parse_memory

    shape = TeacherShape.from_config(read_config(model))
    gpus = None if cluster is None else clusters.Cluster.parse(cluster)
    computed_in = dtype_of(dtype, torch.device("cpu"))
    # The layers that transfer worst are not known yet, but their number is, and any choice costs the same.
    layers = resolve(chosen, shape, errors=[float(index) for index in range(shape.num_layers)], dtype=computed_in)
    planning.check_run(chosen, shape, layers)
    found = None
    if gpu_memory is not None:
        found = fit(chosen, shape, layers, dtype=computed_in, memory=parse_memory(gpu_memory))
        chosen = found.recipe
    # Memory is forecast by running the stages' code, which takes seconds.
    where = None if gpus is None and found is None else torch.device("cuda")
    result = planning.make_plan(chosen, shape, layers, dtype=computed_in, device=where, training_tokens=None)
    shares = [] if gpus is None else clusters.shares(chosen, shape, layers, gpus, dtype=computed_in)
    attention = None
    if dataset is not None:
        from linearize.evaluation.attention_statistics import measured_attention

        attention = measured_attention(model, shape, chosen.data, dtype=computed_in, device=device_of("auto"))
    if as_json:
        more = {"fit": found and found.to_json(), "cluster": [share.to_json() for share in shares]}
        more["teacher_attention"] = attention and asdict(attention)
        show(result.to_json() | {name: value for name, value in more.items() if value}, as_json)
    else:
        show(planning.render(result), as_json)
        if attention is not None:
            from linearize.report.findings import attention_words

            show(attention_words(attention), as_json)
        if gpus is not None:
            show(clusters.render(shares, gpus), as_json)
    for line in found.lines() if found is not None else ():
        note(line)
    if isinstance(chosen.layers.keep_softmax, KeepByTransferError):
        note(
            "a run chooses the softmax layers by their transfer errors; the plan above assumes others, at the same cost"
        )
    if chosen.memory is not None and chosen.memory.per == "layer":
        note("a run measures which layers stay softmax; the plan above assumes others, at the same cost")
    elif chosen.memory is not None:
        note("a run measures the teacher's KV heads and allocates these bytes per head")


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
            help="train one block of layers only: its number, from 0; or any: each block that no other job has taken; "
            "transfer.layers_per_block sets the number of layers of a block"
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
    """Linearize a model: convert, train, compare it with its teacher, and write an ordinary Hugging Face folder.

    A language model gets the short evaluation: the loss of a continuation, needles, speed and memory.
    --set evaluation.long=true trains and measures every control, copying, recall and heads instead, for much longer.
    """
    chosen = recipe_of(recipe, set_, {"data.dataset": dataset, "seed": seed})

    from linearize.distributed import init_distributed
    from linearize.report import terminal
    from linearize.report.load import load_run
    from linearize.run import pipeline, settings

    stages = pipeline.STAGES[1:]  # the first is that of `linearize convert`
    if until not in stages:
        raise UserError(f"--until: expected one of {', '.join(stages)}; found {until!r}")
    job = job_of(chosen, model, output_dir, dtype, device)
    job = settings.settled(job, gpu_memory, note=note)
    with init_distributed(job.device):
        results = pipeline.run(job, until=until, block=block_of(block), command=command_line(), trust_tasks=trust_tasks)
    if results is not None:
        show(results.to_json() if as_json else terminal.measured(load_run(output_dir)), as_json)
    note(f"run folder: {output_dir}" + ("" if results is None else f"; the model: {output_dir / 'model'}"))
    if block is not None:
        left = ", ".join(map(str, pipeline.blocks_to_do(job)))
        note(f"unfinished blocks: {left or 'none; run the same command without --block to continue'}")


@app.command()
def convert(
    model: Model,
    output_dir: OutputDir,
    recipe: RecipeName = RECOMMENDED,
    dataset: Text = None,
    set_: Set = None,
    evaluation: Annotated[
        bool, typer.Option(help="compare the written model with its teacher; this takes some minutes")
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Convert a model without training: measure its KV heads, allocate the budget, and write a model folder in minutes.

    \b
    linearize convert --model M --dataset D --output-dir OUT
    linearize convert --model M --dataset D --output-dir OUT --set memory.fraction=0.2

    M is a Hugging Face folder or hub id, D some text (250,000 tokens are enough).
    OUT/model is an ordinary Hugging Face folder. Its memory is constant: a ninth of
    the teacher's cache at 1,024 tokens, or what memory.fraction says.

    Then the short evaluation prints the loss of a continuation, needles, speed and
    memory of both models, and writes OUT/evaluation.json and OUT/evaluation.md.
    It measures both ways to read a prompt. prefill=streaming, which the model uses by
    default, takes linear time and constant memory. prefill=full reads the first call
    with the teacher's own attention, in the teacher's time. --no-evaluation leaves
    it out. `linearize eval OUT` measures again, with
    --set evaluation.long=true much more.
    """
    untrained = ["transfer=null", "adapt=null", "finetune=null"]
    chosen = recipe_of(recipe, [*untrained, *(set_ or [])], {"data.dataset": dataset, "seed": seed})

    from linearize.distributed import init_distributed
    from linearize.report import terminal
    from linearize.report.load import load_run
    from linearize.run import pipeline

    job = job_of(chosen, model, output_dir, dtype, device)
    with init_distributed(job.device):
        results = pipeline.run(job, until="evaluate" if evaluation else "convert", command=command_line())
    if results is not None:
        show(results.to_json() if as_json else terminal.measured(load_run(output_dir)), as_json)
    note(f"the model: {output_dir / 'model'}; it generates with `linearize generate {output_dir} --prompt ...`")


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
    """Compare a linearized model with its teacher: the loss of a continuation, needles, speed and memory.

    --set evaluation.long=true measures untrained controls, copying, agreement, generations, recall and heads instead.
    Controls that train are there only where the run itself was made with evaluation.long=true.
    """
    from linearize.distributed import init_distributed
    from linearize.recipe import parse_overrides
    from linearize.report import terminal
    from linearize.report.card import evaluation_page
    from linearize.report.load import load_run
    from linearize.run import evaluate as measuring
    from linearize.run import folder as runs

    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise UserError(f"--output: expected a file in a folder that can be written to, found {str(output)!r}")
    where, overrides = device_of(device), parse_overrides(set_ or [])
    given = {"evaluation.tasks": tasks, "evaluation.shots": shots, "evaluation.task_limit": limit}
    overrides |= {field: value for field, value in given.items() if value is not None}
    with init_distributed(where) as world:
        results = measuring.evaluate(
            model,
            teacher=teacher,
            dataset=dataset,
            overrides=overrides,
            dtype=dtype_of(dtype, where),
            device=where,
            command=command_line(),
            trust_tasks=trust_tasks,
            compiled=compiled,
            note=note,
        )
    if not world.main:
        return
    folder = Path(runs.student_folder(model)).resolve().parent
    found = load_run(folder, results)
    if output is not None:
        runs.write_json(output, results.to_json())
        runs.write_text(output.with_suffix(".md"), evaluation_page(found))
    show(results.to_json() if as_json else terminal.measured(found), as_json)


@app.command()
def frontier(
    model: Model,
    output_dir: OutputDir,
    recipe: RecipeName = RECOMMENDED,
    dataset: Text = None,
    fractions: Annotated[
        list[float] | None,
        typer.Option(
            "--fraction",
            min=0.001,
            max=1,
            help="share of the teacher's cache (repeatable); by default 0.2, 0.11, 0.06, 0.03",
        ),
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="the window with which long-context gains are compared")] = 64,
    set_: Set = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Draw quality against bytes: a KV budget allocated per head, per layer, and one window of as many bytes.

    Each is measured before fine-tuning. Then the window and both allocations are fine-tuned on the same tokens.
    --set finetune=null skips this.

    Layers with full attention grow. Their bytes are those at memory.reference_length.
    """
    chosen = recipe_of(recipe, set_, {"data.dataset": dataset, "seed": seed})

    from linearize.report import frontier as words
    from linearize.run import frontier as measuring
    from linearize.run.folder import write_json, write_text

    job = job_of(chosen, model, output_dir, dtype, device)
    found = measuring.frontier(job, fractions or [0.2, 0.11, 0.06, 0.03], reference=window, command=command_line())
    write_json(output_dir / "frontier.json", found)
    write_text(output_dir / "frontier.md", words.page(found))
    write_text(output_dir / "frontier.svg", words.figure(found))
    show(found if as_json else words.table(found), as_json)
    note(f"the table and its figure: {output_dir / 'frontier.md'}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="run folders; several: side by side", metavar="DIR...")],
    output: Annotated[Path | None, typer.Option(help="the page; DIR/report.html by default")] = None,
) -> None:
    """Write one self-contained HTML page about a run: what was kept, what was lost, and what it cost."""
    from linearize.report.page import write_report

    if output is None and len(folders) > 1:
        raise UserError("--output: expected a file for the page about several runs, found nothing; name one")
    if output is not None and output.is_dir():
        raise UserError(f"--output: expected a file for the page, found the folder {str(output)!r}")
    note(f"report: {write_report(folders, output or folders[0] / 'report.html')}")


@app.command()
def bench(
    model: Student,
    teacher: Annotated[str | None, typer.Option(help="the softmax model; the run folder's own by default")] = None,
    lengths: Annotated[list[int] | None, typer.Option(min=1, help="prompt tokens (repeatable)")] = None,
    batch_sizes: Annotated[
        list[int] | None, typer.Option("--batch-size", min=1, help="sequences in a batch (repeatable)")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens generated after each prompt")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="rounds that are measured")] = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    compiled: Compile = False,
    as_json: Json = False,
) -> None:
    """Measure prefill, generation and cache bytes of a linearized model and its teacher, in turns."""
    from linearize.report import terminal
    from linearize.run import evaluate as measuring

    where = device_of(device)
    found = measuring.bench(
        model,
        teacher=teacher,
        batch_sizes=batch_sizes or [1],
        prompt_lengths=lengths or [256, 1024, 4096],
        new_tokens=new_tokens,
        repeats=repeats,
        dtype=dtype_of(dtype, where),
        device=where,
        compiled=compiled,
        note=note,
    )
    show(found.to_json() if as_json else terminal.timed(found), as_json)


@app.command()
def export(
    model: Student,
    directory: Annotated[Path, typer.Argument(help="a new folder", metavar="DIR")],
    to: Annotated[str, typer.Option(help="hf: a stock class of transformers; gguf: a file for llama.cpp")],
    stock_class: Annotated[
        str | None,
        typer.Option("--class", help="granite_swa, ministral, cwm or qwen2, for hf; by default the first that fits"),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--type", help="dtype of the weights: bf16, f16 or f32; for gguf also q8_0"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a converted model as one that vLLM, llama.cpp and transformers run without linearize, and check it.

    \b
    linearize run local-global --model M --dataset D --output-dir OUT
    linearize export OUT DIR --to hf       # then: vllm serve DIR
    linearize export OUT DIR --to gguf     # then: llama-cli -m DIR/model-bf16.gguf

    Layers may have full attention or one sliding window with a learned sink, as the
    recipe local-global makes them; for --to hf also full attention or gated DeltaNet, as
    gated-deltanet-native makes them. Other parts are refused, by layer.
    """
    from linearize.export.command import export as exporting

    found = exporting(model, directory, to=to, stock_class=stock_class, kind=kind, note=note)
    show(asdict(found) if as_json else "\n".join(found.lines()), as_json)


@app.command()
def generate(
    model: Student,
    prompt: Annotated[str, typer.Option(help="the text to continue; -: read it from standard input")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.0,
    prefill: Annotated[
        str | None,
        typer.Option(
            help="how the prompt is read. streaming: linear time, constant memory. full: the teacher's attention, its "
            "time, keys and values of one layer at a time. By default the value in the model's "
            "config: streaming, unless it was changed"
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    compiled: Compile = False,
    seed: Seed = None,
) -> None:
    """Continue a prompt, and print each token when it is generated."""
    from linearize.run import generate as generating

    where = device_of(device)
    generating.generate(
        model,
        sys.stdin.read() if prompt == "-" else prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        prefill=prefill,
        dtype=dtype_of(dtype, where),
        device=where,
        seed=seed or 0,
        compiled=compiled,
        note=note,
    )


@app.command()
def serve(
    model: Student,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port")] = 8000,
    host: Annotated[str, typer.Option(help="0.0.0.0: reachable from every network; then set --api-key")] = "127.0.0.1",
    api_key: Annotated[
        str | None, typer.Option(help="the key that clients must send", envvar="LINEARIZE_API_KEY")
    ] = None,
    page: Annotated[
        bool,
        typer.Option("--ui", help="open a chat in the browser: the student and its teacher, with their bytes"),
    ] = False,
    teacher: Annotated[
        str | None,
        typer.Option(help="also serve this softmax model; with --ui the run folder's own by default"),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="the model's name for clients; by default the name of its run's folder, or of its own"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="most tokens of a prompt and its answer; by default 32,768, or the model's positions"),
    ] = None,
    max_queued_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="most requests in progress or waiting for a model, then status 429; by default 64; not vLLM",
        ),
    ] = None,
    max_request_seconds: Annotated[
        float | None,
        typer.Option(min=0.001, help="longest time to generate an answer; by default 600; not vLLM"),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="vllm or transformers; auto: vLLM if it is installed, except for the page")
    ] = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Serve a model by an OpenAI-compatible API: by vLLM if it is installed, else by transformers' own server."""
    from linearize.serving import command as serving

    if api_key == "" or (api_key is None and os.environ.get("LINEARIZE_API_KEY") == ""):
        raise UserError(
            "--api-key: expected a key, found an empty one; give one, or leave it out and unset the variable"
        )
    endpoint = serving.Endpoint(
        host, port, api_key, served_model_name, max_model_len, max_queued_requests, max_request_seconds
    )
    if serving.choose_engine(engine, alone=not page and teacher is None) == "vllm":
        if device != "auto":
            raise UserError(
                f"--device: expected none, for vLLM computes where it was built for, found {device}; leave it out, or "
                "pass --engine transformers"
            )
        serving.start_vllm(model, endpoint, dtype=dtype, note=note)
    computed_on = device_of(device)
    computed_in = dtype_of(dtype, computed_on)
    serving.start_transformers(
        model, endpoint, dtype=computed_in, device=computed_on, page=page, teacher=teacher, note=note
    )


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Option(help="the run's folder; the same command again resumes it")] = Path(
        "demo-output"
    ),
    device: Device = "cpu",
) -> None:
    """Linearize the small bundled model on Python's own sources: start to finish in minutes on a CPU, no network."""
    from linearize.demo.run import run_demo

    where = device_of(device)
    show(run_demo(output_dir, dtype_of("auto", where), where), as_json=False)
    note(f"run folder: {output_dir}; the model: {output_dir / 'model'}")
