"""Reading teachers and writing students as ordinary Hugging Face folders."""

from __future__ import annotations

import os
from pathlib import Path

AUTO_MODULE = "modeling_linearize"


def auto_map(config_class: str, model_class: str, auto_class: str) -> dict[str, str]:
    """The config's `auto_map`: where ``trust_remote_code=True`` finds the classes."""
    return {"AutoConfig": f"{AUTO_MODULE}.{config_class}", auto_class: f"{AUTO_MODULE}.{model_class}"}


def write_auto_module(folder: str | os.PathLike[str], config_class: str, model_class: str) -> None:
    """The module that `auto_map` names. It only imports: without the package, transformers says what to install."""
    text = f"from linearize.hf.classes import {config_class}, {model_class}\n\n__all__ = [{config_class!r}, {model_class!r}]\n"
    (Path(folder) / f"{AUTO_MODULE}.py").write_text(text.replace("'", '"'), encoding="utf-8")
