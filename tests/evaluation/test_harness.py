"""Our results against lm-eval called by hand, and against log-likelihoods and n-grams counted without it."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.demo.corpus import teacher_path
from linearize.evaluation import harness
from linearize.evaluation.harness import BenchmarkResult, choice_task, run_benchmarks
from linearize.recipe import Recipe

QUESTIONS = [
    {"query": f"Question: which keyword comes first in a {thing}", "choices": choices, "gold": gold, "id": thing}
    for thing, choices, gold in [
        ("function?\n", ["def", "class", "return the value"], 0),
        ("class?", ["def", "class"], 1),
        ("loop", ["for", "import", "raise", "lambda"], 0),
        ("branch", ["while", "if"], 1),
        ("context", ["with", "is not"], 0),
        ("test?\n\n", ["yield from", "assert"], 1),
        ("module", ["import", "return"], 0),
        ("generator", ["pass", "yield"], 1),
        ("handler", ["global", "try", "None"], 1),
        ("check of \u2028 identity", ["is", "=="], 0),
    ]
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(teacher_path())


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    """The demo's teacher, and an untrained student of it."""
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path(), dtype=torch.float32)
    torch.manual_seed(0)
    return {"teacher": teacher, "student": linearize.convert(teacher, Recipe.load("lolcats"))}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Every attempt to reach another machine."""
    tried: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        tried.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tried


@pytest.fixture
def questions(tmp_path: Path, connections: list[Any]) -> Path:
    return write(tmp_path / "keywords.jsonl", QUESTIONS)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def by_hand(model: PreTrainedModel, tokenizer: Any, questions: Path, shots: int, seed: int) -> dict[str, Any]:
    """lm-eval itself, with a task written for this test."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    task = {
        "task": "by_hand",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(questions)}},
        "output_type": "multiple_choice",
        "test_split": "validation",
        "fewshot_split": "validation",
        "doc_to_text": "{{query | trim}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # of this machine; takes a second
        found = simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3),
            tasks=[task],
            num_fewshot=shots,
            task_manager=TaskManager(include_defaults=False),
            limit=8,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    assert found is not None
    return found["results"]["by_hand"]


@pytest.mark.parametrize("shots", [0, 2])
def test_results_are_those_of_lm_eval_to_the_last_digit(
    shots, models, tokenizer, questions, connections, capfd
) -> None:
    models["teacher"].train()
    found = run_benchmarks(models, tokenizer, [str(questions)], shots=shots, limit=8, batch_size=3, seed=5)
    assert capfd.readouterr().out == "" and connections == []
    assert [model.training for model in models.values()] == [True, False]
    for name, model in models.items():
        theirs = by_hand(model.eval(), tokenizer, questions, shots, seed=5)
        assert [result for result in found.results if result.candidate == name] == [
            BenchmarkResult("keywords", metric, name, theirs[f"{metric},none"], theirs[f"{metric}_stderr,none"], 8)
            for metric in ("acc", "acc_norm")
        ]
    assert found.shots == {"keywords": shots}
    assert set(found.versions) == {"lm_eval", "keywords"} and found.versions["keywords"].startswith("sha256:")
    assert len({result.value for result in found.results}) > 1, "the questions tell nothing apart"


def test_right_is_the_likeliest_answer_by_a_forward_pass(models, tokenizer, questions) -> None:
    """Without lm-eval: the sum of the answer's log-probabilities behind the question, divided by its letters or not."""
    for name, model in models.items():
        right, read = {"acc": 0, "acc_norm": 0}, []
        for row in QUESTIONS[:6]:
            prompt = tokenizer(row["query"].rstrip() + "\nAnswer:").input_ids
            sums = []
            for choice in row["choices"]:
                answer = tokenizer(f" {choice}").input_ids
                with torch.no_grad():
                    logits = model.eval()(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                sums.append(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum().item())
                read.append(prompt + answer[:-1])
            per_letter = [total / len(choice) for total, choice in zip(sums, row["choices"], strict=True)]
            right["acc"] += sums.index(max(sums)) == row["gold"]
            right["acc_norm"] += per_letter.index(max(per_letter)) == row["gold"]
        with rows_read(model) as rows:
            found = run_benchmarks({name: model}, tokenizer, [str(questions)], shots=0, limit=6, batch_size=4, seed=0)
        assert {result.metric: result.value for result in found.results} == {k: n / 6 for k, n in right.items()}
        assert {result.samples for result in found.results} == {6}
        assert all(any(row[: len(expected)] == expected for row in rows) for expected in read)


def test_the_seed_draws_the_solved_examples_and_changes_nothing_else(models, tokenizer, questions) -> None:
    tokenizer, drawn = deepcopy(tokenizer), []
    tokenizer.pad_token = None  # lm-eval sets one
    for seed in (0, 0, 1):
        state = torch.random.get_rng_state()
        with rows_read(models["teacher"]) as rows:
            chosen = {"teacher": models["teacher"]}
            run_benchmarks(chosen, tokenizer, [str(questions)], shots=3, limit=2, batch_size=2, seed=seed)
        assert torch.equal(state, torch.random.get_rng_state()) and tokenizer.pad_token is None
        drawn.append(rows)
    assert drawn[0] == drawn[1] != drawn[2]


@contextmanager
def rows_read(model: PreTrainedModel) -> Iterator[list[list[int]]]:
    """The tokens that the model reads, row by row."""
    rows: list[list[int]] = []
    hook = model.register_forward_pre_hook(lambda _, arguments: rows.extend(arguments[0].tolist()))
    yield rows
    hook.remove()


YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{gold}}}}"
generation_kwargs: {{max_gen_toks: 3, until: ["\\n"], do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list: [{{name: {filter}, filter: [{{function: take_first}}]}}]
num_fewshot: 0
"""


def test_a_task_yaml_and_a_folder_of_them_beside_a_file(models, tokenizer, questions, tmp_path) -> None:
    for name, filter_name in (("one", "none"), ("two", "first")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "task.yaml").write_text(YAML.format(name=name, data=questions, filter=filter_name))
    tasks = [str(questions), str(tmp_path / "one" / "task.yaml"), str(tmp_path / "two")]
    student = {"student": models["student"]}
    found = run_benchmarks(student, tokenizer, tasks, shots=1, limit=None, batch_size=8, seed=0)
    assert {result.samples for result in found.results} == {len(QUESTIONS)}
    assert [(result.task, result.metric) for result in found.results] == [
        ("keywords", "acc"),
        ("keywords", "acc_norm"),
        ("one", "exact_match"),
        ("two", "exact_match,first"),
    ]
    assert found.shots == {"keywords": 1, "one": 0, "two": 0}, "a task that fixes its shots keeps them"
    with pytest.raises(UserError, match="expected each task once, found one twice"):
        run_benchmarks(student, tokenizer, tasks[1:2] * 2, shots=0, limit=1, batch_size=1, seed=0)


@pytest.mark.parametrize(
    "task, message",
    [
        ("missing.jsonl", r"expected a file, found none at .*missing\.jsonl"),
        ("missing.yaml", r"expected a file, found none at .*missing\.yaml"),
        ("empty", r"expected a folder with task YAMLs of lm-eval, found none"),
        ("broken.yaml", r"found .*broken\.yaml, which it cannot \(TypeError: .*no_such_field.*\)"),
        ("no_data.yaml", r"found .*no_data\.yaml, which it cannot \(FileNotFoundError: .*nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_said(task, message, models, tokenizer, connections, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.yaml").write_text("task: broken\nno_such_field: 1\n")
    (tmp_path / "no_data.yaml").write_text(YAML.format(name="no_data", data="nowhere.jsonl", filter="none"))
    with pytest.raises(UserError, match=message):
        run_benchmarks(models, tokenizer, [str(tmp_path / task)], shots=0, limit=1, batch_size=1, seed=0)


@pytest.mark.slow  # lm-eval reads all of its own tasks
def test_names_are_those_of_lm_eval(models, tokenizer, connections) -> None:
    with pytest.raises(UserError, match=r"found 'arc_esay'; near: .*arc_easy"):
        run_benchmarks(models, tokenizer, ["arc_esay"], shots=0, limit=1, batch_size=1, seed=0)
    with pytest.raises(UserError, match=r"found piqa, which it cannot \(ConnectionError: .* cannot be downloaded"):
        run_benchmarks(models, tokenizer, ["piqa"], shots=0, limit=1, batch_size=1, seed=0)


@pytest.mark.parametrize(
    "row, found",
    [
        ({"question": "a", "choices": ["b", "c"], "answer": 0}, "found no query, gold but question, choices, answer"),
        ({"query": 1, "choices": ["b", "c"], "gold": 0}, "found query 1"),
        ({"query": "a", "choices": ["b"], "gold": 0}, r"found choices \['b'\]"),
        ({"query": "a", "choices": ["b", ""], "gold": 0}, r"found choices \['b', ''\]"),
        ({"query": "a", "choices": "bc", "gold": 0}, "found choices 'bc'"),
        ({"query": "a", "choices": ["b", "c"], "gold": 2}, "found gold 2 for 2 choices"),
        ({"query": "a", "choices": ["b", "c"], "gold": -1}, "found gold -1"),
        ({"query": "a", "choices": ["b", "c"], "gold": "0"}, "found gold '0'"),
        ({"query": "a", "choices": ["b", "c"], "gold": True}, "found gold True"),
        (["a"], r"found b'\[\"a\"\]'"),
    ],
)
def test_a_wrong_column_is_named_with_its_line(row, found, tmp_path) -> None:
    path = write(tmp_path / "task.jsonl", [QUESTIONS[0], row])
    with pytest.raises(UserError, match=rf"task\.jsonl, line 2: expected .*query .*choices .*gold .*{found}"):
        choice_task(path, 0)


def test_a_file_of_other_text_and_too_many_examples_are_refused(tmp_path) -> None:
    path = write(tmp_path / "task.jsonl", QUESTIONS[:2])
    assert choice_task(path, 1)["task"] == "task"
    with pytest.raises(UserError, match="expected more than 2 questions for 2 solved examples, found 2"):
        choice_task(path, 2)
    path.write_bytes(b"query,\xff\n")
    with pytest.raises(UserError, match=r"line 1: .* found what is not JSON"):
        choice_task(path, 0)


def test_a_missing_extra_is_said(monkeypatch, models, tokenizer, questions) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm-eval, found it not installed; pip install 'linearize\[eval\]'"):
        run_benchmarks(models, tokenizer, [str(questions)], shots=0, limit=1, batch_size=1, seed=0)


def test_each_kind_of_warning_comes_once(models, tokenizer, questions, caplog) -> None:
    """Questions that do not fit are cut off, and lm-eval says so; what it says of every model stays unsaid."""
    long = [{**row, "query": row["query"] * 100} for row in QUESTIONS]
    write(questions, long)
    student = {"student": models["student"]}
    with caplog.at_level(logging.INFO):
        run_benchmarks(student, tokenizer, [str(questions)], shots=0, limit=2, batch_size=2, seed=0)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("lm_eval")]
    assert len(said) == 1 and "Truncating" in said[0]


def test_a_result_that_is_no_number_is_not_reported() -> None:
    with pytest.raises(FloatingPointError, match="wikitext: word_perplexity of student"):
        harness._results("student", {"wikitext": {"word_perplexity,none": float("inf"), "sample_len": 3}})
