"""Models whose logits are not numbers: found while they generate, which would only end, or choose any token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.base import UserError


def require_finite(model: PreTrainedModel) -> None:
    """From now on, let a forward of `model` raise where a logit of the last token is NaN or infinite.

    Minus infinity is allowed, for tokens that never come. Compiled forwards are not checked.
    """
    model.register_forward_hook(_check)


def _check(model: Any, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    last = output.logits[:, -1]
    if bool((last.isnan() | last.isposinf()).any()):
        raise UserError(
            "model: expected logits that are numbers, found NaN or infinity; its weights are damaged, or too large for "
            "its dtype: load it with --dtype float32"
        )
