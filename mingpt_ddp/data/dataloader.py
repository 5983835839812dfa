"""Batches as a pure function of (seed, step), the same at any world size.

One gather fetches several steps.

Shapes: B sequences, T = block_size tokens, N windows of several steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.job import run_name
from mingpt_ddp.data.rng import Ints, derive_seed, feistel_permute
from mingpt_ddp.data.tokens.shards import Shards
from mingpt_ddp.errors import ConfigError, DataError

Device = torch.device | str
SHUFFLE_CHUNK = 1 << 13  # positions of an epoch permuted at a time
# Tokens gathered at a time: x and y take 256 KiB each as int64 and fit a core's cache.
GATHER_TOKENS = 1 << 15
TOKENS_PER_BATCH = 4096  # in evaluation
MAX_RESIDENT_FRACTION = 1 / 8  # of a GPU's memory for the text
# Tokens copied to a GPU at a time: on the host a rank holds no more of the memory-mapped text.
RESIDENT_CHUNK = 1 << 24


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes; `index` counts the micro-batches of a step over all ranks."""

    index: int
    # Of text x and y (B, T) int64, where y has the token after each in x; else collated samples.
    batch: Any
    scale: float = 1.0  # of the loss before backward; 0 for a pass that only other ranks need
    loss_divisor: int = 1  # passes that make up the mean loss of a step, over all ranks
    is_last: bool = True  # of this rank in the step


@dataclass(frozen=True)
class BatchPlan:
    """How a step's batch is split into micro-batches, and these over ranks."""

    batch_size: int
    micro_batch_size: int
    world_size: int

    @property
    def n_micro(self) -> int:
        return self.batch_size // self.micro_batch_size

    def indices_for_rank(self, rank: int) -> range:
        """Return the micro-batches of a rank: index j runs on rank j mod world size."""
        return range(rank, self.n_micro, self.world_size)


def with_batch_size(config: Config, world_size: int, recorded: int | None) -> Config:
    """Return the configuration with `batch_size` for `batch_size_per_rank`. The run keeps its name.

    Args:
        recorded: Batch size in the snapshot to resume. It stays as it was at the first start.
    """
    per_rank = config.trainer.batch_size_per_rank
    if per_rank is None:
        return config
    trainer = replace(
        config.trainer, batch_size=recorded or per_rank * world_size, batch_size_per_rank=None
    )
    return replace(config, run=replace(config.run, name=run_name(config)), trainer=trainer)


def plan_batches(config: Config, world_size: int, kept: int | None = None) -> BatchPlan:
    """Split the batch into micro-batches, at least one per rank.

    Args:
        kept: micro-batch size of the snapshot to resume.

    Raises:
        ConfigError: more ranks than micro-batches; or several micro-batches of a rank with CUDA
            graphs or synchronized batch normalization, whose statistics are those of one forward
            pass.
    """
    trainer = config.trainer
    batch = trainer.batch_size
    per_rank = batch // world_size
    if config.ddp.sync_batchnorm:
        if batch % world_size or trainer.micro_batch_size not in (None, per_rank):
            raise ConfigError(
                "ddp.sync_batchnorm=true needs one micro-batch per rank: "
                f"trainer.batch_size={batch} a multiple of the {world_size} ranks, and "
                "trainer.micro_batch_size=null"
            )
        return BatchPlan(batch, per_rank, world_size)
    divisors = (size for size in range(1, max(1, per_rank) + 1) if batch % size == 0)
    micro = trainer.micro_batch_size or kept or max(divisors)
    if batch % micro:  # of the snapshot; the configuration's own is a divisor
        raise ConfigError(
            f"trainer.batch_size={batch} is not a multiple of {micro}, the micro-batch size of the "
            f"snapshot; set trainer.micro_batch_size={max(divisors)}"
        )
    plan = BatchPlan(batch, micro, world_size)
    if world_size > plan.n_micro:
        raise ConfigError(
            f"trainer.batch_size={batch} in micro-batches of {micro} occupies {plan.n_micro} of "
            f"{world_size} ranks; use at most {plan.n_micro}, or a new run with a larger batch or "
            "smaller micro-batches"
        )
    # the next replay overwrites the gradients
    if trainer.compile == "cuda_graphs" and plan.n_micro > 1:
        raise ConfigError(
            f"trainer.compile=cuda_graphs needs one micro-batch, trainer.batch_size={batch} "
            f"makes {plan.n_micro} of {micro} sequences; use trainer.compile=true"
        )
    return plan


class Loader(Protocol):
    """The training data as an endless sequence of batches.

    Each is a pure function of the seed and the step.
    """

    steps_per_epoch: int
    items_per_step: int  # tokens, or samples

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        """Return the micro-batches of a rank in a step; steps count from 1."""

    def close(self) -> None:
        """Release what the loader holds besides memory."""


@runtime_checkable
class SupportsResidence(Protocol):
    """Optional for a loader: data that stay on a GPU with enough memory."""

    def resident_bytes(self, memory: int) -> int:
        """Return the bytes that stay on a GPU with `memory` bytes: all or none."""


class Split(Protocol):
    """Data to evaluate, every item once."""

    def __len__(self) -> int:
        """Return the number of batches, over all ranks."""

    def batches(self, rank: int, world_size: int) -> Iterator[Any]:
        """Yield the batches of a rank: number i is for rank i mod world size."""


@dataclass(frozen=True)
class WindowStarts:
    """Where the windows at some consecutive positions of an epoch start."""

    epoch: int
    first: int  # position
    starts: Ints


class TokenLoader:
    """The training tokens as an endless sequence of batches."""

    def __init__(
        self,
        tokens: Ints,
        block_size: int,
        stride: int | None,
        batch_size: int,
        seed: int,
        device: Device = "cpu",
    ) -> None:
        """
        Args:
            device: device of the batches. A GPU with enough memory keeps the whole text resident.

        Raises:
            DataError: the text is too short for one batch.
        """
        self.stride = stride or block_size
        self.batch_size = batch_size
        self.block_size = block_size
        self.seed = seed
        self.items_per_step = batch_size * block_size
        self._set_epoch((len(tokens) - block_size) // self.stride)
        self.nbytes = tokens.nbytes
        device = torch.device(device)
        is_resident = False
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            is_resident = self.resident_bytes(total) > 0
        self._tokens = TokenWindows(tokens, block_size + 1, device, is_resident)
        self._starts = WindowStarts(epoch=-1, first=0, starts=np.empty(0, dtype=np.int64))
        # The steps that have been gathered, and for which plan and rank.
        self._plan: tuple[BatchPlan, int] | None = None
        self._first_step = 0
        self._steps = list[list[MicroBatch]]()

    def resident_bytes(self, memory: int) -> int:
        """Return the bytes of the tokens, if they stay on a GPU with `memory` bytes."""
        return self.nbytes if self.nbytes <= memory * MAX_RESIDENT_FRACTION else 0

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        """Return the micro-batches of a rank in a step; steps count from 1."""
        end = self._first_step + len(self._steps)
        if self._plan != (plan, rank) or not self._first_step <= step < end:
            self._steps = self._gather(step, plan, rank)
            self._first_step = step
            self._plan = (plan, rank)
        return self._steps[step - self._first_step]

    def starts(self, step: int) -> Ints:
        """Return the position of the first token of each window of a step, in batch order."""
        epoch, number = divmod(step - 1, self.steps_per_epoch)
        begin = number * self.batch_size
        return self._window_starts(epoch, begin, begin + self.batch_size)

    def close(self) -> None:
        """Do nothing: the tokens are memory."""

    def _set_epoch(self, windows: int) -> None:
        self.windows_per_epoch = windows
        self.steps_per_epoch = windows // self.batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training text has {windows} windows of data.block_size={self.block_size}, "
                f"fewer than trainer.batch_size={self.batch_size}; use a longer text, a smaller "
                "batch or a smaller data.stride"
            )

    def _gather(self, step: int, plan: BatchPlan, rank: int) -> list[list[MicroBatch]]:
        """Return this step and following ones of its epoch, gathered in one call for speed."""
        epoch, first = divmod(step - 1, self.steps_per_epoch)
        indices = plan.indices_for_rank(rank)
        size = plan.micro_batch_size
        count = max(1, GATHER_TOKENS // (len(indices) * size * self.block_size))
        count = min(count, self.steps_per_epoch - first)
        begin = first * self.batch_size
        starts = self._window_starts(epoch, begin, begin + count * self.batch_size)
        by_micro_batch = starts.reshape(count, plan.n_micro, size)
        x, y = self._tokens.gather(by_micro_batch[:, indices.start :: plan.world_size].reshape(-1))
        batches = zip(x.split(size), y.split(size), strict=True)
        steps = []
        for _ in range(count):
            steps.append([MicroBatch(index, next(batches)) for index in indices])
        return steps

    def _window_starts(self, epoch: int, begin: int, end: int) -> Ints:
        """Return where the windows at positions begin .. end - 1 of an epoch start.

        SHUFFLE_CHUNK of them are permuted at a time.
        """
        known = self._starts
        if epoch != known.epoch or begin < known.first or end > known.first + len(known.starts):
            n = self.windows_per_epoch
            positions = np.arange(begin, min(max(end, begin + SHUFFLE_CHUNK), n))
            order = feistel_permute(positions, n, derive_seed("order", self.seed, epoch))
            known = WindowStarts(epoch, begin, self._draw(epoch, order))
            self._starts = known
        return known.starts[begin - known.first : end - known.first]

    def _draw(self, epoch: int, order: Ints) -> Ints:
        """Return where the windows of these shuffled numbers start."""
        return derive_seed("offset", self.seed, epoch) % self.stride + order * self.stride


class TokenWindows:
    """Windows of the tokens, gathered onto a device with few, asynchronous transfers.

    CUDA has few unsigned types besides uint8: tokens are viewed as signed and masked after
    widening.
    """

    def __init__(self, tokens: Ints, length: int, device: torch.device, resident: bool) -> None:
        """
        Args:
            length: T + 1, the length of a window.
            resident: keep all tokens on the device and send only the starts of windows.
        """
        self._device = device
        self._mask = -1 if tokens.itemsize == 8 else (1 << 8 * tokens.itemsize) - 1
        signed: Any = tokens.view(f"i{tokens.itemsize}")
        self._windows_at: Callable[[Ints], Ints]
        if isinstance(signed, Shards):
            self._windows_at = partial(signed.windows, length=length)
        else:  # (n - T, T + 1), no copy
            self._windows_at = np.lib.stride_tricks.sliding_window_view(signed, length).__getitem__
        self._resident = _copy_to(device, signed) if resident else None
        self._within = torch.arange(length, device=device)

    def gather(self, starts: Ints) -> tuple[Tensor, Tensor]:
        """Return x and y (N, T) int64 of the windows that begin at `starts` (N,)."""
        if self._resident is None:
            windows = self._send(self._windows_at(starts))
        else:
            windows = self._resident[self._send(starts)[:, None] + self._within]
        return self._widen(windows[:, :-1]), self._widen(windows[:, 1:])

    def _widen(self, tokens: Tensor) -> Tensor:
        return tokens.to(torch.int64).bitwise_and_(self._mask)

    def _send(self, values: Ints) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)


def _copy_to(device: torch.device, tokens: Ints) -> Tensor:
    """Return the tokens on a device, copied chunk by chunk."""
    dtype = torch.from_numpy(np.empty(0, tokens.dtype)).dtype
    copy = torch.empty(len(tokens), dtype=dtype, device=device)
    for begin in range(0, len(tokens), RESIDENT_CHUNK):
        # Copy, because torch takes no read-only array.
        chunk = np.array(tokens[begin : begin + RESIDENT_CHUNK])
        copy[begin : begin + len(chunk)].copy_(torch.from_numpy(chunk))
    return copy


class TokenSplit:
    """A text for evaluation: every token predicted once, or those of a fixed sample of windows."""

    def __init__(
        self, tokens: Ints, block_size: int, device: torch.device, windows: int | None = None
    ) -> None:
        """
        Args:
            windows: number of windows to evaluate, the same ones every time; None: the whole text.
        """
        self.tokens = tokens
        self.device = device
        n_targets = len(tokens) - 1
        n_windows = n_targets // block_size
        starts: Sequence[int] = range(0, n_windows * block_size, block_size)
        if windows is not None and windows < n_windows:
            sample = feistel_permute(np.arange(windows), n_windows, derive_seed("evaluation"))
            starts = (np.sort(sample) * block_size).tolist()
            n_targets = windows * block_size
        rows = max(1, TOKENS_PER_BATCH // block_size)
        self._batches = [(starts[i : i + rows], block_size) for i in range(0, len(starts), rows)]
        if rest := n_targets % block_size:  # one shorter window
            self._batches.append(([n_targets - rest], rest))

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x and y (B, T) of a rank's disjoint windows."""
        for starts, length in self._batches[rank::world_size]:
            windows = TokenWindows(self.tokens, length + 1, self.device, resident=False)
            yield windows.gather(np.array(starts))
