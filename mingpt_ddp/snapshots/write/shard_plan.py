"""Decide which rank writes which tensors of a snapshot.

If all ranks hold the same state, the tensors are divided among the ranks that share a storage with
rank zero. If each rank holds a shard of the state, each rank writes its own shard.
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.zero1 import share_out
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.snapshots import format as layout
from mingpt_ddp.snapshots.format import HOOKS, shard_name
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.run_directory import PROBE_PREFIX
from mingpt_ddp.storage.storage import Storage

# Tensors by their kind (model, optimizer, ema or hooks) and their name.
TensorsByKind = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Assignment:
    """The tensors of a snapshot, assigned to the ranks that write them."""

    ranks: dict[str, Sequence[int]]  # for each kind of tensors, the ranks that write a shard
    # The rank that writes a whole tensor, by kind and name. A tensor that is not listed is written
    # by the first rank of its kind.
    writers: dict[tuple[str, str], int] = field(default_factory=dict)

    def writer(self, kind: str, name: str) -> int:
        """Return the rank that writes a tensor, if it is written as a whole."""
        return self.writers.get((kind, name), self.ranks[kind][0])


def share_tensors(tensors: TensorsByKind, ranks: Sequence[int]) -> Assignment:
    """Assign whole tensors to ranks, so that all ranks write about the same number of bytes.

    All ranks compute the same assignment. If the shards would be smaller than MIN_SHARD_BYTES, one
    rank writes all tensors of a kind. The first rank also writes the state and the manifest, so it
    then gets the fewest bytes.
    """
    sizes = {}
    by_kind = dict.fromkeys(tensors, 0)
    for kind, named in tensors.items():
        for name, tensor in named.items():
            sizes[kind, name] = tensor.nbytes
            by_kind[kind] += tensor.nbytes
    shards = min(len(ranks), sum(sizes.values()) // layout.MIN_SHARD_BYTES)
    if shards > 1:
        owners = share_out(dict(sorted(sizes.items(), reverse=True)), shards)
        writers = {kind_and_name: ranks[owner] for kind_and_name, owner in owners.items()}
        return Assignment(dict.fromkeys(tensors, ranks[:shards]), writers)
    count = min(len(ranks), len(by_kind))
    owner_by_kind = share_out(by_kind, count)
    loads = [0] * count
    for kind, owner in owner_by_kind.items():
        loads[owner] += by_kind[kind]
    least_first = sorted(range(count), key=loads.__getitem__)
    return Assignment(
        {kind: [ranks[least_first.index(owner)]] for kind, owner in owner_by_kind.items()}
    )


class ShardPlan:
    """The plan of which rank writes which tensors of each snapshot.

    The ranks find out only once, in a collective, which of them share a storage with rank zero.
    """

    def __init__(self, runtime: Runtime, store: SnapshotStore) -> None:
        self.group = runtime.group
        self.strategy = runtime.strategy
        self.storage = store.storage
        # The ranks that share a storage with rank zero. Empty until they are known.
        self._writers: list[int] = []

    def own_files(self, tensors: TensorsByKind) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that this rank writes, by file and name. A collective.

        Every rank also gets the state of hooks. Rank zero writes it, and the other ranks check that
        they have the same state.
        """
        strategy = self.strategy
        joined = {kind: strategy.join_tensors(named) for kind, named in tensors.items()}
        hooks = joined.pop(HOOKS, None)
        assignment = self._assign(joined)
        rank = self.group.rank
        files = {}
        for kind, named in joined.items():
            ranks = assignment.ranks[kind]
            if rank not in ranks:
                continue
            parts: dict[str, Tensor] = {}
            for name, tensor in named.items():
                writer = assignment.writer(kind, name)
                part = strategy.part_to_write(name.partition(":")[0], tensor, writer)
                if part is None:
                    continue
                first, rows = part
                is_whole = rows.shape == tensor.shape
                parts[name if is_whole else f"{name}@{first}-of-{len(tensor)}"] = rows
            files[shard_name(kind, ranks.index(rank), len(ranks))] = parts
        if hooks is not None:
            files[shard_name(HOOKS, 0, 1)] = dict(hooks)
        return files

    def _assign(self, tensors: TensorsByKind) -> Assignment:
        if self.strategy.n_shards > 1:
            return Assignment(dict.fromkeys(tensors, range(self.strategy.n_shards)))
        self._writers = self._writers or ranks_with_same_storage(self.group, self.storage) or [0]
        return share_tensors(tensors, self._writers)

    def check_reach(self) -> None:
        """Check that all ranks reach the storage, if rank zero reaches it. A collective.

        Raises:
            ConfigError: Rank zero reaches the storage, but another rank does not.
        """
        self._writers = self._writers or ranks_with_same_storage(self.group, self.storage)
        world_size = self.group.world_size
        if 0 < len(self._writers) < world_size:
            excluded = next(rank for rank in range(world_size) if rank not in self._writers)
            raise ConfigError(
                f"ddp.strategy={self.strategy.name} needs snapshots that every rank can read, but "
                f"rank {excluded} does not see the files of rank 0; set snapshot.path to a shared "
                "directory or an object store"
            )


def ranks_with_same_storage(group: ProcessGroup, storage: Storage) -> list[int]:
    """List the ranks that see the files that rank zero writes. A collective.

    On a local disk, these are the ranks on the node of rank zero. On a shared filesystem, these are
    all ranks. The list is empty if rank zero cannot write.
    """
    if group.world_size == 1 or storage.shared:
        return [*range(group.world_size)]

    def write_probe() -> str:
        name = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):  # the next save meets the same error, and handles it
            storage.write(name, b"")
        return name

    name = group.run_on_rank_zero(write_probe)
    is_seen = False
    with contextlib.suppress(OSError):
        is_seen = storage.size(name) is not None
    ranks = [rank for rank, sees in enumerate(group.all_gather(is_seen)) if sees]
    with contextlib.suppress(OSError):
        group.env.call_on_rank_zero(partial(storage.delete, name))
    return ranks
