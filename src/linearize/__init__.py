"""Convert pretrained softmax Transformers into linear-attention models, and measure the loss of quality.

Importing the package registers the ``linearized_*`` classes with transformers, now or when transformers is imported.
All else is imported at first use, so reading a recipe imports neither torch nor transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, cast

from linearize.base import UserError
from linearize.recipe import Recipe

if TYPE_CHECKING:
    from linearize.api import (
        attention_transfer,
        build_dataset,
        compile_steps,
        convert,
        finetune,
        fork_state,
        load_state,
        register_feature_map,
        save_state,
        softmax_attention,
        to_softmax,
    )

__all__ = [
    "Recipe",
    "UserError",
    "attention_transfer",
    "build_dataset",
    "compile_steps",
    "convert",
    "finetune",
    "fork_state",
    "load_state",
    "register_feature_map",
    "save_state",
    "softmax_attention",
    "to_softmax",
]


def __getattr__(name: str) -> object:
    """Return a function of `linearize.api`, which is imported at first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("linearize.api"), name)


class _RegisterClasses:
    """An import finder that imports `linearize.hf.classes` right after transformers."""

    @staticmethod
    def find_spec(name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of transformers, whose loader also imports our classes; None for other modules."""
        spec = PathFinder.find_spec(name, cast("Sequence[str] | None", path)) if name == "transformers" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            import_module("linearize.hf.classes")

        spec.loader.exec_module = exec_module
        return spec


if "transformers" in sys.modules:
    import_module("linearize.hf.classes")
else:
    sys.meta_path.insert(0, _RegisterClasses)
