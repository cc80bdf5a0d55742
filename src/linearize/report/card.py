"""The README.md of a student's folder: what it is, what it is worth, and what it is not good for."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from linearize.evaluation.candidates import LABELS
from linearize.report.finding import Finding
from linearize.report.findings import findings
from linearize.report.load import RunFiles, interval, label
from linearize.report.numbers import count, with_interval

_LIMITS = (
    "Measured on one held-out text; on other text, other lengths and other languages it was not.",
    "What the teacher gets wrong, the student does too: it was trained to do as the teacher does.",
)


def model_card(run: RunFiles) -> str:
    """Markdown with the front matter of a Hugging Face folder; every number is from the run's own evaluation."""
    recipe, name = run.recipe or {}, run.name
    described = recipe.get("description") or "see recipe.yaml"
    teacher = run.teacher or "a softmax model"
    parts = [
        f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [linearize, linear-attention]
---

# {name}

`{teacher}`, linearized with the recipe `{recipe.get("name", "unknown")}`: {described}.

```python
import linearize  # registers the classes; or pass trust_remote_code=True
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
```

## Results

Held-out loss, nats per token, with 95 % intervals (lower is better):

{_table(run)}"""
    ]
    found = findings(run)
    for kind, title in (("win", "Kept or better"), ("loss", "Lost or worse"), ("open", "Not decided")):
        parts.append(_list(title, [finding for finding in found if finding.kind == kind]))
    parts.append("## Limits\n\n" + "".join(f"- {line}\n" for line in (*_scope(run), *_LIMITS)))
    if recipe:
        parts.append(f"## Recipe\n\n```yaml\n{yaml.safe_dump(recipe, sort_keys=False, width=110)}```\n")
    return "\n".join(filter(None, parts))


def _table(run: RunFiles) -> str:
    lines = [["model", "loss", f"beyond {count(run.window)} tokens", "what it is"], ["---"] * 4]
    for candidate in LABELS:
        if measured := run.measured(candidate):
            losses = (with_interval(interval(measured["quality"][key])) for key in ("loss", "beyond"))
            lines.append([label(candidate), *losses, measured["note"]])
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


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
