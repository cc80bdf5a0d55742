"""Markdown about a run: its evaluation.md, and the README.md of its student's folder."""

from __future__ import annotations

import json

import yaml

from linearize.report.findings import sentences, sides
from linearize.report.load import RunFiles
from linearize.report.markdown import bullets, code, escaped, fenced, table
from linearize.report.numbers import count
from linearize.report.tables import of_run
from linearize.report.unmeasured import missing_sections

_LIMITS = {
    "text": "Measured on one held-out text. Other texts, lengths and languages were not measured.",
    "examples": "Measured on held-out examples of one data set. Other data sets were not measured.",
    "teacher": "The student has the teacher's errors, because it was made to match the teacher.",
}
_READERS = {"image-classification": "AutoImageProcessor", "image-feature-extraction": "AutoImageProcessor"}


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
