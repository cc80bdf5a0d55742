"""What the measurements say, in sentences that carry their numbers. No interval, no sentence.

A share counts as kept where its whole interval lies above one half and as lost where it lies below; a difference counts
where its interval leaves out zero. All else is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, isfinite, sqrt
from typing import Any

from linearize.report.finding import Finding, Kind, side_of_half
from linearize.report.load import RunFiles, interval
from linearize.report.numbers import THIN, count, milliseconds, number, percent, scaled, share, signed
from linearize.report.task_findings import main_findings, more_findings

_REFERENCES = {
    "teacher": ("its teacher", ""),
    "window_lora": ("the window-only control", " (finetuned alike, no linear part)"),
    "ablated": ("itself with the linear part switched off", ""),
}


def verdict(run: RunFiles) -> list[Finding]:
    """The few sentences that stand on top: the task, against the control and the teacher, beyond the window, memory."""
    found = (difference(run, "window_lora"), difference(run, "teacher"), far_context(run), memory(run))
    return [*main_findings(run), *(finding for finding in found if finding is not None)]


def findings(run: RunFiles) -> list[Finding]:
    """Everything that can be said, the verdict's own sentences first."""
    more = [difference(run, "ablated"), copying(run), *_retrieval(run), *_tasks(run), *_speed(run)]
    return [*verdict(run), *more_findings(run), *(finding for finding in more if finding is not None)]


def difference(run: RunFiles, other: str) -> Finding | None:
    """The student's loss against that of `other`, on the same tokens."""
    compared = run.comparison(other)
    found = interval(compared["overall"]) if compared else None
    if found is None:
        return None
    short, more = _REFERENCES.get(other, (other, ""))
    if found.low <= 0 <= found.high:
        numbers = f"{signed(found.mean)} nats per token"
        interval_words = f"95{THIN}% interval {signed(found.low)} to {signed(found.high)}"
        words = f"On this much text the student cannot be told apart from {short}{more}: {numbers}, {interval_words}."
        bounds = f" ({signed(found.mean)} nats per token [{signed(found.low)}, {signed(found.high)}])."
        return Finding("open", words, ("On this much text the student ", f"cannot be told apart from {short}", bounds))
    better = found.mean < 0
    near, far = sorted((abs(found.low), abs(found.high)))
    size = f"{number(abs(found.mean))} nats per token {'better' if better else 'worse'}"
    change = f"perplexity {share(abs(exp(found.mean) - 1), 1)} {'lower' if better else 'higher'}"
    words = f"The student is {size} than {short}{more}, 95{THIN}% interval {number(near)} to {number(far)} ({change})."
    lead = ("It is ", size, f" than {short} [{number(near)}, {number(far)}].")
    return Finding("win" if better else "loss", words, lead)


def far_context(run: RunFiles) -> Finding | None:
    """How much of the teacher's gain from context beyond the window the student has too."""
    where = f"context beyond the window of {count(run.window)} tokens"
    return _share(run.section("far_context"), f"what the teacher gains from {where}")


def copying(run: RunFiles) -> Finding | None:
    return _share(run.section("copying"), "the teacher's gain from copying random tokens seen beyond the window")


def _share(verdict: dict[str, Any] | None, what: str) -> Finding | None:
    found = interval(verdict["share"]) if verdict and verdict["measurable"] else None
    if verdict is None or found is None:
        return None
    gains = ", ".join(
        f"{who} {number(gain['mean'])} [{number(gain['low'])}, {number(gain['high'])}]"
        for who, gain in (("teacher", verdict["teacher_gain"]), ("student", verdict["student_gain"]))
        if gain is not None
    )
    words = f"The student keeps {percent(found)} of {what} (nats per token: {gains})."
    return Finding(side_of_half(found), words, ("It keeps ", percent(found), f" of {what}."))


def memory(run: RunFiles) -> Finding | None:
    """What the student holds at the measured lengths, and from which length on the teacher holds more."""
    student, teacher = ({s["prompt_length"]: s for s in speeds(run, who)} for who in ("student", "teacher"))
    lengths = sorted(student.keys() & teacher.keys())
    if len(lengths) < 2:
        return None
    short, long = lengths[0], lengths[-1]
    first, last, theirs = student[short]["cache_bytes"], student[long]["cache_bytes"], teacher[long]["cache_bytes"]
    constant = all(student[length]["cache_bytes"] == first for length in lengths)
    between = f"from {count(short)} to {count(long)} tokens"
    if constant:
        lead = ("Its memory is ", "constant", f", {scaled(first, 'B')} at every length measured {between}")
        words = f"Memory is constant: {count(first)} bytes at every length measured {between}"
    else:
        lead = ("Its memory ", "grows", f", {scaled(first, 'B')} to {scaled(last, 'B')} {between}")
        words = f"Memory grows from {count(first)} to {count(last)} bytes {between}"
    ratio = theirs / last
    compared = f"{ratio:.3g} times less than" if ratio >= 1 else f"{1 / ratio:.3g} times as much as"
    words += f"; at {count(long)} that is {compared} the teacher's {count(theirs)} bytes"
    less = ""
    crossing = (run.section("crossover") or {}).get("memory")
    planned = (run.plan or {}).get("break_even_tokens")
    if all(student[length]["cache_bytes"] < teacher[length]["cache_bytes"] for length in lengths):
        less = "; that is less than the teacher's at each of them"
        less += f", and by the plan from {count(planned)} tokens on" if planned is not None else ""
    elif crossing is not None:
        less = f"; it is less than the teacher's from about {count(crossing)} tokens on"
    return Finding("win" if ratio > 1 else "loss", f"{words}{less}.", (lead[0], lead[1], f"{lead[2]}{less}."))


def speeds(run: RunFiles, model: str) -> list[dict[str, Any]]:
    """Speed measurements of one model at the smallest batch size measured, by prompt length."""
    every = run.section("speed") or []
    smallest = min((entry.get("batch_size", 1) for entry in every), default=1)
    chosen = [entry for entry in every if entry["model"] == model and entry.get("batch_size", 1) == smallest]
    return sorted(chosen, key=lambda entry: entry["prompt_length"])


def _retrieval(run: RunFiles) -> Iterator[Finding]:
    for task in run.section("retrieval") or []:
        found = interval(task["recovery"]) if task["measurable"] else None
        if found is None:
            continue
        name = task["name"].replace("_", " ")
        student, teacher = (percent(interval(task[key])) for key in ("student_share", "teacher_share"))
        words = f"Recall, {name}: right in {student} of trials, the teacher in {teacher}; {percent(found)} recovered."
        yield Finding(side_of_half(found), words)


def _tasks(run: RunFiles) -> Iterator[Finding]:
    """Student minus teacher; the interval adds both standard errors, so it is wider than a paired one would be."""
    tasks = run.section("tasks")
    results = {(r["task"], r["metric"], r["candidate"]): r for r in (tasks or {}).get("results", [])}
    for (task, metric, candidate), student in results.items():
        teacher = results.get((task, metric, "teacher"))
        if candidate != "student" or teacher is None or not (_error(student) and _error(teacher)):
            continue
        difference = student["value"] - teacher["value"]
        margin = 1.96 * sqrt(student["stderr"] ** 2 + teacher["stderr"] ** 2)
        low, high = difference - margin, difference + margin
        kind: Kind = "win" if low > 0 else "loss" if high < 0 else "open"
        words = f"{task} ({metric}): {share(student['value'], 1)}, the teacher {share(teacher['value'], 1)}; "
        verb = {"win": "above", "loss": "below", "open": "not told apart from"}[kind]
        words += f"{verb} the teacher, difference {signed(100 * difference, 1)} points "
        yield Finding(kind, f"{words}[{signed(100 * low, 1)}, {signed(100 * high, 1)}].")


def _error(result: dict[str, Any]) -> bool:
    return result["stderr"] is not None and isfinite(result["stderr"])


def _speed(run: RunFiles) -> Iterator[Finding]:
    """At the longest prompt that both were timed at; told apart where the ranges of all repeats do not touch."""
    student, teacher = speeds(run, "student"), speeds(run, "teacher")
    if not student or not teacher or student[-1]["prompt_length"] != teacher[-1]["prompt_length"]:
        return
    length = count(student[-1]["prompt_length"])
    for what, key, unit in (("Prefill of", "prefill", "ms"), ("Generation after", "decode", "ms a token")):
        ours, theirs = student[-1][key], teacher[-1][key]
        kind: Kind = "win" if ours["high"] < theirs["low"] else "loss" if ours["low"] > theirs["high"] else "open"
        word = {"win": "faster", "loss": "slower", "open": "as fast as far as this can show"}[kind]
        numbers = ", ".join(
            f"{who} {milliseconds(s['median'])} {unit} [{milliseconds(s['low'])}, {milliseconds(s['high'])}]"
            for who, s in (("student", ours), ("teacher", theirs))
        )
        yield Finding(kind, f"{what} {length} tokens is {word}: {numbers} (median, least, greatest).")
