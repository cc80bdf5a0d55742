"""Multiple-choice questions by lm-evaluation-harness: a teacher, converted models, and windows of as many bytes.

    python benchmarks/questions.py TEACHER STUDENT --tasks arc_easy.jsonl piqa.jsonl --limit 500 --json results.json

A task is what `linearize eval --tasks` takes, which measures converted models alone. One row (a model, a task) is
written when it is measured; the same command again goes on with what is missing.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

from contenders import Contender, compare, contender_arguments, contenders, share_of_right, teacher_name
from records import Rows

from linearize.base import UserError
from linearize.evaluation.harness import run_benchmarks

METRICS = ("acc", "acc_norm")


def markdown(contents: dict[str, Any]) -> str:
    """Return the page: a table with a line for each model and task."""
    rows, teacher = contents["rows"], contents["teacher"]
    lines = [
        "# Multiple-choice questions",
        "",
        f"By `benchmarks/questions.py`: {contents['shots']} solved examples before each question, in "
        f"{contents['dtype']}. Right answers are in %, with 95 % Wilson intervals. The last number of a cell is the "
        f"share of the right answers of `{teacher}`.",
        "",
        f"| model | prefill | task | questions | {' | '.join(METRICS)} |",
        f"|{' --- |' * (4 + len(METRICS))}",
    ]
    by_teacher = {row["task"]: row for row in rows if row["model"] == teacher}
    for row in rows:
        own = row["model"] == teacher or row["task"] not in by_teacher
        cells = [
            share_of_right(row[metric], row["questions"], None if own else by_teacher[row["task"]][metric])
            for metric in METRICS
        ]
        labels = row["model"], row["prefill"] or "-", f"`{row['task']}`", str(row["questions"])
        lines.append(f"| {' | '.join([*labels, *cells])} |")
    return "\n".join(lines) + "\n"


def measured_row(contender: Contender, task: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask a model the questions of a task."""
    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    options = {"shots": arguments.shots, "limit": arguments.limit, "batch_size": arguments.batch, "seed": 0}
    measured = run_benchmarks({contender.name: contender.model}, contender.tokenizer, [task], **options)
    by_metric = {result.metric: result for result in measured.results}
    if missing := [metric for metric in METRICS if metric not in by_metric]:
        raise UserError(f"--tasks: expected tasks with {', '.join(METRICS)}, found {task} without {', '.join(missing)}")
    count = by_metric["acc"].samples
    return {
        "questions": count,
        **{metric: round(by_metric[metric].value * count) for metric in METRICS},
        "seconds": time.perf_counter() - seconds,
        "cpu_seconds": time.process_time() - cpu_seconds,
        "lm_eval": measured.versions,
    }


def measure(arguments: argparse.Namespace) -> str:
    """Measure what is missing; return the page.

    Raises:
        UserError: arguments, models or files that cannot be used.
    """
    setting = {
        "teacher": teacher_name(arguments),
        "shots": arguments.shots,
        "limit": arguments.limit,
        "dtype": arguments.dtype,
    }
    results = Rows(arguments.json, setting, markdown)
    for contender in contenders(arguments):
        for task in arguments.tasks:
            key = {"model": contender.name, "prefill": contender.prefill, "task": Path(task).stem}
            results.add(key, contender.weights, partial(measured_row, contender, task, arguments))
    return markdown(setting | {"rows": results.rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contender_arguments(parser, "questions.json")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help=".jsonl files, or names of lm-eval's")
    parser.add_argument("--shots", type=int, default=0, metavar="N", help="solved examples (default: 0)")
    parser.add_argument("--limit", type=int, metavar="N", help="the first questions of each task (default: all)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences at once (default: 8)")
    compare(parser, measure)


if __name__ == "__main__":
    main()
