"""Measurements of a grid that has `examine`: on long rows of text, needles, copying, the teacher's outputs, questions.

The grid's students are compared with the control cells that are named in `controls`: `window`, `equal_bytes` and
`softmax`. The JSON file of a grid has each student's losses by row, so that a cell that is added later is compared with
controls that were measured before. Losses are in nats per token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from outcomes import FAR
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError
from linearize.configs.data import DataConfig
from linearize.data.packing import fingerprint, first_tokens
from linearize.data.repeats import ordinary_tokens
from linearize.data.rows import IGNORED, PackedRows, inference
from linearize.evaluation.agreement import logit_agreement
from linearize.evaluation.continuation import score
from linearize.evaluation.controls import without_linear_part
from linearize.evaluation.copying import copy_losses, copy_rows
from linearize.evaluation.harness import run_benchmarks
from linearize.evaluation.intervals import Interval, Totals, resample
from linearize.evaluation.perplexity import TokenLosses, paired_difference, token_losses
from linearize.evaluation.shares import kept_copying
from linearize.evaluation.short import passages
from linearize.evaluation.speed import cache_bytes
from linearize.hf.attention import linearized_layers
from linearize.run.folder import write_json

ROWS, LENGTH = 16, 2048  # rows of the text, and tokens of each
CONTEXT = 1024  # tokens before a needle's question; rows are cut there where two models read them
BATCH_SIZE = 2
TEXT_LIMIT = 2**20  # tokens of the text that are read


@dataclass(frozen=True)
class Examination:
    """The rows and questions that all students of a call are measured on.

    Attributes:
        rows: [ROWS, LENGTH], from places that are evenly spread over the text.
        tasks: .jsonl files of multiple-choice questions, or names of lm-eval's tasks.
        limit: questions of each task; None: all.
    """

    rows: PackedRows
    tokenizer: Tokenizer
    tasks: tuple[str, ...]
    limit: int | None

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer, tasks: tuple[str, ...], limit: int | None) -> Examination:
        """Cut the rows out of a text.

        Raises:
            UserError: nothing to read, or too little.
        """
        tokens = first_tokens(DataConfig(dataset=text), tokenizer, TEXT_LIMIT)
        count = len(tokens) // LENGTH
        if count < ROWS:
            raise UserError(
                f"--examined-text: expected at least {ROWS * LENGTH} tokens, found {len(tokens)} in {text!r}; "
                "give more text"
            )
        places = torch.arange(ROWS) * count // ROWS
        input_ids = tokens[: count * LENGTH].view(count, LENGTH)[places]
        labels = input_ids.clone()
        labels[:, 0] = IGNORED
        positions = torch.arange(LENGTH).expand(ROWS, -1).contiguous()
        return cls(PackedRows(input_ids, positions, labels), tokenizer, tasks, limit)

    @property
    def identity(self) -> list[Any]:
        """What has to be equal for results to be comparable."""
        return [fingerprint(self.rows), [Path(task).name for task in self.tasks], self.limit]

    def losses(self, model: PreTrainedModel, title: str) -> TokenLosses:
        return token_losses(model, self.rows, batch_size=BATCH_SIZE, title=title)

    def teacher(self, load: Callable[[], PreTrainedModel], folder: Path) -> tuple[TokenLosses, dict[str, Any]]:
        """Return the teacher's losses and results, from the files in `folder` where these exist."""
        losses, results = folder / "losses.pt", folder / "teacher.json"
        if not results.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            model = load()
            measured = self.losses(model, "teacher")
            torch.save(asdict(measured), losses)
            write_json(results, self.of_model(model) | {"totals": _totals(measured)})
        return TokenLosses(**torch.load(losses)), json.loads(results.read_text(encoding="utf-8"))

    def of_model(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return what is measured of one model by itself: needles, bytes of the cache, and right answers."""
        found, size = self._needles(model)
        options: dict[str, Any] = {"shots": 0, "limit": self.limit, "batch_size": 8, "seed": 0}
        scores: dict[str, dict[str, float]] = {}
        if self.tasks:
            for result in run_benchmarks({"model": model}, self.tokenizer, self.tasks, **options).results:
                scores.setdefault(result.task, {"questions": result.samples})[result.metric] = result.value
        return {"needles": [found, ROWS], "cache_bytes": size, "tasks": scores}

    def _needles(self, model: PreTrainedModel) -> tuple[int, int]:
        """Return how many needles greedy decoding finds behind CONTEXT tokens, and the bytes of the cache there."""
        ids, found, size = self.rows.input_ids.flatten().tolist(), 0, 0
        forward: Any = model
        with inference(model) as device:
            for passage in passages(ids, self.tokenizer, context=CONTEXT, max_positions=LENGTH, seed=0):
                assert passage.needle is not None
                context = torch.tensor([passage.context], device=device)
                asked = torch.tensor([[*passage.needle.question, *passage.needle.answer]], device=device)
                read = forward(input_ids=context, use_cache=True, logits_to_keep=1)
                size = cache_bytes(read.past_key_values)
                logits = forward(input_ids=asked, past_key_values=read.past_key_values, use_cache=True).logits[0]
                found += score(read.logits[0, -1:], logits, asked[0], len(passage.needle.answer))[1]
        return found, size

    def student(
        self, teacher: PreTrainedModel, student: PreTrainedModel, losses: TokenLosses, of_teacher: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what is measured of a student, alone and compared with its teacher.

        Args:
            losses: the student's, on the rows.
            of_teacher: what `of_model` measured of the teacher.
        """
        short = PackedRows(*(x[:, :CONTEXT] for x in (self.rows.input_ids, self.rows.position_ids, self.rows.labels)))
        agreement = logit_agreement(teacher, student, short, batch_size=BATCH_SIZE, window_size=FAR)
        vocabulary = ordinary_tokens(len(self.tokenizer), self.tokenizer.all_special_ids)
        copies = copy_rows(vocabulary, window_size=FAR, max_positions=LENGTH, rows=ROWS, seed=0)
        assert copies is not None
        copied = [copy_losses(model, copies, batch_size=BATCH_SIZE) for model in (teacher, student)]
        measured = {
            "kl": vars(agreement.kl),
            "top1": vars(agreement.top1),
            "copying": asdict(kept_copying(*copied)),
            "totals": _totals(losses),
            "teacher": of_teacher,
        }
        mixers = [part for layer in linearized_layers(student).values() for _, part in layer.mixer.parts()]
        if any(part.feature_map is not None and part.span.max_softmax_keys > 0 for part in mixers):
            with without_linear_part(student):
                ablated = token_losses(student, short, batch_size=BATCH_SIZE, title="without linear part")
            own = TokenLosses(
                *(getattr(losses, name)[:, :CONTEXT] for name in ("loss", "mask", "position", "document"))
            )
            measured["without_linear"] = vars(paired_difference(ablated, own))
        return measured | self.of_model(student)


Columns = dict[str, list[list[float]]]
"""By part of the tokens ("all", "beyond" FAR tokens), for each row the sum of the losses and how many there are."""


def _totals(losses: TokenLosses) -> Columns:
    parts = {"all": losses.totals(), "beyond": losses.beyond(FAR).totals()}
    return {name: [[round(x, 4) for x in part.sum.tolist()], part.count.tolist()] for name, part in parts.items()}


# --- students beside controls -----------------------------------------------------------------------------------------


def compare(
    label: str, controls: dict[str, str], students: dict[str, Columns], teacher: Columns
) -> dict[str, dict[str, Any]]:
    """Return a student's differences to its controls, and how much of the gain from far context it retains.

    The gain is that of `softmax`, or of the teacher where the cell has no such control, over `window`, on tokens that
    stand more than FAR tokens into their row. It is left out where it is not above zero for certain.

    Args:
        controls: labels by role.
        students: the `totals` of all cells that are measured, by label.
        teacher: the teacher's `totals`.
    """
    measured = {role: students[name] for role, name in controls.items() if name in students and name != label}
    found: dict[str, Any] = {
        f"minus_{role}": {
            part: _interval([students[label][part], totals[part]], lambda x: x[..., 0] - x[..., 1])
            for part in ("all", "beyond")
        }
        for role, totals in measured.items()
    }
    best = students.get(controls["softmax"]) if "softmax" in controls else teacher
    if "window" in measured and best is not None:
        parts = [measured["window"]["beyond"], students[label]["beyond"], best["beyond"]]
        gain = _interval(parts, lambda x: x[..., 0] - x[..., 2])
        if gain["low"] > 0:
            found["gain_retained"] = _interval(parts, lambda x: (x[..., 0] - x[..., 1]) / (x[..., 0] - x[..., 2]))
    return found


def _interval(columns: list[list[list[float]]], of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    totals = [Totals(*(torch.tensor(x, dtype=torch.float64) for x in column)) for column in columns]
    mean, draws = resample(totals)
    return vars(Interval.of(of(mean), of(draws)))
