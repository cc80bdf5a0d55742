"""Commands on folders that others made: a run's folder, a model that was moved, and what none of them may do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from linearize.base import UserError
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.data.stored import _fields
from linearize.evaluation.harness import check_tasks, run_benchmarks
from linearize.report.load import load_run
from linearize.run.folder import Run
from tests import tiny
from tests.commands import Command, assert_refused


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with tiny.quick_measures():
        yield


@pytest.fixture
def finished() -> Run:
    return tiny.finished_run()


@pytest.fixture
def moved(finished: Run, tmp_path: Path) -> Path:
    """The model alone, in another place, of a teacher that is not where it was."""
    folder = tmp_path / "moved"
    shutil.copytree(finished.folder / "model", folder)
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"model": str(tmp_path / "gone")}))
    return folder


def candidates(printed: str) -> set[str]:
    return {line["name"] for line in json.loads(printed)["measured"]}


# --- a run's folder, and a model without it ---------------------------------------------------------------------------


def test_a_run_s_folder_stands_for_its_model(command: Command, finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def load(folder: Path, *evaluation: Any) -> Any:
        read.append(folder)
        return load_run(folder, *evaluation)

    monkeypatch.setattr("linearize.report.load.load_run", load)
    of_the_run, of_the_model = (command("eval", at, "--json") for at in (finished.folder, finished.folder / "model"))
    assert (of_the_run.status, of_the_model.status) == (0, 0)
    assert read == [finished.folder.resolve()] * 2  # whose recipe, plan and memory are told of
    first, second = (tiny.untimed(json.loads(done.out)) for done in (of_the_run, of_the_model))
    assert first == second
    assert len(first["measured"]) == 10  # every control

    timed = command("bench", finished.folder, "--lengths", 4, "--new-tokens", 2, "--repeats", 1, "--json")
    assert {line["model"] for line in json.loads(timed.out)["speed"]} == {"teacher", "student"}
    words = command("generate", finished.folder, "--prompt", "abc", "--max-new-tokens", 4)
    assert words.status == 0 and words.out.startswith("abc")


def test_a_run_without_a_model_yet(command: Command, finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run", ignore=lambda *_: ["model"])
    for name, *more in (["eval"], ["bench"], ["generate", "--prompt", "a"]):
        done = command(name, tmp_path / "run", *more)
        assert_refused(done, f"run folder {tmp_path / 'run'}: expected its model, found none yet; the command that")


def test_a_moved_model_is_measured_on_the_data_that_is_named(command: Command, finished: Run, moved: Path) -> None:
    done = command("eval", moved, "--teacher", finished.model, "--dataset", tiny.text_file(), "--json")
    assert done.status == 0
    assert candidates(done.out) == {"teacher", "swapped", "student", "ablated", "window", "window_sinks"}
    expected = json.loads((finished.folder / "evaluation.json").read_text())
    assert json.loads(done.out)["provenance"]["data"] == expected["provenance"]["data"]


@pytest.mark.parametrize("field", ["dataset", pytest.param("validation_dataset", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", ["run", "model"])
def test_a_recipe_does_not_choose_what_is_read(
    command: Command, finished: Run, tmp_path: Path, place: str, field: str
) -> None:
    """An evaluation quotes its text and is made to be shared; the recipe of a folder can be a stranger's."""
    copied, secret = tmp_path / "copied", tmp_path / "diary.jsonl"
    shutil.copytree(finished.folder if place == "run" else finished.folder / "model", copied)
    texts = [f"my secret number {i} is {i * 7919}. " * 9 for i in range(99)]
    secret.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = yaml.safe_load((copied / "recipe.yaml").read_text())
    recipe["data"] |= {"dataset": None if field == "validation_dataset" else str(secret)} | {field: str(secret)}
    (copied / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    refused = f"data.{field}: expected data that you name, found '{secret}' on this machine"
    for options in ([], ["--set", "data.sequence_length=48"]):
        done = command("eval", copied, "--json", "--output", tmp_path / "evaluation.json", *options)
        if place == "run" and not options:  # the rows are in the folder
            expected = json.loads((finished.folder / "evaluation.json").read_text())["provenance"]["data"]
            assert json.loads(done.out)["provenance"]["data"] == expected
            (tmp_path / "evaluation.json").unlink()
        else:
            assert_refused(done, refused)
        assert "secret number" not in done.err and not (tmp_path / "evaluation.json").exists()
    assert command("eval", copied, "--json", "--dataset", secret).status == 0


def test_a_recipe_does_not_choose_the_questions(command: Command, finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "copied")
    (tmp_path / "questions.jsonl").write_text('{"query": "secret", "choices": "secret", "gold": 0}\n')
    with_tasks(tmp_path / "copied", tmp_path / "questions.jsonl")
    done = command("eval", tmp_path / "copied")
    assert_refused(done, "evaluation.tasks: expected files of questions that you name, found '")
    assert "secret" not in done.err


@pytest.mark.parametrize("name", ["train/input_ids", "test/position_ids", "validation/labels"])
def test_stored_rows_that_the_model_cannot_read(command: Command, finished: Run, tmp_path: Path, name: str) -> None:
    shutil.copytree(finished.folder, tmp_path / "copied")
    path = tmp_path / "copied" / "rows.safetensors"
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    tensors[name] += 100_000
    save_file(tensors, path, about)
    done = command("eval", tmp_path / "copied")
    assert_refused(done, f"{path}: expected the rows that were written there, found others")
    dataset = Dataset(
        *(PackedRows(**_fields(tensors, part)) for part in ("train", "validation", "test")), (1, 1, 1), ()
    )
    save_file(tensors, path, about | {"fingerprint": dataset.fingerprint})
    done = command("eval", tmp_path / "copied")
    assert done.status == 2 and done.err.count("\n") == 1, done.err


def test_a_moved_model_whose_teacher_is_gone_is_measured_alone(command: Command, moved: Path) -> None:
    done = command("eval", moved, "--dataset", tiny.text_file(), "--json")
    assert done.status == 0
    assert candidates(done.out) == {"student", "ablated"}
    assert done.err.startswith("measured without the teacher; pass --teacher to name it: model: expected a model fol")


def test_another_model_is_no_teacher(command: Command, finished: Run, moved: Path) -> None:
    done = command("eval", moved, "--teacher", tiny.gpt2_folder())
    assert_refused(done, f"teacher {tiny.gpt2_folder()}: model_type: expected the student's llama, found gpt2")
    assert_refused(command("eval", finished.folder, "--teacher", moved / "none"), "model: expected a model folder")


def test_rows_of_a_model_that_tells_nothing_fit_its_positions(command: Command, finished: Run, tmp_path: Path) -> None:
    """1,024 tokens is nobody's word here; what the user gives is not bent."""
    folder = tmp_path / "model"
    shutil.copytree(finished.folder / "model", folder)
    for name in ("recipe.yaml", "run.json"):
        (folder / name).unlink()
    options = [
        "--dataset",
        tiny.text_file(),
        "--set",
        "evaluation.examine=false",
        "--set",
        "data.validation_fraction=0.3",
    ]
    done = command("eval", folder, *options, "--json")
    assert done.status == 0
    assert done.err.startswith("rows of 256 tokens, the model's positions; --set data.sequence_length=... for others")
    done = command("eval", folder, *options, "--set", "data.sequence_length=1024")
    assert_refused(done, "data.sequence_length: expected at most the model's 256 positions, found 1024")


def test_files_have_the_permissions_of_any_file() -> None:
    """safetensors writes files that only their owner can read; a run gives them the usual permissions."""
    plain = tiny.finished_run().folder / "run.json"
    modes = {path.name: path.stat().st_mode for path in plain.parent.rglob("*") if path.is_file()}
    assert any(name.endswith(".safetensors") for name in modes)
    assert {name for name, mode in modes.items() if mode != plain.stat().st_mode} == set()


def test_weights_that_are_no_numbers_are_one_line(command: Command, moved: Path) -> None:
    path = moved / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    done = command("eval", moved, "--dataset", tiny.text_file(), "--json")
    assert done.status == 2 and done.err.splitlines()[-1].startswith("error: evaluation: expected finite outputs, ")
    for temperature in (0, 1):
        done = command("generate", moved, "--prompt", "abc", "--temperature", temperature)
        assert done.status == 2, done
        assert done.err.splitlines()[-1].startswith("error: model: expected logits that are numbers, found NaN or inf")


# --- a stranger's folder ----------------------------------------------------------------------------------------------

EVIL = """
task: evil
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: !function evil.write
doc_to_choice: "choices"
doc_to_target: "gold"
"""
OPTIONS = ("--set", "evaluation.examine=true", "--limit", 1, "--json")


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A folder with a task YAML whose Python writes a file `written` beside it, as soon as lm-eval reads it."""
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(
        "from pathlib import Path\n"
        "Path(__file__).with_name('written').touch()\n"
        "def write(doc):\n    return doc['query']\n"
    )
    rows = [{"query": f"What is {i}?", "choices": ["this", "that"], "gold": 1} for i in range(3)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evil.yaml").write_text(EVIL.format(data=folder / "data.jsonl"))
    return folder


def with_tasks(folder: Path, *tasks: Any) -> Path:
    """A folder whose recipe names these tasks."""
    path = folder / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["evaluation"] |= {"tasks": list(map(str, tasks)), "examine": True}
    path.write_text(yaml.safe_dump(recipe))
    return folder


@pytest.mark.parametrize("place", ["run", "model"])
@pytest.mark.parametrize("task", ["evil.yaml", "."])
def test_a_recipe_s_task_yaml_does_not_run(
    command: Command, finished: Run, tmp_path: Path, evil: Path, place: str, task: str
) -> None:
    """Of a run's recipe as of the one in a model's own folder; a folder of YAMLs as one of them."""
    copied = tmp_path / "copied"
    shutil.copytree(finished.folder if place == "run" else finished.folder / "model", copied)
    with_tasks(copied, evil / task, "arc_easy")
    done = command("eval", copied, *OPTIONS)
    assert_refused(done, "evaluation.tasks: expected names of lm-eval's tasks or .jsonl files in a recipe, found '")
    assert not (evil / "written").exists()


def test_a_recipe_file_s_task_yaml_does_not_run(command: Command, tmp_path: Path, evil: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(tiny.recipe(data__dataset=tiny.text_file(), evaluation__examine=True).to_yaml())
    with_tasks(tmp_path, evil / "evil.yaml")
    done = command("run", recipe, "--model", tiny.teacher_folder(), "--output-dir", tmp_path / "run")
    assert_refused(done, "evaluation.tasks: expected names of lm-eval's tasks or .jsonl files in a recipe, found '")
    assert not (evil / "written").exists() and not (tmp_path / "run").exists()


def test_a_folder_named_as_a_task_of_lm_eval_is_not_read(
    command: Command, finished: Run, tmp_path: Path, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished.folder, tmp_path / "copied")
    with_tasks(tmp_path / "copied", "arc_easy")
    evil.rename(tmp_path / "arc_easy")
    monkeypatch.chdir(tmp_path)
    assert_refused(command("eval", tmp_path / "copied", *OPTIONS), "evaluation.tasks: expected names of")
    assert not (tmp_path / "arc_easy" / "written").exists()


def test_no_other_spelling_is_a_task_yaml(evil: Path) -> None:
    """Neither inline tasks and groups, which could include files, nor lines of JSON that are not questions."""
    (evil / "lines.jsonl").write_text((evil / "evil.yaml").read_text())
    (evil / "group.jsonl").write_text(json.dumps({"group": "g", "task": [str(evil / "evil.yaml")]}) + "\n")
    for inline in ({"include": str(evil / "evil.yaml")}, {"group": "g", "task": [str(evil / "evil.yaml")]}):
        with pytest.raises(UserError, match=r"recipe field evaluation\.tasks\.0: .* string"):
            tiny.recipe(evaluation__examine=True, evaluation__tasks=[inline])
    for name in ("evil.yaml", "EVIL.YAML", "evil.yml", "evil.yaml/", "../evil", "lines.jsonl", "group.jsonl"):
        evaluation = tiny.recipe(evaluation__examine=True, evaluation__tasks=[str(evil / name)]).evaluation
        with pytest.raises(UserError):
            check_tasks(evaluation, trusted=False)
    assert not (evil / "written").exists()


@pytest.mark.slow  # lm-eval reads all of its own tasks
@pytest.mark.parametrize("spelling", ["{}/evil.yaml ", "{}/*", "{}/evil", "evil"])
def test_what_is_not_yaml_by_its_name_is_the_name_of_a_task(evil: Path, spelling: str) -> None:
    task = spelling.format(evil)
    check_tasks(tiny.recipe(evaluation__examine=True, evaluation__tasks=[task]).evaluation, trusted=False)
    with pytest.raises(UserError, match="the name of a task of lm-eval, found"):
        run_benchmarks({}, tiny.byte_tokenizer(), [task], shots=0, limit=1, batch_size=1, seed=0)
    assert not (evil / "written").exists()


@pytest.mark.parametrize("trusted", [("--tasks",), pytest.param(("--trust-tasks",), marks=pytest.mark.slow)])
def test_the_user_s_own_word_counts(
    command: Command, finished: Run, tmp_path: Path, evil: Path, trusted: tuple[str]
) -> None:
    shutil.copytree(finished.folder, tmp_path / "copied")
    with_tasks(tmp_path / "copied", evil / "evil.yaml")
    word = (*trusted, evil / "evil.yaml") if trusted == ("--tasks",) else trusted
    small = {"examined_tokens": 128, "fidelity_tokens": 64, "prompts": 2, "new_tokens": 2, "recall_trials": 2}
    options = [word for name, value in small.items() for word in ("--set", f"evaluation.{name}={value}")]
    done = command("eval", tmp_path / "copied", *OPTIONS, *options, *word)
    assert done.status == 0
    assert (evil / "written").exists()
    assert {line["task"] for line in json.loads(done.out)["tasks"]["results"]} == {"evil"}


class Writes:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("harmless", [True, False])
def test_pickled_weights_are_not_read(command: Command, tmp_path: Path, harmless: bool) -> None:
    """Be there nothing but numbers in it."""
    model = tmp_path / "model"
    shutil.copytree(tiny.teacher_folder(), model)
    weights: dict[str, Any] = {**load_file(model / "model.safetensors")}
    if not harmless:
        weights["code"] = Writes(tmp_path / "written")
    torch.save(weights, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    done = command(*tiny.run_arguments(tmp_path / "run"), "--model", model)
    assert_refused(
        done, f"model {model}: expected weights as safetensors, found pytorch_model.bin, a pickle, which can"
    )
    assert not (tmp_path / "written").exists()


def test_no_pickle_is_written(finished: Run) -> None:
    """All that a run leaves is text, or starts as safetensors do."""
    for path in finished.folder.rglob("*"):
        if path.suffix == ".safetensors":
            assert path.read_bytes()[8:9] == b"{"
        elif path.is_file():
            path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages) }}",
        "{{ cycler.__init__.__globals__.os.mkdir('written') }}",
        "{% include 'config.json' %}",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """It sees the messages, and neither Python nor files."""
    model = tmp_path / "model"
    shutil.copytree(tiny.teacher_folder(), model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    turns = [{"role": role, "content": "some words"} for role in ("user", "assistant")]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    monkeypatch.chdir(tmp_path)
    given = ["--model", model, "--dataset", tmp_path / "chats.jsonl", "--set", "data.format=chat"]
    done = command(*tiny.run_arguments(tmp_path / "run"), *given)
    assert_refused(done, "data row 1: the tokenizer's chat template refuses it: ")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "chats.jsonl"}
