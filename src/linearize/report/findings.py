"""Sentences about the measurements, with their numbers, for the terminal, the model card and the page.

A share counts as kept if its whole interval is above one half, and as lost if it is below. A difference counts if its
interval does not include zero. All others are not decided. A number without a comparison is a fact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, hypot
from statistics import median
from typing import Literal

from linearize.evaluation.harness import BenchmarkResult
from linearize.evaluation.intervals import Interval
from linearize.evaluation.metrics import title
from linearize.evaluation.results import NEAR, AttentionStatistics, Reading, ShortEvaluation
from linearize.evaluation.retrieval import Retrieval
from linearize.evaluation.shares import KeptGain
from linearize.evaluation.timings import Crossover, Speed, growth, memory_break_even
from linearize.hf.prefill import FULL, PREFILL_COSTS, STREAMING
from linearize.report.load import RunFiles
from linearize.report.numbers import (
    THIN,
    count,
    memory_size,
    milliseconds,
    number,
    percent,
    share,
    signed,
    with_interval,
)
from linearize.report.unmeasured import missing_sections

Kind = Literal["win", "loss", "open", "fact"]

SPREAD = 0.2  # share of a teacher's attention beyond its last tokens above which it counts as spread
STANDS_OUT = 5.0  # a head stands out above this factor of the median head's relative output error ...
LEAST_ERROR = 0.02  # ... and from this share of the teacher's mean square
MOST_WORST = 10
_OTHERS = {
    "teacher": "its teacher",
    "teacher_finetuned": "its teacher fine-tuned on the same tokens",
    "window_finetuned": "the window-only control",
    "equal_finetuned": "one window of as many bytes for all heads",
    "exact_finetuned": "the same memory without linear parts",
    "ablated": "itself with the linear part switched off",
}
_AGAINST = {
    ("window_finetuned", "teacher_finetuned"): "with teacher and window fine-tuned on the same tokens",
    ("window_finetuned", "teacher"): "with the window fine-tuned on the same tokens and the teacher before fine-tuning",
    ("window", "teacher"): "compared with untrained models: the gain of fine-tuning counts as kept",
}
_LEADING = ("window_finetuned", "equal_finetuned", "exact_finetuned", "teacher")
_SAME_TOKENS = " (fine-tuned on the same tokens)"
_EXPLAINED = {
    "window_finetuned": " (fine-tuned on the same tokens, no linear part)",
    "equal_finetuned": _SAME_TOKENS,
    "exact_finetuned": _SAME_TOKENS,
}


@dataclass(frozen=True)
class Finding:
    """One sentence about a run, and its kind.

    `lead` is its short form for the top of the page: the words before the main part, the main part, the words after.
    """

    kind: Kind
    words: str
    lead: tuple[str, str, str] = ("", "", "")


def verdict(run: RunFiles) -> list[Finding]:
    """Return the main sentences, for the top: task, comparisons with control and teacher, beyond the window, memory."""
    metric = run.task.metrics[0] if run.task else ""
    scored = [*_known(score_difference(run, other, metric) for other in _LEADING)]
    losses = (difference(run, other) for other in _LEADING)
    short = [*_known(short_quality(run, way) for way in PREFILL_COSTS), *_known([short_memory(run)])]
    scored = scored or [*_known([score(run, metric)])]
    return [*scored, *short, *_known([*losses, far_context(run), memory(speeds(run))])]


def findings(run: RunFiles) -> list[Finding]:
    """Return all findings, those of `verdict` first."""
    metrics = run.task.metrics if run.task else []
    pairs = [(other, metric) for metric in metrics for other in _OTHERS]
    leading = [(other, metric) for metric in metrics[:1] for other in _LEADING]
    more = [
        *(score_difference(run, *pair) for pair in pairs if pair not in leading),
        same_answers(run),
        prefill(run),
        short_speed(run),
        difference(run, "ablated"),
        copying(run),
        *(recall(run, task) for task in run.results.retrieval),
        teacher_attention(run),
        agreement(run),
        generations(run),
        per_head_budget(run),
        *_benchmark_findings(run),
        *faster(speeds(run), run.results.crossover),
        outliers(run),
    ]
    return [*verdict(run), *_known(more)]


def sides(run: RunFiles) -> list[tuple[Kind, str, list[str]]]:
    """Return the sentences of all findings by kind, with a heading; kinds without findings are left out."""
    headings: dict[Kind, str] = {
        "win": "Kept or better",
        "loss": "Lost or worse",
        "open": "Not decided",
        "fact": "Also measured",
    }
    every = findings(run)
    sides: list[tuple[Kind, str, list[str]]] = []
    for kind, heading in headings.items():
        if lines := [finding.words for finding in every if finding.kind == kind]:
            sides.append((kind, heading, lines))
    return sides


def sentences(run: RunFiles) -> list[str]:
    """Return the sentences of all findings, and those about missing measurements."""
    return [*(finding.words for finding in findings(run)), *missing_sections(run)]


def _known(found: Iterable[Finding | None]) -> Iterator[Finding]:
    return (finding for finding in found if finding is not None)


# --- losses -----------------------------------------------------------------------------------------------------------


def difference(run: RunFiles, other: str) -> Finding | None:
    """Return the sentence on the student's loss compared with that of `other`, on the same tokens."""
    compared = run.comparison(other)
    if compared is None:
        return None
    found = compared.overall
    far = f" Beyond the window: {with_interval(compared.beyond, sign=True)}." if compared.beyond else ""
    short, more = _OTHERS.get(other, other), _EXPLAINED.get(other, "")
    if other == "window_finetuned" and run.allocation is not None:
        short, more = f"one window of {count(run.window)} for all heads, of as many bytes", _SAME_TOKENS
    if found.low <= 0 <= found.high:
        numbers = f"{signed(found.mean)} nats per token"
        bounds = f"95{THIN}% interval {signed(found.low)} to {signed(found.high)}"
        words = f"On this much text the student cannot be told apart from {short}{more}: {numbers}, {bounds}.{far}"
        bounds = f" ({signed(found.mean)} nats per token [{signed(found.low)}, {signed(found.high)}])."
        return Finding("open", words, ("On this much text the student ", f"cannot be told apart from {short}", bounds))
    better = found.mean < 0
    size, near, far_end = _bounds(found)
    size += f" nats per token {'better' if better else 'worse'}"
    change = f"perplexity {share(abs(exp(min(found.mean, 700)) - 1), 1)} {'lower' if better else 'higher'}"
    words = f"The student is {size} than {short}{more}, 95{THIN}% interval {near} to {far_end} ({change}).{far}"
    return Finding("win" if better else "loss", words, ("It is ", size, f" than {short} [{near}, {far_end}]."))


def _bounds(found: Interval) -> tuple[str, str, str]:
    """Return the size of a difference, and the least and greatest size in its interval, as text."""
    near, far = sorted((abs(found.low), abs(found.high)))
    return number(abs(found.mean)), number(near), number(far)


def far_context(run: RunFiles) -> Finding | None:
    """Return the sentence on the long-context gain that the student retains."""
    where = f"context beyond the window of {count(run.window)} tokens"
    student = run.measured("student")
    if student and run.measured("teacher") and (reason := student.quality.beyond_missing):
        return Finding("fact", f"The gain from {where} cannot be measured on this text: {reason}.")
    kept = run.results.far_context
    return _kept(kept, where, f", {_AGAINST[kept.against]}" if kept and kept.against else "")


def copying(run: RunFiles) -> Finding | None:
    return _kept(run.results.copying, "copying random tokens seen beyond the window")


def _kept(kept: KeptGain | None, what: str, against: str = "") -> Finding | None:
    if kept is None:
        return None
    teacher, found = with_interval(kept.teacher_gain), kept.share
    if found is None:
        gained = f"how much is kept of what it gains from {what}{against}; {teacher} nats per token"
        return Finding("fact", f"Not measurable with this teacher: {gained}.")
    gains = f"teacher {teacher}, student {with_interval(kept.student_gain)}"
    what = f"what the teacher gains from {what}{against}"
    words = f"The student keeps {percent(found)} of {what} (nats per token: {gains})."
    return Finding(_side_of_half(found), words, ("It keeps ", percent(found), f" of {what}."))


def _side_of_half(found: Interval) -> Kind:
    """Return "win" or "loss" if the whole interval is above or below one half, else "open"."""
    return "win" if found.low > 0.5 else "loss" if found.high < 0.5 else "open"


# --- the short evaluation ---------------------------------------------------------------------------------------------


def short_quality(run: RunFiles, way: str) -> Finding | None:
    """Return the sentence on loss and needles of the student with this prefill, compared with the teacher's."""
    student, teacher, evaluation = run.reading("student", way), run.reading("teacher"), run.results.short
    if student is None or evaluation is None:
        return None
    where = f"after contexts of {count(evaluation.context)} tokens"
    needles, theirs = _needles(student, evaluation), _needles(teacher or student, evaluation)
    found = student.difference
    if found is None or teacher is None:
        loss = f"the student's loss {where} is {with_interval(student.loss)} nats per token"
        return Finding("fact", f"With prefill={way} {loss}{needles}; no teacher was measured.")
    kind: Kind = "open" if found.low <= 0 <= found.high else "win" if found.mean < 0 else "loss"
    size = f"{with_interval(found, sign=True)} nats per token compared with the teacher's"
    against = f" (teacher: {theirs.removeprefix(', ').removesuffix(' needles found')})" if theirs else ""
    words = f"With prefill={way} the student's loss {where} is {size}{needles}{against}."
    return Finding(kind, words, (f"With prefill={way} its loss {where} is ", size, f"{needles}."))


def _needles(line: Reading, evaluation: ShortEvaluation) -> str:
    if line.needles is None:
        return ""
    return f", {round(line.needles.mean * evaluation.needles)} of {count(evaluation.needles)} needles found"


def short_memory(run: RunFiles) -> Finding | None:
    """Return the sentence on the bytes of the student's state and the teacher's cache."""
    student, teacher, evaluation = run.reading("student", STREAMING), run.reading("teacher"), run.results.short
    if student is None or teacher is None or evaluation is None:
        return None
    ours, theirs = student.cache_bytes, teacher.cache_bytes
    size = f"{memory_size(ours)}, {share(ours / theirs)} of the teacher's {memory_size(theirs)}"
    where = f"after {count(evaluation.context)} tokens"
    kind: Kind = "win" if ours < theirs else "loss"
    return Finding(kind, f"The student's memory {where} is {size}.", (f"Its memory {where} is ", size, "."))


def short_speed(run: RunFiles) -> Finding | None:
    """Return the sentence on the times of a context and of a token, of teacher and student."""
    evaluation, seconds = run.results.short, {}
    for name, key in _READERS.items():
        line = run.reading(*key)
        if line is not None and line.prefill_seconds is not None and line.decode_seconds is not None:
            spreads = (line.prefill_seconds, line.decode_seconds)
            seconds[name] = f"{name} {' and '.join(milliseconds(spread.median) for spread in spreads)}"
    if evaluation is None or _STREAMING_STUDENT not in seconds:
        return None
    words = f"Milliseconds for {count(evaluation.context)} tokens of context, and for each new token"
    return Finding("fact", f"{words}: {'; '.join(seconds.values())}.")


_STREAMING_STUDENT = f"student, {STREAMING}"
_READERS = {
    "teacher": ("teacher", None),
    _STREAMING_STUDENT: ("student", STREAMING),
    f"student, {FULL}": ("student", FULL),
}


def prefill(run: RunFiles) -> Finding | None:
    """Return the sentence on the saved model's prefill, its cost, and how to choose the other one."""
    if run.results.short is None:
        return None
    saved = run.results.short.saved_prefill
    other = next(way for way in PREFILL_COSTS if way != saved)
    choice = f"model.config.prefill = '{other}' or linearize generate --prefill {other}"
    cost, other_cost = PREFILL_COSTS[saved], PREFILL_COSTS[other]
    words = f"The saved model reads a prompt with prefill={saved}: {cost}. {choice} chooses {other_cost}."
    if run.plan and run.plan.student_cache_bytes_per_token:
        words += " This applies to the converted layers and heads. Those that stay softmax take the teacher's time, "
        words += "and their cache grows."
    return Finding("fact", words)


# --- scores -----------------------------------------------------------------------------------------------------------


def score_difference(run: RunFiles, other: str, metric: str) -> Finding | None:
    """Return the sentence on the student's score compared with that of `other`, on the same examples."""
    found = run.score_difference(other, metric)
    if found is None or run.task is None:
        return None
    name, whom = title(metric), _OTHERS[other]
    values = f"{with_interval(run.score('student', metric))} against {with_interval(run.score(other, metric))}"
    if other == "teacher":
        kept = run.recovery(metric)
        nothing = "the teacher's is not certainly above 0, so it has no share"
        values += f", {percent(kept)} of the teacher's score" if kept else f"; {nothing}"
    if found.low <= 0 <= found.high:
        bounds = f"{signed(found.mean)} [{signed(found.low)}, {signed(found.high)}]"
        examples = f"On these {count(run.task.examples)} examples the student "
        level = f"cannot be told apart from {whom}"
        words = f"{examples}{level} in {name}: {bounds}; {values}."
        return Finding("open", words, (examples, level, f" in {name} ({bounds})."))
    better = found.mean > 0
    size, near, far = _bounds(found)
    size += " better" if better else " worse"
    words = f"The student is {size} than {whom} in {name}, 95{THIN}% interval {near} to {far}: {values}."
    return Finding("win" if better else "loss", words, ("It is ", size, f" than {whom} in {name} [{near}, {far}]."))


def score(run: RunFiles, metric: str) -> Finding | None:
    """Return the sentence on the student's score if there is no teacher."""
    found = run.score("student", metric)
    if found is None or run.task is None:
        return None
    after = f" in {title(metric)} on {count(run.task.examples)} held-out examples; no teacher was measured."
    words = f"The student reaches {with_interval(found)}{after}"
    return Finding("fact", words, ("It reaches ", with_interval(found), after))


def same_answers(run: RunFiles) -> Finding | None:
    found = run.agreement("student")
    return found and Finding("fact", f"The student's answer is the teacher's in {percent(found)} of all cases.")


# --- recall, agreement, heads, benchmarks -----------------------------------------------------------------------------


def recall(run: RunFiles, task: Retrieval) -> Finding:
    """Return the sentence on a retrieval test; a fact if it has no share."""
    name = f"Recall, {task.name.replace('_', ' ')}"
    student, teacher, kept = task.student_share, task.teacher_share, task.recovery
    where = f"beyond the window of {count(run.window)} tokens"
    if student is None:
        return Finding("fact", f"{name}: too few tests {where} fit the model's positions.")
    if teacher is None:
        return Finding("fact", f"{name}: {where} the student is right in {percent(student)} of answers; no teacher.")
    right = f"{where} the student is right in {percent(student)} of answers, the teacher in {percent(teacher)}"
    if task.floor is not None:
        right += f" ({'with the window alone' if 'window' in task.models else 'by guessing'} {share(task.floor, 1)})"
    if kept is None:
        return Finding("fact", f"{name}: {right}; not measurable with this teacher.")
    return Finding(_side_of_half(kept), f"{name}: {right}; {percent(kept)} of the teacher's ability is kept.")


def agreement(run: RunFiles) -> Finding | None:
    found = run.results.agreement
    if found is None:
        return None
    same, divergence = percent(found.top1), with_interval(found.kl)
    words = f"The student's likeliest next token is the teacher's in {same} of all places"
    return Finding("fact", f"{words}; KL(teacher || student) is {divergence} nats per token.")


def generations(run: RunFiles) -> Finding | None:
    found = run.results.generations
    if found is None:
        return None
    same = with_interval(found.common_prefix, 1)
    words = f"Greedy outputs of student and teacher agree for the first {same} of {count(found.new_tokens)} tokens"
    return Finding("fact", f"{words}.")


def outliers(run: RunFiles) -> Finding | None:
    """Name the heads whose relative output error is over 5 times the median head's and at least 2 %, worst first."""
    if run.results.fidelity is None:
        return None
    errors = run.results.fidelity.errors
    middle = median(errors.values())
    far = [(x, where) for where, x in errors.items() if x > STANDS_OUT * middle and x >= LEAST_ERROR]
    if not far:
        return None
    worst = sorted(far, reverse=True)[:MOST_WORST]
    heads = [f"layer {layer} head {head} ({share(x, 1)})" for x, (layer, head) in worst]
    words = f"Heads with the largest output errors, relative to softmax attention: {', '.join(heads)}"
    return Finding("fact", f"{words} of the mean square; the median head has {share(middle, 1)}.")


def benchmarks(run: RunFiles) -> dict[tuple[str, str, str], BenchmarkResult]:
    """Return the results of public benchmarks by task, metric and candidate."""
    results = [] if run.results.tasks is None else run.results.tasks.results
    return {(result.task, result.metric, result.candidate): result for result in results}


def _benchmark_findings(run: RunFiles) -> Iterator[Finding]:
    """Yield differences of student and teacher; intervals combine both standard errors, so they are wide."""
    results = benchmarks(run)
    for (task, metric, candidate), student in results.items():
        teacher = results.get((task, metric, "teacher"))
        if candidate != "student" or teacher is None or not (student.stderr and teacher.stderr):
            continue
        difference = student.value - teacher.value
        margin = 1.96 * hypot(student.stderr, teacher.stderr)
        low, high = difference - margin, difference + margin
        kind: Kind = "win" if low > 0 else "loss" if high < 0 else "open"
        words = f"{task} ({metric}): {share(student.value, 1)}, the teacher {share(teacher.value, 1)}; "
        verb = {"win": "above", "loss": "below", "open": "within the error of"}[kind]
        words += f"{verb} the teacher, difference {signed(100 * difference, 1)} points "
        yield Finding(kind, f"{words}[{signed(100 * low, 1)}, {signed(100 * high, 1)}].")


# --- the teacher ------------------------------------------------------------------------------------------------------


def teacher_attention(run: RunFiles) -> Finding | None:
    """Return the sentences on the teacher's attention and on suitable windows."""
    found = run.results.teacher_attention
    return None if found is None else Finding("fact", attention_words(found))


def attention_words(found: AttentionStatistics) -> str:
    """Return sentences about the statistics of a teacher's attention and about suitable windows."""
    sinks, heads, far = found.sink_heads, count(found.heads), found.beyond_near
    needs = "every window needs sinks" if sinks else "windows need no sinks"
    advice = ": it is spread, so longer windows help" if far > SPREAD else ""
    return (
        f"The teacher gives its first token {share(found.first_token)} of its attention, and more than half in "
        f"{count(sinks)} of {heads} query heads: {needs}. The entropy of its attention is "
        f"{number(found.entropy, 2)} nats, and {share(far)} lies on other tokens beyond the last {NEAR}{advice}."
    )


# --- speed and memory: entries are measurements of one batch size -----------------------------------------------------


def speeds(run: RunFiles, model: str | None = None) -> list[Speed]:
    """Return measurements at the smallest measured batch size, of one model or of both, by prompt length."""
    every = run.results.speed
    smallest = min((entry.batch_size for entry in every), default=1)
    chosen = [entry for entry in every if model in (None, entry.model) and entry.batch_size == smallest]
    return sorted(chosen, key=lambda entry: entry.prompt_length)


def memory(entries: Sequence[Speed]) -> Finding | None:
    """Return the sentence on the student's memory, and on the length from which the teacher's is larger."""
    student, teacher = (
        {entry.prompt_length + entry.new_tokens: entry.cache_bytes for entry in entries if entry.model == model}
        for model in ("student", "teacher")
    )
    if len(student) < 2 or student.keys() != teacher.keys():
        return None
    short, long = min(student), max(student)
    first, last, theirs = student[short], student[long], teacher[long]
    between = f"from {count(short)} to {count(long)} tokens"
    if set(student.values()) == {first}:
        lead = "constant", f", {memory_size(first)} at every length measured {between}"
        words = f"Memory is constant: {count(first)} bytes at every length measured {between}"
    else:
        lead = "growing", f", {memory_size(first)} to {memory_size(last)} {between}"
        words = f"Memory grows from {count(first)} to {count(last)} bytes {between}"
    start = memory_break_even(student, teacher)
    less = "never less than the teacher's"
    if start is not None:
        less = f"less than the teacher's from {count(start)} tokens on"
    words += f"; at {count(long)} tokens that is {share(last / theirs)} of the teacher's {count(theirs)} bytes"
    words += f", which grow by {count(growth(teacher))} per token; {less}."
    return Finding("win" if last < theirs else "loss", words, ("Its memory is ", lead[0], f"{lead[1]}; {less}."))


def per_head_budget(run: RunFiles) -> Finding | None:
    """Return the sentence on the KV heads that keep most of a KV budget allocated per head."""
    pairs = {f"{layer}.{head}": x for layer, row in run.pairs_by_head.items() for head, x in enumerate(row)}
    if not pairs:
        return None
    most, total = sorted(pairs, key=lambda name: -pairs[name]), sum(pairs.values())
    sums = list(accumulate(pairs[name] for name in most))
    half = next(place for place, x in enumerate(sums, start=1) if 2 * x >= total)
    named = ", ".join(most[: min(half, 4)]) + (", ..." if half > 4 else "")
    verb, part = "holds" if half == 1 else "hold", share(sums[half - 1] / total)
    words = f"{half} of {len(pairs)} KV heads {verb} {part} of its {count(total)} key-value pairs ({named}; layer.head)"
    return Finding("fact", f"Per-head KV budget allocation: {words}.")


def faster(entries: Sequence[Speed], crossover: Crossover | None) -> Iterator[Finding]:
    """Yield sentences on speed at the longest prompt; models differ if the ranges of all repeats do not overlap."""
    ours, theirs = ([e for e in entries if e.model == model] for model in ("student", "teacher"))
    if not ours or not theirs or ours[-1].prompt_length != theirs[-1].prompt_length:
        return
    length = count(ours[-1].prompt_length)
    ahead = crossover or Crossover(None, None)
    for what, unit, student, teacher, start in (
        ("Prefill of", "ms", ours[-1].prefill, theirs[-1].prefill, ahead.prefill),
        ("Generation after", "ms a token", ours[-1].decode, theirs[-1].decode, ahead.decode),
    ):
        kind: Kind = "win" if student.high < teacher.low else "loss" if student.low > teacher.high else "open"
        word = {"win": "faster", "loss": "slower", "open": "not measurably faster or slower"}[kind]
        numbers = ", ".join(
            f"{who} {milliseconds(s.median)} {unit} [{milliseconds(s.low)}, {milliseconds(s.high)}]"
            for who, s in (("student", student), ("teacher", teacher))
        )
        since = "" if start is None else f"; ahead from about {count(start)} tokens on"
        yield Finding(kind, f"{what} {length} tokens is {word}: {numbers} (median, minimum, maximum){since}.")
