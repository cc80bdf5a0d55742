"""Compare linearized models with kvpress's presses: one model, the same rows of text, the same bytes.

    make bench-kvpress KVPRESS_ARGS="--model HuggingFaceTB/SmolLM2-135M-Instruct --text wikipedia.txt --json OUT.json"
    python benchmarks/kvpress.py ... --student NAME=FOLDER     # and a converted model of it, in both ways to read

Each model reads a context in one call and its continuation in one more (`contexts.py`): the
continuation's loss minus the teacher's, and needles, found if greedy decoding gives the answer. Rows are of the last
quarter of the text, which a student must not have been trained on. All in fp32 on a CPU. Presses run by kvpress itself
in an environment of its own (`presses.py`), with its default settings; but SnapKV's window is half of what it keeps
where kvpress's 64 tokens do not fit. What follows the context grows a press's cache; of a press that is "held", kvpress
compresses it again after every 16 tokens, so that it never has more than its share, as converted models.

What is measured stands in OUT.rows.jsonl as soon as it is, and is not measured again: the same command goes on where
it was stopped, and later students are compared with rows of before. The table stands in OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import compare, fingerprint, window_control
from contexts import CONTEXT, NEEDLES, TEXTS, ContextRow, measure, needle_rows, text_rows
from records import write_results
from transformers import PreTrainedModel
from turns import seconds_in_turns

from linearize.base import UserError, atomic_file, progress, step_progress
from linearize.data.rows import inference
from linearize.evaluation.continuation import CONTINUATION, Readings, loss_difference
from linearize.evaluation.controls import SINKS
from linearize.evaluation.intervals import wilson
from linearize.evaluation.retrieval import encode
from linearize.evaluation.speed import cache_bytes
from linearize.evaluation.timings import Spread
from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.hf.prefill import FULL as PREFILL_FULL
from linearize.hf.prefill import STREAMING as PREFILL_STREAMING

TEACHER = "teacher"
TOLERANCE = 1e-3  # nats between the teacher here and in kvpress's environment, of any row
FULL, TWICE, STREAMING = "once, full attention", "twice, full attention", "once, streaming"
# How often each press reads the context before it compresses, and with which attention.
PRESSES = {
    "StreamingLLM": FULL,
    "SnapKV": FULL,
    "TOVA": FULL,
    "AdaKV (SnapKV)": FULL,
    "ExpectedAttention": FULL,
    "AdaKV (ExpectedAttention)": FULL,
    "KeyDiff": FULL,
    "Compactor": FULL,
    "KVzip": TWICE,
    "DuoAttention": FULL,
    "SnapKV, held": FULL,
    "TOVA, held": FULL,
    "KeyDiff, held": FULL,
}

HEAD = (
    *("cache", "method", "reads the context", "share after it", "KiB after it", "KiB after the continuation"),
    *("minus teacher, nats", "needles found", "seconds of reading, and times the teacher's"),
)


@dataclass(frozen=True)
class Case:
    """A row of the table: a method, at a budget in shares of the teacher's cache after the context."""

    name: str
    method: str
    budget: float
    reads: str


def make_case(method: str, budget: float, reads: str) -> Case:
    """Return a method's case at one of the budgets."""
    return Case(f"{method}, {100 * budget:g} %", method, budget, reads)


class Store:
    """Keep the measurements of one teacher on one set of rows in a file, one JSON object per line.

    Lines: first {"settings": {field: value}}, then {"read": {name: [[loss, found], ...]}, "first": row},
    {"bytes": {name: [after context, after continuation]}}, {"seconds": {name: seconds}} of one round,
    {"refused": {name: reason}}, {"weights": {name: fingerprint}}, and {"versions": {package: version}} of presses.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Read the file, if there is one.

        Raises:
            UserError: the file is damaged, or of another model or other rows.
        """
        self.path = path
        self.lines = read_lines(path) if path.exists() else [{"settings": settings}]
        stored = self.lines[0]["settings"]
        for field, value in settings.items():
            if stored.get(field) != value:
                raise UserError(
                    f"{path}: expected {field} {value!r}, found {stored.get(field)!r}; name another file by --json, or "
                    "remove this one"
                )

    def add(self, **line: Any) -> None:
        """Keep a line, in the file too."""
        self.lines.append(line)
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        with atomic_file(self.path, len(text)) as scratch:
            scratch.write_text(text, encoding="utf-8")

    def all(self, kind: str) -> dict[str, Any]:
        """Return all entries of one kind by name; the last one counts."""
        return {name: value for line in self.lines for name, value in line.get(kind, {}).items()}

    def readings(self, name: str) -> dict[int, tuple[float, bool]]:
        """Return loss and whether it is found of each row that a model has read."""
        lines = (line for line in self.lines if name in line.get("read", {}))
        return {line["first"] + index: (*pair,) for line in lines for index, pair in enumerate(line["read"][name])}

    def seconds(self, name: str) -> list[tuple[float, float]]:
        """Return what a model and the teacher took to read a context, in each round of one process."""
        rounds = (line["seconds"] for line in self.lines if "seconds" in line)
        return [(seconds[name], seconds[TEACHER]) for seconds in rounds if name in seconds]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, of which the first has "settings".

    Raises:
        UserError: the file holds something else.
    """
    lines: list[Any] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            lines.append(json.loads(line))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"line {len(lines) + 1} cannot be read ({error})"
    else:
        if lines and all(isinstance(line, dict) for line in lines) and "settings" in lines[0]:
            return lines
        problem = "other JSON"
    raise UserError(
        f"{path}: expected a JSON object in each line, settings first, found {problem}; restore the file, or remove it "
        "to measure everything again"
    )


# --- models of this environment ---------------------------------------------------------------------------------------


def prefill(model: PreTrainedModel, row: ContextRow) -> Any:
    """Read the context; return the cache."""
    with inference(model):
        return model(input_ids=torch.tensor([row.context]), use_cache=True, logits_to_keep=1).past_key_values


def cache_sizes(model: PreTrainedModel, row: ContextRow) -> list[int]:
    """Return the bytes of the cache after the context, and after the continuation."""
    cache = prefill(model, row)
    after_context = cache_bytes(cache)
    with inference(model):
        model(input_ids=torch.tensor([row.continuation]), past_key_values=cache, use_cache=True)
    return [after_context, cache_bytes(cache)]


def measure_model(store: Store, name: str, model: PreTrainedModel, rows: Sequence[ContextRow], texts: int) -> None:
    """Measure one model, if that has not been done.

    Raises:
        UserError: another model has been measured by this name.
    """
    weights, known = fingerprint(model), store.all("weights")
    if known.get(name, weights) != weights:
        raise UserError(f"{store.path}: {name!r} was another model before; give this one another name")
    if name not in known:
        store.add(weights={name: weights}, bytes={name: cache_sizes(model, rows[0])})
    for first, part, what in ((0, rows[:texts], "text"), (texts, rows[texts:], "needles")):
        if first not in store.readings(name):
            found = measure(model, part, title=f"{name}, {what}")
            pairs = zip(found.loss.tolist(), found.found.tolist(), strict=True)
            store.add(first=first, read={name: [[loss, right] for loss, right in pairs]})


def time_models(store: Store, models: dict[str, PreTrainedModel], row: ContextRow, repeats: int) -> None:
    """Time the models that have not been timed, in turns with the teacher."""
    untimed = {name: model for name, model in models.items() if name == TEACHER or not store.seconds(name)}
    if len(untimed) == 1:
        return
    calls: dict[str, Callable[[], object]] = {name: partial(prefill, model, row) for name, model in untimed.items()}
    with step_progress() as bar:
        task = bar.add_task("seconds", total=(repeats + 1) * len(calls), status="")
        seconds = seconds_in_turns(calls, repeats, lambda: bar.advance(task))
    for number in range(repeats):
        store.add(seconds={name: values[number] for name, values in seconds.items()})


# --- presses ----------------------------------------------------------------------------------------------------------


def job(store: Store, cases: Sequence[Case], rows: Sequence[ContextRow], opening: int, a: Any) -> dict[str, Any] | None:
    """Return what presses.py still has to measure; None: nothing."""
    refused = store.all("refused")
    read = {case.name: set(store.readings(case.name)) for case in cases if case.name not in refused}
    unread = {name for name, numbers in read.items() if len(numbers) < len(rows)}
    budget = timed_budget(a.budgets)
    timed = {x.name for x in cases if x.name in read and x.budget == budget and not store.seconds(x.name)}
    if not unread and not timed:
        return None
    return {
        "model": a.model,
        "rows": [asdict(row) for row in rows],
        "opening": opening,
        "cases": [(case.name, case.method, case.budget) for case in cases if case.name in unread | timed],
        "missing": [number for number in range(len(rows)) if any(number not in read[name] for name in unread)],
        "timed": sorted(timed),
        "repeats": a.repeats,
        "threads": a.threads,
    }


def timed_budget(budgets: Sequence[float]) -> float:
    """Return the budget at which presses are timed: how much they keep does not change how they read."""
    return budgets[len(budgets) // 2]


@contextmanager
def press_results(python: Path, work: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """Run presses.py on a job, and give an iterator over its results, which waits for each.

    Raises:
        UserError: there is no such Python, or it failed.
    """
    if not python.exists():
        raise UserError(f"--python: expected kvpress's Python, found no {python}; run `make bench-kvpress`")
    command = [str(python), "-I", str(Path(__file__).with_name("presses.py"))]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:
        json.dump(work, stdin)
        stdin.seek(0)
        with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield map(json.loads, process.stdout)
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        raise UserError(f"kvpress: expected presses.py to end well, found status {process.returncode}; see above")


def measure_presses(store: Store, work: dict[str, Any], python: Path) -> None:
    """Measure what the job asks for.

    Raises:
        UserError: kvpress's environment is missing, or its teacher differs from ours.
    """
    with press_results(python, work) as results:
        steps = len(work["missing"]) + (work["repeats"] if work["timed"] else 0)
        for _ in progress(stored(store, results), "kvpress", total=steps):
            pass


def stored(store: Store, results: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Keep all results; stop at each row and each round.

    Raises:
        UserError: the teacher differs from ours.
    """
    ours = store.readings(TEACHER)
    for result in results:
        result.get("bytes", {}).pop(TEACHER, None)
        if "read" in result:
            [(theirs, _)] = result["read"].pop(TEACHER)
            expected = ours[result["first"]][0]
            if abs(theirs - expected) > TOLERANCE:
                raise UserError(
                    f"row {result['first']}: expected the teacher's loss to be {expected:.4f} nats per token in "
                    f"kvpress's environment, too, found {theirs:.4f}; see that --model means the same weights there"
                )
        store.add(**result)
        if "read" in result or "seconds" in result:
            yield


# --- the table --------------------------------------------------------------------------------------------------------


def table(store: Store, cases: Sequence[Case], a: Any) -> list[dict[str, Any]]:
    """Return the rows of the table, by budget."""
    timed, rows = timed_budget(a.budgets), []
    teacher = split(store.readings(TEACHER), a.texts)
    refused, sizes = store.all("refused"), store.all("bytes")
    for case in sorted(cases, key=lambda case: -case.budget):
        if case.name in refused:
            rows.append(asdict(case) | {"does_not_run": refused[case.name]})
            continue
        texts, needles = split(store.readings(case.name), a.texts)
        clock = make_case(case.method, timed, case.reads).name if case.method in PRESSES else case.name
        seconds = store.seconds(clock)
        numbers = {
            "share": sizes[case.name][0] / sizes[TEACHER][0],
            "bytes_after_context": sizes[case.name][0],
            "bytes_after_continuation": sizes[case.name][1],
            "loss": asdict(texts.mean_loss()),
            "minus_teacher": asdict(loss_difference(texts, teacher[0])),
            "needles": asdict(wilson(int(needles.found.sum()), len(needles.found))),
            "seconds": asdict(Spread.of([ours for ours, _ in seconds])),
            "times_teachers_seconds": asdict(Spread.of([ours / teachers for ours, teachers in seconds])),
        }
        rows.append(asdict(case) | numbers)
    return rows


def split(readings: dict[int, tuple[float, bool]], texts: int) -> tuple[Readings, Readings]:
    """Return what was read of texts and of needles."""
    pairs = [readings[number] for number in sorted(readings)]
    parts = (Readings(*map(torch.tensor, zip(*part, strict=True))) for part in (pairs[:texts], pairs[texts:]))
    return next(parts), next(parts)


def markdown(rows: Sequence[dict[str, Any]], a: Any) -> str:
    """Return the table below a sentence about the teacher."""
    loss = rows[0]["loss"]
    lines = [
        f"{a.texts} continuations of {a.continuation} tokens behind {a.context:,}, on which the teacher's loss is "
        f"{loss['mean']:.3f} nats per token ({loss['low']:.3f} to {loss['high']:.3f}), and {a.needles} needles. "
        "Intervals of 95 %. Seconds: medians over rounds, with the least and the greatest; of presses, at "
        f"{100 * timed_budget(a.budgets):g} %.\n",
    ]
    lines += [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    for row in rows:
        cells = [f"{100 * row['budget']:g} %", row["method"], row["reads"]]
        if reason := row.get("does_not_run"):
            cells[2:] = [f"does not run: {reason}", *[""] * (len(HEAD) - 3)]
        else:
            loss, needles, times = row["minus_teacher"], row["needles"], row["times_teachers_seconds"]
            cells += [
                f"{100 * row['share']:.1f} %",
                *(f"{row[f'bytes_after_{part}'] / 1024:,.0f}" for part in ("context", "continuation")),
                f"{loss['mean']:+.3f} ({loss['low']:+.3f} to {loss['high']:+.3f})",
                f"{100 * needles['mean']:.0f} % ({100 * needles['low']:.0f} to {100 * needles['high']:.0f})",
                f"{row['seconds']['median']:.1f}, {times['median']:.2f} ({times['low']:.2f}-{times['high']:.2f})",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- the command ------------------------------------------------------------------------------------------------------


def options() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the teacher, a folder or hub id")
    parser.add_argument("--text", required=True, help="a text file, of which the last quarter is measured")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT.json", help="where the table goes")
    parser.add_argument("--student", action="append", default=[], metavar="NAME=FOLDER", help="a linearized model")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.2, 0.11, 0.06], help="shares of the cache")
    parser.add_argument("--presses", nargs="*", choices=PRESSES, default=[*PRESSES], help="default: all")
    parser.add_argument("--texts", type=int, default=TEXTS, help="rows of text (default: %(default)s)")
    parser.add_argument("--needles", type=int, default=NEEDLES, help="contexts with a needle (default: %(default)s)")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens (default: %(default)s)")
    parser.add_argument("--continuation", type=int, default=CONTINUATION, help="tokens of text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the rows")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds of seconds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch (default: %(default)s)")
    parser.add_argument("--python", default=".venv-kvpress/bin/python", help="of kvpress's environment")
    return parser


def make_rows(a: Any, tokenizer: Any) -> list[ContextRow]:
    """Return rows of text, then rows with needles, of the last quarter of the text."""
    text = Path(a.text).read_text(encoding="utf-8")
    ids = encode(tokenizer, text[len(text) * 3 // 4 :])
    options = {"context": a.context, "seed": a.seed}
    texts = text_rows(ids, tokenizer, rows=a.texts, continuation=a.continuation, **options)
    return [*texts, *needle_rows(ids, tokenizer, needles=a.needles, **options)]


def measure_all(a: Any) -> dict[str, Any]:
    """Measure what has not been measured; return the table's rows, and the versions of presses that are in it.

    Raises:
        UserError: of bad arguments, and of a text that is too short.
    """
    for budget in a.budgets:
        if not SINKS < int(a.context * budget) <= a.context:
            raise UserError(
                f"--budgets: expected shares that keep more than {SINKS} of {a.context:,} tokens, and at most all, "
                f"found {budget:g}"
            )
    teacher, tokenizer = load_model(a.model, dtype=torch.float32, device=torch.device("cpu")), load_tokenizer(a.model)
    rows = make_rows(a, tokenizer)
    digest = hashlib.sha256(json.dumps([asdict(row) for row in rows]).encode()).hexdigest()[:16]
    settings = {"rows": digest, "weights": fingerprint(teacher)}
    store = Store(a.json.with_suffix(".rows.jsonl"), settings)

    models, cases = {TEACHER: teacher}, [Case(TEACHER, TEACHER, 1.0, FULL)]
    for budget in a.budgets:
        cases += [make_case(press, budget, PRESSES[press]) for press in a.presses]
        cases.append(make_case(f"window and {SINKS} sinks", budget, STREAMING))
        models[cases[-1].name] = window_control(teacher, int(a.context * budget))
    given = students(a.student, [case.name for case in cases])
    models |= given
    for name, model in models.items():
        measure_model(store, name, model, rows, a.texts)
    sizes = store.all("bytes")
    for name, model in given.items():
        share = sizes[name][0] / sizes[TEACHER][0]
        budget = min(a.budgets, key=lambda budget: abs(math.log(budget / share)))
        reads = FULL if getattr(model.config, "prefill", None) == PREFILL_FULL else STREAMING
        cases.append(Case(name, name, budget, reads))
    press_cases = [case for case in cases if case.method in PRESSES]
    if work := job(store, press_cases, rows, int(tokenizer.bos_token_id is not None), a):
        measure_presses(store, work, Path(a.python))
    time_models(store, models, rows[-1], a.repeats)
    return {"results": table(store, cases, a), "press_versions": store.all("versions")}


def students(given: Sequence[str], taken: Container[str]) -> dict[str, PreTrainedModel]:
    """Load the models that `--student` names, each once for either way to read a context.

    Raises:
        UserError: no name, one that is taken, or a folder that cannot be read.
    """
    loaded: dict[str, PreTrainedModel] = {}
    for argument in given:
        name, _, folder = argument.partition("=")
        titles = {name: PREFILL_STREAMING, f"{name}, prefill in full": PREFILL_FULL}
        if not name or not folder or any(title in taken or title in loaded for title in titles) or name in PRESSES:
            raise UserError(f"--student: expected NAME=FOLDER with a name of its own, found {argument!r}")
        for title, way in titles.items():
            loaded[title] = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
            loaded[title].config.prefill = way
    return loaded


def write_page(a: Any) -> str:
    """Measure, write the results, and return the page."""
    load = [os.getloadavg()[0]]
    measured = measure_all(a)
    load.append(os.getloadavg()[0])
    write_results(a, load, **measured)
    page = markdown(measured["results"], a)
    a.json.with_suffix(".md").write_text(f"{page}\n", encoding="utf-8")
    return page


def main() -> None:
    compare(options(), write_page)


if __name__ == "__main__":
    main()
