"""The words of the verdict, from numbers whose meaning is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linearize.report import RunFiles, load_run
from linearize.report.findings import copying, difference, far_context, findings, memory, verdict
from linearize.report.numbers import THIN
from tests.report.sample import interval

Read = Callable[..., RunFiles]
COPIES = Path(__file__).parent / "measured" / "pycode-5m"


def compared(other: str, mean: float, half: float) -> list[dict[str, Any]]:
    return [{"other": other, "overall": interval(mean, half), "beyond": None, "words": ""}]


def test_the_verdict_on_a_measured_run() -> None:
    """Of a real run, in the layout of copied files."""
    found = verdict(load_run(COPIES))
    assert [finding.kind for finding in found] == ["win", "loss", "loss", "win"]
    assert ["".join(finding.lead) for finding in found] == [
        "It is 0.006 nats per token better than the window-only control [0.00006, 0.011].",
        "It is 0.164 nats per token worse than its teacher [0.135, 0.197].",
        f"It keeps 9{THIN}% [5, 12] of what the teacher gains from context beyond the window of 64 tokens.",
        f"Its memory is constant, 799{THIN}kB at every length measured from 256 to 1,008 tokens; that is less than the "
        "teacher's at each of them, and by the plan from 130 tokens on.",
    ]
    assert "perplexity 17.9" in found[1].words and "798,768 bytes" in found[3].words


@pytest.mark.parametrize(
    "mean, kind, words",
    [
        (-0.02, "win", "0.020 nats per token better than its teacher"),
        (0.02, "loss", "0.020 nats per token worse than its teacher"),
        (-0.005, "open", "cannot be told apart from its teacher"),
        (0.005, "open", "cannot be told apart from its teacher"),
    ],
)
def test_a_difference_counts_where_its_interval_leaves_out_zero(read: Read, mean: float, kind: str, words: str) -> None:
    found = difference(read(comparisons=compared("teacher", mean, 0.01)), "teacher")
    assert found is not None and found.kind == kind
    assert words in found.words and f"95{THIN}% interval" in found.words


def test_the_bounds_of_a_gain_are_given_from_near_to_far(read: Read) -> None:
    found = difference(read(comparisons=compared("window_lora", -0.02, 0.005)), "window_lora")
    assert found is not None and "interval 0.015 to 0.025 (perplexity 2.0" in found.words and "lower)" in found.words
    assert difference(read(comparisons=[]), "window_lora") is None


@pytest.mark.parametrize(
    "share, kind", [((0.7, 0.1), "win"), ((0.3, 0.1), "loss"), ((0.6, 0.2), "open"), ((0.4, 0.2), "open")]
)
def test_a_share_is_kept_or_lost_where_its_interval_is_on_one_side_of_a_half(
    read: Read, share: tuple[float, float], kind: str
) -> None:
    gains = {"teacher_gain": interval(0.2, 0.02), "student_gain": interval(0.1, 0.02)}
    run = read(far_context={"measurable": True, "share": interval(*share), "words": "", **gains})
    found = far_context(run)
    assert found is not None and found.kind == kind
    assert "teacher 0.200 [0.180, 0.220], student 0.100 [0.080, 0.120]" in found.words


def test_what_is_not_measurable_is_not_spoken_of(read: Read) -> None:
    nothing = {"measurable": False, "teacher_gain": None, "student_gain": None, "share": None, "words": "too short"}
    run = read(far_context=nothing, copying=nothing)
    assert far_context(run) is None and copying(run) is None


def speeds(student: list[int], teacher: list[int], decode: tuple[float, float] = (1.0, 2.0)) -> list[dict[str, Any]]:
    return [
        {"model": model, "prompt_length": 100 * (i + 1), "cache_bytes": size}
        | {key: {"median": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds} for key in ("prefill", "decode")}
        for model, sizes, seconds in (("student", student, decode[0]), ("teacher", teacher, decode[1]))
        for i, size in enumerate(sizes)
    ]


def test_memory_is_constant_grows_or_is_more_than_the_teachers(read: Read) -> None:
    constant = memory(read(speed=speeds([50, 50], [100, 200]), crossover={"memory": 100, "words": ""}))
    assert constant is not None and constant.kind == "win"
    assert constant.words == (
        "Memory is constant: 50 bytes at every length measured from 100 to 200 tokens; at 200 that is 4 times less "
        "than the teacher's 200 bytes; that is less than the teacher's at each of them, and by the plan from 130 "
        "tokens on."
    )
    later = memory(read(speed=speeds([150, 150], [100, 200]), crossover={"memory": 147, "words": ""}))
    assert later is not None and later.words.endswith("it is less than the teacher's from about 147 tokens on.")
    growing = memory(read(speed=speeds([50, 90], [100, 200])))
    assert growing is not None and growing.kind == "win" and "grows from 50 to 90 bytes" in growing.words
    larger = memory(read(speed=speeds([800, 800], [100, 200]), crossover={"memory": None, "words": ""}))
    assert larger is not None and larger.kind == "loss"
    assert larger.words.endswith("4 times as much as the teacher's 200 bytes.")
    assert memory(read(speed=[])) is None and memory(read(speed=speeds([5], [5]))) is None


def test_speed_is_told_apart_only_where_no_repeats_overlap(read: Read) -> None:
    def said(decode: tuple[float, float]) -> list[str]:
        run = read(speed=speeds([50, 50], [100, 200], decode))
        return [finding.kind for finding in findings(run) if "Generation after 200 tokens" in finding.words]

    assert said((1.0, 2.0)) == ["win"]
    assert said((2.0, 1.0)) == ["loss"]
    assert said((1.0, 1.1)) == ["open"]
    words = [finding.words for finding in findings(load_run(COPIES))]
    assert (
        "Prefill of 1,008 tokens is slower: student 89.0 ms [88.1, 95.8], teacher 81.1 ms [79.7, 82.2] (median, least, "
        "greatest)." in words
    )


def test_tasks_are_compared_with_the_error_of_both(read: Read) -> None:
    def kind(student: float, stderr: float | None) -> list[str]:
        scores = (("teacher", 0.5, 0.01), ("student", student, stderr))
        results = [
            {"task": "piqa", "metric": "acc", "candidate": name, "value": value, "stderr": error, "samples": 9}
            for name, value, error in scores
        ]
        run = read(tasks={"shots": {}, "results": results, "versions": {}})
        return [finding.kind for finding in findings(run) if finding.words.startswith("piqa")]

    # 1.96 * sqrt(0.01^2 + 0.01^2) is 2.8 points.
    assert kind(0.47, 0.01) == ["loss"] and kind(0.48, 0.01) == ["open"] and kind(0.53, 0.01) == ["win"]
    assert kind(0.1, None) == []


def test_every_finding_carries_a_number(read: Read) -> None:
    found = findings(read())
    assert len(found) == 13
    assert all(any(c.isdigit() for c in finding.words) for finding in found)
