"""The section on the recipe and the plan of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from linearize.report.html import Block, Code, Section, Table
from linearize.report.load import RunFiles
from linearize.report.numbers import DASH, plain
from linearize.report.unmeasured import not_measured


def recipe(runs: Sequence[RunFiles]) -> Section:
    """Return the section with the plan's numbers, differences of recipes, and each recipe in full, collapsed."""
    blocks: list[Block] = []
    planned = [run for run in runs if run.plan]
    if planned:
        lines = [
            {"recipe": plan.recipe, "teacher": plan.model_type} | plan.rows() for run in planned if (plan := run.plan)
        ]
        caption = "Plan: what the recipe means for this teacher"
        blocks.append(Table.by_run(caption, [run.name for run in planned], lines))
    blocks += not_measured(runs, "plan", lambda run: run.plan)
    written = [run for run in runs if run.recipe]
    if len(written) > 1:
        rows = differences([run.recipe.model_dump(mode="json") for run in written if run.recipe])
        if rows:
            blocks.append(Table.of("Where the recipes differ", ["field", *(run.name for run in written)], rows))
    for run in written:
        title = f"The recipe in full: {run.name}" if run.group else "The recipe in full"
        blocks.append(Code(title, run.recipe_text))
    blocks += not_measured(runs, "recipe", lambda run: run.recipe)
    descriptions = {run.recipe.description: 0 for run in written if run.recipe and run.recipe.description}
    return Section("recipe", "Recipe and plan", blocks, summary=". ".join(descriptions))


def differences(recipes: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return rows of dotted fields in which recipes differ, with the value of each recipe."""
    flat = [flattened(recipe) for recipe in recipes]
    names = {name: 0 for fields in flat for name in fields}
    lines = [[name, *(plain(fields[name]) if name in fields else DASH for fields in flat)] for name in names]
    return [line for line in lines if len(set(line[1:])) > 1]


def flattened(data: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as dotted fields."""
    flat: dict[str, object] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
