"""RULER's needle tasks with one needle, answered by a teacher, converted models and windows of as many bytes.

    python benchmarks/ruler.py TEACHER STUDENT --text essays.txt --window 113 --json results.json

One row (a model, a task, a length) is written when it is measured; the same command again goes on with what is missing.
`ruler_tasks.py` says how prompts are made and in what they differ from RULER's. Answers are greedy and
have at most 128 tokens, which are part of the length. An answer is right if it contains the value: so a generation
ends as soon as every answer of its batch does.

A tokenizer's chat template is used where it has one, as RULER does with chat models: the text and the question are
the user's turn, and the answer's first words follow the header of the assistant's. --base leaves the template out.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import Contender, compare, contender_arguments, contenders, share_of_right, teacher_name
from records import Rows
from ruler_tasks import ANSWER_TOKENS, TASKS, Sample, batches, build_samples, is_right
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import StoppingCriteria, StoppingCriteriaList

from linearize.base import UserError, progress
from linearize.data.rows import inference
from linearize.evaluation.agreement import greedy


class Answered(StoppingCriteria):
    """Ends a generation whose answer contains the value already: more tokens cannot change the score."""

    def __init__(self, tokenizer: Tokenizer, samples: list[Sample]) -> None:
        self.tokenizer, self.samples = tokenizer, samples

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        done = [
            is_right(sample, decoded_answer(self.tokenizer, sample, ids))
            for sample, ids in zip(self.samples, input_ids, strict=True)
        ]
        return torch.tensor(done, device=input_ids.device)


def decoded_answer(tokenizer: Tokenizer, sample: Sample, ids: Any) -> str:
    """Return the text behind a prompt, of prompt and answer together."""
    return str(tokenizer.decode(ids[len(sample.input_ids) :], skip_special_tokens=True))


def count_right(contender: Contender, samples: list[Sample], batch_size: int, title: str) -> int:
    """Return how many questions a model answers right."""
    tokenizer, model, right = contender.tokenizer, contender.model, 0
    end: Any = tokenizer.eos_token_id
    with inference(model) as device, greedy(model, ANSWER_TOKENS, [] if end is None else [end]):
        for indices in progress(batches(samples, batch_size), title):
            asked = [samples[index] for index in indices]
            ids = torch.tensor([sample.input_ids for sample in asked], device=device)
            stop = StoppingCriteriaList([Answered(tokenizer, asked)])
            made: Any = model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=stop)  # type: ignore[operator]
            right += sum(
                is_right(sample, decoded_answer(tokenizer, sample, row))
                for sample, row in zip(asked, made, strict=True)
            )
    return right


def markdown(contents: dict[str, Any]) -> str:
    """Return the page: a table with a line for each model and task and a column for each length."""
    rows, teacher, samples, text = (contents[name] for name in ("rows", "teacher", "samples", "text"))
    templates = " or ".join(sorted({"with" if row["chat_template"] else "without" for row in rows}))
    lengths = sorted({row["length"] for row in rows})
    lines = [
        "# RULER's needle tasks with one needle",
        "",
        f"By `benchmarks/ruler.py`: {samples} questions of each task and length, {templates} the chat template, in "
        f"{contents['dtype']}. The text of `niah_single_2` and `niah_single_3` is `{text['name']}` "
        f"({text['characters']:,} characters), not Paul Graham's essays as in RULER.",
        "",
        f"Lengths are in tokens and include {ANSWER_TOKENS} for the answer. Right answers are in %, with 95 % Wilson "
        "intervals, which do not cover the choice of the text. The last number of a cell is the share of the right "
        f"answers of `{teacher}`.",
        "",
        f"| model | prefill | task | {' | '.join(f'{length:,}' for length in lengths)} |",
        f"|{' --- |' * (3 + len(lengths))}",
    ]
    right = {(row["model"], row["prefill"], row["task"], row["length"]): row["right"] for row in rows}
    for name, prefill in dict.fromkeys((row["model"], row["prefill"]) for row in rows):
        for task in TASKS:
            cells = ["-"] * len(lengths)
            for index, length in enumerate(lengths):
                if (count := right.get((name, prefill, task, length))) is not None:
                    by_teacher = None if name == teacher else right.get((teacher, None, task, length))
                    cells[index] = share_of_right(count, samples, by_teacher)
            if any(cell != "-" for cell in cells):
                lines.append(f"| {name} | {prefill or '-'} | `{task}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measured_row(
    contender: Contender, text: str, task: str, length: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Ask a model the questions of a task at a length."""
    chat = contender.tokenizer.chat_template is not None and not arguments.base
    options = {"length": length, "count": arguments.samples, "chat": chat, "seed": arguments.seed}
    samples = build_samples(task, contender.tokenizer, text, **options)
    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    right = count_right(contender, samples, arguments.batch, f"{contender.name}, {task}, {length}")
    return {
        "chat_template": chat,
        "right": right,
        "seconds": time.perf_counter() - seconds,
        "cpu_seconds": time.process_time() - cpu_seconds,
    }


def measure(arguments: argparse.Namespace) -> str:
    """Measure what is missing; return the page.

    Raises:
        UserError: arguments, models or files that cannot be used.
    """
    try:
        text = arguments.text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--text: expected a text file in UTF-8, found {arguments.text} ({error})") from None
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    setting = {
        "teacher": teacher_name(arguments),
        "text": {"name": arguments.text.name, "characters": len(text), "sha256": digest},
        "samples": arguments.samples,
        "seed": arguments.seed,
        "base": arguments.base,
        "dtype": arguments.dtype,
    }
    results = Rows(arguments.json, setting, markdown)
    for contender in contenders(arguments):
        for length in arguments.lengths:
            for task in arguments.tasks:
                key = {"model": contender.name, "prefill": contender.prefill, "task": task, "length": length}
                measure_row = partial(measured_row, contender, text, task, length, arguments)
                results.add(key, contender.weights, measure_row)
    return markdown(setting | {"rows": results.rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contender_arguments(parser, "ruler.json")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the haystack of niah_single_2 and _3")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], metavar="N", help="in tokens")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="default: all")
    parser.add_argument("--samples", type=int, default=50, metavar="N", help="of each task and length (default: 50)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts at once, at most (default: 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of keys, values and depths (default: 0)")
    parser.add_argument("--base", action="store_true", help="do not use the chat template")
    compare(parser, measure)


if __name__ == "__main__":
    main()
