"""Format numbers as text. A number that was not measured is an en dash; negative numbers have a minus sign."""

from __future__ import annotations

from math import isfinite, log10

from linearize.evaluation.intervals import Interval
from linearize.evaluation.scores import TaskScores
from linearize.planning.results import size as binary_size

Number = int | float  # in a JSON file

MINUS, DASH, THIN = "\N{MINUS SIGN}", "\N{EN DASH}", "\N{NARROW NO-BREAK SPACE}"


def number(value: Number | None, decimals: int = 3) -> str:
    """Return a rounded number; if that would be 0, with one significant digit: -0.00006."""
    if value is None or not isfinite(value):
        return DASH
    text = f"{abs(value):,.{decimals}f}"
    if value and not float(text.replace(",", "")):
        text = f"{abs(value):.{int(-log10(abs(value))) + 1}f}"
    return (MINUS if value < 0 else "") + text


def loss(value: Number) -> str:
    """Return a loss with four digits or more: 2.531, but 630.0 and 31,500."""
    return number(value, 3 if abs(value) < 100 else 1 if abs(value) < 10000 else 0)


def signed(value: Number | None, decimals: int = 3) -> str:
    text = number(value, decimals)
    return f"+{text}" if value is not None and isfinite(value) and value > 0 else text


def with_interval(found: Interval | None, decimals: int = 3, sign: bool = False) -> str:
    """Return a mean and its interval: ``2.531 [2.323, 2.736]``."""
    if found is None:
        return DASH
    write = signed if sign else number
    return f"{write(found.mean, decimals)} [{write(found.low, decimals)}, {write(found.high, decimals)}]"


def percent(found: Interval | None) -> str:
    """Return a share as ``9 % [5, 12]``; with a decimal if the interval is narrower than one percent."""
    if found is None:
        return DASH
    decimals = 0 if 100 * (found.high - found.low) >= 1 else 1
    mean, low, high = (number(100 * x, decimals) for x in (found.mean, found.low, found.high))
    return f"{mean}{THIN}% [{low}, {high}]"


def share(value: Number | None, decimals: int = 0) -> str:
    """Return a share as ``61 %``; shares that would be rounded to 0 are ``<1 %``."""
    if value is None or not isfinite(value):
        return DASH
    least = 10**-decimals
    small = 0 < 100 * value < least / 2
    return f"{'<' if small else ''}{number(least if small else 100 * value, decimals)}{THIN}%"


def count(value: Number | None) -> str:
    """Return a count as ``49,048``."""
    return DASH if value is None else f"{value:,.0f}"


def scaled(value: Number | None, digits: int = 3) -> str:
    """A few digits and a decimal prefix: ``6.29 M``, ``37.1 T``."""
    if value is None or not isfinite(value):
        return DASH
    rounded = float(f"{value:.{digits}g}")
    power = 0 if abs(rounded) < 1000 else min(int(log10(abs(rounded)) / 3), 5)
    prefix = ("", "k", "M", "G", "T", "P")[power]
    return f"{rounded / 1000**power:g}{THIN}{prefix}".rstrip(THIN).replace("-", MINUS)


def memory_size(value: Number | None) -> str:
    """Bytes, in the units of `linearize plan`: ``6.29 MiB``."""
    return DASH if value is None else binary_size(int(value)).replace(" ", THIN)


def milliseconds(seconds: Number) -> str:
    """Return milliseconds with three digits or more: ``4.60``, ``81.1``, ``1,234``."""
    return f"{1e3 * seconds:#.3g}".rstrip(".") if seconds < 0.9995 else f"{1e3 * seconds:,.0f}"


def duration(seconds: Number | None) -> str:
    """Return a duration as ``12 min``."""
    if seconds is None:
        return DASH
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g}{THIN}{unit}"
    return f"{seconds:.3g}{THIN}s"


def short(value: Number | None) -> str:
    """Return a number in at most five characters, for the cells of a heat map."""
    if value is None or not isfinite(value):
        return DASH
    size = abs(value)
    text = f"{size:.2f}" if size < 9.995 else f"{size:.0f}" if size < 999.5 else scaled(size).replace(THIN, "")
    return (MINUS if value < 0 and text != "0.00" else "") + text


def capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"


def plain(value: object) -> str:
    """Return a field of a recipe, a plan or a version as text."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value)) or "none"
    return str(value)


def what(task: TaskScores) -> str:
    """Return the kind of task as text."""
    return task.type.replace("_", " ")
