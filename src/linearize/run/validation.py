"""Check the models that a command is given: before it loads or times them, and while they generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.hf.checkpoint import read_config
from linearize.hf.compiled import compile_steps
from linearize.hf.teacher import TeacherShape

GENERATES = "only language models generate"


def compile_if_possible(*models: PreTrainedModel, note: Callable[[str], None]) -> None:
    """Compile the models' steps of generation; if that is impossible, call `note` with the reason."""
    try:
        compile_steps(*models)
    except UserError as error:
        note(f"--{error}; continuing without compilation")


def check_teacher(model: str, student: TeacherShape) -> None:
    """Raise UserError if a softmax model does not exist or has other sizes than a student."""
    teacher = TeacherShape.from_config(read_config(model))
    fields = ("model_type", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size")
    for name in fields:
        expected, found = getattr(student, name), getattr(teacher, name)
        if found != expected:
            raise UserError(f"teacher {model}: {name}: expected the student's {expected}, found {found}")


def require_linearized(model: str) -> dict[str, Any]:
    """Return the config of a linearized model's folder; raise UserError if it is no linearized model."""
    config = read_config(model)
    if not config.get("linearize"):
        raise UserError(f"model {model}: expected a linearized model, found model_type {config.get('model_type')!r}")
    return config


def require_head(model: str, config: dict[str, Any], auto_class: str, advice: str) -> None:
    """Raise UserError if a linearized model has another head than the Auto class loads; other models pass."""
    found = [name for name in config.get("auto_map") or {} if name != "AutoConfig"]
    if config.get("linearize") and found and auto_class not in found:
        raise UserError(f"model {model}: expected one for {auto_class}, found one for {found[0]}; {advice}")


def require_finite(model: PreTrainedModel) -> None:
    """Make every later forward of `model` raise UserError if a logit of the last token is NaN or infinite.

    transformers would end the text, or sample arbitrary tokens. Minus infinity is allowed: it excludes a token.
    Compiled forwards are not checked.
    """
    model.register_forward_hook(_check_logits)


def _check_logits(model: Any, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    last = output.logits[:, -1]
    if bool((last.isnan() | last.isposinf()).any()):
        raise UserError(
            "model: expected logits that are numbers, found NaN or infinity; its weights are damaged, or too large for "
            "its dtype: load it with --dtype float32"
        )
