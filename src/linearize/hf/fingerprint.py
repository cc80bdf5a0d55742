"""Hash a model's weights, so that a file can be matched with its model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.base import UserError

WORDS = 512  # words of 8 bytes each that are summed before hashing


def fingerprint(model: PreTrainedModel, but: Callable[[str, Tensor], bool] = lambda name, x: False) -> str:
    """Return a hash of the tensors that a checkpoint of the model has; sums are computed on their devices.

    Quantized weights and tensors for which `but` is true do not count. Integer sums of `WORDS` words are hashed instead
    of the words: a single different number changes a sum. 8B parameters take seconds on a CPU.

    Raises:
        UserError: weights are on disk.
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
