"""Batches of some steps by one gather, a pure function of (seed, epoch, position), the same at any world size.

Shapes: B sequences, T = block_size characters, N windows of several steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mingpt_ddp.config.schema import TrainerConfig
from mingpt_ddp.data.rng import derive_seed, feistel_permute
from mingpt_ddp.errors import ConfigError, DataError

Tokens = np.ndarray[Any, np.dtype[Any]]
SHUFFLE_CHUNK = 1 << 13  # positions whose windows are worked out together
GATHER_TOKENS = 1 << 15  # tokens that are gathered together: 2 x 256 KiB of int64, which stay in a core's cache
MAX_RESIDENT_FRACTION = 1 / 8  # of a GPU's memory may hold the text
# A GPU has few operations for integers without a sign, but for bytes: as these they go there, and are told apart there.
SIGNED = {"uint8": "uint8", "uint16": "int16", "uint32": "int32"}


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

    def indices_for_rank(self, rank: int) -> range:
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


class TokenLoader:
    """The training text as an endless sequence of steps."""

    def __init__(
        self,
        tokens: Tokens,
        block_size: int,
        stride: int | None,
        batch_size: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            device: where the batches are wanted. On a GPU that has room for it the text lies there as a whole.

        Raises:
            DataError: the text does not fill one batch.
        """
        self.stride = stride or block_size
        self.batch_size, self.block_size, self.seed = batch_size, block_size, seed
        self.windows_per_epoch = (len(tokens) - block_size) // self.stride
        self.steps_per_epoch = self.windows_per_epoch // batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training text has {self.windows_per_epoch} windows of data.block_size={block_size}, fewer than "
                f"trainer.batch_size={batch_size}; use a longer text, a smaller batch or a smaller data.stride"
            )
        self._text = _text(tokens, block_size + 1, torch.device(device))
        self._known: tuple[int, int, Tokens] = (-1, 0, np.empty(0, dtype=np.int64))
        self._plan: tuple[BatchPlan, int] | None = None  # for which, and for which rank,
        self._first, self._steps = 0, list[list[MicroBatch]]()  # these steps are gathered, the first of that number

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        """What one rank trains on in a step; steps count from 1."""
        if self._plan != (plan, rank) or not self._first <= step < self._first + len(self._steps):
            self._plan, self._first, self._steps = (plan, rank), step, self._gather(step, plan, rank)
        return self._steps[step - self._first]

    def _gather(self, step: int, plan: BatchPlan, rank: int) -> list[list[MicroBatch]]:
        """This step and some that follow it in its epoch: what a gather costs besides its tokens is shared."""
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        numbers, size = plan.indices_for_rank(rank), plan.micro_batch_size
        count = max(1, GATHER_TOKENS // (len(numbers) * size * self.block_size))
        count = min(count, self.steps_per_epoch - index)
        starts = self._starts(epoch, index * self.batch_size, (index + count) * self.batch_size)
        mine = starts.reshape(count, plan.n_micro, size)[:, numbers.start :: plan.world_size]
        x, y = self._text.gather(mine.reshape(-1))
        micros = list(map(MicroBatch, [*numbers] * count, x.split(size), y.split(size)))
        return [micros[begin : begin + len(numbers)] for begin in range(0, len(micros), len(numbers))]

    def _starts(self, epoch: int, begin: int, end: int) -> Tokens:
        """Where the windows at positions begin .. end - 1 of an epoch start; worked out some thousand at a time."""
        known_epoch, first, starts = self._known
        if epoch != known_epoch or begin < first or end > first + len(starts):
            first = begin
            stop = min(max(end, begin + SHUFFLE_CHUNK), self.windows_per_epoch)
            order = feistel_permute(
                np.arange(first, stop), self.windows_per_epoch, derive_seed("order", self.seed, epoch)
            )
            offset = derive_seed("offset", self.seed, epoch) % self.stride
            starts = offset + order * self.stride
            self._known = (epoch, first, starts)
        return starts[begin - first : end - first]


# The text, and windows of it: x (N, T) int64, and y (N, T), the character after each in x.


class HostTokens:
    """The text in memory, or in a file mapped to it."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        """
        Args:
            length: T + 1, of a window.
        """
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, length)  # (n - T, T + 1), no copy

    def gather(self, starts: Tokens) -> tuple[Tensor, Tensor]:
        windows = self._windows[starts]
        x, y = (torch.from_numpy(part.astype(np.int64)) for part in (windows[:, :-1], windows[:, 1:]))
        return x, y


class DeviceTokens:
    """The batches are wanted on a device: in few transfers, for none of which this process waits."""

    def __init__(self, tokens: Tokens, length: int, device: torch.device, resident: bool) -> None:
        """
        Args:
            resident: the text itself lies there, and only where windows start is sent.
        """
        self._device = device
        self._mask = (1 << 8 * tokens.itemsize) - 1
        signed = tokens.view(SIGNED[tokens.dtype.name])
        self._windows = np.lib.stride_tricks.sliding_window_view(signed, length)
        self._resident = torch.from_numpy(np.array(signed)).to(device) if resident else None  # as small as on disk
        self._within = torch.arange(length, device=device)

    def gather(self, starts: Tokens) -> tuple[Tensor, Tensor]:
        if self._resident is None:
            windows = self._send(self._windows[starts])
        else:
            windows = self._resident[self._send(starts)[:, None] + self._within]
        windows = windows.to(torch.int64) & self._mask
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _send(self, values: Tokens) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        return (host.pin_memory() if self._device.type == "cuda" else host).to(self._device, non_blocking=True)


def _text(tokens: Tokens, length: int, device: torch.device) -> HostTokens | DeviceTokens:
    if device.type == "cpu":
        return HostTokens(tokens, length)
    memory = torch.cuda.get_device_properties(device).total_memory
    return DeviceTokens(tokens, length, device, resident=tokens.nbytes <= memory * MAX_RESIDENT_FRACTION)
