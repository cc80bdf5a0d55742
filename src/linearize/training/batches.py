"""Draw the rows of every optimizer step of a stage."""

from __future__ import annotations

import random
from functools import lru_cache

from linearize.configs.training import TrainConfig
from linearize.data.rows import Rows
from linearize.distributed import world


class Batches:
    """The rows of each step, in micro batches. They depend on the seed and the step alone."""

    def __init__(self, rows: Rows, config: TrainConfig, seed: int) -> None:
        if not len(rows):
            raise ValueError("there are no rows to train on")
        self._rows, self._seed = rows, seed
        self._batch_size = min(config.batch_size, len(rows))
        # Several processes divide the rows of a step.
        share = -(-self._batch_size // world().size)
        self._micro_batch_size = min(config.micro_batch_size or config.batch_size, share)
        self._steps_per_epoch = len(rows) // self._batch_size
        self.tokens_per_step = self._batch_size * rows.num_tokens // len(rows)
        self.num_steps = config.epochs * self._steps_per_epoch
        if config.max_tokens is not None:
            self.num_steps = max(1, min(self.num_steps, config.max_tokens // self.tokens_per_step))

    def at(self, step: int) -> list[Rows]:
        epoch, index = divmod(step, self._steps_per_epoch)
        order = _permutation(len(self._rows), self._seed, epoch)
        chosen = order[index * self._batch_size : (index + 1) * self._batch_size]
        starts = range(0, self._batch_size, self._micro_batch_size)
        return [self._rows.rows(chosen[start : start + self._micro_batch_size]) for start in starts]


@lru_cache(maxsize=1)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}, epoch {epoch}").sample(range(length), length)
