"""Whole batches by one gather, a pure function of (seed, epoch, position), the same at any world size.

Shapes: B sequences, T = block_size characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mingpt_ddp.errors import ConfigError, DataError
from mingpt_ddp.groups import TrainerConfig
from mingpt_ddp.seeds import key_to_seed, permuted

Tokens = np.ndarray[Any, np.dtype[Any]]
AHEAD = 1 << 13  # positions whose windows are worked out together


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the model together; `number` counts them within the step, over all ranks."""

    number: int
    x: Tensor  # (B, T) int64
    y: Tensor  # (B, T) int64, the character after each in x


@dataclass(frozen=True)
class BatchPlan:
    """How a step's batch is cut into micro-batches, and which rank takes which."""

    batch_size: int
    micro_batch_size: int
    world_size: int

    @property
    def n_micro(self) -> int:
        return self.batch_size // self.micro_batch_size

    def numbers(self, rank: int) -> range:
        """The micro-batches of a rank: number j runs on rank j mod world size."""
        return range(rank, self.n_micro, self.world_size)


def plan_batches(trainer: TrainerConfig, world_size: int, kept: int | None = None) -> BatchPlan:
    """Cut the batch so that every rank has work.

    Args:
        kept: the micro-batch size of the snapshot that is resumed.

    Raises:
        ConfigError: more ranks than micro-batches, or several of them for CUDA graphs.
    """
    batch = trainer.batch_size
    micro = trainer.micro_batch_size or kept
    if micro is None:
        share = max(1, batch // world_size)
        micro = max(size for size in range(1, share + 1) if batch % size == 0)
    plan = BatchPlan(batch, micro, world_size)
    if world_size > plan.n_micro:
        raise ConfigError(
            f"trainer.batch_size={batch} makes {plan.n_micro} micro-batches of {micro} for {world_size} ranks; "
            f"use at most {plan.n_micro} ranks, or a new run with a larger batch or smaller micro-batches"
        )
    if trainer.compile == "cuda_graphs" and plan.n_micro > 1:  # they keep gradients where the next pass puts its own
        raise ConfigError(
            f"trainer.compile=cuda_graphs takes a step in one pass, trainer.batch_size={batch} makes {plan.n_micro} of "
            f"{micro} sequences; use trainer.compile=true"
        )
    return plan


class Loader:
    """The training text as an endless sequence of steps."""

    def __init__(self, tokens: Tokens, block_size: int, stride: int | None, batch_size: int, seed: int) -> None:
        """
        Raises:
            DataError: the text does not fill one batch.
        """
        self.stride = stride or block_size
        self.batch_size = batch_size
        self.seed = seed
        self.windows = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)  # (n - T, T + 1), no copy
        self.windows_per_epoch = (len(tokens) - block_size) // self.stride
        self.steps_per_epoch = self.windows_per_epoch // batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training text has {self.windows_per_epoch} windows of data.block_size={block_size}, fewer than "
                f"trainer.batch_size={batch_size}; use a longer text, a smaller batch or a smaller data.stride"
            )
        self._known: tuple[int, int, Tokens] = (-1, 0, np.empty(0, dtype=np.int64))

    def step(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        """What one rank trains on in a step; steps count from 1."""
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        starts = self._starts(epoch, index * self.batch_size, (index + 1) * self.batch_size)
        size = plan.micro_batch_size
        return [self._gather(j, starts[j * size : (j + 1) * size]) for j in plan.numbers(rank)]

    def _starts(self, epoch: int, begin: int, end: int) -> Tokens:
        """Where the windows at positions begin .. end - 1 of an epoch start; worked out some thousand at a time."""
        known_epoch, first, starts = self._known
        if epoch != known_epoch or begin < first or end > first + len(starts):
            first = begin
            stop = min(max(end, begin + AHEAD), self.windows_per_epoch)
            order = permuted(np.arange(first, stop), self.windows_per_epoch, key_to_seed("order", self.seed, epoch))
            offset = key_to_seed("offset", self.seed, epoch) % self.stride
            starts = offset + order * self.stride
            self._known = (epoch, first, starts)
        return starts[begin - first : end - first]

    def _gather(self, number: int, starts: Tokens) -> MicroBatch:
        windows = torch.from_numpy(self.windows[starts].astype(np.int64))  # (B, T + 1)
        return MicroBatch(number, windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
