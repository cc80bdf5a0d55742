"""The recipe and the plan of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from linearize.planning.results import Plan
from linearize.report.html import Block, Code, Section, Table
from linearize.report.load import RunFiles
from linearize.report.numbers import DASH, count, plain, scaled, share
from linearize.report.unmeasured import not_measured


def recipe(runs: Sequence[RunFiles]) -> Section:
    """The plan's numbers, where the recipes differ, and each recipe in full, folded away."""
    blocks: list[Block] = []
    planned = [run for run in runs if run.plan]
    if planned:
        lines = [_plan(run.plan) for run in planned if run.plan]
        rows = [[name, *(line.get(name, DASH) for line in lines)] for name in lines[0]]
        blocks.append(Table.of("Plan: what the recipe means for this teacher", ["", *(r.name for r in planned)], rows))
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


def _plan(plan: Plan) -> dict[str, str]:
    layers = len(plan.converted_layers) + len(plan.kept_layers)
    kept = f"; layers {plain(plan.kept_layers)} stay softmax" if plan.kept_layers else ""
    new = plan.new_parameters
    lines = {
        "recipe": plan.recipe,
        "teacher": f"{plan.model_type}, {scaled(plan.teacher_parameters)} parameters",
        "layers converted": f"{len(plan.converted_layers)} of {layers}{kept}",
        "new parameters": f"{count(new)} ({share(new / plan.teacher_parameters, 2)} of the teacher's)",
    }
    for cost, name in ((plan.transfer, "attention transfer"), (plan.finetune, "fine-tuning")):
        lines[name] = "none"
        if cost is not None:
            lines[name] = (
                f"{scaled(cost.trainable_parameters)} trained parameters, {scaled(cost.tokens)} tokens, "
                f"{scaled(cost.flops, 'FLOP')}"
            )
            if cost.memory_bytes is not None:
                lines[name] += f", about {scaled(cost.memory_bytes, 'B')} of memory"
    lines["trained controls"] = scaled(plan.control_flops, "FLOP") if plan.control_flops else "none"
    return lines | _memory(plan)


def _memory(plan: Plan) -> dict[str, str]:
    """Return the bytes of a sequence during generation; an encoder reads its input at once and keeps nothing."""
    if not plan.teacher_cache_bytes_per_token:
        return {"cache": "none: inputs are read at once, in time linear in their length"}
    lines = {}
    growth = plan.student_cache_bytes_per_token
    lines["student holds, per sequence"] = f"{scaled(plan.state_bytes, 'B')}" + (
        f" and {scaled(growth, 'B')} per token" if growth else " at any length"
    )
    lines["teacher holds, per token"] = scaled(plan.teacher_cache_bytes_per_token, "B")
    ends = plan.break_even_tokens
    lines["student holds less from"] = "no length" if ends is None else f"{count(ends)} tokens on"
    return lines


def differences(recipes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Dotted fields in which recipes differ, with each one's value."""
    flat = [flattened(recipe) for recipe in recipes]
    names = {name: 0 for fields in flat for name in fields}
    lines = [[name, *(plain(fields[name]) if name in fields else DASH for fields in flat)] for name in names]
    return [line for line in lines if len(set(line[1:])) > 1]


def flattened(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted fields."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
