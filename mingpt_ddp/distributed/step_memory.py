"""The device memory of one step, allocation by allocation, of a rank that holds the whole state."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

KINDS = (
    "weights",
    "optimizer",
    "average",
    "block_gradients",  # of the parameters in `model.blocks`
    "other_gradients",
    "activations",  # what a forward pass keeps for its backward pass
    "temporaries",
)
Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TensorSize:
    """A tensor of a state."""

    shape: tuple[int, ...]
    itemsize: int  # bytes

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    def shard(self, shards: int) -> int:
        """Return the bytes of the largest of `shards` parts, divided by rows."""
        if not self.shape:
            return self.nbytes
        rows = -(-self.shape[0] // shards)
        return TensorSize((rows, *self.shape[1:]), self.itemsize).nbytes


@dataclass(frozen=True)
class ParameterSize:
    """A parameter, its optimizer state and its average."""

    name: str
    weight: TensorSize
    state: list[TensorSize]
    has_average: bool
    is_trained: bool
    is_buffer: bool = False
    block: int | None = None  # its index in `model.blocks`
    matrices: int = 0  # that Muon orthogonalizes

    @property
    def numel(self) -> int:
        return self.weight.nbytes // self.weight.itemsize


@dataclass(frozen=True)
class StepMemory:
    """The bytes of each kind after every allocation of a step, in its order."""

    live: Bytes  # (kinds, allocations)
    passes: int  # the allocations before the update
    operations: int  # of the matrix products of a forward and backward pass, a number

    @classmethod
    def from_events(
        cls, kinds: list[str], sizes: list[int], passes: int, operations: int
    ) -> "StepMemory":
        """Sum up allocations and releases.

        Args:
            kinds: of each event.
            sizes: bytes; negative for a release.
            passes: the events before the update.
        """
        indices = np.array([KINDS.index(kind) for kind in kinds])
        changes = np.zeros((len(KINDS), len(sizes)), dtype=np.int64)
        changes[indices, np.arange(len(sizes))] = sizes
        is_allocation = np.array(sizes) >= 0
        live = np.cumsum(changes, axis=1)[:, is_allocation]
        return cls(live, int(is_allocation[:passes].sum()), operations)

    def of(self, *kinds: str) -> Bytes:
        """Return the bytes of some kinds together, after each allocation."""
        rows = [KINDS.index(kind) for kind in kinds]
        total: Bytes = self.live[rows].sum(axis=0)
        return total

    def during(self, passes: int, update: int) -> Bytes:
        """Return bytes that are allocated during the passes, and those during the update."""
        return np.where(np.arange(self.live.shape[1]) < self.passes, passes, update)


def on_the_line(few: tuple[int, StepMemory], more: tuple[int, StepMemory], rows: int) -> StepMemory:
    """Return the memory with micro-batches of `rows`, where that of two other numbers is known.

    Every size is a constant and a part per row.

    Raises:
        ValueError: the two steps allocate in different orders.
    """
    first, a = few
    second, b = more
    if a.live.shape != b.live.shape or a.passes != b.passes:
        raise ValueError("the steps of two sizes allocate differently")
    share = (rows - first) / (second - first)
    live = a.live + np.rint((b.live - a.live) * share).astype(np.int64)
    operations = a.operations + round((b.operations - a.operations) * share)
    return replace(a, live=live, operations=operations)
