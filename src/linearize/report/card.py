"""The README.md of a student's folder: what it is, what it is worth, and what it is not good for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from linearize.evaluation.candidates import LABELS
from linearize.evaluation.metrics import title
from linearize.evaluation.tables import markdown_table
from linearize.report.finding import Finding
from linearize.report.findings import findings
from linearize.report.load import RunFiles, interval, label
from linearize.report.numbers import count, with_interval
from linearize.report.task_findings import what

_LIMITS = {
    "text": "Measured on one held-out text; on other text, other lengths and other languages it was not.",
    "examples": "Measured on held-out examples of one data set; on others it was not.",
    "teacher": "What the teacher gets wrong, the student does too: it was trained to do as the teacher does.",
}
_READERS = {"image-classification": "AutoImageProcessor", "image-feature-extraction": "AutoImageProcessor"}
_SIDES = {"win": "Kept or better", "loss": "Lost or worse", "open": "Not decided", "fact": "Also measured"}


def model_card(run: RunFiles) -> str:
    """Markdown with the front matter of a Hugging Face folder; every number is from the run's own evaluation."""
    recipe, name, task = run.recipe or {}, run.name, run.task or {}
    purpose, model = task.get("pipeline_tag", "text-generation"), task.get("auto_class", "AutoModelForCausalLM")
    parts = [
        f"""---
library_name: transformers
pipeline_tag: {purpose}
tags: [linearize, linear-attention]
---

# {name}

{_origin(run)}

```python
import linearize  # registers the classes; or pass trust_remote_code=True
from transformers import {model}, {_READERS.get(purpose, "AutoTokenizer")}

model = {model}.from_pretrained("{name}")
```

## Results
"""
    ]
    if run.task is not None:
        parts.append(_scores(run, run.task))
    if run.is_language_model:
        parts.append(f"Held-out loss, nats per token, with 95 % intervals (lower is better):\n\n{_losses(run)}")
    found = findings(run)
    for kind, heading in _SIDES.items():
        parts.append(_list(heading, [finding for finding in found if finding.kind == kind]))
    parts.append("## Limits\n\n" + "".join(f"- {line}\n" for line in (*_scope(run), *_limits(run))))
    if recipe:
        parts.append(f"## Recipe\n\n```yaml\n{yaml.safe_dump(recipe, sort_keys=False, width=110)}```\n")
    return "\n".join(filter(None, parts))


def _origin(run: RunFiles) -> str:
    recipe = run.recipe or {}
    described = recipe.get("description") or "see recipe.yaml"
    by = f"with the recipe `{recipe.get('name', 'unknown')}`: {described}."
    if _from_scratch(run):
        return f"A linear-attention model of the shape of `{run.teacher or 'another'}`, trained from scratch {by}"
    return f"`{run.teacher or 'a softmax model'}`, linearized {by}"


def _from_scratch(run: RunFiles) -> bool:
    return (run.recipe or {}).get("weights") == "random"


def _limits(run: RunFiles) -> list[str]:
    found = [_LIMITS["text" if run.is_language_model else "examples"]]
    return found if _from_scratch(run) else [*found, _LIMITS["teacher"]]


def _scores(run: RunFiles, task: dict[str, Any]) -> str:
    """The candidates' scores at the task."""
    metrics = task["metrics"]
    lines = [["model", *map(title, metrics), "what it is"]]
    for candidate in LABELS:
        if line := run.scored(candidate):
            scores = (with_interval(run.score(candidate, metric)) for metric in metrics)
            lines.append([label(candidate), *scores, line["note"]])
    kind = what(task)
    head = f"{kind[:1].upper()}{kind[1:]}, {count(task['examples'])} held-out examples, with 95 % intervals"
    return f"{head} (higher is better):\n\n{_table(lines)}"


def _losses(run: RunFiles) -> str:
    lines = [["model", "loss", f"beyond {count(run.window)} tokens", "what it is"]]
    for candidate in LABELS:
        if measured := run.measured(candidate):
            losses = (with_interval(interval(measured["quality"][key])) for key in ("loss", "beyond"))
            lines.append([label(candidate), *losses, measured["note"]])
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return markdown_table(cells[0], cells[1:])


def _list(title: str, found: Sequence[Finding]) -> str:
    return f"### {title}\n\n" + "".join(f"- {finding.words}\n" for finding in found) if found else ""


def _scope(run: RunFiles) -> list[str]:
    """What these results rest on, and what was left out."""
    student = run.measured("student")
    lines = []
    if student is not None:
        quality = student["quality"]
        lines.append(
            f"The losses rest on {count(quality['tokens'])} held-out tokens, {count(quality['tokens_beyond'])} of them "
            f"beyond the window of {count(run.window)}."
        )
    if not run.is_language_model:
        missing = run.section("missing") or []
        return [f"Not measured: {', '.join(missing)}."] if missing else []
    missing = [
        words
        for key, words in (
            ("retrieval", "recall over distances"),
            ("tasks", "downstream tasks"),
            ("agreement", "agreement"),
        )
        if run.section(key) is None
    ]
    if missing:
        lines.append(f"Not measured: {', '.join(missing)}.")
    return lines
