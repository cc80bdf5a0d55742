"""A hash of a model's weights, by which a file that belongs to them is told from another model's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.base import UserError

WORDS = 512  # of 8 bytes each, whose sum goes into a fingerprint


def fingerprint(model: PreTrainedModel, but: Callable[[str, Tensor], bool] = lambda name, x: False) -> str:
    """A hash of what a checkpoint holds of the model, on the devices where it lies.

    Quantized weights do not count, nor does what `but` is true of.

    Sums of `WORDS` words are hashed in place of the words, which is as fast as memory: a single number that differs
    makes another sum, as integers are exact. 8B parameters take seconds on a CPU.

    Raises:
        UserError: weights on disk.
    """
    digest, stored = hashlib.blake2b(digest_size=8), model.state_dict(keep_vars=True).keys()
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if type(x) not in (Tensor, nn.Parameter) or not (name in stored or isinstance(x, nn.Parameter)) or but(name, x):
            continue
        if x.is_meta:
            raise UserError(
                f"model: expected all weights in memory, to identify the model of a state; found {name} on disk"
            )
        data = x.detach().contiguous().flatten().view(torch.uint8)
        rest = len(data) % (8 * WORDS)
        words = data[: len(data) - rest].clone() if data.storage_offset() % 8 else data[: len(data) - rest]
        digest.update(f"{name} {tuple(x.shape)}".encode())
        for part in (words.view(torch.int64).view(-1, WORDS).sum(1), data[len(data) - rest :]):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()
