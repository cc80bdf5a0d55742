"""The words and numbers of the short evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from linearize.report.findings import prefill, short_memory, short_quality, short_speed, verdict
from linearize.report.load import RunFiles, load_run
from linearize.report.overview import key_numbers
from linearize.report.page import write_report
from linearize.report.tables import of_run
from linearize.report.unmeasured import missing_sections
from tests.report.sample import interval, spread


def reading(way: str | None, loss: float, difference: float | None, needles: float | None, size: int) -> dict[str, Any]:
    return {
        "model": "teacher" if way is None else "student",
        "prefill": way,
        "loss": interval(loss, 0.1),
        "difference": None if difference is None else interval(difference, 0.02),
        "needles": None if needles is None else interval(needles, 0.1),
        "prefill_seconds": spread(2.0),
        "decode_seconds": spread(0.05),
        "cache_bytes": size,
    }


def evaluation(**changes: Any) -> dict[str, Any]:
    readings = [
        reading(None, 3.0, None, 1.0, 40_000_000),
        reading("streaming", 3.15, 0.15, 0.75, 4_000_000),
        reading("full", 3.01, 0.01, 0.875, 4_000_000),
    ]
    short = {"context": 1024, "continuation": 256, "rows": 16, "needles": 16, "saved_prefill": "streaming"}
    return {"window_size": 8, "short": short | {"readings": readings} | changes, "measured": [], "not_measured": {}}


def loaded(folder: Path, **changes: Any) -> RunFiles:
    (folder / "evaluation.json").write_text(json.dumps(evaluation(**changes)))
    return load_run(folder)


def test_quality_is_said_of_both_ways_to_read(tmp_path: Path) -> None:
    run = loaded(tmp_path)
    streaming, full = (short_quality(run, way) for way in ("streaming", "full"))
    assert streaming is not None and full is not None
    assert (streaming.kind, full.kind) == ("loss", "open")
    assert streaming.words == (
        "With prefill=streaming the student's loss after contexts of 1,024 tokens is +0.150 [+0.130, +0.170] nats per "
        "token compared with the teacher's, 12 of 16 needles found (teacher: 16 of 16)."
    )
    assert "14 of 16 needles found" in full.words
    assert [finding.kind for finding in verdict(run)] == ["loss", "open", "win"]


def test_the_saved_prefill_and_its_cost_are_said(tmp_path: Path) -> None:
    for saved, other in (("streaming", "full"), ("full", "streaming")):
        found = prefill(loaded(tmp_path, saved_prefill=saved))
        assert found is not None
        costs, choice = found.words.split(". ", 1)
        assert f"prefill={saved}" in costs and f"--prefill {other}" in choice
        assert ("constant memory" in costs) == (saved == "streaming")


def test_memory_and_speed(tmp_path: Path) -> None:
    run = loaded(tmp_path)
    memory, speed = short_memory(run), short_speed(run)
    assert memory is not None and speed is not None
    assert memory.words.replace("\N{NARROW NO-BREAK SPACE}", " ") == (
        "The student's memory after 1,024 tokens is 3.81 MiB, 10 % of the teacher's 38.1 MiB."
    )
    assert "teacher 2,000 and 50.0; student, streaming 2,000 and 50.0" in speed.words


def test_without_a_teacher_and_without_needles(tmp_path: Path) -> None:
    run = loaded(tmp_path, readings=[reading("streaming", 3.15, None, None, 4)], needles=0)
    found = short_quality(run, "streaming")
    assert found is not None and found.kind == "fact" and "needles" not in found.words
    assert short_quality(run, "full") is None and short_memory(run) is None
    (table,) = of_run(run)
    assert [row[3] for group in table.groups for row in group.rows] == ["\N{EN DASH}"]


def test_the_page_has_the_short_evaluation_and_says_what_the_long_one_adds(tmp_path: Path) -> None:
    run = loaded(tmp_path)
    (said,) = missing_sections(run)
    assert "evaluation.long=true" in said
    page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert ">Short evaluation</h2>" in page and ">Quality</h2>" not in page
    rows = {row[0]: row[1] for group in key_numbers([run]).groups for row in group.rows}
    assert rows["Student: loss of a continuation minus teacher's"] == "+0.150 [+0.130, +0.170]"


def test_a_run_without_enough_text_is_read_too(tmp_path: Path) -> None:
    found = evaluation() | {"short": None, "not_measured": {"short": "too little text"}}
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    assert missing_sections(load_run(tmp_path)) == ["Not measured: the short evaluation (too little text)."]


@pytest.mark.parametrize("changes", [{"measured": []}, {"short": None}])
def test_what_holds_no_measurement_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = evaluation() | changes
    if "measured" in changes:
        del found["short"]
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="expected measurements, found none"):
        load_run(tmp_path)
