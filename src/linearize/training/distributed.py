"""Several processes, as torchrun starts them: whose rows are whose, and what is added up over all.

Every process has the whole model and all rows, and computes the gradients of its own rows, divided by what all rows of
the step have. So their sum is what one process would have computed, whatever the number of processes. Files are the
main process's business, the one of rank 0; the others only read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from linearize.base import UserError

_STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells its processes


@dataclass(frozen=True)
class World:
    """Which process this is, from 0, of how many."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether it is the one that writes files."""
        return self.rank == 0


def world() -> World:
    """This process among those that `joined` has brought together; the only one otherwise."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World()


@contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """Within, the processes that torchrun has started know of each other; a process of its own stays alone.

    Raises:
        UserError: another process has ended, so that this one waits in vain.
    """
    if any(name not in os.environ for name in _STARTED):
        yield World()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield world()
    except RuntimeError as error:
        # gloo has no error of its own.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        rank, size = world().rank, world().size
        raise UserError(
            f"process {rank} of {size}: another process has ended, whose own message says why "
            f"({str(error).splitlines()[0]}); the same command goes on from the last checkpoint"
        ) from None
    finally:
        dist.destroy_process_group()


@contextmanager
def in_turn() -> Iterator[None]:
    """The block runs in the main process first, then in all others; none leaves before it has run in all."""
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


def dealt(batches: Sequence[object]) -> list[tuple[int, int]]:
    """Which of these batches this process computes, and whether each counts: 1, or 0.

    Processes take as many each, as those that share a model's weights must: where batches run out, the first is
    computed once more, and does not count.
    """
    rank, size = world().rank, world().size
    mine = range(rank, -(-len(batches) // size) * size, size)
    return [(index, 1) if index < len(batches) else (0, 0) for index in mine]


def summed(losses: dict[str, float]) -> dict[str, float]:
    """The sums over all processes, which have the same names in the same order."""
    if world().size == 1:
        return losses
    values = torch.tensor([*losses.values()], dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(losses, values.tolist(), strict=True))


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its sum over all processes, by one reduction for each dtype.

    A parameter without a gradient counts as one with zeros where another process has found one.
    """
    if world().size == 1:
        return
    parameters = list(parameters)
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
