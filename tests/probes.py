"""What a call does, measured: the largest tensor it makes, its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, autograd's own operations included."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_iter(result) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()
