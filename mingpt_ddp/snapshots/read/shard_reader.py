"""Read a rank's part of a snapshot."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots.format import Snapshot, directory_name
from mingpt_ddp.snapshots.pieces import read_rows
from mingpt_ddp.snapshots.state_dict import parameters_by_name
from mingpt_ddp.snapshots.store_reader import PARALLEL
from mingpt_ddp.storage.urls import open_storage


class ShardReader:
    """Reads the tensors of a snapshot that a rank holds, or its rows of them."""

    def __init__(self, runtime: Runtime) -> None:
        self.group = runtime.group
        self.strategy = runtime.strategy

    def read(self, snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> Snapshot:
        """Return the snapshot with the tensors for this rank's model and optimizer. A collective.

        Args:
            snapshot: with an index instead of tensors.

        Raises:
            SnapshotError: it does not fit the model.
            StorageUnavailableError: a rank cannot read it.
        """
        parameters = parameters_by_name(model, optimizer)
        state: dict[str, Tensor] = {}
        weights: dict[str, dict[str, Tensor] | None] = {}

        def read_own() -> None:
            state.update(self._read(snapshot, "optimizer", parameters))
            likes = model.state_dict()
            for kind in ("model", "ema"):
                read = partial(self._read, snapshot, kind, likes)
                if self.strategy.shards_model:
                    weights[kind] = read()
                else:
                    weights[kind] = self.group.env.call_on_rank_zero(read)

        self.group.decide_on_rank_zero(read_own, len)  # raises the error of any rank on all
        if not self.strategy.shards_model:
            for kind, named in weights.items():
                weights[kind] = self.group.broadcast_tensors(named)
        return replace(
            snapshot,
            model=weights["model"] or {},
            optimizer=state,
            ema=weights["ema"] or {},
            index=None,
        )

    def _read(
        self, snapshot: Snapshot, kind: str, likes: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the tensors of a kind that this rank needs, by name.

        Args:
            likes: the parameter or buffer of each.
        """
        url = snapshot.index["url"]
        entries = snapshot.index[kind]
        storage = open_storage(url)
        is_state = kind == "optimizer"
        names = list(entries)
        if is_state:
            names = [name for name in names if self.strategy.owns_state(name.partition(":")[0])]

        def read(name: str) -> Tensor:
            _, shape, _ = entries[name]
            like = likes.get(name.partition(":")[0] if is_state else name)
            rows = partial(read_rows, storage, directory_name(snapshot.step), entries[name])
            if like is not None and list(like.shape) == shape:
                return self.strategy.assemble(like, rows)
            if like is None or not is_state:
                raise SnapshotError(f"the snapshot's {kind} does not fit the model: {name}")
            return rows(0, shape[0] if shape else 1)  # one number, or another shape of state

        try:
            with ThreadPoolExecutor(PARALLEL if storage.shared else 1) as pool:
                return dict(zip(names, pool.map(read, names), strict=True))
        except OSError as error:
            raise StorageUnavailableError(
                f"cannot read the snapshot of step {snapshot.step} at {url}: {error}"
            ) from error
