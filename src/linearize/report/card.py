"""Markdown about a run: its evaluation.md, and the README.md of its student's folder.

Names from users (files, data sets, tasks, models) are escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import yaml

from linearize.base import without_controls
from linearize.report.findings import sentences, sides
from linearize.report.html import Table
from linearize.report.load import RunFiles
from linearize.report.numbers import count
from linearize.report.tables import of_run
from linearize.report.unmeasured import missing_sections

_LIMITS = {
    "text": "Measured on one held-out text. Other texts, lengths and languages were not measured.",
    "examples": "Measured on held-out examples of one data set. Other data sets were not measured.",
    "teacher": "The student has the teacher's errors, because it was made to match the teacher.",
}
_READERS = {"image-classification": "AutoImageProcessor", "image-feature-extraction": "AutoImageProcessor"}
# Characters with a meaning, at the start of a line or anywhere; brackets around intervals have none.
_NUMBER = r"[-+\N{MINUS SIGN}]?[\d.,]+"
_SPECIAL = re.compile(rf"^[#=-]|^\+(?=\s|$)|^\d+(?=[.)](?:\s|$))|[\\`*_~$|]|\[(?!{_NUMBER}, {_NUMBER}\](?![\[(:]))")
_ENTITIES = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}


def evaluation_page(run: RunFiles) -> str:
    """Return the tables and the findings."""
    return "\n".join([*map(table, of_run(run)), bullets(sentences(run))])


def model_card(run: RunFiles) -> str:
    """Return the model card with front matter for the Hugging Face hub; all numbers are from the run's evaluation."""
    name = run.name
    purpose = "text-generation" if run.task is None else run.task.pipeline_tag
    model = "AutoModelForCausalLM" if run.task is None else run.task.auto_class
    model = model if model.isidentifier() else "AutoModel"
    front = {"library_name": "transformers", "pipeline_tag": purpose, "tags": ["linearize", "linear-attention"]}
    example = f"""import linearize  # registers the classes; or pass trust_remote_code=True
from transformers import {model}, {_READERS.get(purpose, "AutoTokenizer")}

model = {model}.from_pretrained({json.dumps(name, ensure_ascii=False)})
"""
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n",
        f"# {escaped(name)}\n\n{_origin(run)}\n",
        fenced("python", example),
        "## Results\n",
        *map(table, of_run(run)),
    ]
    parts += [f"### {heading}\n\n{bullets(lines)}" for _, heading, lines in sides(run)]
    parts.append(f"## Limits\n\n{bullets([*_scope(run), *missing_sections(run), *_limits(run)])}")
    if run.recipe:
        parts.append(f"## Recipe\n\n{fenced('yaml', run.recipe_text)}")
    return "\n".join(parts)


def _origin(run: RunFiles) -> str:
    described = escaped((run.recipe and run.recipe.description) or "see recipe.yaml")
    by = f"with the recipe {code(run.recipe.name if run.recipe else 'unknown')}: {described}."
    if _from_scratch(run):
        return f"A linear-attention model of the shape of {code(run.teacher or 'another')}, trained from scratch {by}"
    return f"{code(run.teacher or 'a softmax model')}, linearized {by}"


def _from_scratch(run: RunFiles) -> bool:
    return run.recipe is not None and run.recipe.weights == "random"


def _scope(run: RunFiles) -> list[str]:
    """Return a sentence about the data of the losses, in a list; empty without losses."""
    student = run.measured("student")
    if student is None:
        return []
    quality = student.quality
    of = f" of {count(quality.documents)} documents" if quality.documents else ""
    beyond = f"{count(quality.tokens_beyond)} of them beyond the window of {count(run.window)}"
    return [f"The losses rest on {count(quality.tokens)} held-out tokens{of}, {beyond}."]


def _limits(run: RunFiles) -> list[str]:
    found = [_LIMITS["text" if run.is_language_model or run.results.short else "examples"]]
    return found if _from_scratch(run) else [*found, _LIMITS["teacher"]]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Return Markdown that shows a text literally, on one line, in a paragraph, a heading or a table."""
    # A digit cannot be escaped, but the dot that would make it the number of a list can.
    marked = _SPECIAL.sub(lambda found: f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}", _line(text))
    return marked.translate(_ENTITIES)


def _line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return without_controls(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)).strip()


def code(text: str) -> str:
    """Return a name as inline code."""
    line, ticks = _line(text), _longer(text, "")
    return f"{ticks} {line} {ticks}" if len(ticks) > 1 else f"`{line}`"


def fenced(language: str, text: str) -> str:
    """Return a block of code."""
    fence = _longer(text, "``")
    return f"{fence}{language}\n{text}{fence}\n"


def _longer(text: str, least: str) -> str:
    """Return more backquotes than any run of them in the text."""
    return "`" * (1 + max(map(len, [least, *re.findall("`+", text)])))


def bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {escaped(line)}\n" for line in lines)


def table(found: Table) -> str:
    """Return a table with its caption."""
    rows = [found.columns, *(row for group in found.groups for row in group.rows)]
    lines = [" | ".join(map(escaped, row)) for row in rows]
    lines.insert(1, " | ".join(["---"] * len(found.columns)))
    return f"{escaped(found.caption)}:\n\n" + "".join(f"| {line} |\n" for line in lines)
