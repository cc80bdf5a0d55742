"""The command line: what it prints where, with which status, and that a killed run goes on as if unbroken.

Also run as a script, by the tests that kill it.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import linearize
import linearize_cli
from linearize.recipe import Recipe, recipe_names
from linearize.report.card import bullets
from linearize.report.findings import sentences
from linearize.report.load import load_run
from linearize.run import pipeline
from linearize.training import resumption as checkpoint
from tests import tiny
from tests.commands import Command, assert_refused, contents
from tests.fake_compiler import Compiler

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{Path(linearize.__file__).parents[1]}{os.pathsep}{ROOT}",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


# --- quick commands ---------------------------------------------------------------------------------------------------

HELP = """
import resource, sys
import linearize_cli

for word in ("", "recipes", "plan", "run", "eval", "frontier", "report", "bench", "generate", "serve", "demo"):
    sys.argv = ["linearize", *filter(None, [word]), "--help"]
    try:
        linearize_cli.main()
    except SystemExit as status:
        assert not status.code
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, "torch" in sys.modules, file=sys.stderr)
"""


def test_help_is_quick_and_loads_no_torch() -> None:
    child = subprocess.run([sys.executable, "-c", HELP], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    seconds, torch_loaded = child.stderr.split()
    assert torch_loaded == "False"
    assert float(seconds) < 1.0  # of processor time, for all eleven
    assert child.stdout.count("Usage: ") == 11
    assert "the same command again resumes it" in " ".join(child.stdout.split()).replace("│ │ ", "")


RECIPES = """
import contextlib, io, resource, sys
import linearize_cli

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    for words in ([], ["lolcats"]):
        sys.argv = ["linearize", "recipes", *words]
        try:
            linearize_cli.main()
        except SystemExit as status:
            assert not status.code
assert "lolcats" in printed.getvalue()
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, "torch" in sys.modules)
"""


def test_recipes_are_quick_and_load_no_torch() -> None:
    child = subprocess.run([sys.executable, "-c", RECIPES], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    seconds, torch_loaded = child.stdout.split()
    assert torch_loaded == "False"
    assert float(seconds) < 1.0  # of processor time, for both


PLAN = """
import sys
import linearize_cli

sys.argv = ["linearize", "plan", "lolcats", "--set", "data.sequence_length=64", "--model", sys.argv[1]]
try:
    linearize_cli.main()
except SystemExit as status:
    assert not status.code
heavy = ("peft", "datasets", "matplotlib", "lm_eval", "sklearn", "pandas", "torchvision")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


def test_a_plan_loads_no_more_than_the_models_code() -> None:
    arguments = [sys.executable, "-c", PLAN, str(tiny.teacher_folder())]
    child = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert child.stderr.splitlines()[-1] == "[]"


WRONG_FIELD = """
import sys
import linearize_cli

sys.argv = ["linearize", *sys.argv[1:], "--set", "mixer.rate=1"]
try:
    linearize_cli.main()
except SystemExit as status:
    assert status.code == 2
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("command", ["plan", "run", "convert", "frontier"])
def test_an_error_in_a_recipe_is_said_before_torch_is_loaded(command: str, tmp_path: Path) -> None:
    output = [] if command == "plan" else ["--output-dir", str(tmp_path / "out")]
    arguments = [sys.executable, "-c", WRONG_FIELD, command, "lolcats", "--model", str(tmp_path), *output]
    child = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "recipe field mixer.rate: unknown field" in child.stderr
    assert child.stdout == "False\n"


SHORT = ("--set", "data.sequence_length=64")  # the tiny models have 256 positions
TORCH_AFTER_HELP = """
import sys
import linearize_cli

sys.argv = ["linearize", "--help"]
try:
    linearize_cli.main()
except SystemExit:
    import torch
"""


@pytest.mark.parametrize(
    ("set_by_user", "spins"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_how_long_threads_wait_in_a_loop(set_by_user: dict[str, str], spins: str) -> None:
    environment = ENVIRONMENT | {"OMP_DISPLAY_ENV": "verbose"} | set_by_user
    arguments = [sys.executable, "-c", TORCH_AFTER_HELP]
    child = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{spins}'" in child.stderr


def test_no_command_is_help(command: Command) -> None:
    done = command()
    assert "Usage: " in done.out + done.err
    assert done.status == 2


def test_the_version(command: Command) -> None:
    assert command("--version").out == f"linearize {version('linearize')}\n"


def test_recipes_are_listed(command: Command) -> None:
    done = command("recipes")
    assert (done.status, done.err) == (0, "")
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert list(lines) == recipe_names()
    assert "Sliding window + Hedgehog linear attention" in lines["lolcats"]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "lolcats"], ["--help"]], ids=" ".join)
def test_a_reader_that_closes_the_output_is_no_bug(arguments: list[str], unbuffered: str) -> None:
    arguments = [sys.executable, "-m", "linearize", *arguments]
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        said = child.stderr.read()
    assert (child.returncode, said) == (141, b"")


def test_a_printed_recipe_is_the_recipe(command: Command, tmp_path: Path) -> None:
    done = command("recipes", "lolcats")
    assert (done.status, done.err) == (0, "")
    path = tmp_path / "mine.yaml"
    path.write_text(done.out)
    assert Recipe.load(str(path)) == Recipe.load("lolcats")
    path.write_text(command("recipes", path).out)  # a file of one's own: every field, defaults too
    assert Recipe.load(str(path)) == Recipe.load("lolcats")


def test_a_recipe_that_there_is_not(command: Command) -> None:
    assert_refused(command("recipes", "lolcat"), "recipe: expected one of absolute-scale, ")


def test_a_plan_as_json_is_one_object(command: Command) -> None:
    arguments = ("plan", "lolcats", "--model", tiny.teacher_folder(), "--dtype", "float32", *SHORT)
    done = command(*arguments, "--set", "mixer.span.window_size=8", "--json")
    assert (done.status, done.err) == (0, "")
    assert done.out.count("\n") == 1
    plan = json.loads(done.out)
    assert (plan["recipe"], plan["converted_layers"]) == ("lolcats", [0, 1])
    # The window's keys and values, and S and z of 4 heads with 8 features; layers, bytes.
    assert plan["state_bytes"] == 2 * 4 * (2 * 2 * 8 * 8 + 4 * 8 * (8 + 1))

    shown = command(*arguments)
    assert (shown.status, shown.err) == (0, "")
    assert "lolcats" in shown.out


def test_a_plan_with_text_measures_the_teachers_attention(command: Command) -> None:
    arguments = ["plan", "lolcats", "--model", tiny.teacher_folder(), *SHORT, "--dataset", tiny.text_file()]
    found = json.loads(command(*arguments, "--json").out)["teacher_attention"]
    assert found["heads"] == 8 and 0 < found["entropy"] < math.log(256)
    assert "The teacher gives its first token" in command(*arguments).out
    assert_refused(command(*arguments[:-1], "nowhere.txt"), "data.dataset: expected a local file or folder or a hub id")


def test_a_plan_for_a_gpu(command: Command) -> None:
    """A GPU that has room for the tiny model in every way, and one that has for none."""
    arguments = ["plan", "lolcats", "--model", tiny.teacher_folder(), "--set", "data.sequence_length=64"]
    found = command(*arguments, "--gpu-memory", "1GiB", "--json")
    fit = json.loads(found.out)["fit"]
    assert fit["gpu_memory"] == 2**30 and [(x["stage"], x["fits"]) for x in fit["stages"]] == [
        ("transfer", True),
        ("finetune", True),
    ]
    found = command(*arguments, "--gpu-memory", "0.2MiB")
    assert "finetune: nothing fits; nearest is --set finetune.micro_batch_size=1" in found.err
    assert_refused(command(*arguments, "--gpu-memory", "24"), "--gpu-memory: expected a size such as 24GiB")


def test_the_recipe_when_none_is_named(command: Command, tmp_path: Path) -> None:
    plan = command("plan", "--model", tiny.teacher_folder(), *SHORT, "--json")
    assert (plan.status, json.loads(plan.out)["recipe"]) == (0, "recommended")
    fields = {name: value for name, value in tiny.RECIPE.items() if not name.startswith(("transfer", "mixer"))}
    fields |= {"memory.reference_length": 64}
    options = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    where = ("--model", tiny.teacher_folder(), "--dataset", tiny.text_file(), "--output-dir", tmp_path / "run")
    done = command("run", *map(str, where), *options, "--until", "finetune")
    assert done.status == 0
    assert Recipe.load(str(tmp_path / "run" / "recipe.yaml")).name == "recommended"


def test_convert_writes_a_model_without_training(command: Command, tmp_path: Path) -> None:
    fields = {name: value for name, value in tiny.RECIPE.items() if name.startswith("data.")}
    fields |= {"memory.reference_length": 64, "memory.fraction": 0.6}
    options = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    where = ("--model", tiny.teacher_folder(), "--dataset", tiny.text_file(), "--output-dir", tmp_path / "out")
    done = command("convert", *map(str, where), *options, "--no-evaluation")
    assert done.status == 0 and "model" in done.err and not done.out
    assert not (tmp_path / "out" / "evaluation.json").exists()
    done = command("convert", *map(str, where), *options)  # goes on
    assert done.status == 0
    assert all(name in done.out for name in ("teacher", "student, streaming", "student, full", "prefill=streaming"))
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert [line["prefill"] for line in found["short"]["readings"]] == [None, "streaming", "full"]
    assert bullets(sentences(load_run(tmp_path / "out"))) in (tmp_path / "out" / "evaluation.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"model", "allocation.json", "recipe.yaml"}
    assert not (tmp_path / "out" / "finetune").exists()
    prompt = ("--prompt", "abcdefgh" * 20, "--max-new-tokens", "3")
    for way, said in (((), "streaming"), (("--prefill", "streaming"), "streaming"), (("--prefill", "full"), "full")):
        done = command("generate", tmp_path / "out", *prompt, *way)
        assert done.status == 0 and f"the prompt is read with prefill={said}: " in done.err
    wrong = command("generate", tmp_path / "out", *prompt, "--prefill", "half")
    assert_refused(wrong, "--prefill: expected streaming or full, found 'half'")
    softmax = command("generate", tiny.teacher_folder(), *prompt, "--prefill", "full")
    assert_refused(softmax, f"model {tiny.teacher_folder()}: expected a linearized model, found model_type 'llama'")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bloom"}, "model_type: expected a model with softmax attention, found 'bloom': its positions"),
        (
            {"model_type": "llama", "hidden_size": 65, "num_attention_heads": 8, "num_hidden_layers": 2},
            "hidden_size: expected a value that transformers accepts, found 65: The hidden size (65) is not a multiple",
        ),
    ],
)
def test_a_model_that_cannot_be_linearized_is_refused_before_its_weights_are_read(
    command: Command, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    """It has none: from config.json alone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for arguments in (["plan", "lolcats"], ["run", "lolcats", "--output-dir", str(tmp_path / "run")]):
        assert_refused(command(*arguments, "--model", str(tmp_path / "model")), f"config.json: {message}")
    assert not (tmp_path / "run").exists()


def test_numbers_next_to_0_are_taken_for_0(command: Command, tmp_path: Path) -> None:
    """Before anything is computed: they would take a CPU most of its time."""
    torch.set_flush_denormal(False)
    try:
        assert (torch.tensor(1e-30) * 1e-10).item() > 0
        assert command("eval", tmp_path).status == 2
        assert (torch.tensor(1e-30) * 1e-10).item() == 0
    finally:
        torch.set_flush_denormal(True)


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_as_json_is_one_object(command: Command, tmp_path: Path) -> None:
    finished = tiny.finished_run()
    shutil.copytree(finished.folder, tmp_path / "run")
    done = command(*tiny.run_arguments(tmp_path / "run"), "--json")
    assert done.status == 0
    assert done.out.count("\n") == 1
    printed = json.loads(done.out)
    assert printed == json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert tiny.untimed(printed) == tiny.untimed(json.loads((finished.folder / "evaluation.json").read_text()))
    assert done.err.splitlines()[-1] == f"run folder: {tmp_path / 'run'}; the model: {tmp_path / 'run' / 'model'}"


def test_a_run_up_to_a_stage(command: Command, tmp_path: Path) -> None:
    done = command(*tiny.run_arguments(tmp_path / "run"), "--until", "transfer", "--seed", 3)
    assert (done.status, done.out) == (0, "")
    assert "attention transfer: step 6 of 6, held-out loss" in done.err
    assert done.err.splitlines()[-1] == f"run folder: {tmp_path / 'run'}"
    assert Recipe.load(str(tmp_path / "run" / "recipe.yaml")).seed == 3
    assert not (tmp_path / "run" / "finetune").exists()


def test_a_run_takes_what_fits_and_goes_on_with_it(command: Command, tmp_path: Path) -> None:
    """Whatever GPU it goes on with; what the recipe sets, micro batches of 2, stays."""
    arguments = [*tiny.run_arguments(tmp_path / "run", transfer__max_tokens=1, finetune__max_tokens=1)]
    found = command(*arguments, "--until", "transfer", "--gpu-memory", "0.2MiB")
    assert "nothing fits; nearest is" in found.err
    recipe = Recipe.load(str(tmp_path / "run" / "recipe.yaml"))
    assert recipe.transfer is not None and recipe.finetune is not None
    assert (recipe.transfer.micro_batch_size, recipe.transfer.layers_per_block) == (1, 1)
    assert recipe.finetune.micro_batch_size == 2 and recipe.finetune.activation_checkpointing
    assert recipe.finetune.optimizer == "adamw"
    again = command(*arguments, "--until", "finetune", "--gpu-memory", "80GiB")
    assert again.status == 0 and "nearest" not in again.err and "chosen" not in again.err
    assert (tmp_path / "run" / "finetune" / "result.json").is_file()
    assert Recipe.load(str(tmp_path / "run" / "recipe.yaml")) == recipe


def test_a_run_of_one_block_says_what_is_left(command: Command, tmp_path: Path) -> None:
    arguments = tiny.run_arguments(tmp_path / "run", transfer__layers_per_block=1)
    done = command(*arguments, "--block", 1)
    assert (done.status, done.out) == (0, "")
    assert done.err.splitlines()[-2:] == [f"run folder: {tmp_path / 'run'}", "unfinished blocks: 0"]
    done = command(*arguments, "--block", 0)
    assert done.err.splitlines()[-1] == "unfinished blocks: none; run the same command without --block to continue"
    assert_refused(command(*arguments, "--block", 2), "--block: expected one of the blocks 0 to 1, or any; found 2")


def test_eval_shows_a_table(command: Command) -> None:
    finished = tiny.finished_run()
    done = command("eval", finished.folder / "model", "--dataset", tiny.text_file(), "--set", "data.sequence_length=48")
    assert done.status == 0
    assert "Held-out loss" in done.out
    for measured in json.loads((finished.folder / "evaluation.json").read_text())["measured"]:
        assert measured["label"] in done.out


def test_eval_examines_and_the_report_shows_it(command: Command, tmp_path: Path) -> None:
    shutil.copytree(tiny.finished_run().folder, tmp_path / "run")
    questions = tmp_path / "questions.jsonl"
    question = {"query": "What is it?", "choices": ["this", "that"], "gold": 1}
    questions.write_text("".join(json.dumps(question | {"query": f"What is {i}?"}) + "\n" for i in range(4)))
    small = {"examine": True, "examined_tokens": 256, "fidelity_tokens": 128, "prompts": 2, "new_tokens": 4}
    options = [word for name, value in small.items() for word in ("--set", f"evaluation.{name}={value}")]
    evaluation = tmp_path / "run" / "evaluation.json"
    given = ["--tasks", questions, "--shots", 1, "--limit", 3, "--output", evaluation, *options]
    done = command("eval", tmp_path / "run" / "model", *given, "--json")
    assert done.status == 0
    found = json.loads(done.out)
    assert found == json.loads(evaluation.read_text())
    page = evaluation.with_suffix(".md").read_text()
    assert bullets(sentences(load_run(tmp_path / "run"))) in page
    results = found["tasks"]["results"]
    assert {line["candidate"] for line in results} == {"teacher", "student"}
    assert {line["samples"] for line in results} == {3}
    assert found["agreement"]["tokens"] > 0
    assert found["provenance"]["command"].startswith("linearize eval ")
    assert [layer["layer"] for layer in found["fidelity"]["layers"]] == [0, 1]

    done = command("report", tmp_path / "run")
    assert (done.status, done.out) == (0, "")
    assert "questions" in (tmp_path / "run" / "report.html").read_text()
    done = command("report", tmp_path / "run", tiny.finished_run().folder, "--output", tmp_path / "both.html")
    assert done.status == 0 and (tmp_path / "both.html").is_file()


def test_reports_that_cannot_be_written(command: Command, tmp_path: Path) -> None:
    assert_refused(command("report", tmp_path), f"report {tmp_path}: expected a run folder with evaluation.json")
    folders = [tiny.finished_run().folder, tmp_path]
    assert_refused(command("report", *folders), "--output: expected a file for the page about several runs")


def test_bench_times_both_models(command: Command, tmp_path: Path) -> None:
    model = tiny.finished_run().folder / "model"
    done = command("bench", model, "--lengths", 4, "--lengths", 8, "--new-tokens", 2, "--repeats", 1, "--json")
    assert done.status == 0
    found = json.loads(done.out)["speed"]
    assert [(line["model"], line["prompt_length"]) for line in found] == [
        (name, length) for length in (4, 8) for name in ("teacher", "student")
    ]
    assert_refused(command("bench", tiny.teacher_folder()), f"model {tiny.teacher_folder()}: expected a linearized")
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "run.json").unlink()  # a model that tells nothing of its run
    assert_refused(command("bench", tmp_path / "model"), "--teacher: expected the softmax model")


def test_generate_continues_a_prompt(command: Command) -> None:
    arguments = ("generate", tiny.finished_run().folder / "model", "--prompt", "abc", "--max-new-tokens", 8)
    first, second = command(*arguments), command(*arguments)
    assert first.status == 0
    assert first.out == second.out
    assert first.out.startswith("abc")
    assert len(first.out.strip()) > len("abc")
    warm = [command(*arguments, "--temperature", 5, "--seed", seed).out for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]


def test_generate_reads_a_prompt_from_standard_input(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("generate", tiny.finished_run().folder / "model", "--max-new-tokens", 8, "--prompt")
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert command(*arguments, "-").out == command(*arguments, "abc").out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_vocabulary_does_not_command_the_terminal(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from linearize.run.generate import Printer

    text = "a\x1b]0;title\x07\tb\n\x9b2J\r\u202ec é\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    tokenizer: Any = None
    Printer(tokenizer).on_finalized_text(text)
    shown = "a\\x1b]0;title\\x07\tb\n\\x9b2J\\r\\u202ec é\n"
    assert capsys.readouterr().out == (shown if terminal else text)


def test_steps_are_compiled_on_request(command: Command, compiler: Compiler) -> None:
    """Of both models, where two are measured; held-out rows are not."""
    model = tiny.finished_run().folder / "model"
    asked = ("generate", model, "--prompt", "abc", "--max-new-tokens", 8)
    eager = command(*asked)
    assert not compiler.options
    compiled = command(*asked, "--compile")
    assert (compiled.status, compiled.out) == (0, eager.out)
    assert len(compiler.steps) == 1 + 7  # the first sees whether anything can be compiled
    for asked, numbers in ((("bench", model, "--lengths", 4, "--new-tokens", 2), 2), (("eval", model), 4)):
        compiler.steps.clear()
        done = command(*asked, "--compile", "--json")
        assert done.status == 0
        found = json.loads(done.out)["speed"]
        assert len(found) == numbers and all(line["compiling"] > 0 for line in found)
        assert {step["input_ids"].shape[1] for step in compiler.steps[1:]} == {1}
    shown = command("bench", model, "--lengths", 4, "--new-tokens", 2, "--compile").out
    assert "compile" in shown and "compilation is not counted" in shown


def test_without_a_compiler_commands_go_on(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("InvalidCxxCompiler: none\n\nmore of it")

    model = tiny.finished_run().folder / "model"
    asked = ("generate", model, "--prompt", "abc", "--max-new-tokens", 8)
    eager = command(*asked)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    done = command(*asked, "--compile")
    assert (done.status, done.out) == (0, eager.out)
    said = done.err.removesuffix(eager.err)
    assert said.count("\n") == 1 and said.startswith("--compile: expected a C++ compiler (g++")
    assert said.endswith("found: InvalidCxxCompiler: none; install what is missing; continuing without compilation\n")
    for asked in (("bench", model, "--lengths", 4, "--new-tokens", 2, "--repeats", 1), ("eval", model)):
        done = command(*asked, "--compile", "--json")
        assert done.status == 0 and "continuing without compilation" in done.err
        assert all(line["compiling"] is None for line in json.loads(done.out)["speed"])


# --- bugs and interrupts ----------------------------------------------------------------------------------------------


def test_bugs_are_not_hidden(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("a programmer's fault")

    monkeypatch.setattr(pipeline, "run", fail)
    with pytest.raises(ValueError, match="a programmer's fault"):
        command(*tiny.run_arguments(tmp_path / "run"))


def test_an_interrupt_says_how_to_go_on(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupt)
    done = command(*tiny.run_arguments(tmp_path / "run"))
    assert (done.status, done.err) == (130, "interrupted; run the same command again to resume\n")


def test_an_interrupt_of_a_command_that_does_not_resume(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("linearize.run.evaluate.bench", interrupt)
    done = command("bench", "RUN")
    assert (done.status, done.err) == (130, "interrupted\n")


# --- broken off -------------------------------------------------------------------------------------------------------

STAGES = ("transfer", "finetune", "controls/teacher_finetuned", "controls/window_finetuned")


def assert_as_if_unbroken(folder: Path) -> None:
    """The same metrics, evaluation and weights as the run that nothing broke, timings apart."""
    unbroken = tiny.finished_run().folder
    assert {path.relative_to(folder) for path in contents(folder)} == {
        path.relative_to(unbroken) for path in contents(unbroken)
    }
    for stage in STAGES:
        assert tiny.untimed_metrics(folder / stage) == tiny.untimed_metrics(unbroken / stage)
    found, expected = (tiny.untimed(json.loads((at / "evaluation.json").read_text())) for at in (folder, unbroken))
    assert found == expected
    weights = "model/model.safetensors"
    assert (folder / weights).read_bytes() == (unbroken / weights).read_bytes()


def full_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, until the disk is full: the next call writes half a file and fails."""
    done = []

    def wrapper(tensors: dict[str, Any], path: Path, *arguments: Any, **options: Any) -> Any:
        if len(done) == calls:
            Path(path).write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done.append(path)
        return function(tensors, path, *arguments, **options)

    return wrapper


def test_a_full_disk_loses_nothing(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"

    def refused_at(calls: int) -> set[str]:
        """Start or go on with `calls` more files of tensors; what the stages then hold."""
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save_file", full_after(calls, checkpoint.save_file))
            done = command(*tiny.run_arguments(folder))
        assert (done.status, done.out) == (2, "")
        *progress, last = done.err.splitlines()
        assert last.startswith(f"error: {folder}/") and ": the disk is full: expected room for " in last
        assert "run the same command again, which goes on from the last checkpoint" in last
        assert all("held-out loss" in line for line in progress)
        return {str(path.relative_to(folder)) for path in folder.glob("*/*")} - {"transfer/metrics.jsonl"}

    assert refused_at(2) == {"transfer/checkpoint-000000002"}
    stage = {"transfer/result.json", "transfer/trained.safetensors"}
    # Two more checkpoints and the result; then the first of fine-tuning does not fit.
    assert refused_at(3) == stage | {"finetune/metrics.jsonl"}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(linearize.hf.checkpoint.PreTrainedModel, "save_pretrained", full)
        done = command(*tiny.run_arguments(folder))
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith(f"error: {folder / 'model'}: the disk is full: expected room for ")
    assert not (folder / "model").exists() and not (folder / ".model.incomplete").exists()

    assert command(*tiny.run_arguments(folder)).status == 0
    assert_as_if_unbroken(folder)


# Stage: its title, the step at whose end the process is killed, and the steps of the last checkpoint.
KILLS = {"transfer": ("attention transfer", 5, 4), "finetune": ("fine-tuning", 3, 2)}


@pytest.mark.parametrize("stage", ["transfer", pytest.param("finetune", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_as_if_unbroken(command: Command, tmp_path: Path, stage: str) -> None:
    title, step, resumed = KILLS[stage]
    folder = tmp_path / "run"
    killed = [sys.executable, __file__, stage, str(step), *tiny.run_arguments(folder)]
    child = subprocess.run(killed, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert [path.name for path in (folder / stage).glob("checkpoint-*")] == [f"checkpoint-{resumed:09d}"]
    steps = [line["step"] for line in tiny.untimed_metrics(folder / stage) if line["event"] == "step"]
    assert steps == list(range(1, step + 1))
    assert not (folder / "model").exists()

    done = command(*tiny.run_arguments(folder))
    assert done.status == 0
    assert done.err.startswith(f"{title}: step {resumed + 2} of ")  # not from the start
    assert_as_if_unbroken(folder)


def run_until_killed(stage: str, step: int) -> None:
    """The body of the child process: SIGKILL itself when the metrics of `stage` have reached `step`."""
    write = checkpoint.MetricsLog.write

    def write_then_die(self: checkpoint.MetricsLog, record: dict[str, Any]) -> None:
        write(self, record)
        if (self._path.parent.name, record["event"], record["step"]) == (stage, "step", step):
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.MetricsLog.write = write_then_die  # type: ignore[method-assign]
    linearize_cli.main()


if __name__ == "__main__":
    _, chosen_stage, chosen_step, *sys.argv[1:] = sys.argv
    run_until_killed(chosen_stage, int(chosen_step))
