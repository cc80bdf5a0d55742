from __future__ import annotations

from linearize.evaluation.perplexity import Interval
from linearize.evaluation.words import in_words, interval_text


def test_interval_text() -> None:
    assert interval_text(Interval(2.7361, 2.7012, 2.7704)) == "2.736 [2.70, 2.77]"


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
