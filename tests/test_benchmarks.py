"""Benchmarks of whole models run, on a tiny model, and say what they found."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests import tiny

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


def test_whole_models(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--lengths", 8, 24, "--batch", 1, 3, "--repeats", 3]
    recipes = ["lolcats", "recommended"]
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
    assert lines[2].startswith("| prefill | 1 | lolcats | ") and lines[-1].startswith("| decode | 3 | recommended | ")


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
