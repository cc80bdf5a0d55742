"""The closer look at one student: what its loss does not show.

Agreement with the teacher, text that both generate, recall, how faithful each head is, whether the linear part is used,
and public benchmarks where they are asked for.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError
from linearize.data.packing import PackedRows
from linearize.evaluation.agreement import Agreement, Generations, generation_agreement, logit_agreement
from linearize.evaluation.candidates import BATCH_SIZE, Candidate
from linearize.evaluation.config import EvaluationConfig
from linearize.evaluation.fidelity import Fidelity, measure_fidelity
from linearize.evaluation.harness import Tasks, evaluate_tasks
from linearize.evaluation.path_usage import PathUsage, measure_path_usage
from linearize.evaluation.retrieval import Answers, Retrieval, answer, retrieval_result, retrieval_tests
from linearize.evaluation.samples import spread_rows
from linearize.hf.attention import linearized_layers

RECALLING = ("teacher", "student", "window")  # the floor is the teacher within its window
SHOWN = 4  # generations kept as text
TASK_BATCH_SIZE = 16


@dataclass(frozen=True)
class Examination:
    """None where something was not measured; `not_measured` says why, by section."""

    agreement: Agreement | None
    generations: Generations | None
    fidelity: Fidelity
    path_usage: PathUsage | None
    retrieval: list[Retrieval]
    tasks: Tasks | None
    not_measured: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data, by section."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            data[field.name] = value.to_json() if hasattr(value, "to_json") else value
        return data | {"retrieval": [test.to_json() for test in self.retrieval]}

    def lines(self) -> list[str]:
        """The findings, a sentence each."""
        lines = []
        if self.agreement is not None:
            same, kl = self.agreement.top1, self.agreement.kl
            lines.append(
                f"The student's likeliest next token is the teacher's in {same.mean:.1%} [{same.low:.1%}, "
                f"{same.high:.1%}] of all places; KL(teacher || student) is {kl.mean:.3f} "
                f"[{kl.low:.3f}, {kl.high:.3f}] nats per token."
            )
        if self.generations is not None:
            prefix = self.generations.common_prefix
            lines.append(
                f"Left to themselves, both write the same for {prefix.mean:.1f} [{prefix.low:.1f}, {prefix.high:.1f}] "
                f"of {self.generations.new_tokens} tokens before the first difference."
            )
        if self.path_usage is not None:
            lines.append(self.path_usage.words)
        lines += [f"Recall, {test.name.replace('_', ' ')}: {test.verdict}." for test in self.retrieval]
        lines += [outlier.words for outlier in self.fidelity.worst]
        return lines


def examine(
    candidates: Sequence[Candidate],
    rows: PackedRows,
    tokenizer: Tokenizer,
    *,
    window_size: int,
    max_positions: int,
    config: EvaluationConfig,
    seed: int,
) -> Examination:
    """Open the student beside its teacher, then those whose recall is compared, one after another.

    Args:
        candidates: "student" must be among them.
        rows: packed held-out rows, of which `config.examined_tokens` tokens are read.
        window_size: what counts as "beyond the window".
    """
    rows = spread_rows(rows, config.examined_tokens)
    opened = {candidate.name: candidate for candidate in candidates}
    samples: dict[str, Any] = {"samples": config.bootstrap_samples, "seed": seed}
    agreement = generations = tasks = path_usage = None
    missing: dict[str, str] = {}
    if "teacher" not in opened:
        missing |= {"agreement": "no teacher at hand", "generations": "no teacher at hand"}
    with opened["student"].open() as student:
        sampled: dict[str, Any] = {"max_tokens": config.fidelity_tokens, "batch_size": BATCH_SIZE, "seed": seed}
        fidelity = measure_fidelity(student, rows, tokenizer, **sampled)
        if all(layer.mixer.causal for layer in linearized_layers(student).values()):
            path_usage = measure_path_usage(student, rows, **sampled | samples)
        else:
            missing["path_usage"] = "an encoder has no window beside its linear part"
        if "teacher" in opened:
            with opened["teacher"].open() as teacher:
                agreement = logit_agreement(
                    teacher, student, rows, batch_size=BATCH_SIZE, window_size=window_size, **samples
                )
                try:
                    generations = generation_agreement(
                        teacher,
                        student,
                        tokenizer,
                        rows,
                        prompts=config.prompts,
                        prompt_length=min(window_size, max_positions // 4),
                        new_tokens=min(config.new_tokens, max_positions // 2),
                        shown=SHOWN,
                        seed=seed,
                    )
                except UserError as error:  # of the held-out text: the other numbers do not depend on it
                    missing["generations"] = str(error)
                if config.tasks:
                    tasks = _tasks({"teacher": teacher, "student": student}, tokenizer, config, seed)
        elif config.tasks:
            tasks = _tasks({"student": student}, tokenizer, config, seed)
    if not config.tasks:
        missing["tasks"] = "none asked for; name some by --tasks or evaluation.tasks"
    retrieval = _retrieval(opened, rows, tokenizer, window_size, max_positions, config, seed)
    return Examination(agreement, generations, fidelity, path_usage, retrieval, tasks, missing)


def _tasks(models: Mapping[str, Any], tokenizer: Tokenizer, config: EvaluationConfig, seed: int) -> Tasks:
    options: dict[str, Any] = {"shots": config.shots, "limit": config.task_limit, "seed": seed}
    return evaluate_tasks(models, tokenizer, config.tasks, batch_size=TASK_BATCH_SIZE, **options)


def _retrieval(
    opened: Mapping[str, Candidate],
    rows: PackedRows,
    tokenizer: Tokenizer,
    window_size: int,
    max_positions: int,
    config: EvaluationConfig,
    seed: int,
) -> list[Retrieval]:
    sizes: dict[str, int] = {"window_size": window_size, "max_positions": max_positions}
    tests = retrieval_tests(tokenizer, **sizes, trials=config.recall_trials, seed=seed, haystack=rows.input_ids)
    answers: list[dict[str, Answers]] = [{} for _ in tests]
    for name in RECALLING:
        if name not in opened:
            continue
        with opened[name].open() as model:
            for test, given in zip(tests, answers, strict=True):
                given[name] = answer(model, test, batch_size=BATCH_SIZE, title=f"recall: {opened[name].label}")
        del model
        gc.collect()
    samples: dict[str, int] = {"samples": config.bootstrap_samples, "seed": seed}
    return [retrieval_result(test, given, **samples) for test, given in zip(tests, answers, strict=True)]
