"""Quantized teachers: which can be saved, and layers of bitsandbytes (0.50), which change at their first use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from linearize.base import UserError


def refuse_unsavable(model: nn.Module) -> None:
    """See that a model's weights can be saved.

    Raises:
        UserError: they are quantized in a way that transformers cannot write, as from a GGUF file.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.is_serializable():
        return
    method = getattr(quantizer.quantization_config.quant_method, "value", None)
    instead = "with quantization_config=GgufConfig(dequantize=True)" if method == "gguf" else "unquantized"
    raise UserError(
        f"model: expected weights that transformers can save, found weights quantized by {method}, which it cannot; "
        f"load the model {instead}"
    )


def settle(model: nn.Module) -> None:
    """Do now what its layers would do at their first use, or keep them from it; other layers stay as they are.

    A CPU with AVX512-BF16 packs 4-bit weights anew then. They let no gradient through after that, and are saved
    wrongly, so that is kept from happening.

    Raises:
        UserError: 4-bit weights are packed already.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "init_8bit_state") and module.weight.CB is not None:
            module.init_8bit_state()
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise UserError(
                    "model: expected 4-bit weights of bitsandbytes as they were loaded, found weights that were packed "
                    "for this CPU when the model was first used; convert it before that"
                )


def beside_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Where settled layers have their 8-bit weights: in an object of their own, not among parameters and buffers."""
    module: Any
    for module in model.modules():
        if hasattr(module, "init_8bit_state"):
            yield from (x for x in vars(module.state).values() if isinstance(x, Tensor))
