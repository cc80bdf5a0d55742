"""Command lines that cannot be carried out: status 2, one line that says why and what to do, and nothing written."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from linearize.recipe import recipe_names
from tests import tiny
from tests.commands import Command, assert_refused, contents


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What libraries log, which would stand on the user's terminal before our line."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(f"{record.name}: {record.getMessage()}")  # type: ignore[method-assign]
    loggers = [
        logging.getLogger(name) for name in ("", "transformers", "huggingface_hub", "datasets", "lm_eval", "peft")
    ]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


def folder_with(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def without(folder: Path, pattern: str) -> Path:
    """The teacher's folder, some files of it missing."""
    shutil.copytree(tiny.teacher_folder(), folder)
    for path in folder.glob(pattern):
        path.unlink()
    return folder


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The teacher's folder with other weights."""
    shutil.copytree(tiny.teacher_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def sharded(folder: Path, index: Any = None) -> Path:
    """Write the teacher in two shards, of which the second is missing; return the first."""
    shutil.copytree(tiny.teacher_folder(), folder)
    first, second = (f"model-0000{k}-of-00002.safetensors" for k in (1, 2))
    (folder / "model.safetensors").rename(folder / first)
    named = {"metadata": {}, "weight_map": {"lm_head.weight": second, "model.norm.weight": first}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(named if index is None else index))
    return folder / first


def without_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").unlink()
    return folder


def with_vocabulary(folder: Path, size: int) -> Path:
    """The teacher's folder with fewer embeddings."""
    tiny.llama(vocab_size=size, bos_token_id=1, eos_token_id=2).save_pretrained(folder)
    for path in Path(tiny.teacher_folder()).glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def text(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return folder / name


def aliases(depth: int) -> str:
    """YAML whose last list stands for 10 to the power of `depth` words."""
    lines = [f"x{k}: &x{k} [{', '.join(['*x' + str(k - 1)] * 10)}]" for k in range(1, depth + 1)]
    return "\n".join(["name: a", "x0: &x0 [x, x]", *lines, f"seed: *x{depth}"])


def finished(folder: Path, **files: str) -> Path:
    """The finished run, some files of it other ones."""
    shutil.copytree(tiny.finished_run().folder, folder)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def linearized(folder: Path, **config: Any) -> Path:
    """The finished model, moved away from its run, some fields of its config other ones."""
    shutil.copytree(tiny.finished_run().folder / "model", folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def tokenizer_with(folder: Path, **fields: Any) -> Path:
    """The teacher's folder, some fields of its tokenizer's config other ones."""
    shutil.copytree(tiny.teacher_folder(), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def stranger(folder: Path, name: str, **fields: Any) -> Path:
    """The finished model with a JSON file that asks for code of its own."""
    folder = linearized(folder)
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    (folder / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('written').touch()\n")
    return folder


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
Case = tuple[Callable[[Path], list[Any]], str]

# Added to a run that would do; the last of an option counts.
RUNS: dict[str, Case] = {
    "unknown field": (lambda _: ["--set", "mixer.window=3"], "recipe field mixer.window: unknown field"),
    "wrong type": (lambda _: ["--set", "transfer.lr=fast"], "recipe field transfer.lr: .*; found 'fast'"),
    "not finite": (lambda _: ["--set", "transfer.lr=.inf"], "recipe field transfer.lr: .* finite number; found inf"),
    "a rate that no optimizer can take": (
        lambda _: ["--set", "transfer.lr=1.0e+38"],
        "recipe field transfer.lr: .* less than or equal to 1000000; found 1e",
    ),
    "betas": (
        lambda _: ["--set", "finetune.betas=[0.9, 1]"],
        "recipe field finetune.betas.1: .* less than 1; found 1",
    ),
    "no assignment": (lambda _: ["--set", "transfer.lr"], "--set: expected field=value, found 'transfer.lr'"),
    "a Python object": (
        lambda _: ["--set", "name=!!python/name:os.system"],
        "--set name: expected a YAML value, found '!!python/name:os.system'",
    ),
    "no such layer": (lambda _: ["--set", "layers.keep_softmax=[7]"], "layers.keep_softmax: expected indices from -2 "),
    "seed": (lambda _: ["--seed", -1], "recipe field seed: .*; found -1"),
    "a seed that no generator takes": (
        lambda _: ["--seed", 2**64],
        "recipe field seed: .*; found 18446744073709551616",
    ),
    "until": (
        lambda _: ["--until", "end"],
        "--until: expected one of transfer, adapt, finetune, evaluate; found 'end'",
    ),
    "block": (lambda _: ["--block", 0], "--block: expected a recipe with transfer.layers_per_block, found null"),
    "dtype": (lambda _: ["--dtype", "int8"], "--dtype: expected auto or one of float32, .*; found 'int8'"),
    "device": (lambda _: ["--device", "abacus"], "--device: expected a device of this machine, found 'abacus': "),
    "no model": (lambda tmp: ["--model", tmp / "none"], "model: expected a model folder, found nothing at '.*none'"),
    "a file for a model": (
        lambda tmp: ["--model", text(tmp, "m", "")],
        "model: expected a folder, a .gguf file or a hub id, found t",
    ),
    "not a model": (
        lambda tmp: ["--model", folder_with(tmp / "empty")],
        "model: expected a folder with a config.json, found none in '.*empty'",
    ),
    "not json": (
        lambda tmp: ["--model", folder_with(tmp / "broken", config__json="{")],
        "model: .*config.json: expected JSON, found ",
    ),
    "nested without end": (
        lambda tmp: ["--model", folder_with(tmp / "deep", config__json="[" * 100_000)],
        "model: .*config.json: expected JSON, found maximum recursion depth exceeded",
    ),
    "a list": (
        lambda tmp: ["--model", folder_with(tmp / "list", config__json="[1]")],
        "model: .*config.json: expected a JSON object, found list",
    ),
    "unsupported architecture": (
        lambda tmp: ["--model", folder_with(tmp / "t5", config__json='{"model_type": "t5"}')],
        "model_type: expected one of llama, .*; found 't5'",
    ),
    "an encoder": (lambda _: ["--model", tiny.encoder_folder()], "mixer.span: expected `none`, because an encoder's"),
    "no weights": (
        lambda tmp: ["--model", without(tmp / "light", "*.safetensors")],
        r"model .*light: expected weights \(\*.safetensors\), found none; copy model.safetensors, or all shards and th",
    ),
    "weights as a gguf file": (
        lambda tmp: ["--model", text(without(tmp / "light", "*.safetensors"), "m.gguf", "").parent],
        r"model .*light: expected weights \(\*.safetensors\), found m.gguf; to use it, name the file: --model",
    ),
    "shards without their index": (
        lambda tmp: ["--model", without_index(sharded(tmp / "two").parent)],
        "model .*two: expected model.safetensors, or model.safetensors.index.json with model-00001-of-00002.safe",
    ),
    "a pointer to weights": (
        lambda tmp: ["--model", text(without(tmp / "far", "*.safetensors"), "model.safetensors", POINTER).parent],
        ".*far/model.safetensors: expected the file itself, found a git-lfs pointer to it; run `git lfs pull` in its",
    ),
    "weights as a pickle": (
        lambda tmp: ["--model", text(without(tmp / "old", "*.safetensors"), "pytorch_model.bin", "").parent],
        "model .*old: expected weights as safetensors, found pytorch_model.bin, a pickle, which can run code; if you",
    ),
    "a shard missing": (
        lambda tmp: ["--model", sharded(tmp / "two").parent],
        "model .*two: expected model-00002-of-00002.safetensors, which .*index.json names, found none; copy it again",
    ),
    "an index of nothing": (
        lambda tmp: ["--model", sharded(tmp / "odd", index=[1]).parent],
        ".*/odd/model.safetensors.index.json: expected a weight_map from tensors to files, found none; copy it again",
    ),
    "a gguf file": (
        lambda tmp: ["--model", text(tmp, "m.gguf", "")],
        "model: .*m.gguf: expected a GGUF file, found one that does not begin with GGUF; copy it again",
    ),
    "a folder with a gguf file": (
        lambda tmp: ["--model", text(folder_with(tmp / "g"), "m.gguf", "").parent],
        "model: .*m.gguf: expected a GGUF file, found one that does not begin with GGUF; copy it again",
    ),
    "a folder with several gguf files": (
        lambda tmp: ["--model", folder_with(tmp / "g", a__gguf="GGUF", b__gguf="GGUF")],
        "model: expected one GGUF file in .*/g, found a.gguf, b.gguf; name the file itself",
    ),
    "a part of a gguf file": (
        lambda tmp: ["--model", text(tmp, "m-00001-of-00003.gguf", "GGUF")],
        "model: expected a GGUF file with the whole model, found .*, one of 3 parts; join them by `llama-gguf-split",
    ),
    "half the weights": (
        lambda tmp: ["--model", text(without(tmp / "half", "*.safetensors"), "model.safetensors", "abc").parent],
        ".*/half/model.safetensors: expected a whole safetensors file, found .*; copy it again",
    ),
    "a tensor missing": (
        lambda tmp: ["--model", weights(tmp / "whole", lambda x: x.pop("model.layers.1.mlp.up_proj.weight"))],
        "model .*whole: expected all weights of a LlamaForCausalLM and no others, found none for model.layers.1.mlp.up",
    ),
    "a tensor left over": (
        lambda tmp: ["--model", weights(tmp / "more", lambda x: x.update(lora_A=torch.ones(1)))],
        "model .*more: expected all weights of a LlamaForCausalLM and no others, found lora_A, which it has not; ",
    ),
    "a tensor of another shape": (
        lambda tmp: ["--model", weights(tmp / "size", lambda x: x.update({"lm_head.weight": torch.ones(3, 4)}))],
        r"model .*size: .* found lm_head.weight of shape \[3, 4\] for \[259, 32\]; ",
    ),
    "a tokenizer with more tokens": (
        lambda tmp: ["--model", with_vocabulary(tmp / "small", 97)],
        "tokenizer: expected tokens below the model's vocab_size of 97, found 258; use the model's own tokenizer, or ",
    ),
    "more tokens, and rows to choose": (
        lambda tmp: ["--model", with_vocabulary(tmp / "small", 97), "--set", "data.select_rows_by_esl=8"],
        "tokenizer: expected tokens below the model's vocab_size of 97, found 258; ",
    ),
    "a tokenizer of other json": (
        lambda tmp: ["--model", text(without(tmp / "torn", "tokenizer.json"), "tokenizer.json", '{"a": 1}').parent],
        ".*torn/tokenizer.json: expected a tokenizer of the library tokenizers, found none in it; copy it again",
    ),
    "a tokenizer cut short": (
        lambda tmp: ["--model", text(without(tmp / "cut", "tokenizer.json"), "tokenizer.json", '{"model": {').parent],
        ".*cut/tokenizer.json: expected a whole JSON file, found one that is cut off or damaged .*; copy it again",
    ),
    "a pointer to a tokenizer": (
        lambda tmp: ["--model", text(without(tmp / "far", "tokenizer.json"), "tokenizer.json", POINTER).parent],
        ".*far/tokenizer.json: expected the file itself, found a git-lfs pointer to it; run `git lfs pull` in its",
    ),
    "a tokenizer's length that is none": (
        lambda tmp: ["--model", tokenizer_with(tmp / "long", model_max_length={})],
        "model .*long: expected a tokenizer in the folder of the weights; ",
    ),
    "no tokenizer": (
        lambda tmp: ["--model", without(tmp / "mute", "tokenizer*")],
        "model .*mute: expected a tokenizer in the folder of the weights, found none; copy its files, such as "
        "tokenizer.json, f",
    ),
    "linearized": (
        lambda _: ["--model", tiny.finished_run().folder / "model"],
        "model: expected a softmax model, found 'linearized_llama', which is linearized already",
    ),
    "no dataset": (lambda tmp: ["--dataset", tmp / "none.txt"], "data.dataset: .*found nothing at '.*none.txt'"),
    "empty dataset": (lambda tmp: ["--dataset", text(tmp, "empty.txt", "")], "data.dataset: .*found no text in "),
    "short dataset": (
        lambda tmp: ["--dataset", text(tmp, "short.txt", "a few words")],
        "data: expected at least 16 held-out rows of the only document to test on, besides those that choose ",
    ),
    "a damaged gz file": (
        lambda tmp: ["--dataset", text(tmp, "text.jsonl.gz", "a")],
        ".*/text.jsonl.gz: expected a whole gzip file, found a damaged one ",
    ),
    "unknown file": (lambda tmp: ["--dataset", text(tmp, "text.xml", "a")], "data.dataset: expected a file that ends"),
    "broken lines": (lambda tmp: ["--dataset", text(tmp, "a.jsonl", "{}\n{")], ".*a.jsonl line 2: not valid JSON: "),
    "lines nested without end": (
        lambda tmp: ["--dataset", text(tmp, "a.jsonl", "[" * 100_000)],
        ".*a.jsonl line 1: expected rows of text, found JSON nested too deeply",
    ),
    "another column": (
        lambda tmp: ["--dataset", text(tmp, "b.jsonl", '{"words": "a"}\n')],
        "data row 1: expected a column 'text', found words; set data.text_column",
    ),
    "long rows": (
        lambda _: ["--set", "data.sequence_length=257"],
        "data.sequence_length: expected at most the model's 256 positions, found 257; pass --set ",
    ),
    "a file in the way": (
        lambda tmp: ["--output-dir", text(tmp, "file", "mine") / "run"],
        "output folder .*file/run: expected one that can be written to, found: ",
    ),
    "another's folder": (
        lambda tmp: ["--output-dir", folder_with(tmp / "other", notes__txt="mine")],
        "output folder .*other: expected an empty folder or a run to resume, found other files",
    ),
    "a damaged folder": (
        lambda tmp: ["--output-dir", finished(tmp / "torn", run__json="{")],
        r".*torn/run\.json: contents: expected JSON, found other text \(.*\); restore it",
    ),
}

EXAMINED = ("--set", "evaluation.examine=true")  # which tasks are a part of
COMMANDS: dict[str, Case] = {
    "no recipe": (lambda tmp: ["recipes", tmp / "none.yaml"], "recipe: expected a YAML file, found nothing at "),
    "broken yaml": (lambda tmp: ["recipes", text(tmp, "a.yaml", "a: [")], r"recipe .*a\.yaml: not valid YAML: "),
    "yaml nested without end": (
        lambda tmp: ["recipes", text(tmp, "a.yaml", "[" * 3_000)],
        r"recipe .*a\.yaml: not valid YAML: maximum recursion depth exceeded",
    ),
    "yaml of a list": (lambda tmp: ["recipes", text(tmp, "a.yaml", "- a")], r"recipe .*: expected a mapping of fields"),
    "yaml of aliases": (
        lambda tmp: ["recipes", text(tmp, "a.yaml", aliases(9))],
        r"recipe .*a\.yaml: not valid YAML: expected no aliases, found \*x0 ",
    ),
    "a recipe of megabytes": (
        lambda tmp: ["recipes", text(tmp, "a.yaml", "name: " + "x" * 1_000_000)],
        r"recipe .*a\.yaml: expected at most 1,000,000 bytes, found 1,000,006",
    ),
    "a value of kilobytes": (
        lambda tmp: ["recipes", text(tmp, "a.yaml", f"name: x\nseed: {'y' * 100_000}")],
        r"recipe field seed: .*; found 'y{199}; ",
    ),
    "attention from the hub": (
        lambda tmp: ["generate", linearized(tmp / "kernel", attn_implementation="a/kernel"), "--prompt", "a"],
        r"model: .*config.json: attn_implementation: expected a name that transformers knows, found 'a/kernel', for",
    ),
    "experts of the hub": (
        lambda tmp: ["generate", linearized(tmp / "kernel", experts_implementation={"": "a/b"}), "--prompt", "a"],
        r"model: .*config.json: experts_implementation: expected a name that transformers knows, found \{'': 'a/b'\}",
    ),
    "more layers than a model has": (
        lambda tmp: ["generate", linearized(tmp / "deep", num_hidden_layers=10**7), "--prompt", "a"],
        r"model: .*deep/config.json: num_hidden_layers: expected at most 10,000 layers, found 10,000,000",
    ),
    "yaml of python": (
        lambda tmp: ["recipes", text(tmp, "a.yaml", f"name: !!python/object/apply:os.mkdir [{tmp / 'written'}]")],
        r"recipe .*a\.yaml: not valid YAML: could not determine a constructor",
    ),
    "nameless": (lambda tmp: ["recipes", text(tmp, "a.yaml", "seed: 3")], "recipe field name: missing"),
    "plan of nothing": (lambda tmp: ["plan", "--model", tmp / "none"], "model: expected a model folder, found nothing"),
    "plan dtype": (
        lambda _: ["plan", "--model", tiny.teacher_folder(), "--dtype", "int3"],
        "--dtype: expected auto or ",
    ),
    "eval of nothing": (lambda tmp: ["eval", tmp / "none"], "model: expected a model folder, found nothing at "),
    "eval of softmax": (
        lambda _: ["eval", tiny.teacher_folder()],
        "model .*: expected a linearized model, found model_type 'llama'",
    ),
    "a torn recipe": (
        lambda tmp: ["eval", finished(tmp / "run", recipe__yaml="a: [")],
        r"recipe .*run/recipe\.yaml: not valid YAML: ",
    ),
    "no teacher's name": (
        lambda tmp: ["eval", finished(tmp / "run", run__json="{}")],
        r".*run/run\.json: model: expected a value, found none; restore it",
    ),
    "another format": (
        lambda tmp: ["generate", linearized(tmp / "new", linearize={"format_version": 99}), "--prompt", "a"],
        r"model .*new: .*config\.linearize\.format_version: expected 1 or 2, found 99",
    ),
    "no such task": (
        lambda tmp: ["eval", tiny.finished_run().folder, *EXAMINED, "--tasks", tmp / "none.jsonl"],
        r"tasks: expected a file, found none at .*none\.jsonl",
    ),
    "no such task yaml": (
        lambda tmp: ["eval", tiny.finished_run().folder, *EXAMINED, "--tasks", tmp / "none.yaml"],
        r"tasks: expected a file, found none at .*none\.yaml",
    ),
    "a task of other columns": (
        lambda tmp: ["eval", tiny.finished_run().folder, *EXAMINED, "--tasks", text(tmp, "q.jsonl", '{"a": 1}\n')],
        r".*q\.jsonl, line 1: expected an object with the columns query",
    ),
    "an output nowhere": (
        lambda tmp: ["eval", tiny.finished_run().folder, "--output", tmp / "none" / "evaluation.json"],
        "--output: expected a file in a folder that can be written to, found '.*none/evaluation.json'",
    ),
    "report of nothing": (lambda tmp: ["report", tmp], "report .*: expected a run folder with evaluation.json"),
    "report of other json": (
        lambda tmp: ["report", folder_with(tmp / "run", evaluation__json='{"a": 1}')],
        r".*run/evaluation\.json: a: expected no such field, found one; restore the file, or measure again",
    ),
    "a field of many lines": (
        lambda tmp: ["recipes", text(tmp, "a.yaml", '"a\\n\\e[31mb": 1\nname: a')],
        "recipe field a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}.31mb: unknown field",
    ),
    "report of a plan of other json": (
        lambda tmp: ["report", finished(tmp / "run", plan__json='{"recipe": []}')],
        r".*run/plan\.json: recipe: expected a valid string, found \[\]; restore the file",
    ),
    "report of python": (
        lambda tmp: ["report", finished(tmp / "run", recipe__yaml=f"a: !!python/object/apply:os.mkdir [{tmp / 'x'}]")],
        r".*run/recipe\.yaml: recipe .*: not valid YAML: could not determine a constructor",
    ),
    "report twice": (
        lambda tmp: ["report", *[tiny.finished_run().folder] * 2, "--output", tmp / "page.html"],
        "report: expected one or more different run folders, found ",
    ),
    "bench of softmax": (lambda _: ["bench", tiny.teacher_folder()], "model .*: expected a linearized model, found "),
    "generate with an incomplete character": (
        lambda _: ["generate", tiny.finished_run().folder, "--prompt", "so: \udcff"],
        r"--prompt: expected text, found an incomplete character in 'so: \\udcff'",
    ),
    "generate by a seed that no generator takes": (
        lambda _: ["generate", tiny.finished_run().folder, "--prompt", "a", "--seed", 2**70],
        f"--seed: expected a whole number from 0 to {2**62 - 1}, found {2**70}",
    ),
    "on a device without memory": (
        lambda _: ["generate", tiny.finished_run().folder, "--prompt", "a", "--device", "meta"],
        "--device: expected a device of this machine, found 'meta': ",
    ),
    "measuring a field of what made it": (
        lambda _: ["eval", tiny.finished_run().folder, "--set", "mixer.span.window_size=3"],
        "--set mixer.span.window_size: expected a field of data or evaluation, because eval does not change a model",
    ),
    "a report into a folder": (
        lambda tmp: ["report", tiny.finished_run().folder, "--output", tmp],
        "--output: expected a file for the page, found the folder ",
    ),
    "generate with nothing": (
        lambda tmp: ["generate", tmp / "none", "--prompt", "a"],
        "model: expected a model folder",
    ),
    "no prompt": (
        lambda _: ["generate", tiny.finished_run().folder, "--prompt", ""],
        "--prompt: expected some text, found none",
    ),
    "a prompt beyond the embeddings": (
        lambda tmp: ["generate", with_vocabulary(tmp / "small", 67), "--prompt", "z"],
        "tokenizer: expected tokens below the model's vocab_",
    ),
    "a tokenizer's code": (
        lambda tmp: [
            "generate",
            stranger(
                tmp / "evil",
                "tokenizer_config.json",
                tokenizer_class="Evil",
                auto_map={"AutoTokenizer": ["evil.Evil", None]},
            ),
            *("--prompt", "a"),
        ],
        "model .*evil: expected a tokenizer in the folder of the weights; "
        ".*contains custom code which must be executed",
    ),
    "demo in another's folder": (
        lambda tmp: ["demo", "--output-dir", folder_with(tmp / "other", notes__txt="mine")],
        "output folder .*other: expected an empty folder or a run to resume, found other files",
    ),
    "demo device": (lambda _: ["demo", "--device", "abacus"], "--device: expected a device of this machine, found "),
}


@pytest.mark.parametrize("case", [*RUNS, *COMMANDS])
def test_bad_input_is_one_line_and_nothing_written(
    command: Command, tmp_path: Path, said: list[str], case: str
) -> None:
    arguments, message = (RUNS | COMMANDS)[case]
    given = arguments(tmp_path)
    before = contents(tmp_path)
    done = command(*(tiny.run_arguments(tmp_path / "run") if case in RUNS else ()), *given)
    assert_refused(done)
    assert re.match(f"error: {message}", done.err)
    assert said == []
    assert contents(tmp_path) == before


def test_a_recipe_that_does_not_exist(command: Command, tmp_path: Path) -> None:
    names = ", ".join(recipe_names())
    message = f"recipe: expected one of {names} or a path that ends in .yaml; found 'alchemy'"
    arguments = tiny.run_arguments(tmp_path / "run")
    assert_refused(command("run", "alchemy", *arguments[2:]), message)
    assert_refused(command("plan", "alchemy", "--model", tiny.teacher_folder()), message)
    assert_refused(command("recipes", "alchemy"), message)
    assert not (tmp_path / "run").exists()


def test_no_text_at_all(command: Command, tmp_path: Path) -> None:
    arguments = tiny.run_arguments(tmp_path / "run")
    at = arguments.index("--dataset")
    done = command(*arguments[:at], *arguments[at + 2 :])
    assert_refused(done, "data.dataset: expected a hub id, or a local file or folder, found none")
    assert not (tmp_path / "run").exists()


def test_the_folder_of_another_recipe(command: Command, tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    before = contents(tmp_path)
    done = command(*tiny.run_arguments(folder, transfer__lr=0.5))
    assert_refused(done, f"output folder {folder}: expected a run of this recipe, found one of another")
    assert contents(tmp_path) == before


def test_a_gpu_that_is_not_there(command: Command, tmp_path: Path) -> None:
    missing = "cuda:99" if torch.cuda.is_available() else "cuda"
    done = command(*tiny.run_arguments(tmp_path / "run"), "--device", missing)
    assert_refused(done, f"--device: expected a device of this machine, found '{missing}': ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "lolcats"],
        ["walk"],
        ["plan", "lolcats", "--modle", "x"],
        ["generate", "x", "--prompt", "a", "--seed", "b"],
    ],
    ids=" ".join,
)
def test_usage_errors(command: Command, arguments: list[str]) -> None:
    done = command(*arguments)
    assert (done.status, done.out) == (2, "")
    assert "Usage: " in done.err
