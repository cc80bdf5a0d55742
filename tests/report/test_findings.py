"""The words of the verdict, from numbers whose meaning is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from linearize.evaluation.timings import Crossover, Speed, Spread
from linearize.report.findings import (
    copying,
    difference,
    far_context,
    faster,
    findings,
    generations,
    memory,
    outliers,
    recall,
    teacher_attention,
    verdict,
)
from linearize.report.load import RunFiles, load_run
from linearize.report.numbers import THIN
from linearize.report.unmeasured import missing_sections
from tests.report import sample
from tests.report.sample import interval

Read = Callable[..., RunFiles]
COPIES = Path(__file__).parent / "measured" / "pycode-5m"


def compared(other: str, mean: float, half: float) -> list[dict[str, Any]]:
    return [{"other": other, "overall": interval(mean, half), "beyond": None}]


def test_the_verdict_on_a_measured_run() -> None:
    """A real run, in the layout of copied files."""
    found = verdict(load_run(COPIES))
    assert [finding.kind for finding in found] == ["win", "loss", "win"]
    assert ["".join(finding.lead) for finding in found] == [
        "It is 0.006 nats per token better than the window-only control [0.00006, 0.011].",
        "It is 0.164 nats per token worse than its teacher [0.135, 0.197].",
        f"Its memory is constant, 780{THIN}KiB at every length measured from 272 to 1,024 tokens; less than the "
        "teacher's from 131 tokens on.",
    ]
    assert "perplexity 17.9" in found[1].words and "798,768 bytes" in found[2].words


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
    found = difference(read(comparisons=compared("window_finetuned", -0.02, 0.005)), "window_finetuned")
    assert found is not None and "interval 0.015 to 0.025 (perplexity 2.0" in found.words and "lower)" in found.words
    assert difference(read(comparisons=[]), "window_finetuned") is None


@pytest.mark.parametrize(
    "share, kind", [((0.7, 0.1), "win"), ((0.3, 0.1), "loss"), ((0.6, 0.2), "open"), ((0.4, 0.2), "open")]
)
def test_a_share_is_kept_or_lost_where_its_interval_is_on_one_side_of_a_half(
    read: Read, share: tuple[float, float], kind: str
) -> None:
    gains = {"teacher_gain": interval(0.2, 0.02), "student_gain": interval(0.1, 0.02), "against": ["window", "teacher"]}
    run = read(far_context={"share": interval(*share), **gains})
    found = far_context(run)
    assert found is not None and found.kind == kind
    assert "teacher 0.200 [0.180, 0.220], student 0.100 [0.080, 0.120]" in found.words
    assert ", compared with untrained models: the gain of fine-tuning counts as kept (" in found.words


def test_what_cannot_be_kept_or_measured_is_said(read: Read) -> None:
    nothing = {"teacher_gain": interval(0.01, 0.02), "student_gain": interval(0.0, 0.02), "share": None}
    run = read(far_context=nothing | {"against": ["window_finetuned", "teacher_finetuned"]}, copying=nothing)
    for found in (far_context(run), copying(run)):
        assert (
            found is not None
            and found.kind == "fact"
            and found.words.endswith("0.010 [\u22120.010, 0.030] nats per token.")
        )
    measured = sample.evaluation()["measured"]
    for line in measured:
        line["quality"]["beyond_missing"] = "no token stands more than 64 tokens into its document"
    found = far_context(read(far_context=None, measured=measured))
    assert found is not None and "cannot be measured on this text: no token stands" in found.words
    assert copying(read(copying=None)) is None


def speeds(student: list[int], teacher: list[int], decode: tuple[float, float] = (1.0, 2.0)) -> list[Speed]:
    def spread(seconds: float) -> Spread:
        return Spread(seconds, 0.9 * seconds, 1.1 * seconds)

    return [
        Speed(model, 100 * (i + 1), spread(seconds), spread(seconds), size, new_tokens=0)
        for model, sizes, seconds in (("student", student, decode[0]), ("teacher", teacher, decode[1]))
        for i, size in enumerate(sizes)
    ]


def test_memory_is_constant_grows_or_is_more_than_the_teachers(read: Read) -> None:
    constant = memory(speeds([50, 50], [100, 200]))
    assert constant is not None and constant.kind == "win"
    assert constant.words == (
        "Memory is constant: 50 bytes at every length measured from 100 to 200 tokens; at 200 tokens that is "
        f"25{THIN}% of the teacher's 200 bytes, which grow by 1 per token; less than the teacher's from 51 tokens on."
    )
    growing = memory(speeds([50, 90], [100, 200]))
    assert growing is not None and growing.kind == "win" and "grows from 50 to 90 bytes" in growing.words
    larger = memory(speeds([800, 900], [100, 200]))
    assert larger is not None and larger.kind == "loss"
    assert f"450{THIN}% of the teacher's 200 bytes" in larger.words
    assert larger.words.endswith("never less than the teacher's.")
    assert memory([]) is None and memory(speeds([5], [5])) is None


def test_speed_is_told_apart_only_where_no_repeats_overlap(read: Read) -> None:
    def said(decode: tuple[float, float]) -> list[str]:
        run = read(speed=list(map(asdict, speeds([50, 50], [100, 200], decode))))
        return [finding.kind for finding in findings(run) if "Generation after 200 tokens" in finding.words]

    assert said((1.0, 2.0)) == ["win"]
    assert said((2.0, 1.0)) == ["loss"]
    assert said((1.0, 1.1)) == ["open"]
    ahead = [finding.words for finding in faster(speeds([50, 50], [100, 200]), Crossover(prefill=125, decode=None))]
    assert ahead[0].endswith("; ahead from about 125 tokens on.") and "ahead" not in ahead[1]
    words = [finding.words for finding in findings(load_run(COPIES))]
    assert (
        "Prefill of 1,008 tokens is slower: student 89.0 ms [88.1, 95.8], teacher 81.1 ms [79.7, 82.2] (median, "
        "minimum, maximum)." in words
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
    assert len(found) == 17
    assert all(any(c.isdigit() for c in finding.words) for finding in found)


# --- the closer look --------------------------------------------------------------------------------------------------


def test_recall_is_told_with_what_it_is_measured_against(read: Read) -> None:
    run = read()
    task = run.results.retrieval[0]

    def said(**changes: Any) -> str:
        found = recall(run, replace(task, **changes))
        assert (found.kind == "fact") == (changes != {})
        return found.words

    assert said() == (
        f"Recall, passkey: beyond the window of 64 tokens the student is right in 17{THIN}% [14, 20] of answers, the "
        f"teacher in 91{THIN}% [89, 93] (by guessing 1.0{THIN}%); 18{THIN}% [14, 22] of the teacher's ability is kept."
    )
    assert f"(with the window alone 1.0{THIN}%)" in said(
        models=task.models | {"window": [[0.0] * 5] * 5}, recovery=None
    )
    assert said(recovery=None).endswith("; not measurable with this teacher.")
    assert said(teacher_share=None, recovery=None).endswith("of answers; no teacher.")
    shares = dict.fromkeys(("student_share", "teacher_share", "recovery"))
    assert said(**shares) == "Recall, passkey: too few tests beyond the window of 64 tokens fit the model's positions."


@pytest.mark.parametrize(
    "changed, words",
    [
        ({}, f"The teacher gives its first token 31{THIN}% of its attention, and more than half in 75 of 270 query "
         "heads: every window needs sinks. The entropy of its attention is 2.59 nats, and "
         f"29{THIN}% lies on other tokens beyond the last 64: it is spread, so longer windows help."),
        (dict(first_token=0.0003, sink_heads=0, beyond_near=0.16, entropy=0.123),
         f"The teacher gives its first token <1{THIN}% of its attention, and more than half in 0 of 270 query heads: "
         "windows need no sinks. The entropy of its attention is 0.12 nats, and "
         f"16{THIN}% lies on other tokens beyond the last 64."),
    ],
)  # fmt: skip
def test_what_the_teachers_attention_means(read: Read, changed: dict[str, float], words: str) -> None:
    found = teacher_attention(read(teacher_attention=sample.ATTENTION | changed))
    assert found is not None and (found.kind, found.words) == ("fact", words)
    assert teacher_attention(read(teacher_attention=None)) is None


def test_heads_that_stand_out_are_named_beside_the_median(read: Read) -> None:
    def named(*layers: list[float]) -> str:
        fidelity = [{"layer": layer, "output_relative": errors} for layer, errors in enumerate(layers, start=3)]
        found = outliers(read(fidelity={"tokens": 4096, "layers": fidelity}))
        return "" if found is None else found.words

    words = named([0.01, 0.01, 0.372], [0.02, 0.2, 0.02, 0.04])
    assert f": layer 3 head 2 (37.2{THIN}%), layer 4 head 1 (20.0{THIN}%) of" in words
    assert words.endswith(f"the median head has 2.0{THIN}%.")
    assert not named([0.1] * 8, [0.5]), "not over five times the median"
    assert not named([0.001] * 8, [0.019]), "less than 2 % of the mean square"
    assert named([float(head > 30) for head in range(50)]).count("head ") == 10 + 1
    assert outliers(read(fidelity=None)) is None


def test_generations_are_told_by_their_common_beginning(read: Read) -> None:
    found = generations(read())
    assert found is not None and "agree for the first 13.2 [10.1, 16.3] of 48 tokens" in found.words


def test_what_was_not_measured_is_one_sentence_with_its_reasons(read: Read) -> None:
    assert missing_sections(read()) == []
    few = read(tasks=None, retrieval=[], missing=["teacher, fine-tuned"], not_measured={"tasks": "none asked for."})
    words = "Not measured: teacher, fine-tuned; recall over distances; public benchmarks (none asked for)."
    assert missing_sections(few) == [words]
