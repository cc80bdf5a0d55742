"""Data parallelism over the processes that torchrun starts.

Every process has all rows, and computes the gradients of its own rows, divided by the number of tokens or labels in all
rows of the step. So the sum over processes does not depend on their number. FSDP2 has already summed the gradients of
sharded weights (DTensors, see `hf.sharding`) in the backward pass. The main process (rank 0) writes files; the others
only read them, or write their shards.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from linearize.base import UserError

T = TypeVar("T")
_STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_meshes: list[DeviceMesh] = []  # made by `device_mesh` within `init_distributed`


@dataclass(frozen=True)
class World:
    """The rank of this process, from 0, and the number of processes."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Return whether this is the main process, which writes files."""
        return self.rank == 0


def world() -> World:
    """Return rank and number of processes; 0 and 1 outside `init_distributed`."""
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World()


@contextmanager
def init_distributed(device: torch.device) -> Iterator[World]:
    """Connect the processes that torchrun has started for the block; yield the rank and number of processes.

    Raises:
        UserError: another process has ended.
    """
    if any(name not in os.environ for name in _STARTED):
        yield World()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL uses the current device
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield world()
    except RuntimeError as error:
        # gloo has no error class.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        rank, size = world().rank, world().size
        raise UserError(
            f"process {rank} of {size}: another process has ended, with a message of its own "
            f"({str(error).splitlines()[0]}); the same command continues from the last checkpoint"
        ) from None
    finally:
        dist.destroy_process_group()
        # A group's threads end with the last reference to it, and a gloo thread that drops a tensor while Python ends
        # would abort the process. Sharded models refer to the group, and DTensors' caches to the meshes.
        for mesh in _meshes:
            mesh._pg_registry.clear()
        _meshes.clear()
        gc.collect()


def device_mesh(device: torch.device) -> DeviceMesh:
    """Return a mesh of all processes; it is usable until `init_distributed` ends."""
    mesh = init_device_mesh(device.type, (world().size,))
    _meshes.append(mesh)
    return mesh


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block in the main process first, then in all others; wait until all have run it."""
    main = world().main
    if not main:
        barrier()
    yield
    if main:
        barrier()
    barrier()


def barrier() -> None:
    """Wait for all processes."""
    if world().size > 1:
        dist.barrier()


def shard_batches(batches: Sequence[object]) -> list[tuple[int, int]]:
    """Return the indices of the batches that this process computes, with a weight of 1 or 0 for each.

    All processes get equally many, as sharded weights require: missing ones are replaced by the first, with weight 0.
    """
    rank, size = world().rank, world().size
    mine = range(rank, -(-len(batches) // size) * size, size)
    return [(index, 1) if index < len(batches) else (0, 0) for index in mine]


def all_reduce_losses(losses: dict[str, float]) -> dict[str, float]:
    """Return the sums over all processes, which must have the same names in the same order."""
    if world().size == 1:
        return losses
    values = torch.tensor([*losses.values()], dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(losses, values.tolist(), strict=True))


def all_reduce_sum(part: Tensor) -> Tensor:
    """Return the sum over processes of a CPU tensor in which each has filled a part and left zeros elsewhere."""
    if world().size > 1:
        dist.all_reduce(part)
    return part


def broadcast_object(value: T) -> T:
    """Return the main process's value, which must be plain data, in all processes."""
    if world().size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def all_reduce_min(number: int) -> int:
    """Return the minimum of the processes' numbers."""
    if world().size == 1:
        return number
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its sum over all processes, with one reduction per dtype; skip sharded parameters.

    A parameter without a gradient counts as zeros if another process has a gradient for it.
    """
    if world().size == 1:
        return
    parameters = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    found = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for parameter, exists in zip(parameters, found.tolist(), strict=True):
        if exists:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for tensors in gradients.values():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale gradients in place to a joint norm of at most `max_norm`; return their norm before.

    The norm is over all gradients, replicated or sharded. If it is not finite, nothing is scaled.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    rows = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    norm = nn.utils.get_total_norm(whole)
    if rows:
        squares = nn.utils.get_total_norm(rows).double().square()
        dist.all_reduce(squares)
        norm = (norm.double().square() + squares).sqrt()
    if max_norm is not None and norm.isfinite():
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in (*whole, *rows):
            gradient.mul_(scale.to(gradient.device))
    return norm.item()


def read_rows(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors from the safetensors in a folder, by name; of sharded ones, this process's rows only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # each process reads independently
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model's weights are sharded over processes."""
    return isinstance(model, FSDPModule)
