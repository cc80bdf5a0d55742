"""Run `linearize demo`: the bundled teacher, per-head KV budget allocation, a little training, and every control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from linearize.data.packing import dataset_from_documents
from linearize.demo.corpus import standard_library_texts, teacher_path
from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.recipe import Recipe
from linearize.report import terminal
from linearize.report.load import load_run
from linearize.run.folder import Run
from linearize.run.pipeline import run

PROMPT = "def read_config(path):\n"
# Small enough for two CPU cores and a few minutes, including the trained control, a window of as many tokens.
BUDGET = {
    "data.validation_rows": 24,
    "evaluation.long": True,
    "finetune.max_tokens": 80_000,
    "finetune.eval_every": 20,
}


def run_demo(output_dir: Path, dtype: torch.dtype, device: torch.device) -> RenderableType:
    """Run the demo; return the table of results and a sample of the student."""
    torch.manual_seed(0)
    teacher = str(teacher_path())
    recipe = Recipe.load("recommended", BUDGET)
    tokenizer = load_tokenizer(teacher)
    dataset = dataset_from_documents(*standard_library_texts(), tokenizer, recipe.data, recipe.seed)
    run(Run(recipe, teacher, output_dir, dtype, device), dataset=dataset)

    student: Any = load_model(str(output_dir / "model"), dtype=dtype, device=device)
    inputs = tokenizer(PROMPT, return_tensors="pt").to(device)
    torch.manual_seed(0)
    sample = student.generate(**inputs, max_new_tokens=80, do_sample=True, temperature=0.7)
    return Group(
        terminal.measured(load_run(output_dir)),
        Text("\nThe student continues a prompt (5M parameters: it writes the form of code, without meaning):\n"),
        Text(str(tokenizer.decode(sample[0], skip_special_tokens=True))),
    )
