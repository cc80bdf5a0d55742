"""Benchmarks of whole models run, on a tiny model, and say what they found."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM

from benchmarks import turns
from linearize.evaluation import harness
from linearize.evaluation.harness import BenchmarkResult, Benchmarks
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a script of benchmarks/, which is on the path within the test; the JSON that it writes."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def call(script: str, *arguments: object) -> Any:
        results = tmp_path / "results.json"
        more = ["--threads", torch.get_num_threads(), "--json", results]
        monkeypatch.setattr(sys, "argv", [script, *map(str, [*arguments, *more])])
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
        return json.loads(results.read_text())

    return call


SCRIPTS = sorted(set(BENCHMARKS.glob("*.py")) - {BENCHMARKS / "presses.py"})  # runs in kvpress's own environment


@pytest.mark.usefixtures("benchmark")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_each_script_can_be_loaded(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in SCRIPTS:  # a folder of tests may have been imported by the same name
        monkeypatch.delitem(sys.modules, other.stem, raising=False)
    runpy.run_path(str(script), run_name="loaded")


def test_calls_take_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scripted clock: the n-th call of all takes n s, and what comes between two calls is not counted."""
    called: list[str] = []
    clock = iter(time for n in range(1, 7) for time in (100.0 * n, 100.0 * n + n))
    monkeypatch.setattr(turns, "now", lambda: next(clock))
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    assert turns.seconds_in_turns(calls, 2, lambda: called.append("|")) == {"a": [4.0, 5.0], "b": [3.0, 6.0]}
    assert "".join(called) == "a|b|b|a|a|b|"


def test_whole_models(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--lengths", 8, 24, "--batch", 1, 3, "--repeats", 3]
    recipes = ["lolcats", "recommended", "recommended:full"]
    found = benchmark("models", "--model", tiny.teacher_folder(), "--recipes", *recipes, *arguments)
    cases = [(r["what"], r["batch"], r["length"], r["recipe"]) for r in found["results"]]
    expected = [(p, b, n, r) for p in ("prefill", "decode") for b in (1, 3) for n in (8, 24) for r in recipes]
    assert cases == expected
    for row in found["results"]:
        least, greatest = (row["teacher"][a] / row["student"][b] for a, b in (("low", "high"), ("high", "low")))
        assert least <= row["times_faster"]["low"] <= row["times_faster"]["median"] <= row["times_faster"]["high"]
        assert row["times_faster"]["high"] <= greatest
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| pass | batch | recipe | 8 | 24 |" and len(lines) == 2 + len(cases) // 2
    assert lines[2].startswith("| prefill | 1 | lolcats | ") and lines[-1].startswith(
        "| decode | 3 | recommended:full | "
    )


@pytest.mark.slow
def test_batches(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--recipes", "lolcats", "--lengths", 8, 24, "--most", 5, "--repeats", 2]
    found = benchmark("batches", "--model", tiny.teacher_folder(), *arguments)["results"]
    assert [(row["model"], row["length"], row["batch"]) for row in found] == [
        (name, length, 5) for length in (8, 24) for name in ("teacher", "lolcats")
    ]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[-1].startswith("| lolcats | 24 | 5 | ")


def test_the_largest_batch(benchmark: Any) -> None:
    largest = runpy.run_path(str(BENCHMARKS / "batches.py"))["largest"]
    for size in (0, 1, 2, 3, 5, 16, 17, 31, 33, 100, 1000, 12345):
        asked = []
        found = largest(lambda batch, size=size, asked=asked: asked.append(batch) or batch <= size, 10_000)
        assert min(size, 10_000) * 15 / 16 <= found <= min(size, 10_000)
        assert max(asked) <= 10_000 and len(asked) == len(set(asked)) <= 20


def test_training(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recipes, arguments = ["lolcats", "recommended"], ["--length", 48, "--batch", 2, "--repeats", 2]
    found = benchmark("training", "--model", tiny.teacher_folder(), "--recipes", *recipes, *arguments)
    stages = [(row["recipe"], row["stage"]) for row in found["results"]]
    assert stages == [("lolcats", "transfer"), ("lolcats", "LoRA"), ("recommended", "all weights")]
    for row in found["results"]:
        assert row["times"]["median"] > 0 and row["teacher_peak_bytes"] > 0
        least, greatest = (row["student"][a] / row["teacher"][b] for a, b in (("low", "high"), ("high", "low")))
        assert least <= row["times"]["low"] <= row["times"]["high"] <= greatest
    # A forward pass holds no graph, transfer that of a layer, fine-tuning of the teacher its own.
    transfer, lora, _ = found["results"]
    assert transfer["teacher_peak_bytes"] < transfer["student_peak_bytes"]
    assert transfer["teacher_peak_bytes"] < lora["teacher_peak_bytes"]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(stages)


@pytest.mark.parametrize("what", ["prefill", "decode"])
def test_profiles(benchmark: Any, what: str) -> None:
    arguments = ["--length", 16, "--repeats", 1, "--recipes", "lolcats", "--pass", what]
    found = benchmark("profiles", "--model", tiny.teacher_folder(), *arguments)
    assert [row["model"] for row in found["results"]] == ["teacher", "lolcats"]
    for row in found["results"]:
        assert row["operations"] == pytest.approx(row["products"] + sum(row["others"].values()))
        assert 0 < row["products"] < row["operations"] and 0 < row["limit"] < row["seconds"]["high"]


@pytest.mark.usefixtures("benchmark")
def test_what_is_multiplied() -> None:
    flops = runpy.run_path(str(BENCHMARKS / "profiles.py"))["flops"]
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 24, 16)
    attention = 2 * 2 * 2 * 4 * 8 * 24 * 16
    assert flops(lambda: scaled_dot_product_attention(q, k, k, enable_gqa=True)) == attention
    causal = 2 * 2 * 2 * 4 * (8 * 9 // 2) * 16
    assert flops(lambda: scaled_dot_product_attention(q, q, q, is_causal=True)) == causal
    assert flops(lambda: torch.randn(3, 4) @ torch.randn(4, 5)) == 2 * 3 * 4 * 5


def test_too_few_learned_positions(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark("models", "--model", tiny.gpt2_folder(), "--recipes", "lolcats", "--lengths", 256)
    assert "to fit its 256 learned positions, found 262" in capsys.readouterr().err


@pytest.mark.usefixtures("benchmark")
def test_what_a_step_comes_after() -> None:
    models = runpy.run_path(str(BENCHMARKS / "models.py"))
    teacher = tiny.llama()
    student = models["make_student"](teacher, tiny.recipe(layers__keep_softmax=[1]))
    with torch.no_grad():
        caches = models["random_cache"](teacher, 3, 40), models["filled_cache"](student, 3, 40)
        for model, cache in zip((teacher, student), caches, strict=True):
            assert cache.get_seq_length() == 40
            models["decode_call"](model, cache, 3)()
            assert cache.get_seq_length() == 41
            assert cache.layers[1].keys.shape == (3, 2, 41, 8)


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    """What each of two hands to the others in a step: its gradients, losses, and a mark for each parameter."""
    results = tmp_path / "results.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--model", tiny.teacher_folder(), "--recipes", "lolcats", "--length", "48", "--repeats", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(BENCHMARKS.parent / x) for x in ("src", "."))}
    command = [*launcher, str(BENCHMARKS / "processes.py"), *arguments, "--json", str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())["results"]
    assert [row["stage"] for row in found] == ["transfer", "LoRA"]
    for row in found:
        assert row["processes"] == 2 and 4 * row["trained"] < row["exchanged"] < 4 * row["trained"] + 200


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Questions for even numbers are answered right, token by token; the lengths of what is generated are collected."""
    lengths: list[int] = []

    def generate(self: Any, ids: torch.Tensor, attention_mask: torch.Tensor, stopping_criteria: Any) -> torch.Tensor:
        assert attention_mask.shape == ids.shape and attention_mask.all()
        assert self.generation_config.max_new_tokens == 128 and not self.generation_config.do_sample
        (criterion,) = stopping_criteria
        texts = [sample.value if int(sample.value) % 2 == 0 else "no" for sample in criterion.samples]
        tokens = [tiny.tokens(f" {text}.".ljust(128))[0] for text in texts]
        prompt = ids.shape[1]
        for step in range(128):
            ids = torch.cat([ids, torch.stack([row[step] for row in tokens])[:, None]], dim=1)
            if stopping_criteria(ids, None).all():
                break
        lengths.append(ids.shape[1] - prompt)
        return ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    return lengths


def ruler_arguments(tmp_path: Path, *more: object) -> list[object]:
    text = tmp_path / "text.txt"
    text.write_text("Some words of a text. " * 200)
    options = ["--text", text, "--lengths", 800, "--tasks", "niah_single_2", "--samples", 5]
    return [f"big={tiny.teacher_folder()}", *more, *options]


def test_ruler(benchmark: Any, answers: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = benchmark("ruler", *ruler_arguments(tmp_path), "--batch", 1)["rows"]
    asked = sys.modules["ruler_tasks"].build_samples(
        "niah_single_2", byte_tokenizer(), (tmp_path / "text.txt").read_text(), length=800, count=5, chat=False
    )
    right = sum(int(sample.value) % 2 == 0 for sample in asked)
    assert 0 < right < 5
    keys = ("model", "prefill", "chat_template", "task", "length", "right")
    assert [[row[key] for key in keys] for row in rows] == [["big", None, False, "niah_single_2", 800, right]]
    # A space and 7 digits: then a generation ends.
    assert sorted(answers) == [8] * right + [128] * (5 - right)
    assert f"| big | - | `niah_single_2` | {20 * right}.0 [" in capsys.readouterr().out

    answers.clear()
    assert benchmark("ruler", *ruler_arguments(tmp_path), "--batch", 8)["rows"] == rows and not answers
    student = f"small={tiny.teacher_folder()}"
    both = benchmark("ruler", *ruler_arguments(tmp_path, student), "--batch", 8)["rows"]
    assert both[0] == rows[0] and (both[1]["model"], both[1]["right"]) == ("small", right)
    assert 128 in answers and len(answers) < 5
    page = (tmp_path / "results.md").read_text()
    assert re.search(rf"\| small \| - \| `niah_single_2` \| {20 * right}\.0 \[.*\], 100% \|", page)
    assert page in capsys.readouterr().out


def test_ruler_goes_on_where_it_was_interrupted(
    benchmark: Any, answers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*ruler_arguments(tmp_path), "--lengths", 800, 900]
    generate = LlamaForCausalLM.generate

    def interrupted(self: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        if ids.shape[1] > 700:
            raise KeyboardInterrupt
        return generate(self, ids, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            benchmark("ruler", *arguments)
    written = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["length"] for row in written] == [800]
    answers.clear()
    rows = benchmark("ruler", *arguments)["rows"]
    assert rows[0] == written[0] and rows[1]["length"] == 900 and answers


def test_rows_of_another_setting_or_other_weights(
    benchmark: Any, answers: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = benchmark("ruler", *ruler_arguments(tmp_path))["rows"]
    with pytest.raises(SystemExit, match="2"):
        benchmark("ruler", *ruler_arguments(tmp_path), "--samples", 6)
    assert "expected rows with samples 6, found 5; give another --json" in capsys.readouterr().err
    contents = json.loads((tmp_path / "results.json").read_text())
    contents["rows"][0]["weights"] = "others"
    (tmp_path / "results.json").write_text(json.dumps(contents))
    again = benchmark("ruler", *ruler_arguments(tmp_path))["rows"]
    assert len(again) == 1 and again[0]["weights"] == rows[0]["weights"]


def test_a_window_beside_the_teacher(benchmark: Any, answers: list[int], tmp_path: Path) -> None:
    rows = benchmark("ruler", *ruler_arguments(tmp_path), "--window", 12, 16)["rows"]
    assert [row["model"] for row in rows] == ["big", "window of 8 and 4 sinks", "window of 12 and 4 sinks"]
    assert len({row["weights"] for row in rows}) == 3


@pytest.mark.usefixtures("benchmark")
def test_which_keys_a_window_reads() -> None:
    contenders = runpy.run_path(str(BENCHMARKS / "contenders.py"))
    student = contenders["window_control"](tiny.llama(layers=1), 12)
    ids = torch.randint(256, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        read = [
            not torch.equal(
                student(ids).logits[:, -1], student(ids.index_fill(1, torch.tensor([at]), 256)).logits[:, -1]
            )
            for at in range(30)
        ]
    assert read == [True] * 4 + [False] * 18 + [True] * 8


def test_how_converted_models_read_a_prompt(
    benchmark: Any, answers: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = runpy.run_path(str(BENCHMARKS / "contenders.py"))
    student = tiny.moved_student(tiny.llama())
    if not hasattr(student.config, "prefill"):
        arguments = [*ruler_arguments(tmp_path), "--window", 12, "--prefill", "full"]
        with pytest.raises(SystemExit, match="2"):
            benchmark("ruler", *arguments)
        assert "--prefill: expected a model with a config.prefill, found none in window of" in capsys.readouterr().err
    student.config.prefill = "streaming"
    named = contenders["_contender"]("student", student, None, "full")
    assert student.config.prefill == named.prefill == "full"
    assert contenders["_contender"]("student", student, None, None).prefill == "full"
    assert contenders["_contender"]("teacher", tiny.llama(), None, "full").prefill is None


def test_models_need_names_of_their_own(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark("ruler", *ruler_arguments(tmp_path, f"big={tiny.teacher_folder()}"))
    assert "models: expected a name for each, found 'big' twice; give NAME=MODEL" in capsys.readouterr().err


def test_questions(benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def run_benchmarks(models: Any, tokenizer: Any, tasks: Any, **options: Any) -> Benchmarks:
        (name,), (task,) = models, tasks
        asked.append((name, task, options))
        values = {"acc": 0.5, "acc_norm": 0.25} if name == "big" else {"acc": 0.25, "acc_norm": 0.25}
        results = [BenchmarkResult(Path(task).stem, metric, name, x, None, 20) for metric, x in values.items()]
        return Benchmarks({}, results, {"lm_eval": "0"})

    monkeypatch.setattr(harness, "run_benchmarks", run_benchmarks)
    models, options = [f"{name}={tiny.teacher_folder()}" for name in ("big", "small")], ["--limit", 20]
    rows = benchmark("questions", *models, "--tasks", "x/piqa.jsonl", *options)["rows"]
    assert [(row["model"], row["task"], row["acc"], row["acc_norm"]) for row in rows] == [
        ("big", "piqa", 10, 5),
        ("small", "piqa", 5, 5),
    ]
    assert [(name, task) for name, task, _ in asked] == [("big", "x/piqa.jsonl"), ("small", "x/piqa.jsonl")]
    assert asked[0][2] == {"shots": 0, "limit": 20, "batch_size": 8, "seed": 0}
    lines = capsys.readouterr().out.splitlines()
    assert "| big | - | `piqa` | 20 | 50.0 [29.9, 70.1] | 25.0 [11.2, 46.9] |" in lines
    assert "| small | - | `piqa` | 20 | 25.0 [11.2, 46.9], 50% | 25.0 [11.2, 46.9], 100% |" in lines
    benchmark("questions", *models, "--tasks", "x/piqa.jsonl", *options)
    assert len(asked) == 2


def test_steps_as_generate_runs_them(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU nothing is compiled by itself."""
    arguments = ["--model", tiny.teacher_folder(), "--recipes", "lolcats", "--lengths", 8, 24]
    found = benchmark("generate", *arguments, "--new-tokens", 8, "--repeats", 2)
    names = ["teacher", "lolcats eager", "lolcats"]
    assert [(row["model"], row["length"]) for row in found["steps"]] == [(name, n) for n in (8, 24) for name in names]
    assert not any(row["compiled"] for row in found["steps"])
    assert all(0 < row["step"]["low"] <= row["step"]["high"] for row in found["steps"])
    assert re.search(r"\| lolcats eager \| 24 \| no \| [\d.]+ \([\d.]+-[\d.]+\) \|", capsys.readouterr().out)
