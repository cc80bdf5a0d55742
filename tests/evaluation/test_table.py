from __future__ import annotations

import json
from io import StringIO

from rich.console import Console

from linearize.evaluation.perplexity import Interval, Quality
from linearize.evaluation.table import Row, in_words, interval_text, markdown, rich_table, to_json

TEACHER = Quality(Interval(2.7361, 2.7012, 2.7704), Interval(2.66, 2.61, 2.7), 80_000, 60_000, None)
SHORT = Quality(Interval(3.0, 2.9, 3.1), None, 100, 0, "no token stands 64 or more tokens into its document")
ROWS = [Row("teacher", TEACHER), Row("window | only", SHORT, "no [linear] part")]


def test_interval_text() -> None:
    assert interval_text(TEACHER.loss) == "2.736 [2.70, 2.77]"


def test_markdown_is_a_table_of_four_columns() -> None:
    lines = markdown(ROWS).splitlines()
    assert lines[0] == "| model | loss (nats/token) | beyond the window | note |"
    assert lines[1] == "| --- | --- | --- | --- |"
    assert lines[2] == "| teacher | 2.736 [2.70, 2.77] | 2.660 [2.61, 2.70] |  |"
    assert lines[3].startswith(r"| window \| only | 3.000 [2.90, 3.10] | no token stands 64")
    assert len(lines) == 4


def test_rich_table_shows_brackets_as_they_are() -> None:
    console = Console(width=200, file=StringIO())
    console.print(rich_table(ROWS, title="Quality"))
    shown = console.file.getvalue()
    for text in ("Quality", "2.736 [2.70, 2.77]", "no [linear] part", "no token stands 64"):
        assert text in shown


def test_json_holds_every_number() -> None:
    made = json.loads(json.dumps(to_json(ROWS), allow_nan=False))
    assert made[0]["quality"]["loss"] == {"mean": 2.7361, "low": 2.7012, "high": 2.7704}
    assert made[1]["quality"]["beyond"] is None and made[1]["quality"]["tokens"] == 100


def test_words_for_worse_better_and_undecided() -> None:
    worse = in_words("the student", "the teacher", Interval(0.05, 0.04, 0.06))
    assert worse == (
        "the student is worse than the teacher: 0.050 nats per token more (95 % interval 0.040 to 0.060), "
        "a perplexity 5.1% higher."
    )
    better = in_words("the student", "the window alone", Interval(-0.05, -0.06, -0.04))
    assert better == (
        "the student is better than the window alone: 0.050 nats per token less (95 % interval 0.040 to 0.060), "
        "a perplexity 4.9% lower."
    )
    undecided = in_words("a", "b", Interval(0.01, -0.01, 0.03))
    assert "no difference that this much text could show" in undecided and "-0.010 to +0.030" in undecided
