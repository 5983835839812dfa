"""Which rank writes which files of a snapshot: those that share rank zero's storage share them.

If the strategy divides the state, every rank writes its own part.
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.snapshots.format import HOOKS, shard_name, shard_tensors
from mingpt_ddp.snapshots.pieces import own_parts
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.run_dir import PROBE

TensorsByKind = Mapping[str, Mapping[str, Tensor]]  # by kind (model, optimizer, ema, hooks), name


class ShardPlan:
    """Which files each rank writes; found once, by a collective."""

    def __init__(self, runtime: Runtime, stores: Sequence[SnapshotStore]) -> None:
        self.group = runtime.group
        self.strategy = runtime.strategy
        self.stores = stores
        self._writers: list[int] = []  # ranks; [] until they are known

    def own_files(self, tensors: TensorsByKind) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that this rank writes, by file and name."""
        divided = {kind: named for kind, named in tensors.items() if kind != HOOKS}
        files = self._own_files(divided)
        if HOOKS in tensors:  # the same on all ranks
            hooks = {shard_name(HOOKS, 0, 1): dict(tensors[HOOKS])}
            files |= self.group.env.call_on_rank_zero(lambda: hooks) or {}
        return files

    def _own_files(self, tensors: TensorsByKind) -> dict[str, dict[str, Tensor]]:
        rank = self.group.rank
        strategy = self.strategy
        if not strategy.is_sharded:
            self._writers = self._writers or ranks_with_same_storage(self.group, self.stores) or [0]
            whole = {kind: strategy.join_tensors(named) for kind, named in tensors.items()}
            shards = shard_tensors(whole, len(self._writers))
            for writer, files in zip(self._writers, shards, strict=False):  # fewer if small
                if writer == rank:
                    return files
            return {}
        if rank >= strategy.shards:  # another replica
            return {}
        files = {}
        for kind, named in tensors.items():
            files[shard_name(kind, rank, strategy.shards)] = own_parts(strategy, named)
        return files

    def check_reach(self) -> None:
        """Check that all ranks reach the storage, if rank zero does. A collective.

        Raises:
            ConfigError: some do not.
        """
        self._writers = self._writers or ranks_with_same_storage(self.group, self.stores)
        world_size = self.group.world_size
        if 0 < len(self._writers) < world_size:
            other = next(rank for rank in range(world_size) if rank not in self._writers)
            raise ConfigError(
                f"ddp.strategy={self.strategy.name} needs snapshots that every rank reaches, but "
                f"rank {other} does not see the files of rank 0; set snapshot.path to a shared "
                "directory or an object store"
            )


def ranks_with_same_storage(group: ProcessGroup, stores: Sequence[SnapshotStore]) -> list[int]:
    """Return the ranks that see the files that rank zero writes. A collective.

    They are those of its node, or all ranks on a shared filesystem; [] if rank zero cannot write.
    """
    storages = []
    if group.world_size > 1:
        storages = [store.storage for store in stores if not store.storage.shared]

    def write_probes() -> str:
        name = f"{PROBE}{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):  # the save will hit the same error and handle it
            for storage in storages:
                storage.write(name, b"")
        return name

    name = group.run_on_rank_zero(write_probes)
    sees_all = False
    with contextlib.suppress(OSError):
        sees_all = all(storage.size(name) is not None for storage in storages)
    ranks = [rank for rank, sees in enumerate(group.all_gather(sees_all)) if sees]
    with contextlib.suppress(OSError):
        for storage in storages:
            group.env.call_on_rank_zero(partial(storage.delete, name))
    return ranks
