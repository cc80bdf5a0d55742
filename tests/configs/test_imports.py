"""Reading a recipe loads no torch, and importing the package registers its classes all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import linearize

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(linearize.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

RECIPES = """
import sys
from linearize.recipe import Recipe, recipe_names

assert len([Recipe.load(name) for name in recipe_names()]) > 20
print([name for name in ("numpy", "torch", "transformers") if name in sys.modules])
"""

REGISTERED = """
{}
from transformers import AutoConfig

print(AutoConfig.for_model("linearized_llama").model_type)
"""


def printed(script: str) -> str:
    child = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return child.stdout.strip()


def test_recipes_are_read_without_torch() -> None:
    assert printed(RECIPES) == "[]"


LATER = [
    pytest.param(imports, marks=pytest.mark.slow)
    for imports in ("import transformers, linearize", "import linearize.recipe")
]


@pytest.mark.parametrize("imports", ["import linearize", *LATER])
def test_classes_are_registered_whichever_is_imported_first(imports: str) -> None:
    assert printed(REGISTERED.format(imports)) == "linearized_llama"


@pytest.mark.parametrize("name", linearize.__all__)
def test_the_package_has_what_it_lists(name: str) -> None:
    assert getattr(linearize, name).__name__ == name
