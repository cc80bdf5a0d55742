"""Intervals and differences in words that a newcomer understands."""

from __future__ import annotations

from math import exp

from linearize.evaluation.perplexity import Interval


def interval_text(interval: Interval) -> str:
    """``2.736 [2.70, 2.77]``."""
    return f"{interval.mean:.3f} [{interval.low:.2f}, {interval.high:.2f}]"


def in_words(label: str, reference: str, difference: Interval) -> str:
    """What a paired difference (`label`'s loss minus `reference`'s) means, for a newcomer."""
    mean, low, high = difference.mean, difference.low, difference.high
    if low <= 0 <= high:
        return (
            f"{label} and {reference}: no difference that this much text could show "
            f"({mean:+.3f} nats per token, 95 % interval {low:+.3f} to {high:+.3f})."
        )
    word, sign, change = ("worse", "more", "higher") if mean > 0 else ("better", "less", "lower")
    near, far = sorted((abs(low), abs(high)))
    return (
        f"{label} is {word} than {reference}: {abs(mean):.3f} nats per token {sign} "
        f"(95 % interval {near:.3f} to {far:.3f}), a perplexity {abs(exp(mean) - 1):.1%} {change}."
    )
