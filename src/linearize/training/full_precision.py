"""Forward passes in fp32 of a model whose weights are in half precision, without an fp32 copy of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

HALF = (torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter, DTensor, FakeTensor)  # FakeTensor: for forecasts of memory


@contextmanager
def computed_in_fp32(model: nn.Module) -> Iterator[None]:
    """Compute the model's forward passes in fp32 in the `with` block, from the same weights.

    Half precision rounds every activation, and the output of adapters. This changes a loss by more than a small step of
    training does. Here each part of the model (a layer, the embeddings, the head) has fp32 copies of its weights while
    its forward runs, so extra memory is that of the largest part and of fp32 activations. On a GPU, matrix products use
    TF32, which represents half-precision weights exactly and is slower than bf16.

    Nothing changes for models without weights in half precision, for quantized weights, and for models with
    FlashAttention, which does not support fp32.
    """
    flash = "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    parts = [] if flash else [_Part(module) for module in _parts(model)]
    products = torch.backends.cuda.matmul
    precision: Any = products.fp32_precision
    # FSDP2's hooks on the same modules gather divided weights: our hooks run after them, and leave before.
    handles = [part.module.register_forward_pre_hook(part.enter, with_kwargs=True) for part in parts]
    handles += [part.module.register_forward_hook(part.leave, prepend=True) for part in parts]
    if parts and torch.cuda.is_available():
        products.fp32_precision = "tf32"
    try:
        yield
    finally:
        if products.fp32_precision != precision:
            products.fp32_precision = precision
        for handle in handles:
            handle.remove()
        for part in parts:
            part.leave()


class _Part:
    """A module whose weights are in fp32 while its forward runs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._replaced: list[tuple[dict[str, Any], str, Tensor]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Put fp32 copies in place of weights in half precision; return the arguments in fp32."""
        copies: dict[int, Tensor] = {}  # tied weights have one
        for tensors in _tensors_of(module):
            for name, tensor in [*tensors.items()]:
                if _is_half(tensor):
                    if id(tensor) not in copies:
                        raised = tensor.detach().float()
                        parameter = isinstance(tensor, nn.Parameter)
                        copies[id(tensor)] = nn.Parameter(raised, requires_grad=False) if parameter else raised
                    self._replaced.append((tensors, name, tensor))
                    tensors[name] = copies[id(tensor)]
        return tree_map_only(Tensor, lambda x: x.float() if x.dtype in HALF else x, (args, kwargs))

    def leave(self, *_: Any) -> None:
        """Put the weights back; nothing happens if they are in place."""
        for tensors, name, tensor in self._replaced:
            tensors[name] = tensor
        self._replaced.clear()


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield disjoint modules that cover all weights in half precision: items of module lists, and other modules."""
    if any(_is_half(x) for x in (*model.parameters(recurse=False), *model.buffers(recurse=False))):
        yield model
        return
    for child in model.children():
        if not isinstance(model, nn.ModuleList):
            yield from _parts(child)
        elif any(_is_half(x) for tensors in _tensors_of(child) for x in tensors.values()):
            yield child


def _tensors_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    for part in module.modules():
        yield part._parameters
        yield part._buffers


def _is_half(tensor: Tensor | None) -> bool:
    """Return whether a tensor is in half precision and not quantized; quantized tensors have other classes."""
    return type(tensor) in _PLAIN and tensor is not None and tensor.dtype in HALF
