"""Read only those tensors and rows of a snapshot that this rank needs."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.errors import SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.state_dict import parameters_by_name
from mingpt_ddp.snapshots.store_reader import CONCURRENT_FILES
from mingpt_ddp.snapshots.tensor_index import read_rows
from mingpt_ddp.storage.urls import open_storage


def read_shards(
    runtime: Runtime, snapshot: Snapshot, model: nn.Module, optimizer: Optimizer
) -> Snapshot:
    """Return a snapshot with the tensors of this rank's model and optimizer. A collective.

    Args:
        snapshot: The snapshot, with an index of its tensors instead of the tensors.

    Raises:
        SnapshotError: The snapshot does not fit the model.
        StorageUnavailableError: A rank cannot read the snapshot.
    """
    group = runtime.group
    every_rank_reads = runtime.strategy.weights == "rows"
    read = partial(_read, runtime.strategy, snapshot)
    tensors: dict[str, Any] = {}

    def read_own() -> None:
        tensors["optimizer"] = read("optimizer", parameters_by_name(model, optimizer))
        for kind in ("model", "ema"):
            read_weights = partial(read, kind, model.state_dict())
            tensors[kind] = (
                read_weights() if every_rank_reads else group.env.call_on_rank_zero(read_weights)
            )

    group.decide_on_rank_zero(read_own, len)  # an error on any rank is raised on all ranks
    if not every_rank_reads:
        for kind in ("model", "ema"):
            tensors[kind] = group.broadcast_tensors(tensors[kind])
    return replace(snapshot, **tensors, index=None)


def _read(
    strategy: Strategy, snapshot: Snapshot, kind: str, targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Read the tensors of one kind that this rank needs. Return them by name.

    Args:
        targets: The parameters or buffers that the tensors belong to, by name.
    """
    url = snapshot.index["url"]
    entries = snapshot.index[kind]
    storage = open_storage(url)
    is_state = kind == "optimizer"
    names = list(entries)
    if is_state:
        names = [name for name in names if strategy.owns_state(name.partition(":")[0])]

    def read(name: str) -> Tensor:
        _, shape, _ = entries[name]
        target = targets.get(name.partition(":")[0] if is_state else name)
        rows = partial(read_rows, storage.chunks, entries[name])
        if target is not None and list(target.shape) == shape:
            return strategy.assemble(target, rows)
        if target is None or not is_state:
            raise SnapshotError(f"the snapshot's {kind} does not fit the model: {name}")
        # This optimizer state does not have the shape of its parameter: it may be a single number.
        # The rank that owns it reads all of it.
        return rows()

    try:
        with ThreadPoolExecutor(CONCURRENT_FILES if storage.shared else 1) as pool:
            return dict(zip(names, pool.map(read, names), strict=True))
    except OSError as error:
        raise StorageUnavailableError(
            f"cannot read the snapshot of step {snapshot.step} at {url}: {error}"
        ) from error
