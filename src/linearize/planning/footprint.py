"""Count the peak memory of a computation without using it: every tensor of floats is fake.

A fake tensor (torch's FakeTensor) has a shape, a dtype, a device and a storage with a number of bytes, but no data. The
program itself runs on fake tensors, autograd included, so the count is what the program would use. Integers and masks
made from them (positions, documents, labels) are real, and so are decisions that depend on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten: Any = torch.ops.aten
_CPU = torch.device("cpu")


class Footprint(TorchDispatchMode):
    """Make tensors of floats fake, on a CPU, and count bytes in the `with` block.

    Numbers read from a fake tensor are 0 or False. Its nonzero elements are all elements of a vector, and a share of
    1 / `experts` of a matrix, as if tokens were spread evenly over experts.

    Attributes:
        held: bytes of live tensors that were made in the block.
        peak: the most bytes held so far.
    """

    def __init__(self, experts: int = 1) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._experts = experts
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def pretend(self, model: nn.Module, known: dict[int, Tensor]) -> None:
        """Replace all parameters and buffers by fake tensors, which do not count.

        `known`: replacements by the id of the original, for models that share tensors.
        """

        def pretended(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                new = self._like(tensor)
                self._known.add(new.untyped_storage())
                known[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            return known[id(tensor)]

        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors |= {name: pretended(tensor) for name, tensor in tensors.items() if tensor is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _CPU
        out = self._compute(func, args, kwargs or {})
        for tensor in _tensors([out]):
            self._count(tensor)
        return out

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        if not any(isinstance(x, FakeTensor) for x in tensors):
            if not _gives_floats(func, tensors, args, kwargs.get("dtype")):
                return func(*args, **kwargs)
        elif func is aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        elif func is aten.nonzero.default:
            return self._spread(args[0])
        elif func in (aten.index.Tensor, aten.index_put_.default):  # masks among the indices
            split = [(x,) if x is None or x.dtype is not torch.bool else x.nonzero().unbind(1) for x in args[1]]
            args = (args[0], [index for part in split for index in part], *args[2:])
        with self._fake:
            if not all(isinstance(x, FakeTensor) for x in tensors):
                args, kwargs = tree_map_only(Tensor, self._pretended, (args, kwargs))
            return func(*args, **kwargs)

    def _pretended(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._like(tensor)

    def _like(self, tensor: Tensor) -> Tensor:
        with self._fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def _spread(self, tensor: Tensor) -> Tensor:
        """Return real indices, [n, ndim], of the elements that count as nonzero."""
        count = tensor.numel() // (self._experts if tensor.ndim > 1 else 1)
        return torch.stack(torch.unravel_index(torch.arange(count), tensor.shape), 1)

    def _count(self, tensor: Tensor) -> None:
        storage: Any = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.held -= size


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results of an operation, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _gives_floats(func: Any, tensors: list[Tensor], args: Any, dtype: torch.dtype | None) -> bool:
    """Return whether an operation on real tensors returns floats, as far as its arguments tell."""
    if dtype is not None:
        return dtype.is_floating_point
    if tensors:
        return any(x.is_floating_point() for x in tensors)
    return func.overloadpacket is not aten.arange or any(isinstance(x, float) for x in args)
