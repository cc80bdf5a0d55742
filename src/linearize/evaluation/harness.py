"""Run public benchmarks by lm-evaluation-harness (the extra `eval`) on models in memory.

A task is one of
- a ``.jsonl`` file of multiple-choice questions, described at `choice_task`, which needs no server,
- a task of lm-eval: its YAML file, a folder of them, or the name of one that comes with lm-eval.
"""

# lm-eval has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError
from linearize.configs.evaluation import EvaluationConfig
from linearize.data.rows import inference

_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class BenchmarkResult:
    """One number of lm-eval. `metric` is lm-eval's own name, followed by a comma and its filter if there is one."""

    task: str
    metric: str
    candidate: str
    value: float
    stderr: float | None  # None: lm-eval gives none
    samples: int


@dataclass(frozen=True)
class Benchmarks:
    """The results of all candidates on all tasks, groups of tasks included."""

    shots: dict[str, int]  # by task; a task that fixes its own number keeps it
    results: list[BenchmarkResult]
    versions: dict[str, str]  # of lm-eval ("lm_eval"), and of each task; of a jsonl file, its sha256


def run_benchmarks(
    models: Mapping[str, PreTrainedModel],
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    shots: int,
    limit: int | None,
    batch_size: int,
    seed: int,
) -> Benchmarks:
    """Return the scores of `lm_eval.simple_evaluate` for each model, to the last digit.

    Args:
        models: by candidate; each on its own device.
        tasks: files, folders or names, see above.
        shots: solved examples before each question.
        limit: only the first questions of every task; None for all.
        batch_size: sequences per forward pass.
        seed: of the draw of solved examples, and of sampled answers.

    Raises:
        UserError: lm-eval is not installed, or it does not know or cannot load a task, or a file's columns are wrong.
        FloatingPointError: a result is not a finite number.
    """
    evaluator, hflm = _of_extra("lm_eval.evaluator"), _of_extra("lm_eval.models.huggingface").HFLM
    results: list[BenchmarkResult] = []
    found: dict[str, Any] = {}
    with _level("lm_eval", logging.WARNING), _first_warnings("lm_eval.models.huggingface"):
        loaded = _load(tasks, shots)
        for name, model in models.items():
            if (console := Console(stderr=True)).is_terminal:
                console.print(f"tasks: {name}")  # lm-eval's own bars follow
            for task in loaded["tasks"].values():
                task.set_fewshot_seed(seed)  # every model gets the same solved examples
            with inference(model), torch.random.fork_rng():
                torch.manual_seed(seed)
                with _level("lm_eval.models", logging.ERROR):  # it warns about every model in memory
                    wrapped = hflm(pretrained=model, tokenizer=deepcopy(tokenizer), batch_size=batch_size)
                found = evaluator.evaluate(wrapped, loaded, limit=limit, log_samples=False)
            results += _results(name, found["results"])
    versions = {task: str(version) for task, version in found["versions"].items() if version is not None}
    return Benchmarks(found["n-shot"], results, {"lm_eval": _of_extra("lm_eval").__version__} | versions)


def check_tasks(config: EvaluationConfig, *, trusted: bool, files: bool = True) -> None:
    """Check, before hours of training or measuring, that tasks can be run and that none runs untrusted code.

    A task YAML of lm-eval can call Python functions (`!function`), and a recipe may be a stranger's.

    Args:
        trusted: the user has named the tasks, or trusts the author of the recipe.
        files: whether files of questions may be read; not if only the recipe of a folder names them.

    Raises:
        UserError: an untrusted task may run code, lm-eval is not installed, or a file is missing or has other columns.
    """
    for task in config.tasks:
        path = Path(task)
        if not trusted and (path.suffix.lower() in _YAML or path.is_dir()):
            raise UserError(
                f"evaluation.tasks: expected names of lm-eval's tasks or .jsonl files in a recipe, found {task!r}, "
                "task YAML, which can run any code; pass --trust-tasks if you trust it"
            )
        if not files and path.exists():
            raise UserError(
                f"evaluation.tasks: expected files of questions that you name, found {task!r} on this machine, as the "
                "recipe of the folder names it; pass --tasks, or --trust-tasks if you trust it"
            )
        if path.suffix == ".jsonl":
            choice_task(path, config.shots)
        elif path.suffix in _YAML:
            _file(path)
    if config.tasks:
        _of_extra("lm_eval")


def choice_task(path: Path, shots: int) -> dict[str, object]:
    """Return lm-eval's task description for a file of multiple-choice questions, one JSON object per line.

    - ``query``: the question, any text,
    - ``choices``: the possible answers, two texts or more,
    - ``gold``: which of them is right, counted from 0.

    Other columns are ignored. The model reads ``query``, a new line and ``Answer:``, as in lm-eval's own ``piqa`` and
    ``arc_easy``; solved examples are other questions of the file. For any other format, write a task YAML of lm-eval.

    Raises:
        UserError: columns are missing or hold something else, or there are too few questions.
    """
    text = _file(path).read_bytes()
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if fault := _fault(line):
            raise UserError(
                f"{path}, line {number}: expected an object with the columns query (text), choices (two texts or more) "
                f"and gold (the number of the right one, from 0), found {fault}; for other columns, write a task YAML"
            )
    if len(lines) <= shots:
        raise UserError(
            f"{path}: expected more than {shots} questions for {shots} solved examples, found {len(lines)}; ask fewer"
        )
    mean: dict[str, object] = {"aggregation": "mean", "higher_is_better": True}
    return {
        "task": path.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path.resolve())}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "fewshot_split": "test",  # lm-eval never shows a question as its own example
        "doc_to_text": "{{query.rstrip()}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": metric} | mean for metric in ("acc", "acc_norm")],
        "metadata": {"version": f"sha256:{hashlib.sha256(text).hexdigest()}"},
    }


def _file(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"tasks: expected a file, found none at {path}")
    return path


def _fault(line: bytes) -> str | None:
    """Return the fault of a line of `choice_task`'s file, in words; None: it is valid."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return f"what is not JSON: {line[:40]!r}"
    if not isinstance(row, dict):
        return f"{line[:40]!r}"
    row = cast(dict[str, object], row)
    if missing := [name for name in ("query", "choices", "gold") if name not in row]:
        return f"no {', '.join(missing)} but {', '.join(row)[:80] or 'nothing'}"
    query, choices, gold = row["query"], row["choices"], row["gold"]
    if not isinstance(query, str):
        return f"query {query!r:.80}"
    choices = cast(list[object], choices) if isinstance(choices, list) else []
    if len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        return f"choices {row['choices']!r:.80}"
    if type(gold) is not int or not 0 <= gold < len(choices):
        return f"gold {gold!r:.80} for {len(choices)} choices"
    return None


def _load(tasks: Sequence[str], shots: int) -> dict[str, Any]:
    """Return all tasks and groups of tasks, by name, each set to `shots`."""
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    for given in tasks:
        found = _load_one(given, shots)
        if double := loaded["tasks"].keys() & found["tasks"].keys():
            raise UserError(f"tasks: expected each task once, found {', '.join(sorted(double))} twice; name it once")
        for kind, members in loaded.items():
            members.update(found[kind])
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") != 0:  # tasks with 0 must not have solved examples
            task.set_config("num_fewshot", shots)
    return loaded


def _load_one(given: str, shots: int) -> dict[str, Any]:
    path, manager = Path(given), _of_extra("lm_eval.tasks").TaskManager
    if path.suffix == ".jsonl":
        index, names = manager(include_defaults=False), [choice_task(path, shots)]
    elif path.is_dir():
        index = manager(include_path=str(path), include_defaults=False)
        if not (names := index.all_subtasks):
            raise UserError(f"tasks: expected a folder with task YAMLs of lm-eval, found none in {path}")
    elif path.suffix in _YAML:
        index, names = manager(include_defaults=False), [str(_file(path))]
    else:
        index, names = _own_tasks(), [given]
        if given not in index.task_index:
            near = ", ".join(get_close_matches(given, index.all_tasks, n=3)) or "`lm_eval ls tasks` lists them"
            raise UserError(
                f"tasks: expected a .jsonl file, a task YAML, a folder of them or the name of a task of lm-eval, "
                f"found {given!r}; near: {near}"
            )
    try:
        return index.load(names)
    except Exception as error:  # a task may contain code, which can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"tasks: expected a task that lm-eval can load, found {given}, which it cannot ({reason}); "
            f"correct it, or give a .jsonl file if its data cannot be downloaded"
        ) from error


@cache
def _own_tasks() -> Any:
    """Return the index of the tasks that come with lm-eval; reading its thousands of files takes some seconds."""
    return _of_extra("lm_eval.tasks").TaskManager()


def _results(candidate: str, found: Mapping[str, Mapping[str, Any]]) -> list[BenchmarkResult]:
    """Convert lm-eval's table ``{task: {"acc,none": value, "acc_stderr,none": value, "sample_len": count, ...}}``."""
    results: list[BenchmarkResult] = []
    for task, metrics in found.items():
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
                continue
            if not isfinite(value):
                raise FloatingPointError(f"{task}: {metric} of {candidate} is not a finite number")
            stderr = metrics.get(f"{metric}_stderr,{filter_name}")
            stderr = float(stderr) if isinstance(stderr, Real) else None
            name = metric if filter_name == "none" else key
            results.append(BenchmarkResult(task, name, candidate, float(value), stderr, metrics["sample_len"]))
    return results


def _of_extra(module: str) -> Any:
    """Import a module of the extra `eval`; raise UserError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise UserError(
            f"expected the package {package.replace('_', '-')}, found it not installed; pip install 'linearize[eval]'"
        ) from error


@contextmanager
def _level(logger: str, level: int) -> Generator[None, None, None]:
    """Set the level of a logger in the `with` block."""
    chosen = logging.getLogger(logger)
    before = chosen.level
    chosen.setLevel(level)
    try:
        yield
    finally:
        chosen.setLevel(before)


@contextmanager
def _first_warnings(logger: str) -> Generator[None, None, None]:
    """Let a logger print each kind of warning once: lm-eval warns of every single question that is truncated."""
    said: set[int] = set()

    def first(record: logging.LogRecord) -> bool:
        known = record.lineno in said
        said.add(record.lineno)
        return not known

    chosen = logging.getLogger(logger)
    chosen.addFilter(first)
    try:
        yield
    finally:
        chosen.removeFilter(first)
