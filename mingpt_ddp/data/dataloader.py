"""Load batches as a pure function of the seed and the step, the same at any world size.

A window is a run of consecutive tokens, from which one sequence and its targets are cut. The
windows of several steps are gathered in one call.

Shapes: B sequences in a micro-batch, T = block_size tokens, N windows in one call.
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
from mingpt_ddp.errors import ConfigError, DataError, counted

Device = torch.device | str
SHUFFLE_CHUNK = 1 << 13  # number of positions of an epoch that are permuted in one call
# Number of tokens gathered in one call: x and y take 256 KiB each as int64 and fit a core's cache.
GATHER_TOKENS = 1 << 15
EVALUATION_BATCH_TOKENS = 4096
# A text stays on a GPU if it takes at most this share of the GPU's memory.
MAX_RESIDENT_FRACTION = 1 / 8
# Number of tokens copied to a GPU in one piece. A rank never holds more than one piece of the
# memory-mapped text in host memory.
RESIDENT_CHUNK = 1 << 24


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass.

    Attributes:
        index: Number of the micro-batch in its step, counted over all ranks.
        batch: For text, x and y (B, T) int64, where y holds the token that follows each token of x.
            For other datasets, collated samples.
        scale: Factor for the loss before the backward pass. It is 0 if the rank only repeats a
            micro-batch, to take part in the collectives of ranks that have one more micro-batch.
        loss_divisor: Divide the loss by this number. The sum over all passes of all ranks is then
            the mean loss of the step.
        is_last: True for this rank's last micro-batch in the step.
    """

    index: int
    batch: Any
    scale: float = 1.0
    loss_divisor: int = 1
    is_last: bool = True


@dataclass(frozen=True)
class BatchPlan:
    """The split of a step's batch into micro-batches, which are shared among the ranks."""

    batch_size: int
    micro_batch_size: int
    world_size: int

    @property
    def n_micro(self) -> int:
        return self.batch_size // self.micro_batch_size

    def indices_for_rank(self, rank: int) -> range:
        """Return the indices of a rank's micro-batches. Index j runs on rank j mod world size."""
        return range(rank, self.n_micro, self.world_size)


def with_batch_size(config: Config, world_size: int, recorded_batch_size: int | None) -> Config:
    """Replace `batch_size_per_rank` in the configuration by the equivalent `batch_size`.

    The name of a run may be a hash of its settings. This change does not alter it.

    Args:
        recorded_batch_size: Batch size in the snapshot to resume, or None in a new run. A resumed
            run keeps the batch size of its first start, at any number of ranks.
    """
    per_rank = config.trainer.batch_size_per_rank
    if per_rank is None:
        return config
    trainer = replace(
        config.trainer,
        batch_size=recorded_batch_size or per_rank * world_size,
        batch_size_per_rank=None,
    )
    return replace(config, run=replace(config.run, name=run_name(config)), trainer=trainer)


def plan_batches(config: Config, world_size: int, kept: int | None = None) -> BatchPlan:
    """Split the batch into micro-batches, at least one per rank.

    Args:
        kept: Micro-batch size in the snapshot to resume, or None in a new run.

    Raises:
        ConfigError: There are more ranks than micro-batches, or the step has several micro-batches
            with CUDA graphs, or a rank has several micro-batches with synchronized batch
            normalization, which computes its statistics in one forward pass.
    """
    trainer = config.trainer
    batch = trainer.batch_size
    per_rank = batch // world_size
    if config.ddp.sync_batchnorm:
        if batch % world_size or trainer.micro_batch_size not in (None, per_rank):
            raise ConfigError(
                "ddp.sync_batchnorm=true needs one micro-batch per rank; "
                f"make trainer.batch_size={batch} a multiple of the {world_size} ranks, and set "
                "trainer.micro_batch_size=null"
            )
        return BatchPlan(batch, per_rank, world_size)
    divisors = (size for size in range(1, max(1, per_rank) + 1) if batch % size == 0)
    micro = trainer.micro_batch_size or kept or max(divisors)
    # Only a snapshot's micro-batch size can fail here: validation checks the configuration's own.
    if batch % micro:
        raise ConfigError(
            f"trainer.batch_size={batch} is not a multiple of {micro}, the micro-batch size of the "
            f"snapshot; set trainer.micro_batch_size={max(divisors)}"
        )
    plan = BatchPlan(batch, micro, world_size)
    if world_size > plan.n_micro:
        raise ConfigError(
            f"trainer.batch_size={batch} in micro-batches of {micro} occupies {plan.n_micro} of "
            f"{world_size} ranks; use at most {counted(plan.n_micro, 'rank')}, or start a new "
            "run with a larger batch or smaller micro-batches"
        )
    # A CUDA graph runs one micro-batch. Replaying it for the next micro-batch would overwrite the
    # gradients of the first.
    if trainer.compile == "cuda_graphs" and plan.n_micro > 1:
        raise ConfigError(
            f"trainer.compile=cuda_graphs needs one micro-batch, but trainer.batch_size={batch} "
            f"makes {plan.n_micro} micro-batches of {micro} sequences; use trainer.compile=true"
        )
    return plan


class Loader(Protocol):
    """The training data as an endless sequence of batches.

    Each batch is a pure function of the seed and the step.
    """

    steps_per_epoch: int
    items_per_step: int  # number of tokens of a text, or of samples of another dataset

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        """Return a rank's micro-batches in a step. Steps count from 1."""

    def close(self) -> None:
        """Release all resources that are not memory, such as loader processes."""


@runtime_checkable
class SupportsResidence(Protocol):
    """Optional interface of a loader whose data stay on a GPU with enough memory."""

    def resident_bytes(self, memory: int) -> int:
        """Return how many bytes of data stay on a GPU with `memory` bytes: all of them or 0."""


class Split(Protocol):
    """The data of an evaluation, which reads every item once."""

    def __len__(self) -> int:
        """Return the number of batches, over all ranks."""

    def batches(self, rank: int, world_size: int) -> Iterator[Any]:
        """Yield the batches of a rank. Batch number i belongs to rank i mod world size."""


@dataclass(frozen=True)
class WindowStarts:
    """The starts of the windows at consecutive positions of an epoch.

    Attributes:
        epoch: Number of the epoch.
        first: First of the consecutive positions.
        starts: For each window, the index of its first token in the text.
    """

    epoch: int
    first: int
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
            tokens: The training tokens.
            block_size: Number of tokens in a sequence.
            stride: Distance between the starts of neighbouring windows. None means block_size.
            batch_size: Number of sequences in a step, over all ranks.
            seed: Seed of the order of the windows.
            device: The device of the batches. The whole text stays on a GPU with enough memory.

        Raises:
            DataError: The text is too short for one batch.
        """
        self.stride = stride or block_size
        self.batch_size = batch_size
        self.block_size = block_size
        self.seed = seed
        self.items_per_step = batch_size * block_size
        self._set_epoch_size((len(tokens) - block_size) // self.stride)
        self.nbytes = tokens.nbytes
        device = torch.device(device)
        is_resident = False
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            is_resident = self.resident_bytes(total) > 0
        self._tokens = TokenWindows(tokens, block_size + 1, device, is_resident)
        self._starts = WindowStarts(epoch=-1, first=0, starts=np.empty(0, dtype=np.int64))
        # Steps that have already been gathered, for one plan and rank.
        self._plan_and_rank: tuple[BatchPlan, int] | None = None
        self._first_step = 0
        self._steps = list[list[MicroBatch]]()

    def resident_bytes(self, memory: int) -> int:
        """Return the size of the tokens if they stay on a GPU with `memory` bytes, else 0."""
        return self.nbytes if self.nbytes <= memory * MAX_RESIDENT_FRACTION else 0

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        """Return a rank's micro-batches in a step. Steps count from 1."""
        end = self._first_step + len(self._steps)
        if self._plan_and_rank != (plan, rank) or not self._first_step <= step < end:
            self._steps = self._gather(step, plan, rank)
            self._first_step = step
            self._plan_and_rank = (plan, rank)
        return self._steps[step - self._first_step]

    def starts(self, step: int) -> Ints:
        """Return where each window of a step begins in the text, in the order of the batch."""
        epoch, number = divmod(step - 1, self.steps_per_epoch)
        begin = number * self.batch_size
        return self._window_starts(epoch, begin, begin + self.batch_size)

    def close(self) -> None:
        """Do nothing: this loader holds only memory."""

    def _set_epoch_size(self, windows: int) -> None:
        self.windows_per_epoch = windows
        self.steps_per_epoch = windows // self.batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training text has {windows} windows of data.block_size={self.block_size}, "
                f"fewer than trainer.batch_size={self.batch_size}; use a longer text, a smaller "
                "batch or a smaller data.stride"
            )

    def _gather(self, step: int, plan: BatchPlan, rank: int) -> list[list[MicroBatch]]:
        """Gather this step and the next ones of its epoch in one call, which is faster."""
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
        """Look up the starts of the windows at the positions begin .. end - 1 of an epoch.

        At least SHUFFLE_CHUNK positions are permuted in one call, and kept for the next steps.
        """
        known = self._starts
        if epoch != known.epoch or begin < known.first or end > known.first + len(known.starts):
            n = self.windows_per_epoch
            positions = np.arange(begin, min(max(end, begin + SHUFFLE_CHUNK), n))
            order = feistel_permute(positions, n, derive_seed("order", self.seed, epoch))
            known = WindowStarts(epoch, begin, self._starts_of(epoch, order))
            self._starts = known
        return known.starts[begin - known.first : end - known.first]

    def _starts_of(self, epoch: int, order: Ints) -> Ints:
        """Compute the starts of windows from their numbers in the text.

        Args:
            epoch: Number of the epoch.
            order: Numbers of windows, in shuffled order.
        """
        return derive_seed("offset", self.seed, epoch) % self.stride + order * self.stride


class TokenWindows:
    """Windows of the tokens, gathered onto a device with few, asynchronous transfers.

    On CUDA, torch hardly supports unsigned types besides uint8. Tokens are therefore viewed as
    signed integers, and masked after they have been widened to int64.
    """

    def __init__(self, tokens: Ints, length: int, device: torch.device, resident: bool) -> None:
        """
        Args:
            tokens: The tokens of a text.
            length: Number of tokens in a window, T + 1.
            device: The device of the windows.
            resident: Keep all tokens on the device, and send only the starts of windows.
        """
        self._device = device
        self._mask = -1 if tokens.itemsize == 8 else (1 << 8 * tokens.itemsize) - 1
        signed: Any = tokens.view(f"i{tokens.itemsize}")
        self._windows_at: Callable[[Ints], Ints]
        if isinstance(signed, Shards):
            self._windows_at = partial(signed.windows, length=length)
        else:
            # The view has shape (n - T, T + 1) and copies nothing.
            self._windows_at = np.lib.stride_tricks.sliding_window_view(signed, length).__getitem__
        self._resident = _copy_to(device, signed) if resident else None
        self._offsets = torch.arange(length, device=device)

    def gather(self, starts: Ints) -> tuple[Tensor, Tensor]:
        """Return x and y (N, T) int64 of the windows that begin at `starts` (N,)."""
        if self._resident is None:
            windows = self._send(self._windows_at(starts))
        else:
            windows = self._resident[self._send(starts)[:, None] + self._offsets]
        return self._widen(windows[:, :-1]), self._widen(windows[:, 1:])

    def _widen(self, tokens: Tensor) -> Tensor:
        return tokens.to(torch.int64).bitwise_and_(self._mask)

    def _send(self, values: Ints) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)


def _copy_to(device: torch.device, tokens: Ints) -> Tensor:
    """Copy the tokens to a device, chunk by chunk."""
    dtype = torch.from_numpy(np.empty(0, tokens.dtype)).dtype
    copy = torch.empty(len(tokens), dtype=dtype, device=device)
    for begin in range(0, len(tokens), RESIDENT_CHUNK):
        # Copy the chunk, because torch does not accept read-only arrays.
        chunk = np.array(tokens[begin : begin + RESIDENT_CHUNK])
        copy[begin : begin + len(chunk)].copy_(torch.from_numpy(chunk))
    return copy


class TokenSplit:
    """A text for evaluation: all of its tokens, or those in a fixed sample of windows."""

    def __init__(
        self, tokens: Ints, block_size: int, device: torch.device, windows: int | None = None
    ) -> None:
        """
        Args:
            tokens: The tokens of the text.
            block_size: Number of targets in a window, which has one token more.
            device: The device of the batches.
            windows: Number of windows to evaluate, the same ones every time. None evaluates the
                whole text.
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
        rows = max(1, EVALUATION_BATCH_TOKENS // block_size)
        self._batches = [(starts[i : i + rows], block_size) for i in range(0, len(starts), rows)]
        # The last window may be shorter.
        if rest := n_targets % block_size:
            self._batches.append(([n_targets - rest], rest))

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a rank's batches: x and y (B, T) of disjoint windows."""
        for starts, length in self._batches[rank::world_size]:
            windows = TokenWindows(self.tokens, length + 1, self.device, resident=False)
            yield windows.gather(np.array(starts))
