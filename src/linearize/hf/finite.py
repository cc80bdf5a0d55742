"""Check that logits are finite during generation; transformers would end the text, or sample arbitrary tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.base import UserError


def require_finite(model: PreTrainedModel) -> None:
    """Make every later forward of `model` raise UserError if a logit of the last token is NaN or infinite.

    Minus infinity is allowed: it excludes a token. Compiled forwards are not checked.
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
