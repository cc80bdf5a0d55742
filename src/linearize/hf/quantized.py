"""Handle quantized teachers: refuse those that cannot be saved, and prepare layers of bitsandbytes (0.50)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from linearize.base import UserError


def refuse_unsavable(model: nn.Module) -> None:
    """Raise UserError if weights are quantized in a way that transformers cannot save, as from a GGUF file."""
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
    """Prepare layers of bitsandbytes, in place, so that their first use does not change them.

    8-bit layers are initialised now. 4-bit layers are kept from packing their weights anew on CPUs with AVX512-BF16:
    packed weights have no gradients and are saved wrongly.

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
    """Yield the 8-bit weights of settled layers, which are neither parameters nor buffers."""
    module: Any
    for module in model.modules():
        if hasattr(module, "init_8bit_state"):
            yield from (x for x in vars(module.state).values() if isinstance(x, Tensor))
